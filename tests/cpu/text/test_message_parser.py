"""Tests the parsers of calls and reasoning: what they find in an answer, however its text is split."""

import json
from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.calls import LEARNT
from support.quick import examples

from staticllm.events import (
    ArgumentsDelta,
    CallBegin,
    CallBroken,
    CallEnd,
    ContentDelta,
    ReasoningDelta,
    merged,
    message_of,
)
from staticllm.pipelines.conversation.formats import MessageFormat
from staticllm.pipelines.conversation.message_parser import MessageParser
from staticllm.pipelines.conversation.named_arguments import as_json

THINK = ("<think>", "</think>")
TAGGED = MessageFormat("tagged", ("<tool_call>", "</tool_call>"), THINK)
XML = replace(LEARNT["xml"], reasoning=THINK)
NAMED = replace(LEARNT["mistral"], reasoning=("[THINK]", "[/THINK]"))
BARE = MessageFormat("bare_json", ("<|python_tag|>", ""))
PYTHON = MessageFormat("python", ("<|python_start|>", "<|python_end|>"))
HARMONY = MessageFormat("harmony")
OPEN = MessageFormat("tagged", ("<tool_call>", "</tool_call>"), THINK, is_reasoning_open=True)
FORMATS = {
    "tagged": TAGGED,
    "xml": XML,
    "named": NAMED,
    "bare": BARE,
    "python": PYTHON,
    "harmony": HARMONY,
    "open": OPEN,
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "opts": {"type": "object"}},
                "required": ["city"],
            },
        },
    },
    {"name": "now"},
]


def events_of(format, pieces):
    numbers = count(1)
    parser = MessageParser(format, TOOLS, lambda: f"id{next(numbers)}")
    events = [event for piece in pieces for event in parser.push(piece)]
    return merged(events + parser.finish())


def parsed(format, text):
    """Return content, reasoning and the calls as pairs of a name and its arguments."""
    message = message_of(events_of(format, [text]))
    calls = [(call.name, call.parsed_arguments) for call in message.tool_calls]
    return message.content, message.reasoning_content, calls


BERLIN = ("weather", {"city": "Berlin"})
CASES = [
    (TAGGED, "Hello there.\n", "Hello there.\n", "", []),
    (TAGGED, '<tool_call>\n{"name": "weather", "arguments": {"city": "Berlin"}}\n</tool_call>', "", "", [BERLIN]),
    (
        TAGGED,
        "<think>\nBerlin, I think.\n</think>\n\nLet me look.\n\n"
        '<tool_call>{"arguments": {"city": "Berlin"}, "name": "weather"}</tool_call>\n'
        '<tool_call>\n{"name": "now"}\n</tool_call>\n',
        "Let me look.", "Berlin, I think.", [BERLIN, ("now", {})],
    ),
    (TAGGED, '<tool_call>[{"name": "weather", "arguments": "{\\"city\\": \\"Berlin\\"}"}, {"name": "now", "arguments": null}]',
     "", "", [BERLIN, ("now", {})]),
    (TAGGED, '<tool_call>{"type": "function", "function": {"name": "weather", "parameters": {"city": "Berlin"}}, "id": 7}',
     "", "", [BERLIN]),
    (TAGGED, '<tool_call>[{"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Berlin"}}]</tool_call>',
     "", "", [BERLIN]),
    (TAGGED, 'a <tool_call>{"name": "f", "arguments": [1]}</tool_call> b',
     'a <tool_call>{"name": "f", "arguments": [1]}</tool_call> b', "", []),
    (TAGGED, 'a <tool_call>{"name": "f", "arguments": {"x": oops}}</tool_call>',
     'a <tool_call>{"name": "f", "arguments": {"x": oops}}</tool_call>', "", []),
    (TAGGED, 'cut <tool_call>{"name": "f", "arguments": {"x": "y', 'cut <tool_call>{"name": "f", "arguments": {"x": "y', "", []),
    (TAGGED, '<tool_call><tool_call>{"name": "now"}</tool_call>', "<tool_call>", "", [("now", {})]),
    (TAGGED, "A tag <tool_ca", "A tag <tool_ca", "", []),
    (TAGGED, '<think>a <tool_call>{"name": "now"}</tool_call>', "", 'a <tool_call>{"name": "now"}</tool_call>', []),
    (OPEN, "\nstill thinking\n</think>\n\nDone.", "Done.", "still thinking", []),
    (OPEN, "<think>once more</think>Done.", "Done.", "once more", []),
    (OPEN, "never done ", "", "never done", []),
    (
        XML,
        "I look.\n<tool_call>\n<function=weather>\n<parameter=city>\nNew \"York\"\n\nCity\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=opts>\n{\"a\": [1, true]}\n</parameter>\n</function>\n</tool_call>",
        "I look.", "", [("weather", {"city": 'New "York"\n\nCity', "days": 3, "opts": {"a": [1, True]}})],
    ),
    (XML, "<function=now>\n</function>", "", "", [("now", {})]),
    (XML, "<function=other><parameter=x>7</parameter><parameter=y>a b</parameter></function> ok", "ok", "",
     [("other", {"x": 7, "y": "a b"})]),
    (XML, "<function=now> <parameter=x>7", "<function=now> <parameter=x>7", "", []),
    (XML, '<tool_call>{"name": "now", "arguments": {}}</tool_call>', "", "", [("now", {})]),
    (NAMED, '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Berlin"}}, {"name": "now", "arguments": {}}]',
     "", "", [BERLIN, ("now", {})]),
    (NAMED, '[TOOL_CALLS]weather[ARGS]{"city": "Berlin"}[TOOL_CALLS]now[CALL_ID]abc123XYZ[ARGS]{}',
     "", "", [BERLIN, ("now", {})]),
    (NAMED, '[THINK]hm[/THINK]Yes.[TOOL_CALLS]weather{"city": "Berlin"}', "Yes.", "hm", [BERLIN]),
    (NAMED, "[TOOL_CALLS]nothing\n", "[TOOL_CALLS]nothing\n", "", []),
    (BARE, '{"name": "weather", "parameters": {"city": "Berlin"}}', "", "", [BERLIN]),
    (BARE, '<|python_tag|>{"name": "now", "parameters": {}}; {"name": "weather", "parameters": {"city": "Berlin"}}',
     "", "", [("now", {}), BERLIN]),
    (BARE, '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', "", []),
    (BARE, '{"city": "Berlin", "name": "weather"}', '{"city": "Berlin", "name": "weather"}', "", []),
    (BARE, 'See: {"name": "now", "parameters": {}}', 'See: {"name": "now", "parameters": {}}', "", []),
    (PYTHON, "[weather(city='Berlin', days=2, opts={'a': None}), now()]", "", "",
     [("weather", {"city": "Berlin", "days": 2, "opts": {"a": None}}), ("now", {})]),
    (PYTHON, "<|python_start|>[weather(city='x\\", "<|python_start|>[weather(city='x\\", "", []),
    (PYTHON, '<|python_start|>[weather(city="a, (b)", opts={"t": true})]<|python_end|>', "", "",
     [("weather", {"city": "a, (b)", "opts": {"t": True}})]),
    (PYTHON, "[1, 2, 3] is a list", "[1, 2, 3] is a list", "", []),
    (PYTHON, "[delete(all=True)]", "[delete(all=True)]", "", []),
    (PYTHON, "[weather(city=open('x'))]", "[weather(city=open('x'))]", "", []),
    (
        HARMONY,
        "<|channel|>analysis<|message|>Need the weather.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "Berlin"}<|call|>',
        "", "Need the weather.", [BERLIN],
    ),
    (HARMONY, ' to=functions.now<|channel|>commentary json<|message|>{}<|call|>', "", "", [("now", {})]),
    (HARMONY, "<|channel|>final<|message|>It is sunny.<|return|>", "It is sunny.", "", []),
    (HARMONY, "plain text", "plain text", "", []),
    (HARMONY, "<|channel|>commentary to=functions.now<|message|>{oops<|call|>",
     "<|channel|>commentary to=functions.now<|message|>{oops<|call|>", "", []),
    (HARMONY, "<|channel|>analysis", "<|channel|>analysis", "", []),
]  # fmt: skip


@pytest.mark.parametrize(("format", "text", "content", "reasoning", "calls"), CASES)
def test_parts_of_an_answer(format, text, content, reasoning, calls):
    assert parsed(format, text) == (content, reasoning, calls)


@pytest.mark.parametrize(("format", "text", "content", "reasoning", "calls"), [case for case in CASES if case[4]])
def test_calls_that_are_complete_stay_so_wherever_the_rest_is_cut_off(format, text, content, reasoning, calls):
    """A limit of tokens or a stop string may fall into what closes a call: that is no content, and the call is none the less."""
    found = [parsed(format, text[:length]) for length in range(len(text) + 1)]
    first = next(length for length, each in enumerate(found) if each[2] == calls)
    for each in found[first:]:
        assert each[2] == calls
        assert content.startswith(each[0])


@pytest.mark.parametrize(("format", "text"), [case[:2] for case in CASES])
def test_the_events_of_an_answer_are_the_same_letter_by_letter(format, text):
    assert events_of(format, text) == events_of(format, [text])


FRAGMENTS = {
    "tagged": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "xml": ["<tool_call>", "<function=weather>", "<function=", "<parameter=city>", "<parameter=days>", "</parameter>",
            "</function>", "</tool_call>", "\n\n"],
    "named": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "weather", "[THINK]", "[/THINK]", "[", ","],
    "bare": ["<|python_tag|>", ";", '"parameters"', "{"],
    "python": ["<|python_start|>", "[", "weather(", "now()", "city=", "'Ber(lin'", "opts={'a': [1]}", ")", "]", ","],
    "harmony": ["<|channel|>", "analysis", "final", "commentary to=functions.now", "<|message|>", "<|end|>", "<|start|>",
                "assistant", "<|call|>", "<|constrain|>json"],
    "open": ["<tool_call>", "</tool_call>", "<think>", "</think>"],
}  # fmt: skip
COMMON = [
    '{"name": "weather", "arguments": {"city": "Bérlin \\u00e9"}}', '{"name": "now", "parameters": {}}', '{"name"', "{", "}",
    '{"city": "x", "days": [1, 2.5e3, null]}', '"', "\\", "text", " ", "\n", "<", "[", "é🙂",
]  # fmt: skip


@st.composite
def answers(draw):
    name = draw(st.sampled_from(sorted(FORMATS)))
    well_formed = [text for format, text, *_ in CASES if format is FORMATS[name]]
    part = st.sampled_from([*FRAGMENTS[name], *COMMON, *well_formed])
    text = "".join(draw(st.lists(part, max_size=8)))
    if text and draw(st.booleans()):
        place = draw(st.integers(0, len(text) - 1))
        text = text[:place] + draw(st.sampled_from(["", "{", '"', "<"])) + text[place + 1 :]
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return FORMATS[name], text, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(max_examples=examples(600), deadline=None)
@given(answers())
def test_however_a_text_is_split_the_events_are_the_same(answer):
    format, text, pieces = answer
    whole = events_of(format, [text])
    assert events_of(format, pieces) == whole
    assert events_of(format, text) == whole


@settings(max_examples=examples(600), deadline=None)
@given(answers())
def test_events_are_well_formed(answer):
    format, _, pieces = answer
    open_call, ended = None, 0
    for event in events_of(format, pieces):
        assert event != ContentDelta("")
        assert event != ReasoningDelta("")
        if isinstance(event, CallBegin):
            assert open_call is None
            assert event.index == ended
            open_call, arguments = event.index, ""
        elif isinstance(event, ArgumentsDelta):
            assert event.index == open_call
            assert event.text
            arguments += event.text
        elif isinstance(event, (CallEnd, CallBroken)):
            assert event.index == open_call
            open_call, ended = None, ended + 1
            if isinstance(event, CallEnd):
                assert isinstance(json.loads(arguments), dict)
        else:
            assert open_call is None
    assert open_call is None


def squeezed(text):
    return "".join(text.split())


@settings(max_examples=examples(800), deadline=None)
@given(answers())
def test_nothing_is_lost_where_no_call_is_found(answer):
    """All but whitespace around blocks is content or reasoning, in its order; markers of reasoning and of channels go."""
    format, text, pieces = answer
    events = events_of(format, pieces)
    if any(isinstance(event, CallEnd) for event in events) or format is HARMONY:
        return
    shown = squeezed("".join(event.text for event in events if isinstance(event, (ContentDelta, ReasoningDelta))))
    left = squeezed(text)
    for marker in format.reasoning:
        if marker:
            shown, left = shown.replace(marker, ""), left.replace(marker, "")
    assert shown == left


def test_arguments_stream_as_they_come():
    parser = MessageParser(TAGGED, TOOLS, lambda: "id1")
    text = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ber'
    assert parser.push(text) == [CallBegin(0, "id1", "weather"), ArgumentsDelta(0, '{"city": "Ber')]
    assert parser.push('lin"') == [ArgumentsDelta(0, 'lin"')]
    assert parser.push("}") == [ArgumentsDelta(0, "}")]
    assert parser.push("}\n</tool_") == [CallEnd(0)]
    assert parser.push("call>") == parser.finish() == []
    xml = MessageParser(XML, TOOLS, lambda: "id1")
    xml.push("<function=weather><parameter=city>\nBer")
    assert xml.push('li"n') == [ArgumentsDelta(0, 'li\\"n')]
    plain = MessageParser(TAGGED)
    assert plain.push("Hello <") == [ContentDelta("Hello")]
    assert plain.push("b") == [ContentDelta(" <b")]


def test_a_broken_call_says_so_and_its_text_follows():
    text = '<tool_call>{"name": "f", "arguments": {"x": 1, oops'
    assert events_of(TAGGED, [text]) == [
        CallBegin(0, "id1", "f"), ArgumentsDelta(0, '{"x": 1, '), CallBroken(0), ContentDelta(text)
    ]  # fmt: skip


def test_ids_are_unique():
    parser = MessageParser(TAGGED)
    events = parser.push('<tool_call>{"name": "a"}</tool_call>' * 50)
    assert len({event.id for event in events if isinstance(event, CallBegin)}) == 50


def test_a_long_answer_takes_linear_time():
    """A megabyte of arguments in pieces of a token."""
    text = '<tool_call>{"name": "f", "arguments": {"text": "' + "lorem ipsum " * 20_000 + '"}}</tool_call>'
    pieces = [text[start : start + 4] for start in range(0, len(text), 4)]
    message = message_of(events_of(TAGGED, pieces))
    assert len(message.tool_calls[0].parsed_arguments["text"]) == 240_000


@pytest.mark.parametrize("deep", ['{"name": "f", "arguments": ' + '{"a": ' * 5000, "[" * 5000, '{"function": ' * 5000])
def test_deep_nesting_is_content(deep):
    content, _, calls = parsed(TAGGED, "<tool_call>" + deep)
    assert content == "<tool_call>" + deep
    assert not calls


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=examples(300), deadline=None)
@given(st.dictionaries(st.text(max_size=6), json_values, max_size=4), st.booleans(), st.sampled_from([None, 1]))
def test_any_json_object_can_be_the_arguments(arguments, is_ascii, indent):
    text = json.dumps({"name": "f", "arguments": arguments}, ensure_ascii=is_ascii, indent=indent)
    message = message_of(events_of(TAGGED, f"<tool_call>{text}</tool_call>"))
    assert [call.parsed_arguments for call in message.tool_calls] == [arguments]


@settings(max_examples=examples(300), deadline=None)
@given(st.dictionaries(st.from_regex(r"[a-z_]{1,5}", fullmatch=True), json_values, max_size=4))
def test_any_python_literal_can_be_an_argument(arguments):
    text = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
    assert parsed(PYTHON, f"[now({text})]")[2] == [("now", arguments)]
    assert all(json.loads(as_json(json.dumps(value))) == value for value in arguments.values())


@settings(max_examples=examples(300), deadline=None)
@given(st.text(max_size=30).filter(lambda text: "</parameter>" not in text and "\r" not in text))
def test_any_text_can_be_a_string_parameter(value):
    text = f"<function=weather>\n<parameter=city>\n{value}\n</parameter>\n</function>"
    assert parsed(XML, text)[2] == [("weather", {"city": value})]
