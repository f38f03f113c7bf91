"""Tests answers that are nothing but the JSON of a call, which small models write whatever format their template shows."""

import json
import random

import pytest
from support.calls import LEARNT

from staticllm.events import CallBroken, ContentDelta, merged, message_of
from staticllm.pipelines.conversation.formats import MessageFormat
from staticllm.pipelines.conversation.message_parser import MessageParser
from staticllm.pipelines.grammars.schema_facts import fits

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "unit": {"enum": ["c", "f"]}},
    "required": ["city"],
}
OPEN = {"type": "object", "properties": {"a": {"type": ["number", "null"]}}, "additionalProperties": True}
NESTED = {
    "type": "object",
    "properties": {"at": {"$ref": "#/$defs/at"}, "to": {"type": "array", "items": {"$ref": "#/$defs/at"}}},
    "required": ["at"],
    "$defs": {"at": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY}},
    {"name": "now"},
    {"name": "open", "parameters": OPEN},
    {"name": "go", "parameters": NESTED},
]
FORMATS = {
    "none": MessageFormat(),
    "tagged": MessageFormat("tagged", ("<tool_call>", "</tool_call>"), ("<think>", "</think>")),
    "list": MessageFormat("tagged", ("[TOOL_CALLS]", ""), is_list=True),
    "python": MessageFormat("python", ("<|python_start|>", "<|python_end|>")),
    "keyed": MessageFormat("keyed", ("<tools>", "</tools>")),
    "listed": MessageFormat("tagged", ("<tool_call>", "</tool_call>"), has_listed_calls=True),
    **LEARNT,
}
CALLS = {
    '{"name": "weather", "arguments": {"city": "Rome"}}': [("weather", {"city": "Rome"})],
    ' \n{"name": "weather", "parameters": {"days": 2, "city": "Rome", "unit": "c"}}\n': [
        ("weather", {"days": 2, "city": "Rome", "unit": "c"})
    ],
    '{"arguments": {"city": "}{\\"name\\":"}, "name": "weather"}': [("weather", {"city": '}{"name":'})],
    '{"type": "function", "function": {"name": "now", "arguments": {}}}': [("now", {})],
    '{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}': [("weather", {"city": "Rome"})],
    '[{"name": "now", "arguments": {}}, {"name": "open", "arguments": {"a": 1.5, "b": []}}]': [
        ("now", {}),
        ("open", {"a": 1.5, "b": []}),
    ],
    '{"name": "go", "arguments": {"at": {"x": 1}, "to": [{"x": 2}]}}': [("go", {"at": {"x": 1}, "to": [{"x": 2}]})],
}
TEXTS = [
    '{"name": "weather", "arguments": {"city": "Rome"}} and so on',
    'Sure: {"name": "weather", "arguments": {"city": "Rome"}}',
    '{"name": "weather", "arguments": {"city": "Rome"}}{"name": "now", "arguments": {}}',
    '{"name": "wether", "arguments": {"city": "Rome"}}',
    '{"name": "weather", "arguments": {"days": 2}}',
    '{"name": "weather", "arguments": {"city": 5}}',
    '{"name": "weather", "arguments": {"city": "Rome", "unit": "k"}}',
    '{"name": "weather", "arguments": {"city": "Rome", "town": "Rome"}}',
    '{"name": "weather", "arguments": {"city": "Rome", "days": 1.5}}',
    '{"name": "weather", "arguments": ["Rome"]}',
    '{"name": "weather"}',
    '{"name": "weather", "arguments": {"city": "Ro',
    '{"name": "go", "arguments": {"at": {"x": "1"}}}',
    '{"name": "go", "arguments": {"at": {"x": 1}, "to": [{}]}}',
    '{"name": "weather", "arguments": {"city": "Rome"}, "more": 1}',
    '[{"name": "now", "arguments": {}}, {"name": "weather", "arguments": {}}]',
    '{"city": "Rome"}',
    "[1, 2]",
    "{}",
    "[]",
    "{",
    "",
    "  ",
]


def parsed(format, text, cuts, tools=TOOLS, **options):
    parser = MessageParser(format, tools, **options)
    pieces = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    events = merged([event for piece in pieces for event in parser.push(piece)] + parser.finish())
    assert not any(isinstance(event, CallBroken) for event in events), "nothing is taken back"
    return message_of(events)


def random_cuts(text, seed):
    drawn = random.Random(seed)
    return sorted(drawn.randint(0, len(text)) for _ in range(drawn.randint(0, 8)))


@pytest.mark.parametrize("name", FORMATS)
def test_an_answer_that_is_the_json_of_a_call_is_one(name):
    for text, calls in CALLS.items():
        for seed in range(20):
            message = parsed(FORMATS[name], text, random_cuts(text, seed))
            assert [(call.name, call.parsed_arguments) for call in message.tool_calls] == calls, text
            assert message.content == ""


@pytest.mark.parametrize("name", FORMATS)
def test_any_other_answer_is_the_text_that_it_was(name):
    for text in TEXTS:
        for seed in range(20):
            message = parsed(FORMATS[name], text, random_cuts(text, seed))
            assert (message.content, message.tool_calls) == (text, ()), text


def test_it_is_none_without_tools_or_where_calls_are_content_or_required():
    text = next(iter(CALLS))
    tagged = FORMATS["tagged"]
    for options in ({"tools": []}, {"calls": "none"}, {"is_content": True}):
        message = parsed(tagged, text, [], **options)
        assert (message.content, message.tool_calls) == (text, ()), options


def test_it_may_follow_reasoning_and_may_be_the_only_one():
    both = '[{"name": "now", "arguments": {}}, {"name": "open", "arguments": {}}]'
    message = parsed(FORMATS["tagged"], f"<think>hm {both}</think>\n\n{both}", [3, 30, 70])
    assert (message.reasoning_content, message.content) == (f"hm {both}", "")
    assert [call.name for call in message.tool_calls] == ["now", "open"]
    message = parsed(FORMATS["tagged"], both, [], has_one_call=True)
    assert [call.name for call in message.tool_calls] == ["now"]


def test_other_text_is_not_held_longer_than_it_may_be_a_call():
    parser = MessageParser(FORMATS["tagged"], TOOLS)
    assert parser.push('{"na') == []
    assert parser.push('ive": ') == [ContentDelta('{"naive":')]
    assert parser.push("1") == [ContentDelta(" 1")]


def test_fitting_is_what_a_validator_says_of_random_arguments():
    jsonschema = pytest.importorskip("jsonschema")
    values = ["Rome", 5, 1.0, 1.5, None, True, [], {}, {"x": 1}, {"x": "1"}, [{"x": 1}], [{"x": 1}, {}], "c", "k"]
    num_valid = 0
    for seed in range(3000):
        drawn = random.Random(seed)
        schema = drawn.choice([CITY, OPEN, NESTED, {**CITY, "additionalProperties": False}])
        names = drawn.sample([*schema["properties"], *schema["properties"], "b"], drawn.randint(0, 3))
        value = {name: drawn.choice(values) for name in names}
        closed = schema if "additionalProperties" in schema else {**schema, "additionalProperties": False}
        closed = json.loads(
            json.dumps(closed).replace('"required": ["x"]', '"required": ["x"], "additionalProperties": false')
        )
        is_valid = jsonschema.Draft202012Validator(closed).is_valid(value)
        assert fits(value, schema) == is_valid, (schema, value)
        num_valid += is_valid
    assert num_valid > 300
