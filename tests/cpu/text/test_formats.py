"""Tests how the format of calls and reasoning is found in the text of a chat template, and what a required call must be."""

import json

import pytest
from support.calls import LEARNT

from staticllm.errors import GenerationConfigError
from staticllm.events import message_of
from staticllm.pipelines.conversation.formats import BLOCK, MessageFormat, find_format, shows_tools
from staticllm.pipelines.conversation.headed_messages import ARROWS, TAGGED
from staticllm.pipelines.conversation.message_parser import MessageParser
from staticllm.pipelines.conversation.required_calls import required_calls
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
        ('{{- "[TOOL_CALLS] [" }}', MessageFormat("tagged", ("[TOOL_CALLS]", ""), is_list=True)),
        (
            "[THINK] [/THINK] [TOOL_CALLS]",
            MessageFormat("tagged", ("[TOOL_CALLS]", ""), ("[THINK]", "[/THINK]"), is_list=True),
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


def options(choice, is_parallel=False):
    given = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": is_parallel}
    return extra_options(given, False).tool_options


FORMATS = [
    MessageFormat("tagged", TAGS), *LEARNT.values(), MessageFormat("bare_json"),
    MessageFormat("tagged", ("[TOOL_CALLS]", ""), is_list=True),
    MessageFormat("python"), MessageFormat("python", ("<|python_start|>", "<|python_end|>")), MessageFormat("harmony"),
    MessageFormat("fenced", BLOCK, is_fenced=True), MessageFormat("fenced", BLOCK), MessageFormat("python", BLOCK),
    MessageFormat("recipients", ARROWS), MessageFormat("recipients", ARROWS, is_call_open=True),
    MessageFormat("recipients", TAGGED, is_call_open=True), MessageFormat("keyed", ("<tools>", "</tools>")),
    MessageFormat("generic"),
]  # fmt: skip


def test_any_function_may_be_called_where_a_call_is_required():
    weather, now = required_calls(FORMATS[0], options("required"))["format"]["elements"]
    assert weather["elements"] == [
        {"type": "const_string", "value": '<tool_call>\n{"name": "'}, {"type": "plain_string", "value": "weather"},
        {"type": "const_string", "value": '", "arguments": '}, {"type": "json_schema", "json_schema": SCHEMA},
        {"type": "const_string", "value": "}\n</tool_call>"},
    ]  # fmt: skip
    assert now["elements"][1] == {"type": "plain_string", "value": "now"}
    assert now["elements"][3] == {"type": "json_schema", "json_schema": {"type": "object"}}
    xml = required_calls(LEARNT["xml"], options("required"))["format"]["elements"][0]
    city = ["const_string", "plain_string", "const_string", "string", "const_string"]
    found = [each["type"] for each in xml["elements"]]
    assert found == ["const_string", "plain_string", "const_string", *city, "optional", "const_string"]


def written(form, with_optional):
    """Return a text that a format of a structural tag allows: what may be repeated twice, and the last of several choices."""
    kind = form["type"]
    if kind in ("star", "or"):
        inner = form["content"] if kind == "star" else form["elements"][-1]
        return written(inner, with_optional) * (2 if kind == "star" else 1)
    if kind == "sequence":
        return "".join(written(each, with_optional) for each in form["elements"])
    if kind == "optional":
        return written(form["content"], with_optional) if with_optional else ""
    if kind == "json_schema":
        both = '{"city": "Berlin", "days": 3}' if with_optional else '{"city": "Berlin"}'
        both = both if "properties" in form["json_schema"] else "{}"
        return {"object": both, "string": '"Berlin"', "integer": "3"}[form["json_schema"]["type"]]
    if kind == "string":
        return "Berlin"
    assert kind in ("const_string", "plain_string")
    assert form["value"]
    return form["value"]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("with_optional", [False, True])
def test_what_a_required_call_allows_is_what_the_parser_reads(format, with_optional):
    def found(form):
        parser = MessageParser(format, TOOLS)
        message = message_of([*parser.push(written(form, with_optional)), *parser.finish()])
        assert not message.content
        return [(call.name, call.parsed_arguments) for call in message.tool_calls]

    city = {"city": "Berlin", "days": 3} if with_optional else {"city": "Berlin"}
    tag = required_calls(format, options({"type": "function", "function": {"name": "weather"}}))
    assert tag["type"] == "structural_tag"
    assert json.loads(json.dumps(tag)) == tag
    assert found(tag["format"]) == [("weather", city)]
    any_of = required_calls(format, options("required"))["format"]
    assert any_of["type"] == "or"
    assert [found(each) for each in any_of["elements"]] == [[("weather", city)], [("now", {})]]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("with_optional", [False, True])
@pytest.mark.parametrize("num_tools", [1, 2])
def test_calls_that_a_required_one_allows_behind_it_are_read(format, with_optional, num_tools):
    """Whether or not the answer may have several; a named function is called once."""
    given = {"tools": TOOLS[:num_tools], "tool_choice": "required", "parallel_tool_calls": True}
    text = written(required_calls(format, extra_options(given, False).tool_options)["format"], with_optional)
    can_repeat = format.syntax not in ("bare_json", "harmony", "recipients")
    call = ("weather", {"city": "Berlin", "days": 3} if with_optional else {"city": "Berlin"})
    call = call if num_tools == 1 else ("now", {})
    for has_one_call, count in ((False, 3 if can_repeat else 1), (True, 1)):
        for size in (len(text), 1):
            parser = MessageParser(format, TOOLS, calls="required", has_one_call=has_one_call)
            pieces = [text[start : start + size] for start in range(0, len(text), size)]
            events = [event for piece in pieces for event in parser.push(piece)]
            message = message_of([*events, *parser.finish()])
            assert not message.content
            assert [(found.name, found.parsed_arguments) for found in message.tool_calls] == [call] * count
            assert parser.has_called == has_one_call
    named = options({"type": "function", "function": {"name": "weather"}}, is_parallel=True)
    assert required_calls(format, named) == required_calls(
        format, options({"type": "function", "function": {"name": "weather"}})
    )


def test_a_template_without_a_known_format_cannot_require_a_call():
    with pytest.raises(GenerationConfigError, match="tool_choice='required': the chat template shows no known format"):
        required_calls(MessageFormat(), options("required"))


@pytest.mark.parametrize(("value", "is_parallel"), [(None, True), (True, True), (1, True), (False, False), (0, False)])
def test_numbers_that_count_as_truth_values_mean_what_they_count_as(value, is_parallel):
    found = extra_options({"parallel_tool_calls": value, "parse_tools": value}, False).tool_options
    assert found.is_parallel is is_parallel
    assert found.parse is (None if value is None else is_parallel)
