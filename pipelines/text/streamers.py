"""Streams answers into the forms of streamer that GenAI accepts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import openvino_genai as genai
from openvino_genai import StreamingStatus as Status

from staticllm.core import FinishReason
from staticllm.errors import GenerationConfigError, shown

from .handle import GenerationHandle
from .output_processor import RequestOutput


class TokenSink(ABC):
    """Receives confirmed tokens and the text that they add. ``takes_text``: whether it uses the text."""

    takes_text = False

    @property
    def parsed(self) -> dict[str, object] | None:
        """The message that a parsing streamer made of the answer; None without one."""
        return None

    @abstractmethod
    def write(self, tokens: list[int], text: str) -> Status:
        """Receive one increment of the answer, and return whether to continue."""

    def end(self) -> None:  # noqa: B027  (most have nothing to do)
        """End the stream; called after the last increment."""


class TextSink(TokenSink):
    """Passes text to a callable, which returns None, a bool (True stops) or a ``StreamingStatus``."""

    takes_text = True

    def __init__(self, callback: Callable[[str], object]) -> None:
        self._callback = callback

    def write(self, tokens: list[int], text: str) -> Status:
        return as_status(self._callback(text)) if text else Status.RUNNING


class StreamerSink(TokenSink):
    """Passes tokens to an ``openvino_genai.StreamerBase`` as a list, as GenAI 2026 does: one token, or several held back."""

    def __init__(self, streamer: genai.StreamerBase) -> None:
        self._streamer = streamer
        self._take: Callable[[list[int]], object] = streamer.write

    def write(self, tokens: list[int], text: str) -> Status:
        return as_status(self._take(list(tokens))) if tokens else Status.RUNNING

    def end(self) -> None:
        self._streamer.end()


class ParserSink(StreamerSink):
    """Passes tokens to an ``openvino_genai.TextParserStreamer``, whose ``write`` receives messages in place of tokens.

    As in GenAI, it is reset before each answer.
    """

    def __init__(self, streamer: genai.TextParserStreamer) -> None:
        super().__init__(streamer)
        self._parser = streamer
        self._take = streamer._write
        streamer.reset()

    @property
    def parsed(self) -> dict[str, object] | None:
        return dict(self._parser.get_parsed_message())


def make_sink(streamer: object) -> TokenSink:
    """Return the sink for the argument ``streamer`` of a call.

    Raises:
        GenerationConfigError: it is neither callable nor a streamer.
    """
    if isinstance(streamer, genai.TextParserStreamer):
        return ParserSink(streamer)
    if isinstance(streamer, genai.StreamerBase):
        return StreamerSink(streamer)
    if callable(streamer):
        return TextSink(streamer)
    raise GenerationConfigError(
        f"streamer is a {type(streamer).__name__}: must be a callable that takes a str, an openvino_genai.StreamerBase or None"
    )


REASONS = {
    Status.STOP: FinishReason.STOP,
    Status.CANCEL: FinishReason.CANCELLED,
    Status.TOOL_CALL_STOP: FinishReason.TOOL_CALL,
}
"""The finish reason of an answer for each status with which a streamer ends it."""


def stream(handle: GenerationHandle, sink: TokenSink) -> RequestOutput:
    """Read one answer on this thread, token by token. An exception in the sink cancels the request.

    Raises:
        StaticLLMError: the request failed.
        Exception: the sink raised it.
    """
    try:
        for delta in handle.deltas(sink.takes_text):
            status = sink.write(delta.tokens, delta.text)
            if status != Status.RUNNING:
                handle.stop(REASONS[status], is_dropped=status == Status.CANCEL)
        sink.end()
        return handle.output()
    except BaseException:
        handle.cancel()
        raise


def check_callback(callback: object) -> None:
    """Check the argument ``callback`` of ``submit``.

    Raises:
        GenerationConfigError: it is neither None nor callable.
    """
    if callback is not None and not callable(callback):
        raise GenerationConfigError(f"callback is a {type(callback).__name__}: must be a callable that takes a str")


def as_status(answer: object) -> Status:
    """Return the status that a streamer's return value stands for.

    Raises:
        GenerationConfigError: it is neither None, a bool nor a ``StreamingStatus``.
    """
    if isinstance(answer, Status):
        return answer
    if answer is None or answer is False or answer == 0:
        return Status.RUNNING
    if answer is True or answer == 1:
        return Status.STOP
    raise GenerationConfigError(
        f"the streamer returned {shown(answer)}: must return None, a bool or a StreamingStatus; "
        "wrap what returns something else, as in lambda text: print(text, end='')"
    )
