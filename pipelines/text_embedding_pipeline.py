"""``StaticEmbeddingPipeline`` takes the place of ``openvino_genai.TextEmbeddingPipeline``: texts become vectors."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Literal, overload

import numpy as np
import openvino_genai as genai

from staticllm.config import is_whole
from staticllm.core import OnProgress
from staticllm.errors import ConfigError, shown

from .embedding.embedding_config import (
    POOLINGS,
    EmbeddingConfig,
    PoolingType,
    resolved_config,
)
from .embedding.embedding_request import EmbeddingRequest
from .embedding.encoder_kind import EncoderChoices
from .embedding.output_types import (
    Embeddings,
    OutputType,
    as_vectors,
    check_output_type,
    convert,
    ranges_of,
)
from .embedding.packing.encoder_buffers import Vectors
from .embedding.pool.served_encoder import ServingOptions
from .embedding.text_tokenizer import Overflow, check_text, lower_case
from .encoder_pipeline import QUERY_PRIORITY, EncoderHandle, EncoderPipeline, OnTexts
from .engine.jobs import JobHost


class EmbeddingHandle(EncoderHandle[Vectors]):
    """The vector ``[width]`` of a text that was submitted: ``result`` waits for it, ``await`` too, and ``cancel`` gives it up."""


class EmbeddingsHandle(EncoderHandle[Vectors]):
    """The vectors ``[n, width]`` of texts that were submitted: ``result`` waits for them, ``await`` too; ``cancel`` gives up."""


class StaticEmbeddingPipeline(EncoderPipeline):
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
            engine: The engine of another pipeline on the same device, of several the one that is named first:
                ``engine=llm.engine``. Its scheduler then decides which pipeline uses the device next. None: the devices are this
                pipeline's alone.
            overflow: Whether texts of more than ``max_length`` tokens are truncated or refused.
            max_waiting: The most texts that may wait.
            on_progress: Is called with each part of loading.
            properties: OpenVINO's properties of the device, fields of ``Config``, those of ``StaticLLMPipeline`` about blobs
                (``CACHE_DIR``, ``BLOB_PATH`` …), ``PROGRAMS`` and ``WEIGHTS_PATH``, and those of several devices
                (docs/embeddings.md): ``HETEROGENEOUS``, ``LATENCY_MS``, ``QUEUE_POLICY``, ``QUEUE_DEPTHS``,
                ``DEVICE_PROPERTIES``, ``SEPARATE_PROCESS``.

        Raises:
            ModelError: a file of the model is missing or damaged, or it cannot be lowered.
            ConfigError: an option is unknown or impossible.
            DeviceError: the device is missing, or cannot compile or run the model.
            BlobError: the set at ``BLOB_PATH`` is damaged or was made for something else.
        """
        serving = ServingOptions(engine, overflow, max_waiting, on_progress)
        self._config = resolved_config(EmbeddingConfig, config, properties)
        super().__init__(models_path, device, _choices(self._config), serving, properties)

    @property
    def width(self) -> int:
        """The number of values of a vector."""
        return self._served.info.width

    @property
    def prompts(self) -> dict[str, str]:
        """The text that is put before each kind of text: ``query``, ``document``, and others that the model's files name."""
        return {
            **self._served.files.prompts,
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
        """Return the vectors of texts, each with ``prompt`` before it; None as for ``encode``.

        Raises:
            StaticLLMError: a text cannot be embedded.
        """
        return _as_lists(self.encode(texts, prompt=prompt))

    def encode(
        self,
        texts: Sequence[str],
        *,
        prompt: str | None = None,
        prompt_name: str | None = None,
        dimensions: int | None = None,
        priority: int = 0,
        deadline_ms: float | None = None,
        on_progress: OnTexts | None = None,
        output_type: OutputType = "float32",
        calibration: Embeddings | Sequence[Sequence[float]] | None = None,
    ) -> Embeddings:
        """Return the vectors ``[n, width]`` of texts.

        Args:
            texts: Any number of texts.
            prompt: A text to put before each of them. None: the ``default_prompt_name`` of the model's files; most have none.
            prompt_name: A key of ``prompts``, in place of its text; ``prompt`` goes before it.
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
        given = None if calibration is None else as_vectors(calibration)
        check_output_type(output_type, given, dimensions or self.width)
        ranges = None if given is None else ranges_of(given)
        named = None if prompt_name is None else self._named(prompt_name)  # it is checked beside a prompt, too
        prompt = named if prompt is None else prompt
        vectors = self._run(self._prompted(texts, prompt, priority, deadline_ms), on_progress)
        return convert(self._cut(vectors, dimensions), output_type, ranges)

    def start_embed_documents_async(self, texts: Sequence[str]) -> None:
        """Begin to embed documents; ``wait_embed_documents`` returns their vectors.

        Raises:
            StaticLLMError: a text is not valid, or too many wait.
        """
        self._begin("document", self._prompted(texts, self._instruction("document")))

    def wait_embed_documents(self) -> list[list[float]]:
        """Return the vectors of the documents that were begun last.

        Raises:
            StaticLLMError: a text could not be embedded, or none were begun.
        """
        return _as_lists(self._end("document", "start_embed_documents_async"))

    def start_embed_query_async(self, text: str) -> None:
        """Begin to embed a query; ``wait_embed_query`` returns its vector.

        Raises:
            StaticLLMError: the text is not valid, or too many wait.
        """
        self._begin("query", self._prompted([text], self._instruction("query"), QUERY_PRIORITY))

    def wait_embed_query(self) -> list[float]:
        """Return the vector of the query that was begun last.

        Raises:
            StaticLLMError: it could not be embedded, or none was begun.
        """
        return _as_lists(self._end("query", "start_embed_query_async"))[0]

    def submit(
        self, text: str, *, prompt: str | None = None, priority: int = 0, deadline_ms: float | None = None
    ) -> EmbeddingHandle:
        """Submit one text and return at once.

        Raises:
            PromptError: the text is not valid.
            BusyError: too many texts wait.
        """
        request = self._submitted(self._prompted([text], prompt, priority, deadline_ms))
        return EmbeddingHandle(request, self, lambda vectors: vectors[0])

    def submit_texts(
        self,
        texts: Sequence[str],
        *,
        prompt: str | None = None,
        dimensions: int | None = None,
        priority: int = 0,
        deadline_ms: float | None = None,
    ) -> EmbeddingsHandle:
        """Submit several texts and return at once. The options are those of ``encode``.

        Raises:
            PromptError: a text is not valid.
            ConfigError: an option is impossible.
            BusyError: too many texts wait.
        """
        self._check_dimensions(dimensions)
        request = self._submitted(self._prompted(texts, prompt, priority, deadline_ms))
        return EmbeddingsHandle(request, self, partial(self._cut, dimensions=dimensions))

    def _prompted(
        self, texts: Sequence[str], prompt: str | None, priority: int = 0, deadline_ms: float | None = None
    ) -> EmbeddingRequest:
        given = self._check_call(texts, priority, deadline_ms)
        files = self._served.files
        prompt = files.default_prompt if prompt is None else prompt
        check_text(prompt, "the prompt")
        if prompt:  # the tokenizer refuses what is no str
            given = [prompt + text if isinstance(text, str) else text for text in given]
        if files.is_lower_cased:
            prompt = lower_case(prompt)
            given = [lower_case(t) if isinstance(t, str) else t for t in given]
        num_prompt = 0 if files.is_prompt_pooled else self._tokenizer.count_prompt(prompt)
        return self._request(self._tokenizer.encode(given, num_prompt), priority, deadline_ms)

    def _named(self, name: str) -> str:
        known = self.prompts
        if not isinstance(name, str) or (plain := str.__str__(name)) not in known:
            raise ConfigError(f"prompt_name={shown(name)}: must be one of {', '.join(known)}, or None")
        return known[plain]

    def _instruction(self, kind: Literal["query", "document"]) -> str:
        given = self._config.query_instruction if kind == "query" else self._config.embed_instruction
        if given is not None:
            return given
        files = self._served.files
        return files.prompts.get("query", "") if kind == "query" else files.document_prompt

    def _check_dimensions(self, dimensions: int | None) -> None:
        if dimensions is None:
            return
        if not is_whole(dimensions, 1, self.width):
            raise ConfigError(f"dimensions={shown(dimensions)}: must be a whole number from 1 to {self.width}")

    def _cut(self, vectors: Vectors, dimensions: int | None) -> Vectors:
        """Return the leading ``dimensions``, all for None, normalised again if vectors are."""
        if dimensions is None:
            return vectors
        cut = vectors[:, :dimensions]
        if not self._config.normalize:
            return cut
        return np.asarray(cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), 1e-12), np.float32)


def _choices(config: EmbeddingConfig) -> EncoderChoices:
    return EncoderChoices(
        pooling=None if config.pooling_type is None else POOLINGS[config.pooling_type],
        is_normalised=config.normalize,
        max_length=config.max_length,
        output="embeddings",
        names=tuple(vars(config)),
    )


def _as_lists(vectors: Vectors) -> list[list[float]]:
    found: list[list[float]] = vectors.tolist()
    return found
