"""Parses an answer while it is written, and gives its events: content, reasoning, and calls with their arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from staticllm.errors import GenerationConfigError
from staticllm.events import CallEnd, Event

from ..generation.options.extra import function_of
from ..grammars.parameters import Owner, Parameter, listed_parameters
from .formats import MessageFormat
from .headed_messages import take_harmony, take_recipients
from .json_calls import (
    SoleCalls,
    take_bare_objects,
    take_call_objects,
    take_keyed_calls,
    take_listed_calls,
)
from .learnt_calls import take_learnt_calls
from .named_arguments import take_braced_calls, take_fenced_calls, take_python_calls
from .parser_output import ExpectedCalls, Output, new_call_id
from .text_stream import MalformedError, Steps, TextStream
from .unquoted_values import Types

_TAKERS: dict[str, Callable[[TextStream, Output], Steps[None]]] = {
    "tagged": take_call_objects,
    "python": take_python_calls,
    "fenced": take_fenced_calls,
    "bare_json": take_bare_objects,
    "generic": take_listed_calls,
    "keyed": take_keyed_calls,
}
"""What takes the calls after a marker, by syntax."""


class MessageParser:
    """Parses one answer. However its text is split, the events concatenate to the same.

    A call that is malformed or cut off becomes content, with all its text; ``cut`` keeps one that is cut off. Calls in reasoning
    are not looked for.

    Args:
        format: How the answer is written.
        tools: The functions that may be called, as OpenAI's API takes them. They say of what type the values are where the
            format does not. Calls without markers are found only if they name one of them; without tools, any name will do.
        new_id: Makes the id of a call.
        calls: ``none`` makes content of calls; ``required`` says that a grammar constrains the answer to a call.
        is_content: whether a grammar wrote the text for the user: it is content as it stands, whatever markers it has, after the
            opening and the reasoning that the format has before it.
        has_one_call: whether the answer ends with its first call, and what follows is no part of it.
    """

    def __init__(
        self,
        format: MessageFormat,
        tools: Iterable[Mapping[str, Any]] = (),
        new_id: Callable[[], str] = new_call_id,
        calls: ExpectedCalls = "auto",
        is_content: bool = False,
        has_one_call: bool = False,
    ) -> None:
        functions = [function_of(tool) for tool in tools]
        self._format = format
        self._has_one_call = has_one_call
        self.has_called = False
        self._types = {str(function["name"]): _types_of(function) for function in functions}
        self._schemas = {str(function["name"]): function.get("parameters") or {} for function in functions}
        self._new_id = new_id
        self._may_be_sole = calls == "auto" and format.syntax not in ("bare_json", "generic")
        self._stream = TextStream()
        self._output = Output(self._types, new_id, calls)
        self._steps = self._constrained_answer() if is_content else self._whole_answer()
        self._is_over = False
        self._advance()

    def push(self, text: str) -> list[Event]:
        """Add a piece of the answer, and return the events that are certain now."""
        self._stream.feed(text)
        self._advance()
        return self._taken()

    def finish(self) -> list[Event]:
        """End the answer, and return its last events; to be called once."""
        self._stream.close()
        self._advance()
        self._output.finish()
        return self._taken()

    def _taken(self) -> list[Event]:
        """Return the new events; if the answer has one call, those up to its end."""
        events = self._output.take_events()
        if self.has_called:
            return []
        ends = [place for place, event in enumerate(events) if isinstance(event, CallEnd)]
        if not (self._has_one_call and ends):
            return events
        self.has_called = True
        return events[: ends[0] + 1]

    def cut(self) -> list[Event]:
        """End an answer with a required call that is cut off, in place of ``finish``.

        A call whose name is known stays one, with the arguments so far.
        """
        self._output.keeps_cut_calls = True
        return self.finish()

    def _advance(self) -> None:
        if not self._is_over:
            self._is_over = next(self._steps, self) is self

    def _whole_answer(self) -> Steps[None]:
        if self._format.syntax == "harmony":
            return take_harmony(self._stream, self._output)
        if self._format.syntax == "recipients":
            return take_recipients(self._stream, self._output, self._format.call, self._format.is_call_open)
        return self._answer()

    def _constrained_answer(self) -> Steps[None]:
        """Take an answer whose text for the user a grammar wrote, after what comes before it in the format."""
        stream = self._stream
        output = self._output
        for end, write in ((self._format.opening, str), (self._format.reasoning_end, output.reasoning)):
            if end and not (yield from stream.text_until([end], write, takes_cut_marker=False)):
                return  # it was cut off before the grammar began
        yield from stream.text_until([], output.verbatim)

    def _answer(self) -> Steps[None]:
        stream = self._stream
        output = self._output
        format = self._format
        markers = [marker for marker in (format.call[0], format.wrapper[0]) if marker]
        markers += [] if format.learnt is None else format.learnt.openings[1:]
        yield from self._leading_reasoning()
        if self._may_be_sole and self._schemas and (yield from self._sole_calls()):
            return
        while True:
            if (yield from self._bare_calls()):
                continue
            marker = yield from stream.text_until(markers, output.content)
            if not marker:
                return
            output.open_block()
            yield from self._wrapped(marker) if marker == format.wrapper[0] else self._block(marker)

    def _leading_reasoning(self) -> Steps[None]:
        """Take the reasoning, which stands only before all else: its markers are text where a model writes about them."""
        stream = self._stream
        begin = self._format.reasoning[0]
        if not begin:
            return
        stream.mark()
        self._output.open_block()
        yield from stream.skip_space()
        is_written = yield from stream.skip(begin)  # also where the prompt has it: some models write it once more
        if is_written or self._format.is_reasoning_open:
            stream.since_mark()
            yield from self._reasoning()
        else:
            self._output.break_block(stream.since_mark())

    def _reasoning(self) -> Steps[None]:
        yield from self._stream.text_until([self._format.reasoning[1]], self._output.reasoning)
        self._output.close_block()

    def _wrapped(self, marker: str) -> Steps[None]:
        """Take the calls after the marker that is around all of them, each with its own marker, and the end of it."""
        stream = self._stream
        output = self._output
        begin = self._format.call[0]
        _, end = self._format.wrapper
        stream.mark(len(marker))
        yield from stream.skip_space()
        if not (yield from stream.skip(begin)):
            output.break_block(stream.since_mark())
            return
        layout = stream.since_mark()
        while (yield from self._block(begin, layout)):
            yield from stream.skip_space()
            if not (yield from stream.skip(begin)):
                yield from stream.skip_end(end)
                return
            output.open_block()
            layout = begin

    def _block(self, marker: str, layout: str = "") -> Steps[bool]:
        """Take the calls after a marker, and return whether there were any. ``layout``: all that was taken, if it is more."""
        self._stream.mark(len(marker))
        try:
            yield from self._calls(marker)
            self._stream.since_mark()
            yield from self._stream.skip_space()
            if self._format.call[1]:
                yield from self._stream.skip_end(self._format.call[1])
            self._output.close_block()
            return True
        except MalformedError:
            self._output.break_block(layout.removesuffix(marker) + self._stream.since_mark())
            return False

    def _calls(self, marker: str) -> Steps[None]:
        format = self._format
        if format.learnt is not None:
            return take_learnt_calls(self._stream, self._output, format.learnt, self._types, marker)
        if format.syntax == "braced":
            return take_braced_calls(self._stream, self._output, format.quote)
        return _TAKERS[format.syntax](self._stream, self._output)

    def _sole_calls(self) -> Steps[bool]:
        """Take an answer that is nothing but calls as JSON, whatever the model's own format is. Return whether it is."""
        stream = self._stream
        calls = SoleCalls(self._schemas, self._new_id)
        taken: list[str] = []
        while calls.is_possible and not stream.is_over:
            if not (text := stream.take_all()):
                yield
                continue
            taken.append(text)
            calls.push(text)
        found = calls.finish() if calls.is_possible else ()
        if not found:
            stream.put_back("".join(taken))
            return False
        for call in found:
            self._output.begin_call(call.name)
            self._output.arguments(call.arguments)
            self._output.end_call()
        self._output.close_block()
        return True

    def _bare_calls(self) -> Steps[bool]:
        """Take calls without a marker, which are possible only at the beginning of content. Return whether there were any."""
        stream = self._stream
        output = self._output
        syntax = self._format.syntax
        openings = {"bare_json": "{[", "python": "[", "generic": "{"}.get(syntax, "")
        is_listed = self._format.has_listed_calls and "{" not in openings
        if not (openings or is_listed) or output.has_content:
            return False
        stream.mark()
        output.open_block()
        is_call = False
        try:
            if (first := (yield from stream.skip_space())) and (first in openings or (is_listed and first == "{")):
                yield from (_TAKERS[syntax] if first in openings else take_listed_calls)(stream, output)
                stream.since_mark()
                output.close_block()
                is_call = True
        except MalformedError:
            pass
        if not is_call:
            output.break_block(stream.since_mark())
        return is_call


def _types_of(function: Mapping[str, Any]) -> Types:
    parameters = function.get("parameters")
    if not isinstance(parameters, Mapping):
        return {}
    try:
        listed = listed_parameters(parameters, Owner("", ""))
    except GenerationConfigError:  # then what is listed is known at least
        properties = parameters.get("properties")
        listed = [] if not isinstance(properties, Mapping) else [
            Parameter(str(name), schema, False) for name, schema in properties.items() if isinstance(schema, Mapping)
        ]  # fmt: skip
    return {parameter.name: parameter.schema for parameter in listed}
