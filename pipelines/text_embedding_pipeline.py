"""``StaticEmbeddingPipeline`` takes the place of ``openvino_genai.TextEmbeddingPipeline``: texts become vectors."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields
from functools import partial
from types import TracebackType
from typing import Literal, overload

import numpy as np
import openvino_genai as genai
from numpy.typing import NDArray

from staticllm.core import OnProgress
from staticllm.errors import ConfigError
from staticllm.model_dir import check_model_dir
from staticllm.pipelines.embedding.embedding_config import (
    POOLINGS,
    EmbeddingConfig,
    PoolingType,
    resolved_config,
)
from staticllm.pipelines.embedding.embedding_queue import EmbeddingQueue
from staticllm.pipelines.embedding.embedding_request import EmbeddingRequest
from staticllm.pipelines.embedding.load import EncoderChoices, load_encoder
from staticllm.pipelines.embedding.output_types import Embeddings, OutputType, check_output_type, convert, ranges_of
from staticllm.pipelines.embedding.pool.embedding_pool import EmbeddingPool
from staticllm.pipelines.embedding.pool.instances import EncoderInfo
from staticllm.pipelines.embedding.pool.pool_loader import load_pool, needs_pool, take_options
from staticllm.pipelines.embedding.text_tokenizer import Overflow, TextTokenizer
from staticllm.pipelines.engine.job_engine import JobEngine
from staticllm.pipelines.engine.jobs import JobHost, checked_host
from staticllm.threads import check_process, close_when_collected

Vectors = NDArray[np.float32]
QUERY_PRIORITY = 1
"""The default priority of queries; that of documents is 0."""


class EmbeddingHandle:
    """The vector of a text that was submitted: ``result`` waits for it, ``await`` too, and ``cancel`` gives it up."""

    def __init__(self, request: EmbeddingRequest, pipeline: StaticEmbeddingPipeline) -> None:
        self._request, self._pipeline = request, pipeline  # a pipeline that is deleted closes

    def result(self, timeout: float | None = None) -> Vectors:
        """Return the vector ``[width]``.

        Raises:
            StaticLLMError: the text failed, or its deadline passed.
            TimeoutError: it took longer than ``timeout`` seconds.
            concurrent.futures.CancelledError: it was cancelled.
        """
        vectors = self._request.future.result(timeout)
        return np.asarray(vectors[0], np.float32)

    def cancel(self) -> bool:
        """Give the text up. Return whether that was possible: False if its vector was there already."""
        return self._request.future.cancel()

    @property
    def future(self) -> Future[Vectors]:
        """The future of the vectors ``[1, width]``, for ``concurrent.futures`` and ``asyncio.wrap_future``."""
        return self._request.future


class StaticEmbeddingPipeline:
    """Embeds texts on a device that only executes graphs of fixed shape. Any number of threads may call its methods."""

    Config = EmbeddingConfig
    PoolingType = PoolingType

    def __init__(
        self,
        models_path: str | os.PathLike[str],
        device: str = "CPU",
        config: EmbeddingConfig | genai.TextEmbeddingPipeline.Config | None = None,
        *,
        engine: JobHost | None = None,
        overflow: Overflow = "truncate",
        max_waiting: int = 1 << 20,
        on_progress: OnProgress | None = None,
        **properties: object,
    ) -> None:
        """Load an encoder with its tokenizer.

        Args:
            models_path: The folder of an OpenVINO model (feature-extraction) with its tokenizer.
            device: The OpenVINO device, or several: ``NPU,CPU``, or groups of cores, ``CPU#0-3,CPU#4-7``.
            config: Options as for GenAI; fields of it can also be given as keywords.
            engine: The engine of another pipeline on the same device: ``engine=llm.engine``. Its scheduler then decides which
                pipeline uses the device next. None: the device is this pipeline's alone.
            overflow: Whether texts of more than ``max_length`` tokens are truncated or refused.
            max_waiting: The most texts that may wait.
            on_progress: Is called with each part of loading.
            properties: OpenVINO's properties of the device, fields of ``Config``, those of ``StaticLLMPipeline`` about blobs
                (``CACHE_DIR``, ``BLOB_PATH`` …), ``PROGRAMS`` and ``WEIGHTS_PATH``, and those of several devices
                (docs/windve.md): ``HETEROGENEOUS``, ``LATENCY_MS``, ``QUEUE_POLICY``, ``QUEUE_DEPTHS``, ``DEVICE_PROPERTIES``.

        Raises:
            ModelError: a file of the model is missing or damaged, or it cannot be lowered.
            ConfigError: an option is unknown or impossible.
            DeviceError: the device is missing, or cannot compile or run the model.
            BlobError: the set at ``BLOB_PATH`` is damaged or was made for something else.
        """
        if overflow not in ("truncate", "refuse"):
            raise ConfigError(f"overflow={overflow!r}: must be 'truncate' or 'refuse'")
        if not _is_whole(max_waiting) or max_waiting < 1:
            raise ConfigError(f"max_waiting={max_waiting!r}: must be a whole number from 1")
        self._pid = os.getpid()
        names = {item.name for item in fields(EmbeddingConfig)}
        own = {name: properties.pop(name) for name in list(properties) if name in names}
        self._config = resolved_config(config, own)
        options = take_options(properties)
        pooling = None if self._config.pooling_type is None else POOLINGS[self._config.pooling_type]
        choices = EncoderChoices(
            pooling,
            self._config.normalize,
            self._config.max_length,
            properties=properties or None,
            output="embeddings",
        )
        self._own_engine: JobEngine | EmbeddingPool | None = None
        self._engine: JobHost | None = None
        self._queue: EmbeddingQueue | EmbeddingPool
        if needs_pool(device, options):
            if engine is not None:
                raise ConfigError(
                    f"device {device!r} with engine=: a shared engine has one device, without HETEROGENEOUS and LATENCY_MS"
                )
            pool = load_pool(check_model_dir(models_path), device, choices, max_waiting, options)
            info, tokenizer, self._files = pool.info, pool.tokenizer, pool.files
            self._queue = self._own_engine = pool.pool
        else:
            loaded = load_encoder(models_path, device, choices, on_progress or (lambda event: None))
            info, tokenizer, self._files = EncoderInfo.of(loaded), loaded.tokenizer, loaded.files
            self._queue = EmbeddingQueue(loaded.runner, max_waiting)
            own_engine = self._own_engine = JobEngine() if engine is None else None
            self._engine = own_engine or checked_host(engine)
            self._engine.add_jobs(self._queue)
        self._width = info.width
        self._tokenizer = TextTokenizer(tokenizer, info.max_length, info.vocab_size, overflow)
        close_when_collected(self, partial(_close, self._engine, self._queue, self._own_engine))
        self._started: dict[str, Future[Vectors]] = {}

    @property
    def width(self) -> int:
        """The number of values of a vector."""
        return self._width

    @property
    def prompts(self) -> dict[str, str]:
        """The text that is put before each kind of text: ``query``, ``document``, and others that the model's files name."""
        return {
            **self._files.prompts,
            "query": self._instruction("query"),
            "document": self._instruction("document"),
        }

    @overload
    def embed_documents(self, texts: Sequence[str], *, as_array: Literal[False] = False) -> list[list[float]]: ...
    @overload
    def embed_documents(self, texts: Sequence[str], *, as_array: Literal[True]) -> Vectors: ...

    def embed_documents(self, texts: Sequence[str], *, as_array: bool = False) -> list[list[float]] | Vectors:
        """Return the vectors of documents: lists as GenAI's, or with ``as_array`` an array ``[n, width]``.

        Raises:
            StaticLLMError: a text cannot be embedded; the message has its index.
        """
        found = self.encode(texts, prompt=self._instruction("document"))
        return found if as_array else _as_lists(found)

    def embed_query(self, text: str) -> list[float]:
        """Return the vector of a query, which goes before documents.

        Raises:
            StaticLLMError: the text cannot be embedded.
        """
        return _as_lists(self.encode([text], prompt=self._instruction("query"), priority=QUERY_PRIORITY))[0]

    def embed(self, texts: Sequence[str], prompt: str | None = None) -> list[list[float]]:
        """Return the vectors of texts, each with ``prompt`` before it.

        Raises:
            StaticLLMError: a text cannot be embedded.
        """
        return _as_lists(self.encode(texts, prompt=prompt or ""))

    def encode(
        self,
        texts: Sequence[str],
        *,
        prompt: str = "",
        dimensions: int | None = None,
        priority: int = 0,
        deadline_ms: float | None = None,
        on_progress: Callable[[int, int], None] | None = None,
        output_type: OutputType = "float32",
        calibration: Embeddings | None = None,
    ) -> Embeddings:
        """Return the vectors ``[n, width]`` of texts.

        Args:
            texts: Any number of texts.
            prompt: A text to put before each of them.
            dimensions: The number of leading values to keep, for models that were trained for it (Matryoshka); vectors are
                normalised again if they are normalised at all.
            priority: Texts of a higher priority are run first.
            deadline_ms: The time from now after which texts are given up.
            on_progress: A function that gets the number of texts that are done, and of all texts, on the caller's thread.
            output_type: ``float32``, ``int8``, ``uint8``, ``binary`` or ``ubinary``, as sentence-transformers computes them.
                The last two are bits, ``[n, ceil(width / 8)]``.
            calibration: Vectors ``[n, width]`` of float32 whose ranges divide the values of ``int8`` and ``uint8``; two
                vectors may be the least and the greatest values themselves. Without it, the ranges are those of these texts.

        Raises:
            StaticLLMError: a text cannot be embedded, or the deadline passed.
            ConfigError: an option is impossible.
        """
        self._check_dimensions(dimensions)
        check_output_type(output_type, calibration, dimensions or self.width)
        ranges = None if calibration is None else ranges_of(calibration)
        vectors = self._run(self._request(texts, prompt, priority, deadline_ms), on_progress)
        return convert(vectors if dimensions is None else self._cut(vectors, dimensions), output_type, ranges)

    def _run(self, request: EmbeddingRequest, on_progress: Callable[[int, int], None] | None) -> Vectors:
        if not request.texts:
            return request.vectors
        self._queue.submit(request)
        return request.wait(on_progress)

    def start_embed_documents_async(self, texts: Sequence[str]) -> None:
        """Begin to embed documents; ``wait_embed_documents`` returns their vectors.

        Raises:
            StaticLLMError: a text is not valid, or too many wait.
        """
        self._start("documents", texts, self._instruction("document"), 0)

    def wait_embed_documents(self) -> list[list[float]]:
        """Return the vectors of the documents that were begun last.

        Raises:
            StaticLLMError: a text could not be embedded, or none were begun.
        """
        return self._wait("documents")

    def start_embed_query_async(self, text: str) -> None:
        """Begin to embed a query; ``wait_embed_query`` returns its vector.

        Raises:
            StaticLLMError: the text is not valid, or too many wait.
        """
        self._start("query", [text], self._instruction("query"), QUERY_PRIORITY)

    def wait_embed_query(self) -> list[float]:
        """Return the vector of the query that was begun last.

        Raises:
            StaticLLMError: it could not be embedded, or none was begun.
        """
        return self._wait("query")[0]

    def submit(
        self, text: str, *, prompt: str = "", priority: int = 0, deadline_ms: float | None = None
    ) -> EmbeddingHandle:
        """Submit one text and return at once.

        Raises:
            PromptError: the text is not valid.
            BusyError: too many texts wait.
        """
        request = self._request([text], prompt, priority, deadline_ms)
        self._queue.submit(request)
        return EmbeddingHandle(request, self)

    def close(self) -> None:
        """Release the device; texts that wait get a ``ClosedError``. An engine that was given goes on."""
        _close(self._engine, self._queue, self._own_engine)

    @property
    def engine(self) -> JobHost:
        """The engine that owns the device, for other pipelines on the same device.

        Raises:
            ConfigError: the pipeline has several devices, or a latency limit.
        """
        if self._engine is None:
            raise ConfigError(
                "a pipeline on several devices or with LATENCY_MS has no engine to share: load it without"
            )
        return self._engine

    def __enter__(self) -> StaticEmbeddingPipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, kind: str, texts: Sequence[str], prompt: str, priority: int) -> None:
        request = self._request(texts, prompt, priority, None)
        if request.texts:
            self._queue.submit(request)
        else:
            request.future.set_result(request.vectors)
        self._started[kind] = request.future

    def _wait(self, kind: str) -> list[list[float]]:
        future = self._started.pop(kind, None)
        if future is None:
            raise ConfigError(f"no {kind} were begun: call start_embed_{kind}_async first")
        return _as_lists(future.result())

    def _request(self, texts: Sequence[str], prompt: str, priority: int, deadline_ms: float | None) -> EmbeddingRequest:
        check_process(self._pid)
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise ConfigError(f"texts is a {type(texts).__name__}: must be a list of str")
        if not _is_whole(priority):
            raise ConfigError(f"priority={priority!r}: must be a whole number")
        if deadline_ms is not None and not (isinstance(deadline_ms, (int, float)) and not math.isnan(deadline_ms)):
            raise ConfigError(f"deadline_ms={deadline_ms!r}: must be a number of milliseconds, or None")
        prompted = [prompt + text if isinstance(text, str) else text for text in texts] if prompt else list(texts)
        deadline = None if deadline_ms is None else time.perf_counter() + deadline_ms / 1e3
        return EmbeddingRequest(self._tokenizer.encode(prompted), self.width, priority, deadline)

    def _instruction(self, kind: Literal["query", "document"]) -> str:
        given = self._config.query_instruction if kind == "query" else self._config.embed_instruction
        if given is not None:
            return given
        prompts: Mapping[str, str] = self._files.prompts
        return prompts.get(kind) or (prompts.get("passage", "") if kind == "document" else "")

    def _check_dimensions(self, dimensions: int | None) -> None:
        if dimensions is None:
            return
        if not _is_whole(dimensions) or not 1 <= dimensions <= self.width:
            raise ConfigError(f"dimensions={dimensions!r}: must be a whole number from 1 to {self.width}")

    def _cut(self, vectors: Vectors, dimensions: int) -> Vectors:
        cut = vectors[:, :dimensions]
        if not self._config.normalize:
            return cut
        return np.asarray(cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), 1e-12), np.float32)


def _close(
    engine: JobHost | None, queue: EmbeddingQueue | EmbeddingPool, own_engine: JobEngine | EmbeddingPool | None
) -> None:
    if engine is not None and isinstance(queue, EmbeddingQueue):
        engine.remove_jobs(queue)
    if own_engine is not None:
        own_engine.close()


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _as_lists(vectors: Vectors) -> list[list[float]]:
    found: list[list[float]] = vectors.tolist()
    return found
