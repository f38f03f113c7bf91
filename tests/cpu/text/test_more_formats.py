"""Tests formats of calls that several families of models have of their own: found in templates, parsed, and required."""

from __future__ import annotations

import json
import string
import time
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import calls
from support.quick import examples

from staticllm.errors import GenerationConfigError
from staticllm.events import ArgumentsDelta, CallBroken, merged, message_of
from staticllm.pipelines.conversation import template_shape
from staticllm.pipelines.conversation.formats import find_format, format_beside, shows_tools
from staticllm.pipelines.conversation.message_parser import MessageParser
from staticllm.pipelines.conversation.required_calls import required_calls
from staticllm.pipelines.generation.options.extra import extra_options

TEMPLATES = {
    "glm": f"{calls.GLM}{{# </think> #}}",
    "deepseek": f"{calls.DEEPSEEK}{{# </think> #}}",
    "deepseek31": f"{calls.DEEPSEEK_31}{{# </think> #}}",
    "minicpm": "{{ '<|thought_start|>\\n' + thought + '\\n<|thought_end|>\\n' }}{{ '<|tool_call_start|>\\n```python\\n' }}",
    "lfm2": "{{ 'List of tools: <|tool_list_start|>' }}",
    "functionary3": "{{ '>>>all\\n' + message['content'] }}{{ '>>>' + name + '\\n' + arguments }}",
    "functionary31": calls.FUNCTION_JSON,
    "functionary2": "{{ '<|from|>assistant\\n<|recipient|>' + name + '\\n<|content|>' + arguments }}",
}  # fmt: skip
DESCRIBED = {
    "glm": "For each function call, output the function name and arguments within the following XML format:\n"
    "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>\n<arg_value>{arg-value-1}</arg_value>\n...\n</tool_call>"
    "{{ content.split('</think>')[-1] }}",
    "deepseek": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' "
    "+ tool['function']['name'] + '\\n' + '```json' + '\\n' + tool['function']['arguments'] + '\\n' + '```' "
    "+ '<｜tool▁call▁end｜>'}}{{'<｜tool▁calls▁end｜>'}}</think>",
    "deepseek31": "{{'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>' + arguments "
    "+ '<｜tool▁call▁end｜>'}}</think>",
    "functionary31": "<function=example_function_name>{\"example_name\": \"example_value\"}</function> <|python_tag|>",
    "xml": "<tool_call>\n<function=example>\n<parameter=example_1>\nvalue_1\n</parameter>\n</function>\n</tool_call>",
    "bare_xml": "<function=example>\n<parameter=example_1>\nvalue_1\n</parameter>\n</function>",
    "mistral": "[TOOL_CALLS]name[ARGS]{}",
    "mistral_ids": "[TOOL_CALLS]name[CALL_ID]id[ARGS]{}",
}  # fmt: skip
"""Templates whose source has calls, but that show none in a prompt."""
TEMPLATES |= {f"described {name}": template for name, template in DESCRIBED.items()}
OPENINGS = {"functionary3": "assistant<|end_header_id|>\n\n>>>", "functionary2": "<|from|>assistant\n<|recipient|>"}
FORMATS = {name: find_format(template).after(OPENINGS.get(name, "")) for name, template in TEMPLATES.items()}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": {
        "type": "object", "required": ["city"],
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "opts": {"type": "object"}},
    }}},
    {"type": "function", "function": {"name": "now"}},
]  # fmt: skip


def events_of(name, pieces):
    numbers = count(1)
    parser = MessageParser(FORMATS[name], TOOLS, lambda: f"id{next(numbers)}")
    return merged([event for piece in pieces for event in parser.push(piece)] + parser.finish())


def parsed(name, text):
    message = message_of(events_of(name, [text]))
    return (
        message.content,
        message.reasoning_content,
        [(call.name, call.parsed_arguments) for call in message.tool_calls],
    )


BERLIN, NOW = ("weather", {"city": "Berlin"}), ("now", {})
BEGIN, END, CALL, SEP, STOP = (
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
)  # fmt: skip
FENCED = f'function{SEP}weather\n```json\n{{"city": "Berlin"}}\n```{STOP}'
CASES = [
    (
        "glm",
        "<think>hm</think>\nLet me look.\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ber\nlin\n</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n<arg_key>opts</arg_key>\n<arg_value>{\"a\": 1}</arg_value>\n"
        "</tool_call>",
        "Let me look.", "hm", [("weather", {"city": "Ber\nlin\n", "days": 3, "opts": {"a": 1}})],
    ),
    ("glm", "<tool_call>now</tool_call><tool_call>weather<arg_key>city</arg_key><arg_value>Berlin</arg_value></tool_call>",
     "", "", [NOW, BERLIN]),
    ("glm", '<tool_call>{"name": "now", "arguments": {}}</tool_call>', "", "", [NOW]),
    ("glm", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ber",
     "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ber", "", []),
    ("glm", "<tool_call>now\n<arg_key>a</arg_key>\n<b></tool_call>",
     "<tool_call>now\n<arg_key>a</arg_key>\n<b></tool_call>", "", []),
    ("deepseek", f"I look.{BEGIN}{CALL}{FENCED}\n{CALL}function{SEP}now\n```json\n{{}}\n```{STOP}{END}",
     "I look.", "", [BERLIN, NOW]),
    ("deepseek", f"<think>hm</think>{CALL}{FENCED}", "", "hm", [BERLIN]),
    ("deepseek", f"{BEGIN}{CALL}{FENCED[:-40]}", f"{BEGIN}{CALL}{FENCED[:-40]}", "", []),
    ("deepseek", f"{BEGIN}{END}", f"{BEGIN}{END}", "", []),
    ("deepseek", f'{BEGIN}{CALL}weather{SEP}{{"city": "Berlin"}}{STOP}{CALL}now{SEP}{{}}{STOP}{END}', "", "", [BERLIN, NOW]),
    ("deepseek31", f'{BEGIN}{CALL}weather{SEP}{{"city": "Berlin"}}{STOP}{CALL}now{SEP}{{}}{STOP}{END}', "", "", [BERLIN, NOW]),
    ("deepseek31", f"{BEGIN}{CALL}{FENCED}{END}", "", "", [BERLIN]),
    ("deepseek31", f"{BEGIN}{CALL}{FENCED}\n{CALL}now{SEP}{{}}{STOP}{END}", "", "", [BERLIN, NOW]),
    ("deepseek31", f"{BEGIN}{CALL}function{SEP}now{STOP}", f"{BEGIN}{CALL}function{SEP}now{STOP}", "", []),
    ("deepseek31", f'{BEGIN}{CALL}weather{SEP}{{"city": "Berlin"}}', "", "", [BERLIN]),
    (
        "minicpm",
        "<|thought_start|>\nhm\n<|thought_end|>\nI look.\n<|tool_call_start|>\n```python\nweather(city='Berlin')\nnow()\n```\n"
        "<|tool_call_end|>", "I look.", "hm", [BERLIN, NOW],
    ),
    ("minicpm", "<|tool_call_start|>weather(city='Berlin')<|tool_call_end|>", "", "", [BERLIN]),
    ("minicpm", "<|tool_call_start|>\n```python\nweather(city=open('x'))\n```",
     "<|tool_call_start|>\n```python\nweather(city=open('x'))\n```",
     "", []),
    ("minicpm", "```python\nnow()\n```", "```python\nnow()\n```", "", []),
    ("lfm2", "<|tool_call_start|>[weather(city='Berlin'), now()]<|tool_call_end|>Checking.", "Checking.", "", [BERLIN, NOW]),
    ("functionary3", "all\nHello there.", "Hello there.", "", []),
    ("functionary3", 'weather\n{"city": "Berlin"}', "", "", [BERLIN]),
    ("functionary3", 'all\nI look.\n>>>weather\n{"city": "Berlin"}>>>now\n{}', "I look.", "", [BERLIN, NOW]),
    ("functionary3", "all\nIn Python:\n>>> print(1)\n1\n>>>stranger\n{}", "In Python:\n>>> print(1)\n1\n>>>stranger\n{}", "", []),
    ("functionary3", "no line break", "no line break", "", []),
    ("functionary31", '<function=weather>{"city": "Berlin"}</function><function=now>{}</function>', "", "", [BERLIN, NOW]),
    ("functionary31", "<function=weather>oops</function>", "<function=weather>oops</function>", "", []),
    ("functionary2", "all\n<|content|>Hello.", "Hello.", "", []),
    (
        "functionary2",
        'all\n<|content|>I look.\n<|from|>assistant\n<|recipient|>weather\n<|content|>{"city": "Berlin"}\n'
        "<|from|>assistant\n<|recipient|>now\n<|content|>{}", "I look.", "", [BERLIN, NOW],
    ),
]  # fmt: skip
CASES += [(f"described {case[0]}", *case[1:]) for case in CASES if case[0] in DESCRIBED]
XML = "<function=weather>\n<parameter=city>\nBerlin\n</parameter>\n</function>"
CASES += [
    ("described xml", f"I look.<tool_call>\n{XML}\n</tool_call>", "I look.", "", [BERLIN]),
    ("described xml", XML, "", "", [BERLIN]),
    ("described bare_xml", f"I look.{XML}", "I look.", "", [BERLIN]),
    ("described mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Berlin"}[TOOL_CALLS]now[ARGS]{}', "", "", [BERLIN, NOW]),
    ("described mistral_ids", '[TOOL_CALLS]weather[CALL_ID]abc[ARGS]{"city": "Berlin"}', "", "", [BERLIN]),
]


def test_formats_of_templates():
    found = {name: (format.syntax, format.is_fenced) for name, format in FORMATS.items()}
    assert found == {
        "glm": ("learnt", False), "deepseek": ("learnt", False), "deepseek31": ("learnt", False),
        "minicpm": ("fenced", True), "lfm2": ("python", False), "functionary3": ("recipients", False),
        "functionary31": ("learnt", False), "functionary2": ("recipients", False),
        **{f"described {name}": ("learnt", False) for name in DESCRIBED},
    }  # fmt: skip
    assert FORMATS["glm"].reasoning == ("<think>", "</think>")
    assert FORMATS["minicpm"].reasoning == ("<|thought_start|>", "<|thought_end|>")
    assert FORMATS["functionary3"].is_call_open
    assert not find_format(TEMPLATES["functionary3"]).after("").is_call_open


@pytest.mark.parametrize("name", ["glm", "deepseek", "deepseek31", "functionary31"])
def test_calls_that_are_only_described_are_those_that_are_shown(name):
    assert replace(FORMATS[f"described {name}"], reasoning=("", "")) == replace(FORMATS[name], reasoning=("", ""))
    assert find_format(DESCRIBED["xml"]).learnt == calls.LEARNT["xml"].learnt
    assert find_format(DESCRIBED["mistral_ids"]).learnt == calls.LEARNT["mistral"].learnt


def test_a_template_that_shows_no_tools_gets_the_format_of_its_own_description():
    turns = "{% for m in messages %}{{ m.content }}{% endfor %}"
    found = format_beside(turns + DESCRIBED["bare_xml"], has_tools=True)
    assert (found.syntax, found.learnt) == ("generic", None)


@pytest.fixture
def no_time(monkeypatch):
    """Let all probes run out of time."""
    monkeypatch.setattr(template_shape, "ALL_PROBES_SECONDS", -1.0)
    yield monkeypatch
    monkeypatch.undo()
    template_shape._incomplete.clear()


def later(no_time):
    """Let the probes have their time again, and the results of those before be old."""
    no_time.undo()
    now = time.monotonic() + template_shape.RETRY_SECONDS + 1
    no_time.setattr(template_shape, "time", SimpleNamespace(monotonic=lambda: now))


def test_a_probe_that_runs_out_of_time_once_is_made_again(no_time):
    """The template shows its calls and mentions nothing that ``_DESCRIBED`` has."""
    template = calls.showing(
        '<once><tool name="{{ c.function.name }}">{{ c.function.arguments | tojson }}</tool></once>'
    )
    assert find_format(template).syntax == ""
    assert format_beside(template, has_tools=True).syntax == "generic"
    assert not shows_tools(template)
    no_time.undo()
    assert find_format(template).syntax == "", "the format of one conversation does not change between two questions"
    later(no_time)
    assert find_format(template).syntax == "learnt"
    assert format_beside(template, has_tools=True).syntax == "learnt"
    assert shows_tools(template)
    assert template_shape.probed_shape(template) is template_shape.probed_shape(template), "a complete one is kept"


@pytest.mark.parametrize("name", ["XML", "GLM", "DEEPSEEK", "DEEPSEEK_31", "FUNCTION_JSON", "MISTRAL"])
def test_calls_are_found_while_probes_run_out_of_time(name, no_time):
    template = f"{getattr(calls, name)}{{# cut #}}"
    assert find_format(template).learnt == find_format(getattr(calls, name)).learnt
    later(no_time)
    assert find_format(template) == find_format(getattr(calls, name))


@pytest.mark.parametrize(("name", "text", "content", "reasoning", "found"), CASES)
def test_parts_of_an_answer(name, text, content, reasoning, found):
    assert parsed(name, text) == (content, reasoning, found)
    assert events_of(name, list(text)) == events_of(name, [text])


@pytest.mark.parametrize(("name", "text", "content", "reasoning", "found"), [case for case in CASES if case[4]])
def test_calls_that_are_complete_stay_so_wherever_the_rest_is_cut_off(name, text, content, reasoning, found):
    """A limit of tokens or a stop string may fall into what closes a call: that is no content, and the call is none the less."""
    cut = [parsed(name, text[:length]) for length in range(len(text) + 1)]
    first = next(length for length, each in enumerate(cut) if each[2] == found)
    for each in cut[first:]:
        assert each[2] == found
        assert content.startswith(each[0])


@given(st.data())
@settings(max_examples=examples(300), deadline=None)
def test_however_a_text_is_split_and_cut_the_events_are_the_same(data):
    name, text = data.draw(st.sampled_from([case[:2] for case in CASES]))
    text = text[: data.draw(st.integers(0, len(text)))]
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert events_of(name, pieces) == events_of(name, [text])


def test_arguments_stream_as_they_come_and_a_broken_call_says_so():
    parser = MessageParser(FORMATS["glm"], TOOLS)
    events = [*parser.push("<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ber"), *parser.push("lin")]
    written = "".join(event.text for event in events if isinstance(event, ArgumentsDelta))
    assert written == '{"city": "Berlin'
    assert any(isinstance(event, CallBroken) for event in parser.finish())
    parser = MessageParser(FORMATS["deepseek"], TOOLS)
    events = parser.push(f'{BEGIN}{CALL}function{SEP}weather\n```json\n{{"city": "Ber')
    assert [type(event).__name__ for event in events] == ["CallBegin", "ArgumentsDelta"]


def required(name, tools):
    given = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    chosen = extra_options(given, False).tool_options
    return required_calls(FORMATS[name], chosen)["format"]


WRITTEN = {"city": "Berlin", "days": "3", "opts": "{}"}


def written(form, key=""):
    """Return a text that a format of a structural tag allows, with all optional parts."""
    kind = form["type"]
    if kind == "sequence":
        texts = []
        for each in form["elements"]:
            texts.append(written(each, key))
            key = next((name for name in WRITTEN if name in texts[-1]), key)
        return "".join(texts)
    if kind == "optional":
        return written(form["content"], key)
    if kind == "string":
        return "Berlin"
    if kind == "json_schema":
        schema = form["json_schema"]
        if "properties" in schema or not key:
            return '{"city": "Berlin", "days": 3, "opts": {}}' if "properties" in schema else "{}"
        return '"Berlin"' if schema["type"] == "string" else WRITTEN[key]
    return form["value"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_required_call_allows_is_what_the_parser_reads(name):
    for tool, arguments in zip(TOOLS, ({"city": "Berlin", "days": 3, "opts": {}}, {}), strict=True):
        form = required(name, [tool])
        assert json.loads(json.dumps(form)) == form
        assert parsed(name, written(form)) == ("", "", [(tool["function"]["name"], arguments)])


LEARNT = [name for name, format in FORMATS.items() if format.learnt is not None]


@pytest.mark.parametrize("name", LEARNT)
def test_a_name_that_is_not_refused_is_read_as_it_is_written(name):
    has_keys = FORMATS[name].learnt.parameters is not None
    num_read = 0
    for char in string.punctuation:
        for function, key in ((f"f{char}g", "city"), (f"{char}f", "city"), (f"f{char}", "city"), ("f", f"a{char}city")):
            schema = {"type": "object", "properties": {key: {"type": "string"}}}
            try:
                form = required(name, [{"name": function, **({"parameters": schema} if has_keys else {})}])
            except GenerationConfigError:
                continue
            num_read += 1
            arguments = {key: "Berlin"} if has_keys else {}
            assert parsed(name, written(form)) == ("", "", [(function, arguments)]), (function, key)
    assert num_read > 100


@pytest.mark.parametrize(
    ("name", "function", "parameter"),
    [
        ("described xml", 'f[g]{h}"i', 'a[b]{c}"d<e'),
        ("glm", 'f[g]{h}"i>', 'a[b]{c}"d>e'),
        ("functionary31", 'f[g]{h}"i', "x"),
        ("deepseek31", 'f[g]}"i', "x"),
    ],
)
def test_names_may_have_all_that_ends_no_name(name, function, parameter):
    required(
        name, [{"name": function, "parameters": {"type": "object", "properties": {parameter: {"type": "string"}}}}]
    )


@pytest.mark.parametrize(
    ("name", "function", "parameter"),
    [
        ("glm", "a b", "x"),
        ("glm", "f", "a<b"),
        ("deepseek", "f<g", "x"),
        ("deepseek31", "f{g", "x"),
        ("glm", "{f", "x"),
        ("glm", "[f", "x"),
        ("functionary31", "f>g", "x"),
        ("described xml", "f", "a>b"),
        ("described mistral", "f[g", "x"),
        ("minicpm", "f", "a-b"),
        ("functionary3", "a\nb", "x"),
    ],
)
def test_names_that_cannot_be_written_get_one_line(name, function, parameter):
    tools = [{"name": function, "parameters": {"type": "object", "properties": {parameter: {"type": "string"}}}}]
    with pytest.raises(GenerationConfigError, match="cannot be written") as caught:
        required(name, tools)
    assert "\n" not in str(caught.value)
