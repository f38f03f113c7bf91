"""Answers of messages with headers: channels (harmony), and recipients (Functionary).

``<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…``, or ``>>>all``, text, ``>>>f``, JSON.
"""

from __future__ import annotations

import re

from .json_calls import take_object
from .parser_output import Output
from .text_stream import MalformedError, Steps, TextStream

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_MARKERS = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
FINAL = f"{ENDS[0]}{START}assistant{CHANNEL}final{MESSAGE}"
"""What stands between the reasoning and the text for the user."""
MAX_HEADER_CHARS = 400


def take_harmony(stream: TextStream, output: Output) -> Steps[None]:
    """Take a whole answer: messages with headers. The first header may begin behind the role, which the prompt has.

    Text outside of messages is content.
    """
    is_header = (yield from stream.starts_with(CHANNEL)) or (yield from stream.starts_with(" to="))
    while True:
        if not is_header:
            marker = yield from stream.text_until((START, CHANNEL), output.content)
            if not marker:
                return
            stream.take(-len(marker))
        is_header = False
        stream.mark()
        output.open_block()
        try:
            yield from _take_message(stream, output)
        except MalformedError:
            output.break_block(stream.since_mark())


def _take_message(stream: TextStream, output: Output) -> Steps[None]:
    header = yield from _take_header(stream)
    recipient = re.search(r"to=functions\.([\w.-]+)", header)
    channel = re.search(rf"{re.escape(CHANNEL)}\s*(\w+)", header)
    if recipient is not None:
        output.begin_call(recipient[1])
        yield from take_object(stream, output.arguments)
        output.end_call()
        stream.mark()
        yield from stream.skip_space()
        for end in ENDS:
            if (yield from stream.skip_end(end)):
                break
    else:
        stream.since_mark()
        is_reasoning = channel is not None and channel[1] == "analysis"
        if not is_reasoning:
            output.close_block()
        yield from stream.text_until(ENDS, output.reasoning if is_reasoning else output.content)
    output.close_block()


def _take_header(stream: TextStream) -> Steps[str]:
    """Take the text up to ``<|message|>``, and that."""
    found: list[str] = []
    while not (yield from stream.skip(MESSAGE)):
        char = yield from stream.peek()
        if not char or len(found) > MAX_HEADER_CHARS:
            raise MalformedError("a header without a message")
        found.append(char)
        stream.take()
    return "".join(found)


EVERYBODY = "all"
"""The recipient of text for the user."""
TAGGED, ARROWS = ("<|from|>assistant\n<|recipient|>", "\n<|content|>"), (">>>", "\n")
"""What stands before and after a recipient, in Functionary's versions 2 and 3.2."""
RECIPIENT_MARKERS = ("<|from|>", "<|recipient|>", "<|content|>")


def take_recipients(stream: TextStream, output: Output, header: tuple[str, str], is_open: bool) -> Steps[None]:
    """Take a whole answer.

    Text outside of messages is content, and so is a header whose recipient is neither ``all`` nor a known function.

    Args:
        is_open: Whether the prompt ends with the beginning of the first header.
    """
    begin, end = header
    num_before = 0
    if not is_open and not (yield from _skip_begin(stream, begin)):
        if not (yield from stream.text_until((begin,), output.content)):
            return
        num_before = len(begin)
    while True:
        stream.mark(num_before)
        output.open_block()
        try:
            yield from _take_message_to(stream, output, end)
        except MalformedError:
            output.break_block(stream.since_mark())
        if not (yield from stream.text_until((begin,), output.content)):
            return
        num_before = len(begin)


def _skip_begin(stream: TextStream, begin: str) -> Steps[bool]:
    yield from stream.skip_space()
    return (yield from stream.skip(begin))


def _take_message_to(stream: TextStream, output: Output, end: str) -> Steps[None]:
    name = (yield from stream.word("\n")).strip()
    yield from stream.expect(end)
    if name != EVERYBODY:
        output.begin_bare_call(name)
        yield from take_object(stream, output.arguments)
        output.end_call()
    stream.since_mark()
    output.close_block()
