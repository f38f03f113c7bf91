"""Streams answers: into the forms of streamer that GenAI accepts, and those of several prompts together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import openvino_genai as genai
from openvino_genai import StreamingStatus as Status

from staticllm.core import FinishReason
from staticllm.errors import BusyError, GenerationConfigError, shown
from staticllm.pipelines.text.handle import GenerationHandle
from staticllm.pipelines.text.input_processor import Prompt
from staticllm.pipelines.text.output_processor import RequestOutput


class TokenSink:
    """Receives confirmed tokens and the text that they add; this one discards them. ``takes_text``: whether it uses the text."""

    takes_text = False

    @property
    def parsed(self) -> dict[str, object] | None:
        """The message that a parsing streamer made of the answer; None without one."""
        return None

    def write(self, tokens: list[int], text: str) -> Status:
        """Receive one increment of the answer, and return whether to continue."""
        return Status.RUNNING

    def end(self) -> None:
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
        GenerationConfigError: it is neither None, callable nor a streamer.
    """
    if streamer is None:
        return TokenSink()
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
    """Check the argument ``callback`` of ``submit``. Raises GenerationConfigError: it is neither None nor callable."""
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


Begin = Callable[[Prompt], GenerationHandle]
"""Submits one prompt."""


def run_together(begin: Begin, prompts: Sequence[Prompt]) -> list[RequestOutput]:
    """Submit all prompts, at most ``MAX_WAITING`` at a time, and wait for their answers, in the order of the prompts.

    Raises:
        BusyError: the queue is full of other requests.
        StaticLLMError: a request failed; all are cancelled then.
    """
    handles: list[GenerationHandle] = []
    try:
        for prompt in prompts:
            handles.append(_begin_when_possible(begin, prompt, handles))
        return [output for handle in handles for output in handle.outputs()]
    except BaseException:
        for handle in handles:
            handle.cancel()
        raise


def _begin_when_possible(begin: Begin, prompt: Prompt, before: Sequence[GenerationHandle]) -> GenerationHandle:
    """Submit a prompt. If the queue is full and holds prompts of this call, wait for the first of them."""
    while True:
        try:
            return begin(prompt)
        except BusyError:
            unfinished = [handle for handle in before if not handle.is_done]
            if not unfinished:
                raise
            unfinished[0].outputs()
