"""What the pipelines of encoders share: checked calls, requests that are begun and waited for, and the release of the device."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from types import TracebackType
from typing import Any, ClassVar, Generic, TypeVar

import openvino_genai as genai

from staticllm.config import as_float, is_whole
from staticllm.errors import ConfigError, shown
from staticllm.system.heap import return_free_memory
from staticllm.system.threads import check_process, close_when_collected

from .embedding.embedding_request import EmbeddingRequest
from .embedding.encoder_kind import EncoderChoices
from .embedding.packing.encoder_buffers import Vectors
from .embedding.packing.tokenized_text import TokenizedText
from .embedding.pool.pool_plan import POOL_PROPERTIES, take_options
from .embedding.pool.served_encoder import ServedEncoder, ServingOptions, serve_encoder
from .embedding.queue.device_queue import DeviceState
from .embedding.text_tokenizer import TextTokenizer
from .engine.jobs import JobHost

QUERY_PRIORITY = 1
"""The default priority of queries; that of documents is 0."""
OnTexts = Callable[[int, int], None]
"""A function that gets the number of texts that are done, and of all texts, on the caller's thread."""

Result = TypeVar("Result")
Pipeline = TypeVar("Pipeline", bound="EncoderPipeline")


class EncoderHandle(Generic[Result]):
    """What was submitted: ``result`` waits for it, ``await`` too, and ``cancel`` gives it up."""

    def __init__(self, request: EmbeddingRequest, pipeline: EncoderPipeline, read: Callable[[Vectors], Result]) -> None:
        """Take what was submitted, and the function that makes its result of what the device computes, ``[n, width]``."""
        self._request = request
        self._pipeline = pipeline  # a pipeline that is deleted closes
        self._read = read

    def result(self, timeout: float | None = None) -> Result:
        """Return the result.

        Raises:
            StaticLLMError: a text failed, or its deadline passed.
            TimeoutError: it took longer than ``timeout`` seconds.
            concurrent.futures.CancelledError: it was cancelled.
        """
        return self._read(self._request.future.result(timeout))

    def cancel(self) -> bool:
        """Give it up. Return whether that was possible: False if the result was there already."""
        return self._request.future.cancel()

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all texts."""
        return sum(map(len, self._request.texts))

    @property
    def device_seconds(self) -> float:
        """Its part of the device calls that ended so far, in seconds, by tokens."""
        return self._request.device_seconds

    @property
    def future(self) -> Future[Vectors]:
        """The future of what the device computes, ``[n, width]``, for ``concurrent.futures`` and ``asyncio.wrap_future``."""
        return self._request.future

    def __await__(self) -> Generator[Any, None, Result]:
        yield from asyncio.wrap_future(self._request.future).__await__()
        return self.result(0)


class EncoderPipeline:
    """An encoder that serves calls of any number of threads. It ends when it is closed, left by ``with``, or deleted."""

    _options: ClassVar[tuple[str, ...]] = ("engine", "overflow", "max_waiting", "on_progress", *POOL_PROPERTIES)
    """The options of the constructor that are no properties of OpenVINO, beside those of the config."""

    def __init__(
        self,
        models_path: str | os.PathLike[str],
        device: str,
        choices: EncoderChoices,
        serving: ServingOptions,
        properties: dict[str, object],
        tokenizer: genai.Tokenizer | None = None,
    ) -> None:
        """Load an encoder and serve it. ``tokenizer``: another one than that of its directory."""
        self._pid = os.getpid()
        options = take_options(properties)
        names = (*choices.names, *self._options)
        choices = replace(choices, properties=properties or None, names=names)
        served, own = serve_encoder(models_path, device, choices, serving, options)
        self._served = served
        self._driver = served.driver
        self._engine = served.engine
        self._latency_limit = options.limit_s
        self._begun: dict[str, EmbeddingRequest] = {}
        try:
            info = served.info
            self._tokenizer = TextTokenizer(tokenizer or own, info.max_length, info.vocab_size, serving.overflow)
        except BaseException:
            served.release()
            raise
        close_when_collected(self, _close, served, self._tokenizer)

    @property
    def engine(self) -> JobHost:
        """The engine that owns the device, or of several the first one, for other pipelines on the same device.

        Raises:
            ConfigError: no engine was given, and the pipeline has several devices, a latency limit, or a process of its own.
        """
        if self._engine is None:
            raise ConfigError(
                "a pipeline on several devices, with LATENCY_MS or SEPARATE_PROCESS has no engine to share: load it without, or "
                "give both pipelines the engine of a third"
            )
        return self._engine

    @property
    def shared_engine(self) -> JobHost | None:
        """The engine of ``engine``; None if the pipeline has none."""
        return self._engine

    @property
    def max_length(self) -> int:
        """The most tokens of a text, or of a query with a text."""
        return self._served.info.max_length

    @property
    def latency_limit(self) -> float | None:
        """The latency limit of queries (``LATENCY_MS``), in seconds; None without one."""
        return self._latency_limit

    def devices(self) -> tuple[DeviceState, ...]:
        """Return what waits for each device and runs on it now, the preferred device first. Any thread may call."""
        return self._driver.devices()

    @property
    def is_usable(self) -> bool:
        """Whether a device works, or is being started again; a pipeline without one has to be loaded anew."""
        return self._driver.is_usable

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Return the tokens of each text with its special ones, before it is truncated to ``max_length``.

        Raises:
            PromptError: a text is not valid.
        """
        return self._tokenizer.count(list_of(texts))

    def close(self) -> None:
        """Release the device; texts that wait get a ``ClosedError``. An engine that was given goes on.

        The programs and the tokenizer are given back before it returns, with their memory, threads and files.
        """
        _close(self._served, self._tokenizer)

    def __enter__(self: Pipeline) -> Pipeline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_call(self, texts: Sequence[str], priority: int, deadline_ms: float | None) -> list[str]:
        """Return the texts as a list. The tokenizer checks each of them."""
        check_process(self._pid)
        given = list_of(texts)
        if not is_whole(priority):
            raise ConfigError(f"priority={shown(priority)}: must be a whole number")
        if deadline_ms is not None and not _is_time(deadline_ms):
            raise ConfigError(f"deadline_ms={shown(deadline_ms)}: must be a number of milliseconds, or None")
        return given

    def _request(
        self, tokens: Sequence[TokenizedText], priority: int = 0, deadline_ms: float | None = None
    ) -> EmbeddingRequest:
        deadline = None if deadline_ms is None else time.perf_counter() + deadline_ms / 1e3
        return EmbeddingRequest(tokens, self._served.info.width, int(priority), deadline)

    def _submitted(self, request: EmbeddingRequest) -> EmbeddingRequest:
        if request.texts:
            self._driver.submit(request)
        else:
            request.future.set_result(request.vectors)
        return request

    def _run(self, request: EmbeddingRequest, on_progress: OnTexts | None = None) -> Vectors:
        if on_progress is not None and not callable(on_progress):
            raise ConfigError(f"on_progress={shown(on_progress)}: must be a function of two numbers of texts, or None")
        try:
            return self._submitted(request).wait(on_progress if request.texts else None)
        except BaseException:  # also Ctrl-C before the wait begins
            request.future.cancel()
            raise

    def _begin(self, kind: str, request: EmbeddingRequest) -> None:
        self._begun[kind] = self._submitted(request)

    def _end(self, kind: str, start: str) -> Vectors:
        """Return what was begun last of a kind; ``start`` is the method that begins it."""
        request = self._begun.get(kind)
        if request is None:
            raise ConfigError(f"no {kind} was begun: call {start} first")
        try:
            return request.collect()
        finally:
            is_over = request.future.done()  # not after Ctrl-C: it goes on, and may be waited for again
            if is_over and self._begun.get(kind) is request:
                del self._begun[kind]


def list_of(texts: object) -> list[str]:
    """Return the texts of a call.

    Raises:
        ConfigError: they are no list of texts; the tokenizer checks each of them.
    """
    try:
        given = None if isinstance(texts, str) else iter(texts)  # type: ignore[call-overload]
    except Exception:  # it has no items, or is of a caller's class
        given = None
    if given is None:
        raise ConfigError(f"texts is a {type(texts).__name__}: must be a list of str")
    return list(given)


def _close(served: ServedEncoder, tokenizer: TextTokenizer) -> None:
    served.release()
    tokenizer.close()
    return_free_memory()


def _is_time(value: object) -> bool:
    number = as_float(value)
    return number is not None and not math.isnan(number)
