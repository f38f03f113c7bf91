"""Tests that a call and its result go back to the model with every released chat template, or are refused in one line.

``_chat_templates/released.zip`` has templates as their publishers released them (Apache-2.0 or MIT; ``sources.json`` names each
model, its licence and the package that carries the template). Those that may not be kept are written anew in ``rewritten/``, in
what matters here.
"""

import json
import time
import zipfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quick import examples

from staticllm.errors import PromptError
from staticllm.events import merged, message_of
from staticllm.pipelines.conversation.chat_template import render, shape_of
from staticllm.pipelines.conversation.formats import find_format, format_beside
from staticllm.pipelines.conversation.message_parser import MessageParser
from staticllm.pipelines.conversation.required_calls import required_calls
from staticllm.pipelines.generation.options.extra import extra_options

FOLDER = Path(__file__).parents[2] / "_chat_templates"
TURNS = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}</s>{% endfor %}"
REWRITTEN = {path.stem: path.read_text("utf-8") for path in sorted((FOLDER / "rewritten").glob("*.jinja"))}


def released():
    with zipfile.ZipFile(FOLDER / "released.zip") as archive:
        return {name.removesuffix(".jinja"): archive.read(name).decode() for name in archive.namelist()}


TEMPLATES = {**released(), **REWRITTEN}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
TOOL = {
    "type": "function",
    "function": {
        "name": "get_sun", "description": "The weather.",
        "parameters": {
            "type": "object", "required": ["city"],
            "properties": {
                "city": {"type": "string", "description": "Where."},
                "days": {"type": "integer", "description": "How long."},
            },
        },
    },
}  # fmt: skip
USER = {"role": "user", "content": "How is the weather?"}
RESULT = "sunny 21"
REFUSING = {"ibm-granite-granite-20b-functioncalling"}
"""A template that fails with every conversation: it reads the parameters of a call from a list."""


def call(name="get_sun", id="call_0123456789abcdef01234567", arguments='{"city": "Romulus", "days": 3}'):
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def conversations():
    asked = {"role": "assistant", "content": "", "tool_calls": [call("call_sun")]}
    answered = {"role": "tool", "tool_call_id": call()["id"], "content": RESULT}
    first = [USER, asked, answered]
    yield first
    yield [USER, {**asked, "content": None}, answered]
    yield [*first, {"role": "assistant", "content": "It is sunny."}, USER]
    nameless = {"type": "function", "function": call("call_sun")["function"]}
    yield [USER, {"role": "assistant", "content": "", "tool_calls": [nameless]}, {"role": "tool", "content": RESULT}]
    as_dict = {**nameless, "function": {"name": "call_sun", "arguments": {"city": "Romulus"}}}
    yield [
        USER,
        {"role": "assistant", "tool_calls": [as_dict]},
        {"role": "tool", "name": "call_sun", "content": RESULT},
    ]


def shown(template, messages, tools):
    """Return the prompt; None if it is refused in one line."""
    try:
        return render(template, messages, TOKENS, tools)
    except PromptError as error:
        assert "\n" not in str(error)
        assert str(error).startswith(("the chat template ", "messages."))
        return None


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_call_and_its_result_are_shown_or_refused(name):
    template, num_shown = TEMPLATES[name], 0
    for messages in conversations():
        for tools in ([TOOL], []):
            text = shown(template, messages, tools)
            if text is not None:
                num_shown += 1
                for piece in ("call_sun", "Romulus", RESULT):
                    assert piece in text
                assert not tools or "get_sun" in text
                assert "None" not in text.partition("call_sun")[2]
    assert num_shown or name in REFUSING


@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_that_were_cut_off_are_shown_as_they_were_written(name):
    for broken in ('{"city": "Romu', "Romu", '{"a": 1}}'):
        messages = [
            USER, {"role": "assistant", "content": "", "tool_calls": [call("call_sun", arguments=broken)]},
            {"role": "tool", "tool_call_id": call()["id"], "content": RESULT},
        ]  # fmt: skip
        text = shown(TEMPLATES[name], messages, [TOOL])
        assert text is None or ("call_sun" in text and ("Romu" in text or '"a": 1' in text or '\\"a\\": 1' in text))
        if text is None:
            assert shown(TEMPLATES[name], next(conversations()), [TOOL]) is None, "the arguments are not the reason"


@pytest.mark.parametrize("name", [name for name, text in TEMPLATES.items() if name in REWRITTEN or "tool" in text])
def test_a_call_that_a_template_shows_is_found_in_an_answer_and_goes_back(name):
    template = TEMPLATES[name]
    shape, format = shape_of(template), find_format(template)
    if shape.tools is None or shape.examples is None or not format.syntax or format.syntax == "harmony":
        return  # harmony: the header of the message begins in the prompt
    properties = {"arg1": {"type": "string", "description": "One."}}
    function = {"name": "tool_name", "description": "One.", "parameters": {"type": "object", "properties": properties}}
    tool = {"type": "function", "function": function}
    begun = format.after(render(template, [USER], TOKENS, [tool]))
    parser = MessageParser(replace(begun, is_reasoning_open=False), [tool])
    message = message_of([*parser.push(shape.examples.one), *parser.finish()])
    (found,) = message.tool_calls
    assert (found.name, found.parsed_arguments) == ("tool_name", {"arg1": "some_value"})
    result = {"role": "tool", "tool_call_id": found.id, "content": RESULT}
    text = render(template, [USER, message.to_dict(), result], TOKENS, [tool])
    for piece in ("tool_name", "some_value", RESULT):
        assert piece in text


EXAMPLES = {
    "one": [("tool_name", {"arg1": "some_value"})],
    "number": [("tool_name", {"arg1": 7})],
    "two_arguments": [("tool_name", {"arg1": "some_value", "arg2": "other_value"})],
    "two_calls": [("tool_name", {"arg1": "some_value"}), ("other_tool", {"arg1": "some_value"})],
}


@pytest.mark.parametrize("name", [name for name, text in TEMPLATES.items() if name in REWRITTEN or "tool" in text])
@pytest.mark.parametrize("is_split", [False, True])
def test_every_example_of_a_learnt_format_is_read(name, is_split):
    shape, format = shape_of(TEMPLATES[name]), find_format(TEMPLATES[name])
    if format.learnt is None:
        return
    for kind, calls in EXAMPLES.items():
        parser = MessageParser(format)
        text = f"Let me see.\n{getattr(shape.examples, kind)}\nThere."
        events = [event for piece in (text if is_split else [text]) for event in parser.push(piece)]
        message = message_of([*events, *parser.finish()])
        assert [(call.name, call.parsed_arguments) for call in message.tool_calls] == calls
        assert message.content == "Let me see.There."
    begun = shape.examples.one.partition("some_value")[0]
    cut = MessageParser(format)
    message = message_of([*cut.push(begun), *cut.finish()])
    assert (message.content, message.tool_calls) == (begun, ()), "a call that is cut off is content"


@cache
def learnt():
    return {name: found for name, text in TEMPLATES.items() if (found := find_format(text)).learnt is not None}


@st.composite
def answers(draw):
    name = draw(st.sampled_from(sorted(learnt())))
    shown = shape_of(TEMPLATES[name]).examples
    pieces = [
        *shown,
        *learnt()[name].learnt.markers,
        "tool_name",
        '{"arg1": "x"}',
        "{",
        '"',
        "<",
        "text",
        "\n",
        "call1call",
    ]
    text = "".join(draw(st.lists(st.sampled_from(pieces), max_size=8)))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return learnt()[name], text, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@settings(max_examples=examples(400), deadline=None)
@given(answers())
def test_however_an_answer_in_a_learnt_format_is_split_the_events_are_the_same(answer):
    format, text, pieces = answer

    def events_of(parts):
        parser = MessageParser(format, [TOOL], new_id=lambda: "id")
        return merged([event for part in parts for event in parser.push(part)] + parser.finish())

    assert events_of(pieces) == events_of([text]) == events_of(text)


def test_calls_that_a_template_does_not_show_are_written_and_read_as_genai_writes_them():
    template = TEMPLATES["tools-without-calls"]
    asked = {"role": "assistant", "content": "", "tool_calls": [call("call_sun")]}
    text = render(template, [USER, asked], TOKENS, [TOOL])
    written = text.partition("<|assistant|>")[2].partition("<|end|>")[0]
    for answer in (written, '<tool_call>{"name": "call_sun", "arguments": {"city": "Romulus", "days": 3}}</tool_call>'):
        parser = MessageParser(format_beside(template, has_tools=True))
        (found,) = message_of([*parser.push(answer), *parser.finish()]).tool_calls
        assert (found.name, found.parsed_arguments) == ("call_sun", {"city": "Romulus", "days": 3})


THINKING = [name for name, text in TEMPLATES.items() if "reasoning_content" in text or ".thinking" in text]


@pytest.mark.parametrize("name", THINKING)
def test_the_reasoning_before_a_call_goes_back_under_any_of_its_names(name):
    shape = shape_of(TEMPLATES[name])
    if shape.reasoning is None:
        return
    for key in ("reasoning_content", "reasoning", "thinking"):
        asked = {"role": "assistant", "content": None, key: "It is about Rome.", "tool_calls": [call()]}
        answered = {"role": "tool", "tool_call_id": call()["id"], "content": RESULT}
        for tools in ([TOOL], []):
            assert "It is about Rome." in render(TEMPLATES[name], [USER, asked, answered], TOKENS, tools)
        text = render(TEMPLATES[name], [USER, {**asked, "content": "Let me see."}, answered], TOKENS, [TOOL])
        assert "Let me see." in text or "It is about Rome." in text


def test_most_templates_with_a_name_for_reasoning_show_it():
    assert sum(shape_of(TEMPLATES[name]).reasoning is not None for name in THINKING) > len(THINKING) // 2
    assert shape_of(TEMPLATES["openai-gpt-oss-120b"]).reasoning == "thinking"


def test_a_type_that_the_tag_of_a_parameter_says_is_kept():
    parser = MessageParser(find_format(TEMPLATES["deepseek-ai-DeepSeek-V3.2"]))
    example = shape_of(TEMPLATES["deepseek-ai-DeepSeek-V3.2"]).examples.one
    texts = example.replace("some_value", "12"), example.replace("some_value", "12").replace('"true"', '"false"')
    message = message_of([*parser.push("".join(texts)), *parser.finish()])
    assert [call.parsed_arguments for call in message.tool_calls] == [{"arg1": "12"}, {"arg1": 12}]


def test_tools_that_a_template_does_not_show_are_described_as_genai_does():
    text = render(TURNS, [USER], TOKENS, [TOOL])
    assert "You can call any of the following tools to satisfy the user's requests: [" in text
    assert '"name": "get_sun"' in text
    assert '"tool_calls": [' in text
    format = format_beside(TURNS, has_tools=True)
    assert format.syntax == "generic"
    parser = MessageParser(format, [TOOL])
    written = {"tool_calls": [{"name": "get_sun", "arguments": {"city": "Rome"}, "id": "call_1___"}], "content": ""}
    answer = json.dumps(written, indent=2)
    message = message_of([*parser.push(answer), *parser.finish()])
    assert [(found.name, found.parsed_arguments) for found in message.tool_calls] == [("get_sun", {"city": "Rome"})]
    assert not message.content


@pytest.mark.parametrize(
    "text", ['{"tool_calls": 3}', '{"tool_calls": []}', '{"a": 1}', '{"content": "x"}', "{", "[1, 2]"]
)
def test_an_object_without_calls_stays_content(text):
    parser = MessageParser(format_beside(TURNS, has_tools=True), [TOOL])
    message = message_of([*parser.push(text), *parser.finish()])
    assert (message.content, message.tool_calls) == (text, ())


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in ("braces",)])
def test_a_required_call_is_read_where_tools_are_shown_in_any_way(name):
    format = format_beside(TEMPLATES[name], has_tools=True)
    if not format.syntax:
        return
    given = {"tools": [TOOL], "tool_choice": "required"}
    tag = required_calls(format, extra_options(given, do_sample=False).tool_options)
    text = written(tag["format"])
    parser = MessageParser(format, [TOOL], calls="required")
    message = message_of([*parser.push(text), *parser.finish()])
    assert [found.name for found in message.tool_calls] == ["get_sun"]


def written(form):
    """Return a text that a format of a structural tag allows."""
    if form["type"] == "sequence":
        return "".join(map(written, form["elements"]))
    if form["type"] in ("optional", "star"):
        return ""
    if form["type"] == "json_schema":
        return {"object": '{"city": "Rome"}', "string": '"Rome"'}[form["json_schema"]["type"]]
    return "Rome" if form["type"] == "string" else form["value"]


def test_sources_name_every_template():
    sources = {
        each["file"].removesuffix(".jinja"): each for each in json.loads((FOLDER / "sources.json").read_text("utf-8"))
    }
    assert sources.keys() == released().keys()
    assert all(
        each["model"] and each["package"] and each["licence"] in ("Apache-2.0", "MIT") for each in sources.values()
    )


PARTS = [{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("role", ["user", "system"])
def test_parts_with_text_are_that_text(name, role):
    others = [] if role == "user" else [USER]
    in_parts = shown(TEMPLATES[name], [{"role": role, "content": PARTS}, *others], [])
    in_text = shown(TEMPLATES[name], [{"role": role, "content": "Hi there"}, *others], [])
    assert in_parts == in_text
    assert in_parts is None or "'text'" not in in_parts


@pytest.mark.parametrize("name", ["no-tools", "parts", "Qwen-Qwen3-0.6B", "mistralai-Mistral-7B-Instruct-v0.3"])
def test_parts_that_are_no_text_are_refused_where_the_template_would_print_them(name):
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    text = shown(TEMPLATES[name], [{"role": "user", "content": [*PARTS, image]}], [])
    assert text is None or "image_url" not in text
    with pytest.raises(
        PromptError, match=r"messages\.0\.content has a part of type 'image_url': only text is supported"
    ):
        render(TURNS, [{"role": "user", "content": [image]}], TOKENS)


def two_calls(text=""):
    calls = [call("call_sun", "call_one"), call("call_rain", "call_two", '{"city": "Paris"}')]
    results = [{"role": "tool", "tool_call_id": each["id"], "content": f"{RESULT} {each['id']}"} for each in calls]
    return [USER, {"role": "assistant", "content": text, "tool_calls": calls}, *results]


@pytest.mark.parametrize("name", TEMPLATES)
def test_several_calls_and_a_text_beside_them_are_shown_or_refused(name):
    """Calls that a template shows one at a time are sent one after the other, each with its result."""
    for text in ("", "Let me see."):
        prompt = shown(TEMPLATES[name], two_calls(text), [TOOL])
        if prompt is not None:
            for wanted in ("call_sun", "call_rain", "Romulus", "Paris", f"{RESULT} call_one", f"{RESULT} call_two"):
                assert wanted in prompt, wanted


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize(
    "void", [{"tool_calls": None}, {"tool_calls": []}, {"function_call": None, "name": None, "refusal": None}]
)
def test_keys_that_say_nothing_change_nothing(name, void):
    plain = [USER, {"role": "assistant", "content": "An answer."}, USER]
    assert shown(TEMPLATES[name], [{**each, **void} for each in plain], []) == shown(TEMPLATES[name], plain, [])


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("void", [{"content": None}, {}])
def test_a_message_without_content_is_an_empty_one(name, void):
    empty = [USER, {"role": "assistant", "content": ""}, USER]
    assert shown(TEMPLATES[name], [USER, {"role": "assistant", **void}, USER], []) == shown(TEMPLATES[name], empty, [])


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_empty_system_message_is_none_where_the_text_would_move(name):
    if not shape_of(TEMPLATES[name]).has_system:
        with_system = shown(TEMPLATES[name], [{"role": "system", "content": ""}, USER], [])
        assert with_system == shown(TEMPLATES[name], [USER], [])


@pytest.mark.parametrize("around", ["{{ '<a>' * 20000 }}x", "{{ '[' * 20000 }}", "{{ ('[' ~ '1,' * 3000) * 200 }}"])
def test_a_template_cannot_make_the_search_for_a_format_long(around):
    one = '{"name": "{{ m.tool_calls[0].function.name }}", "arguments": {{ m.tool_calls[0].function.arguments | tojson }}}'
    shown_calls = "{% if m.tool_calls %}" + around + one + "{% endif %}"
    template = "{% for m in messages %}{{ m.content or '' }}" + shown_calls + "{% endfor %}"
    begin = time.monotonic()
    find_format(template)
    assert time.monotonic() - begin < 3


def test_a_system_message_that_is_shown_only_beside_tools_moves_without_them():
    turn = "{% if m.role != 'system' or tools %}<{{ m.role }}>{{ m.content }}{% endif %}"
    template = "{% for m in messages %}" + turn + "{% endfor %}{{ tools }}"
    system = {"role": "system", "content": "Be brief."}
    assert "<user>Be brief.\nHow" in render(template, [system, USER], TOKENS)
    assert "<system>Be brief." in render(template, [system, USER], TOKENS, [TOOL])
