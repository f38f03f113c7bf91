"""What the pipelines of encoders share: checked calls, requests that are begun and waited for, and the release of the device."""

from __future__ import annotations

import asyncio
import math
import numbers
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Generic, TypeVar

import openvino_genai as genai

from staticllm.errors import ConfigError, shown
from staticllm.pipelines.embedding.embedding_request import EmbeddingRequest
from staticllm.pipelines.embedding.packing.encoder_buffers import Vectors
from staticllm.pipelines.embedding.packing.tokenized_text import TokenizedText
from staticllm.pipelines.embedding.pool.served_encoder import ServedEncoder
from staticllm.pipelines.embedding.text_tokenizer import Overflow, TextTokenizer
from staticllm.pipelines.engine.jobs import JobHost
from staticllm.system.heap import return_free_memory
from staticllm.system.threads import check_process, close_when_collected

QUERY_PRIORITY = 1
"""The default priority of queries; that of documents is 0."""
OnTexts = Callable[[int, int], None]
"""A function that gets the number of texts that are done, and of all texts, on the caller's thread."""

Result = TypeVar("Result")
Pipeline = TypeVar("Pipeline", bound="EncoderPipeline")


class EncoderHandle(ABC, Generic[Result]):
    """What was submitted: ``result`` waits for it, ``await`` too, and ``cancel`` gives it up."""

    def __init__(self, request: EmbeddingRequest, pipeline: EncoderPipeline) -> None:
        self._request, self._pipeline = request, pipeline  # a pipeline that is deleted closes

    @abstractmethod
    def result(self, timeout: float | None = None) -> Result:
        """Return the result.

        Raises:
            StaticLLMError: a text failed, or its deadline passed.
            TimeoutError: it took longer than ``timeout`` seconds.
            concurrent.futures.CancelledError: it was cancelled.
        """

    def cancel(self) -> bool:
        """Give it up. Return whether that was possible: False if the result was there already."""
        return self._request.future.cancel()

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all texts."""
        return sum(map(len, self._request.texts))

    @property
    def future(self) -> Future[Vectors]:
        """The future of what the device computes, ``[n, width]``, for ``concurrent.futures`` and ``asyncio.wrap_future``."""
        return self._request.future

    def __await__(self) -> Generator[Any, None, Result]:
        yield from asyncio.wrap_future(self._request.future).__await__()
        return self.result(0)


class EncoderPipeline:
    """An encoder that serves calls of any number of threads. It ends when it is closed, left by ``with``, or deleted."""

    def __init__(self, served: ServedEncoder, tokenizer: genai.Tokenizer, overflow: Overflow) -> None:
        """Take an encoder that serves; it is closed if its tokenizer cannot be used."""
        self._pid = os.getpid()
        self._served, self._driver, self._engine = served, served.driver, served.engine
        self._begun: dict[str, EmbeddingRequest] = {}
        try:
            info = served.info
            self._tokenizer = TextTokenizer(tokenizer, info.max_length, info.vocab_size, overflow)
        except BaseException:
            served.close()
            raise
        close_when_collected(self, _close, served, self._tokenizer)

    @property
    def engine(self) -> JobHost:
        """The engine that owns the device, for other pipelines on the same device.

        Raises:
            ConfigError: the pipeline has several devices, a latency limit, or a process of its own.
        """
        if self._engine is None:
            raise ConfigError(
                "a pipeline on several devices, with LATENCY_MS or SEPARATE_PROCESS has no engine to share: load it without"
            )
        return self._engine

    @property
    def max_length(self) -> int:
        """The most tokens of a text, or of a query with a text."""
        return self._served.info.max_length

    @property
    def is_usable(self) -> bool:
        """Whether a device works, or is being started again; a pipeline without one has to be loaded anew."""
        return self._driver.is_usable

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Return the tokens of each text with its special ones, before it is truncated to ``max_length``.

        Raises:
            PromptError: a text is not valid.
        """
        return self._tokenizer.count(texts)

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
        if isinstance(texts, str) or not isinstance(texts, Iterable):
            raise ConfigError(f"texts is a {type(texts).__name__}: must be a list of str")
        if not is_whole(priority):
            raise ConfigError(f"priority={priority!r}: must be a whole number")
        if deadline_ms is not None and not _is_time(deadline_ms):
            raise ConfigError(f"deadline_ms={shown(deadline_ms)}: must be a number of milliseconds, or None")
        return list(texts)

    def _request(
        self, tokens: Sequence[TokenizedText], priority: int = 0, deadline_ms: float | None = None
    ) -> EmbeddingRequest:
        deadline = None if deadline_ms is None else time.perf_counter() + deadline_ms / 1e3
        return EmbeddingRequest(tokens, self._served.info.width, priority, deadline)

    def _submitted(self, request: EmbeddingRequest) -> EmbeddingRequest:
        if request.texts:
            self._driver.submit(request)
        else:
            request.future.set_result(request.vectors)
        return request

    def _run(self, request: EmbeddingRequest, on_progress: OnTexts | None = None) -> Vectors:
        if on_progress is not None and not callable(on_progress):
            raise ConfigError(f"on_progress={on_progress!r}: must be a function of two numbers of texts, or None")
        try:
            return self._submitted(request).wait(on_progress if request.texts else None)
        except BaseException:  # also Ctrl-C before the wait begins
            request.future.cancel()
            raise

    def _begin(self, kind: str, request: EmbeddingRequest) -> None:
        self._begun[kind] = self._submitted(request)

    def _end(self, kind: str, start: str) -> Vectors:
        """Return what was begun last of a kind; ``start`` is the method that begins it."""
        request = self._begun.pop(kind, None)
        if request is None:
            raise ConfigError(f"no {kind} was begun: call {start} first")
        return request.wait()


def _close(served: ServedEncoder, tokenizer: TextTokenizer) -> None:
    served.close()
    tokenizer.close()
    return_free_memory()


def is_whole(value: object) -> bool:
    """Return whether a value is a whole number, which ``True`` is not; those of numpy are."""
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def check_serving(overflow: object, max_waiting: object, on_progress: object) -> None:
    """Check the options that are about no model.

    Raises:
        ConfigError: one of them is impossible.
    """
    if overflow not in ("truncate", "refuse"):
        raise ConfigError(f"overflow={overflow!r}: must be 'truncate' or 'refuse'")
    if not isinstance(max_waiting, int) or isinstance(max_waiting, bool) or max_waiting < 1:
        raise ConfigError(f"max_waiting={max_waiting!r}: must be a whole number from 1")
    if on_progress is not None and not callable(on_progress):
        raise ConfigError(f"on_progress={on_progress!r}: must be a function of one ProgressEvent, or None")


def _is_time(value: object) -> bool:
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)
    except OverflowError:  # a whole number that no float holds
        return False
