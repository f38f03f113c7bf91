"""Messages with a recipient each (Functionary): ``>>>all``, text, ``>>>get_weather``, arguments."""

from __future__ import annotations

from staticllm.pipelines.conversation.parsing.json_text import take_json
from staticllm.pipelines.conversation.parsing.output import Output
from staticllm.pipelines.conversation.parsing.source import MalformedError, Source, Steps

EVERYBODY = "all"
"""The recipient of text for the user."""
TAGGED, ARROWS = ("<|from|>assistant\n<|recipient|>", "\n<|content|>"), (">>>", "\n")
"""What stands before and after a recipient, in Functionary's versions 2 and 3.2."""
MARKERS = ("<|from|>", "<|recipient|>", "<|content|>")


def take_recipients(source: Source, output: Output, header: tuple[str, str], is_open: bool) -> Steps[None]:
    """Take a whole answer. ``is_open``: the prompt ends with the beginning of the first header.

    Text outside of messages is content, and so is a header whose recipient is neither ``all`` nor a known function.
    """
    begin, end = header
    num_before = 0
    if not is_open and not (yield from _skip_begin(source, begin)):
        if not (yield from source.text_until((begin,), output.content)):
            return
        num_before = len(begin)
    while True:
        source.mark(num_before)
        output.open_block()
        try:
            yield from _take_message(source, output, end)
        except MalformedError:
            output.break_block(source.since_mark())
        if not (yield from source.text_until((begin,), output.content)):
            return
        num_before = len(begin)


def _skip_begin(source: Source, begin: str) -> Steps[bool]:
    yield from source.skip_space()
    return (yield from source.skip(begin))


def _take_message(source: Source, output: Output, end: str) -> Steps[None]:
    name = (yield from source.word("\n")).strip()
    yield from source.expect(end)
    if name != EVERYBODY:
        output.begin_bare_call(name)
        if (yield from source.skip_space()) != "{":
            raise MalformedError("arguments that are no object")
        yield from take_json(source, output.arguments)
        output.end_call()
    source.since_mark()
    output.close_block()
