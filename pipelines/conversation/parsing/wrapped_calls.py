"""Calls between markers of their own within markers around all calls (DeepSeek), and calls in a block of Python (MiniCPM)."""

from __future__ import annotations

from staticllm.pipelines.conversation.parsing.json_text import take_json
from staticllm.pipelines.conversation.parsing.output import Output
from staticllm.pipelines.conversation.parsing.python_calls import take_python_call
from staticllm.pipelines.conversation.parsing.source import MalformedError, Source, Steps

CALLS = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
CALL = ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")
SEPARATOR = "<｜tool▁sep｜>"
FENCE = "```"


def take_separated_calls(source: Source, output: Output) -> Steps[None]:
    """Take the calls after ``<｜tool▁calls▁begin｜>`` or after the first ``<｜tool▁call▁begin｜>``; the last end is not taken.

    A call is ``name<｜tool▁sep｜>{…}`` (DeepSeek V3.1), or ``function<｜tool▁sep｜>name`` and a block of JSON (V3, R1).

    Raises:
        MalformedError: one is neither. The calls before the one that is malformed are written.
    """
    while True:
        yield from source.skip_space()
        yield from source.skip(CALL[0])
        yield from _take_separated_call(source, output)
        yield from source.skip_space()
        if not (yield from source.starts_with(CALL[0])):
            return


def _take_separated_call(source: Source, output: Output) -> Steps[None]:
    name = (yield from source.word("<")).strip()
    yield from source.expect(SEPARATOR)
    is_fenced = (yield from source.skip_space()) != "{"
    if is_fenced:
        name = (yield from source.word("\n")).strip()
        yield from source.skip_space()
        yield from source.expect(f"{FENCE}json")
        if (yield from source.skip_space()) != "{":
            raise MalformedError("arguments that are no object")
    if not name:
        raise MalformedError("a call without a name")
    output.begin_call(name)
    yield from take_json(source, output.arguments)
    yield from source.skip_space()
    if is_fenced:
        yield from source.expect(FENCE)
        yield from source.skip_space()
    if (yield from source.peek()):  # the end of a generation may be this marker, which is then left out
        yield from source.expect(CALL[1])
    output.end_call()
    source.mark()


def take_fenced_calls(source: Source, output: Output) -> Steps[None]:
    """Take a block of Python with one call after the other: ```` ```python ````, calls, ```` ``` ````.

    Raises:
        MalformedError: it is none. The calls before the one that is malformed are written.
    """
    yield from source.skip_space()
    is_fenced = yield from source.skip(FENCE)
    if is_fenced:
        yield from source.skip("python")
    while True:
        yield from source.skip_space()
        yield from take_python_call(source, output)
        after = yield from source.skip_space()
        if is_fenced and (yield from source.skip(FENCE)):
            return
        if after in ("", "<") and not is_fenced:
            return
        if not after:
            raise MalformedError("a block without an end")
