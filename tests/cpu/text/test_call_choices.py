"""Tests how ``tool_choice`` and schemas change what a parser finds: required calls that are cut off, no calls, types."""

import ast
import contextlib
import json

import pytest
from support.calls import LEARNT

jsonschema = pytest.importorskip("jsonschema")

from staticllm.events import CallBegin, CallBroken, CallEnd, ContentDelta, merged, message_of  # noqa: E402
from staticllm.pipelines.conversation.formats import MessageFormat  # noqa: E402
from staticllm.pipelines.conversation.message_parser import MessageParser  # noqa: E402

TAGS = ("<tool_call>", "</tool_call>")
TAGGED = MessageFormat("tagged", TAGS, ("<think>", "</think>"))
XML, GLM = LEARNT["xml"], LEARNT["glm"]
TOOLS = [
    {"name": "weather", "parameters": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}},
    {"name": "now"},
]

CUT = {
    "tagged": (TAGGED, '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome <b>", "days": 3}}\n</tool_call>'),
    "xml": (
        XML,
        "<tool_call>\n<function=weather>\n<parameter=city>\nRome <b>\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        "</function>\n</tool_call>",
    ),
    "named": (LEARNT["mistral"], '[TOOL_CALLS]weather[ARGS]{"city": "Rome <b>", "days": 3}'),
    "bare": (
        MessageFormat("bare_json", ("<|python_tag|>", "")),
        '{"name": "weather", "parameters": {"city": "Rome <b>", "days": 3}}',
    ),
    "python": (
        MessageFormat("python", ("<|python_start|>", "<|python_end|>")),
        '<|python_start|>[weather(city="Rome <b>", days=3)]<|python_end|>',
    ),
    "harmony": (
        MessageFormat("harmony"),
        '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome <b>", "days": 3}<|call|>',
    ),
}


@pytest.mark.parametrize("name", CUT)
def test_a_required_call_that_is_cut_off_keeps_its_arguments(name):
    """Wherever the text ends: the arguments are the beginning of the whole ones, and nothing of the call is content."""
    format, text = CUT[name]
    parser = MessageParser(format, TOOLS)
    whole = message_of(parser.push(text) + parser.finish()).tool_calls[0].arguments
    lengths = set()
    for length in range(len(text) + 1):
        parser = MessageParser(format, TOOLS, calls="required")
        events = parser.push(text[:length]) + parser.cut()
        message = message_of(events)
        assert not any(isinstance(event, CallBroken) for event in events)
        begun, ended = ([event for event in events if isinstance(event, kind)] for kind in (CallBegin, CallEnd))
        assert len(begun) == len(ended) == len(message.tool_calls)
        if message.tool_calls:
            (call,) = message.tool_calls
            assert (call.name, message.content) == ("weather", "")
            assert whole.startswith(call.arguments)
            lengths.add(len(call.arguments))
    assert len(lengths) > (1 if name == "python" else 12)
    assert len(whole) in lengths


@pytest.mark.parametrize("name", CUT)
def test_a_required_call_that_ends_too_early_without_a_limit_is_content(name):
    """A stop string ends it, for example: its arguments would be no JSON."""
    format, text = CUT[name]
    for length in range(len(text)):
        parser = MessageParser(format, TOOLS, calls="required")
        message = message_of(parser.push(text[:length]) + parser.finish())
        for call in message.tool_calls:
            assert set(call.parsed_arguments) == {"city", "days"}
        assert message.tool_calls or message.content.strip() == text[:length].strip()


def test_json_in_a_constrained_answer_may_contain_the_tag_that_ends_a_parameter():
    tools = [{"name": "f", "parameters": {"properties": {"a": {"type": "array"}, "b": {"type": "integer"}}}}]
    value = '["x</parameter>\\n<parameter=b>", {"c": "</function>"}]'
    parameters = f"<parameter=a>\n{value}\n</parameter>\n<parameter=b>\n5\n</parameter>\n"
    text = f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>"
    for size in (1, 7, len(text)):
        parser = MessageParser(XML, tools, calls="required")
        events = [event for place in range(0, len(text), size) for event in parser.push(text[place : place + size])]
        message = message_of(events + parser.finish())
        assert [call.parsed_arguments for call in message.tool_calls] == [{"a": json.loads(value), "b": 5}]
        assert message.content == ""


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "boolean"}, "True", True),
        ({"type": "boolean"}, "False", False),
        ({"type": "boolean"}, "true", True),
        ({"type": "boolean"}, "None", "None"),
        ({"type": "null"}, "None", None),
        ({"type": "null"}, "null", None),
        ({"type": ["integer", "null"]}, "None", None),
        ({"anyOf": [{"type": "boolean"}, {"type": "null"}]}, "True", True),
        ({"$ref": "#/$defs/flag"}, "True", True),
        ({"type": "string"}, "True", "True"),
        ({"type": ["string", "null"]}, "None", "None"),
        ({"type": "integer"}, "True", "True"),
        ({}, "True", "True"),
        ({"type": 5}, "True", "True"),
        ({"type": "boolean", "allOf": 5}, "True", "True"),
    ],
)
@pytest.mark.parametrize("is_xml", [True, False])
def test_literals_of_python_are_read_as_the_schema_says(schema, text, value, is_xml):
    parameters = {"properties": {"a": schema}, "$defs": {"flag": {"type": "boolean"}}}
    parser = MessageParser(XML if is_xml else GLM, [{"name": "f", "parameters": parameters}])
    parameter = (
        f"<parameter=a>{text}</parameter></function>"
        if is_xml
        else f"<arg_key>a</arg_key><arg_value>{text}</arg_value>"
    )
    call = f"<tool_call>{'<function=f>' if is_xml else 'f'}\n{parameter}</tool_call>"
    message = message_of(parser.push(call) + parser.finish())
    assert [call.parsed_arguments for call in message.tool_calls] == [{"a": value}]


@pytest.mark.parametrize("name", CUT)
def test_without_calls_a_call_is_content(name):
    format, text = CUT[name]
    for size in (1, 5, len(text)):
        parser = MessageParser(format, TOOLS, calls="none")
        events = [event for place in range(0, len(text), size) for event in parser.push(text[place : place + size])]
        assert merged(events + parser.finish()) == [ContentDelta(text)]


def test_without_calls_reasoning_is_found():
    parser = MessageParser(TAGGED, TOOLS, calls="none")
    text = '<think>Hm.</think>Look: <tool_call>{"name": "now"}</tool_call>'
    message = message_of(parser.push(text) + parser.finish())
    assert (message.reasoning_content, message.tool_calls) == ("Hm.", ())
    assert message.content == 'Look: <tool_call>{"name": "now"}</tool_call>'


VALUES = ["12345", "-3", "1.5", "1e5", "true", "False", "null", "None", '{"a": 1}', "{'a': 1}", "[1]", '"x"', "x", " x ", "",
          "  ", "12.0", "NaN", "Infinity", "1_000", "('a', 1)", "1e400"]  # fmt: skip
SCHEMAS = [
    {"type": "string"}, {"type": ["string", "null"]}, {"type": ["null", "string"]}, {"enum": ["1", "true", "x", "12345"]},
    {"anyOf": [{"type": "string"}, {"type": "null"}]}, {"oneOf": [{"type": "string"}, {"type": "boolean"}]}, {"const": "12345"},
    {"allOf": [{"type": "string"}]}, {"$ref": "#/properties/b"}, {"type": "integer"}, {"type": "number"}, {"type": "boolean"},
    {"type": "null"}, {"type": "object"}, {"type": "array"}, {"type": ["integer", "null"]}, {"type": ["string", "integer"]},
    {"enum": [1, "2", None]}, {"type": "object", "properties": {"a": {"type": "integer"}}}, {},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
@pytest.mark.parametrize("is_xml", [True, False])
@pytest.mark.parametrize("is_split", [False, True])
def test_a_value_without_quotes_is_what_the_schema_allows(schema, is_xml, is_split):
    """Wherever any reading of the text satisfies the schema, the one that was chosen does."""
    parameters = {"type": "object", "properties": {"a": schema, "b": {"type": "string"}}}
    tools = [{"name": "f", "parameters": parameters}]
    for text in VALUES:
        inner = f"<parameter=a>\n{text}\n</parameter><parameter=b>1</parameter></function>" if is_xml else (
            f"<arg_key>a</arg_key><arg_value>{text}</arg_value><arg_key>b</arg_key><arg_value>1</arg_value>"
        )  # fmt: skip
        call = f"<tool_call>{'<function=f>' if is_xml else 'f'}\n{inner}</tool_call>"
        parser = MessageParser(XML if is_xml else GLM, tools)
        events = [event for piece in (call if is_split else [call]) for event in parser.push(piece)]
        (found,) = message_of(events + parser.finish()).tool_calls
        arguments = found.parsed_arguments
        assert arguments.pop("b") == "1", "an empty value before it does not matter"
        is_valid = jsonschema.Draft202012Validator(parameters).is_valid
        readings = [{"a": value} for value in readings_of(text)]
        possible = [reading for reading in readings if is_valid(reading)]
        if not text.strip() and not any(isinstance(each["a"], str) for each in possible):
            assert arguments in ({}, {"a": None})
            assert is_valid(arguments)
        elif possible:
            assert is_valid(arguments), (text, arguments)
            assert arguments in possible


def refuse(name):
    raise ValueError(name)


def readings_of(text):
    yield text
    if text == "1e400":
        return  # infinite, which is no JSON
    with contextlib.suppress(ValueError):
        yield json.loads(text, parse_constant=refuse)
    with contextlib.suppress(ValueError, SyntaxError):
        value = ast.literal_eval(text.strip())
        yield list(value) if isinstance(value, tuple) else value
