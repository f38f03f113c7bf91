"""Tests how the format of calls and reasoning is found in the text of a chat template, and what a required call must be."""

import json

import pytest

from staticllm.errors import GenerationConfigError
from staticllm.pipelines.conversation.parsing.events import message_of
from staticllm.pipelines.conversation.parsing.formats import MessageFormat, find_format, shows_tools
from staticllm.pipelines.conversation.parsing.message_parser import MessageParser
from staticllm.pipelines.conversation.parsing.required_calls import (
    Json,
    LimitedText,
    OptionalParts,
    PlainText,
    Text,
    required_calls,
)  # fmt: skip
from staticllm.pipelines.generation.options.extra import extra_options

THINK = ("<think>", "</think>")
TAGS = ("<tool_call>", "</tool_call>")


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ messages[0].content }}", MessageFormat()),
        (
            'within <tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": '
            "<args-json-object>}\\n</tool_call>{{ content.split('</think>')[-1] }}",
            MessageFormat("tagged", TAGS, THINK),
        ),
        (
            "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>",
            MessageFormat("xml", TAGS),
        ),
        (
            'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
            '{{- "<|python_tag|>" + tool_call.name }}',
            MessageFormat("bare_json", ("<|python_tag|>", "")),
        ),
        ('{"name": function name, "parameters": dictionary}', MessageFormat("bare_json")),
        (
            "you MUST put it in the format of [func_name1(params_name1=params_value1, params_name2=params_value2...)]",
            MessageFormat("python"),
        ),
        (
            "'<|python_start|>' ~ calls ~ '<|python_end|>'",
            MessageFormat("python", ("<|python_start|>", "<|python_end|>")),
        ),
        ('{{- "[TOOL_CALLS] [" }}', MessageFormat("named", ("[TOOL_CALLS]", ""))),
        (
            "[THINK] [/THINK] [TOOL_CALLS]name[ARGS]",
            MessageFormat("named", ("[TOOL_CALLS]", ""), ("[THINK]", "[/THINK]"), has_args_marker=True),
        ),
        ("<|START_ACTION|>[]<|END_ACTION|>", MessageFormat("tagged", ("<|START_ACTION|>", "<|END_ACTION|>"))),
        ("<|start|>assistant<|channel|>analysis<|message|>", MessageFormat("harmony")),
        (
            "{{ '<|tool_call|>' + tools + '<|/tool_call|>' }}",
            MessageFormat("tagged", ("<|tool_call|>", "<|/tool_call|>")),
        ),
    ],
)
def test_formats_of_templates(template, expected):
    assert find_format(template) == expected


def test_a_template_that_opens_the_reasoning_in_the_prompt():
    format = find_format("...</think>...")
    assert format.after("<|im_start|>assistant\n<think>\n").is_reasoning_open
    assert not format.after("<|im_start|>assistant\n<think>\n\n</think>\n\n").is_reasoning_open
    assert not format.after("<|im_start|>assistant\n").is_reasoning_open
    assert not MessageFormat().after("<think>").is_reasoning_open


def test_which_templates_show_tools():
    turns = "{% for message in messages %}{{ message.content }}{% endfor %}"
    assert shows_tools(turns + "{{ tools | tojson }}")
    assert shows_tools(turns + "{%- for tool in tools or [] %}{{ tool.function.name }}{% endfor %}")
    assert shows_tools("{%- for tool in messages[0].tools or [] %}{{ tool.function.name }}{% endfor %}" + turns)
    assert not shows_tools(turns + "{% if tools is not none %}There are tools.{% endif %}")
    assert not shows_tools("{% for message in messages %}{{ message.tools_used }}{{ message.content }}{% endfor %}")
    assert not shows_tools("")
    assert not shows_tools("{% for %}")


TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "required": ["city"],
        "properties": {"days": {"type": "integer"}, "city": {"type": "string"}},
    }}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip
SCHEMA = TOOLS[0]["function"]["parameters"]


def options(choice):
    return extra_options({"tools": TOOLS, "tool_choice": choice}, False).tool_options


WRITTEN = {"city": ('"Berlin"', "Berlin"), "days": ("3", "3")}


def text_of(parts, with_optional):
    """Return a text that the parts allow."""
    texts, key = [], ""
    for part in parts:
        if isinstance(part, (Text, PlainText)):
            texts.append(part.text)
            key = next((name for name in WRITTEN if name in part.text), key)
        elif isinstance(part, LimitedText):
            texts.append(WRITTEN[key][1])
        elif isinstance(part, Json):
            is_object = part.schema.get("type") == "object"
            both = '{"city": "Berlin", "days": 3}' if with_optional else '{"city": "Berlin"}'
            texts.append(both if is_object else WRITTEN[key][0])
        elif with_optional:
            texts.append(text_of(part.parts, with_optional))
    return "".join(texts)


FORMATS = [
    MessageFormat("tagged", TAGS), MessageFormat("xml", TAGS), MessageFormat("xml"), MessageFormat("bare_json"),
    MessageFormat("named", ("[TOOL_CALLS]", "")), MessageFormat("named", ("[TOOL_CALLS]", ""), has_args_marker=True),
    MessageFormat("python"), MessageFormat("python", ("<|python_start|>", "<|python_end|>")), MessageFormat("harmony"),
]  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("with_optional", [False, True])
def test_what_a_required_call_allows_is_what_the_parser_reads(format, with_optional):
    named = {"type": "function", "function": {"name": "weather"}}
    (parts,) = required_calls(format, options(named)).calls
    parser = MessageParser(format, TOOLS)
    message = message_of([*parser.push(text_of(parts, with_optional)), *parser.finish()])
    assert not message.content
    (call,) = message.tool_calls
    assert call.name == "weather"
    assert call.parsed_arguments == ({"city": "Berlin", "days": 3} if with_optional else {"city": "Berlin"})


def test_any_function_may_be_called_where_a_call_is_required():
    def named(name):
        return Text('<tool_call>\n{"name": "'), PlainText(name)

    required = required_calls(FORMATS[0], options("required"))
    assert required.calls == (
        (*named("weather"), Text('", "arguments": '), Json(SCHEMA), Text("}\n</tool_call>")),
        (*named("now"), Text('", "arguments": '), Json({"type": "object"}), Text("}\n</tool_call>")),
    )
    xml = required_calls(FORMATS[1], options("required")).calls[0]
    city = [Text, PlainText, Text, LimitedText, Text]
    assert [type(part) for part in xml] == [Text, PlainText, Text, *city, OptionalParts, Text]


def written(form, with_optional):
    """Return a text that a format of a structural tag allows."""
    kind = form["type"]
    if kind == "sequence":
        return "".join(written(each, with_optional) for each in form["elements"])
    if kind == "optional":
        return written(form["content"], with_optional) if with_optional else ""
    if kind == "json_schema":
        both = '{"city": "Berlin", "days": 3}' if with_optional else '{"city": "Berlin"}'
        return {"object": both, "string": '"Berlin"', "integer": "3"}[form["json_schema"]["type"]]
    if kind == "string":
        return "Berlin"
    assert kind in ("const_string", "plain_string")
    assert form["value"]
    return form["value"]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("with_optional", [False, True])
def test_the_structural_tag_of_a_required_call(format, with_optional):
    tag = required_calls(format, options({"type": "function", "function": {"name": "weather"}})).to_structural_tag()
    assert tag["type"] == "structural_tag"
    assert json.loads(json.dumps(tag)) == tag
    parser = MessageParser(format, TOOLS)
    message = message_of([*parser.push(written(tag["format"], with_optional)), *parser.finish()])
    (call,) = message.tool_calls
    assert call.parsed_arguments == ({"city": "Berlin", "days": 3} if with_optional else {"city": "Berlin"})
    any_of = required_calls(format, options("required")).to_structural_tag()["format"]
    assert any_of["type"] == "or"
    assert len(any_of["elements"]) == 2


def test_a_template_without_a_known_format_cannot_require_a_call():
    with pytest.raises(GenerationConfigError, match="tool_choice='required': the chat template shows no known format"):
        required_calls(MessageFormat(), options("required"))
