"""Learns from calls in prompts what stands around their names and arguments, and takes calls that are written so."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .json_calls import take_call_objects, take_object
from .named_arguments import FENCE
from .parser_output import Output
from .template_shape import CallExamples, num_equal
from .text_stream import MalformedError, Steps, TextStream
from .unquoted_values import Types, take_parameter_value

ID = "call1call"
"""Where a call has an id; also what a required call is given there."""
TYPE = "function"
"""The type of a call. Some models write it in place of the name, then the name and a block of JSON, as models before them did."""
MAX_LEAD_CHARS = 256
"""The most characters between the first marker of a call and what is directly before its name."""
_JSON = re.compile(r'\{\s*"arg1":\s*"some_value"\s*\}')
_TOKEN = re.compile(r"<[^<>\n]+>|\[/?[A-Z_]+\]|[^<\n\[]+|[<\[][^<\n\[]*")
_NUMBERED = re.compile(r"^functions\.(?=.)|:\d+$")


@dataclass(frozen=True)
class LearntParameters:
    """What stands before and after the name of a parameter, and after its value."""

    before_name: str
    after_name: str
    after_name_of_other: str
    """The same for a value that is no string."""
    after_value: str


@dataclass(frozen=True)
class LearntCalls:
    """The text around all calls, before and after each, and between a name and the arguments, with its layout."""

    wrapper: tuple[str, str]
    before: str
    after_name: str
    after: str
    parameters: LearntParameters | None = None
    """None for arguments that are one JSON object."""

    @property
    def openings(self) -> tuple[str, ...]:
        """The markers that a call may begin with, the first one first; some models leave out all but the last."""
        wrapper = tokens_of(self.wrapper[0])
        before = tokens_of(self.before)
        last = [token for token in before[1:] if token.startswith("<")]
        return tuple(dict.fromkeys([*wrapper[:1], *before[:1], *last[-1:]]))

    @property
    def markers(self) -> tuple[str, ...]:
        """All pieces of text that a call has around its parts."""
        inner = self.parameters
        texts = [*self.wrapper, self.before, self.after_name, self.after]
        texts += (
            [] if inner is None else [inner.before_name, inner.after_name, inner.after_name_of_other, inner.after_value]
        )
        return tuple(token for text in texts for token in tokens_of(text) if token != ID)

    @property
    def has_number(self) -> bool:
        """Whether the number of a call stands behind its name."""
        return bool(re.fullmatch(r":\d+", self._after_name[0]))

    @property
    def name_ends(self) -> str:
        """The characters that end the name of a function. Before JSON, some models leave out what is between."""
        is_in_tag = re.search(r"<[^<>]*$", self.before) is not None
        after_name = self._after_name[self.has_number and len(self._after_name) > 1 :]
        return f"{after_name[0][0]}\n{'<' if self.parameters is not None else '' if is_in_tag else '{'}"

    @property
    def _after_name(self) -> list[str]:
        inner = self.parameters
        return tokens_of(self.after_name) or ([] if inner is None else tokens_of(inner.before_name))

    def can_call(self, function: str) -> bool:
        """Return whether the name of a function is read as it is written."""
        is_json = function[:1] in ("{", "[") and not self.wrapper[0] and len(tokens_of(self.before)) == 1
        return not (is_json or set(function) & {*self.name_ends, "<"})

    def can_pass(self, parameter: str) -> bool:
        """Return whether the name of a parameter is read as it is written."""
        return self.parameters is None or tokens_of(self.parameters.after_name)[0][0] not in parameter


def tokens_of(text: str) -> list[str]:
    """Return the tags of a text and what is between them; white space between lines is left out."""
    pieces = (piece for part in re.split(f"({ID})", text) for piece in _TOKEN.findall(part))
    return [piece.strip() for piece in pieces if piece.strip()]


def learnt_calls(examples: CallExamples) -> LearntCalls | None:
    """Return what is around the parts of calls; None if the examples do not tell."""
    one = examples.one
    name = one.find("tool_name")
    before = one[:name]
    rest = one[name + len("tool_name") :]
    if "tool_name" in rest or not tokens_of(before) or tokens_of(before)[0][0] not in "<[":
        return None
    found = _JSON.search(rest)
    if found is not None:
        learnt = LearntCalls(("", ""), before, rest[: found.start()], rest[found.end() :])
    else:
        parameters = _learnt_parameters(rest, examples)
        if parameters is None:
            return None
        after_name, inner, after = parameters
        learnt = LearntCalls(("", ""), before, after_name, after, inner)
    return _with_wrapper(learnt, examples.two_calls) if learnt.after_name.strip() or learnt.parameters else None


def _learnt_parameters(rest: str, examples: CallExamples) -> tuple[str, LearntParameters, str] | None:
    """Return what is between the name and the parameters, what is around these, and what is after them."""
    one = re.fullmatch("(.*)arg1(.*)some_value(.*)", rest, re.DOTALL)
    two = re.search("some_value(.*)arg2(.*)other_value", examples.two_arguments, re.DOTALL)
    number = re.search("arg1(.*?)7", examples.number, re.DOTALL)
    if one is None or two is None or ">" not in one[2]:
        return None
    between = two[1]
    begin = one[1]
    end = one[3]
    before_name, after_value = _apart(_common_end(begin, between), _common_begin(between, end), between)
    if not (before_name.strip() and after_value.strip()) or one[2] != two[2]:
        return None
    inner = LearntParameters(before_name, one[2], number[1] if number else one[2], after_value)
    return begin[: len(begin) - len(before_name)], inner, end[len(after_value) :]


def _with_wrapper(learnt: LearntCalls, two_calls: str) -> LearntCalls:
    """Return it with what is around all calls apart from what is around each."""
    inner = learnt.parameters
    end = "some_value" + ("" if inner is None else inner.after_value)
    between = re.search(f"{re.escape(end)}(.*)other_tool", two_calls, re.DOTALL)
    if between is None:
        return learnt
    text = between[1] if inner is not None else re.sub(r'^"\s*\}', "", between[1])
    text = re.sub("call2call", ID, text)
    before, after = _apart(_common_end(learnt.before, text), _common_begin(text, learnt.after), text)
    if not before.strip():
        return learnt
    closing = learnt.after[len(after) :]
    if not closing and after:  # some templates write it only after several calls
        closing = two_calls[two_calls.rfind("some_value") :].partition(after)[2]
    wrapper = learnt.before[: len(learnt.before) - len(before)], closing
    return LearntCalls(wrapper, before, learnt.after_name, after, inner)


def _apart(before: str, after: str, between: str) -> tuple[str, str]:
    """Return the end and the begin of ``between``: white space that belongs to both belongs to the begin."""
    overlap = len(before) + len(after) - len(between)
    if overlap <= 0:
        return before, after
    return (before[overlap:], after) if before[:overlap].isspace() else ("", "")


def _common_begin(one: str, other: str) -> str:
    """Return the text with which both begin, without a part of a tag at its end."""
    text = one[: num_equal(one, other)]
    begin = text.rfind("<")
    return text[:begin] if begin > text.rfind(">") else text


def _common_end(one: str, other: str) -> str:
    """Return the text with which both end, without a part of a tag at its beginning."""
    count = num_equal(one[::-1], other[::-1])
    for text in (one, other):
        cut = len(text) - count
        if text.rfind("<", 0, cut) > text.rfind(">", 0, cut) and (end := text.find(">", cut)) >= 0:
            count = len(text) - end - 1
    return one[len(one) - count :]


def take_learnt_calls(
    stream: TextStream, output: Output, learnt: LearntCalls, functions: Mapping[str, Types], marker: str
) -> Steps[None]:
    """Take the calls after ``marker``, one of ``openings``.

    In place of a call there may be JSON (``take_call_objects``).

    Args:
        functions: The schemas of parameters, by function.
    """
    opening, closing = (tokens_of(text) for text in learnt.wrapper)
    before = tokens_of(learnt.before)
    leads = {before[-1]: [], before[0]: before[1:]}
    lead = [*opening[1:], *before] if marker in opening[:1] else leads[marker]
    first = yield from stream.skip_space()
    if first and first in "{[" and not (lead and lead[0].startswith(first)):
        yield from take_call_objects(stream, output)
        yield from _skip_tokens(stream, [*tokens_of(learnt.after), *closing])
        return
    while True:
        written = yield from _take_lead(stream, lead)
        yield from _take_call(stream, output, learnt, functions, written)
        yield from stream.skip_space()
        if not (yield from stream.starts_with(before[0])):
            break
        lead = before
    yield from _skip_tokens(stream, closing)


def _skip_tokens(stream: TextStream, tokens: list[str]) -> Steps[None]:
    for token in tokens:
        yield from stream.skip_space()
        yield from stream.skip_end(token)


def _take_lead(stream: TextStream, tokens: list[str]) -> Steps[str]:
    """Take the text before a name. Only its last piece must be as in the template: some models write less than that.

    Return what is written between the last two tags.
    """
    if not tokens:
        yield from stream.skip_space()
        return ""
    if tokens[-1] == "functions.":
        yield from _take_tokens(stream, tokens[:-1])
        return ""
    taken: list[str] = []
    found = yield from stream.text_until([tokens[-1]], taken.append, takes_cut_marker=False)
    text = "".join(taken)
    if not found or len(text) > MAX_LEAD_CHARS:
        raise MalformedError("a call without a name")
    return text.rpartition(">")[2].strip()


def _take_tokens(stream: TextStream, tokens: list[str]) -> Steps[None]:
    for index, token in enumerate(tokens):
        yield from stream.skip_space()
        if token == ID:
            yield from stream.word(tokens[index + 1][0] if index + 1 < len(tokens) else "\n<")
        else:
            yield from stream.expect(token)


def _take_call(
    stream: TextStream, output: Output, learnt: LearntCalls, functions: Mapping[str, Types], before_name: str
) -> Steps[None]:
    """Take a call. ``before_name``: what stands in place of the type of the call; some models write the name there, then JSON."""
    inner = learnt.parameters
    end = tokens_of(learnt.after)
    numbered = learnt.has_number
    if (yield from stream.skip_space()) == "{" and inner is None and before_name not in ("", TYPE):
        name = before_name
        end = [token for token in end if token != FENCE]
    else:
        name = (yield from stream.word(learnt.name_ends)).strip()
        name = _NUMBERED.sub("", name) if numbered else name
        yield from _take_after_name(stream, tokens_of(learnt.after_name)[1 if numbered else 0 :], inner is None)
    if inner is None and name == TYPE and (yield from stream.skip_space()) != "{":
        name = yield from _take_fenced_name(stream)
        end = [FENCE, *end]
    if not name:
        raise MalformedError("a call without a name")
    output.begin_call(name)
    if inner is None:
        yield from take_object(stream, output.arguments)
    else:
        yield from _take_parameters(stream, output, inner, functions.get(name, {}), (end or [""])[0])
    yield from _take_end(stream, end, inner is None)
    output.end_call()
    stream.mark()


def _take_after_name(stream: TextStream, tokens: list[str], has_json: bool) -> Steps[None]:
    """Take the text between a name and the arguments; before JSON, some models leave it out, or the id in it."""
    if has_json and (yield from stream.skip_space()) == "{":
        return
    if len(tokens) > 2 and tokens[1] == ID and not (yield from stream.starts_with(tokens[0])):
        tokens = tokens[2:]
    yield from _take_tokens(stream, tokens)


def _take_fenced_name(stream: TextStream) -> Steps[str]:
    """Take a name and the beginning of a block of JSON."""
    name = (yield from stream.word("\n")).strip()
    yield from stream.skip_space()
    yield from stream.expect(f"{FENCE}json")
    return name


def _take_end(stream: TextStream, tokens: list[str], has_json: bool) -> Steps[None]:
    """Take the text after a call. Only its first piece must come, and after JSON not even that at the end of the text."""
    if not tokens or (has_json and not (yield from stream.skip_space())):
        return
    if not (has_json and (yield from stream.skip_end(tokens[0]))):
        yield from _take_tokens(stream, tokens[:1])
    yield from _skip_tokens(stream, tokens[1:])


def _take_parameters(
    stream: TextStream, output: Output, inner: LearntParameters, types: Types, call_end: str
) -> Steps[None]:
    seen = set[str]()
    before = "{"
    opening = inner.before_name.strip()
    between = tokens_of(inner.after_name)
    while True:
        yield from stream.skip_space()
        if not (yield from stream.skip(opening)):
            break
        key = (yield from stream.word(between[0][0])).strip()
        if not key or key in seen:
            raise MalformedError(f"the parameter {key!r} is empty or comes twice")
        seen.add(key)
        schema: Mapping[str, Any] = types.get(key, {})
        if inner.after_name != inner.after_name_of_other and (yield from stream.skip(inner.after_name.strip())):
            schema = schema if schema.get("type") else {**schema, "type": "string"}
        else:
            yield from _take_tokens(stream, tokens_of(inner.after_name_of_other))
        written = f"{before}{json.dumps(key, ensure_ascii=False)}: "
        end = inner.after_value.strip()
        has_lines = inner.after_value.startswith("\n")
        if (yield from take_parameter_value(stream, output, written, schema, end, has_line_breaks=has_lines)):
            before = ", "
    if not (yield from stream.starts_with(call_end)):
        raise MalformedError("a call without an end")
    output.arguments("{}" if before == "{" else "}")
