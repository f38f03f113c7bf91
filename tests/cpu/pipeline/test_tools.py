"""Tests tools through a whole pipeline: what the model is shown, how its answer is parsed, and what the results hold."""

from __future__ import annotations

import asyncio
import json
import shutil

import numpy as np
import openvino_genai as genai
import pytest
from support.helpers import one_line

from staticllm import AssistantMessage, GenerationConfigError, PromptError, StaticLLMPipeline, ToolCall, demo_model_path
from staticllm.events import ArgumentsDelta, CallBegin, CallEnd, ContentDelta, message_of
from staticllm.pipelines.conversation import formats
from staticllm.pipelines.text.tokenizer_tools import SpecialTokens
from staticllm.testing import fake_pipeline

pytestmark = pytest.mark.usefixtures("shared_programs")

SHORT = {"MAX_PROMPT_LEN": 1024, "MIN_RESPONSE_LEN": 256}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
HERMES = (
    "{% for t in tools or [] %}[tool {{ t.function.name }}]{% endfor %}{{ mood or '' }}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    '{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Berlin"}}\n</tool_call>'
ANSWER = "Let me look.\n" + CALL


def pipe_of(reply, template=HERMES):
    tokenizer = genai.Tokenizer(str(demo_model_path()))
    tokenizer.chat_template = template
    return fake_pipeline(reply, tokenizer=tokenizer, **SHORT)


def test_calls_are_parsed_where_tools_are_passed():
    prompts = []

    def reply(prompt):
        prompts.append(prompt)
        return ANSWER

    with pipe_of(reply) as pipe:
        result = pipe.generate("How is the weather in Berlin?", tools=[WEATHER])
        assert "[tool weather]" in prompts[0]
        assert result == ANSWER
        (message,) = result.messages
        assert (message.content, message.reasoning_content) == ("Let me look.", "")
        ((call,),) = result.tool_calls
        assert (call.name, call.parsed_arguments) == ("weather", {"city": "Berlin"})
        assert result.finish_reasons == ["tool_call"]
        assert result.finish_reasons == [genai.GenerationFinishReason.TOOL_CALL]
        plain = pipe.generate("How is the weather?", tools=[WEATHER], parse_tools=False)
        assert plain.messages == plain.tool_calls == plain.reasoning_content == []
        assert plain.finish_reasons == ["stop"]
        only = pipe.generate("How?", parse_tools=True)
        assert only.tool_calls[0][0].name == "weather"
        assert "[tool" not in prompts[-1]
        bare = pipe.generate("How?", tools=[WEATHER["function"]])
        assert "[tool weather]" in prompts[-1], "a function without the outer dict is a tool as well"
        assert bare.tool_calls[0][0].name == "weather"


def test_a_call_is_content_where_tool_choice_is_none():
    with pipe_of(ANSWER) as pipe:
        for options in ({"tools": [WEATHER]}, {"parse_tools": True}):
            result = pipe.generate("How?", tool_choice="none", **options)
            assert result.finish_reasons == ["stop"]
            assert result.tool_calls == [[]]
            assert result.messages[0].content.strip() == ANSWER.strip()


def test_a_conversation_goes_on_with_the_message():
    prompts = []

    def reply(prompt):
        prompts.append(prompt)
        return ANSWER if "<tool>" not in prompt else "It is sunny."

    with pipe_of(reply) as pipe:
        messages = [{"role": "user", "content": "How is it in Berlin?"}]
        first = pipe.generate(messages, tools=[WEATHER])
        messages += [first.messages[0].to_dict(), {"role": "tool", "content": "sun", "tool_call_id": "x"}]
        assert json.loads(messages[1]["tool_calls"][0]["function"]["arguments"]) == {"city": "Berlin"}
        second = pipe.generate(messages, tools=[WEATHER])
        assert '"arguments": {"city": "Berlin"}}</tool_call>' in prompts[1], "the template gets a dict, not its text"
        assert second.texts == ["It is sunny."]
        assert second.messages == [AssistantMessage("It is sunny.")]
        assert second.finish_reasons == ["stop"]


@pytest.mark.parametrize("name", ["weather", r"weather\ud83d"])
def test_a_conversation_goes_on_after_a_call_with_half_of_a_surrogate_pair(name):
    """Models write such escapes, JSON allows them, and no tokenizer encodes them."""
    prompts = []

    def reply(prompt):
        prompts.append(prompt)
        return CALL.replace("weather", name).replace("Berlin", r"\ud83d")

    with pipe_of(reply) as pipe:
        messages = [{"role": "user", "content": "How is it?"}]
        first = pipe.generate(messages, tools=[WEATHER])
        assert first.tool_calls[0][0].parsed_arguments == {"city": "\ud83d"}
        pipe.generate([*messages, first.messages[0].to_dict()], tools=[WEATHER])
        assert '{"city": "\ufffd"}' in prompts[1]


@pytest.mark.parametrize("arguments", [{"city": "Berlin"}, '{"city": "Berlin"}'])
def test_a_template_that_takes_arguments_as_text_gets_text(arguments):
    template = (
        "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        "{{ c.function.name + ' ' + c.function.arguments }}{% endfor %}{% endfor %}"
    )
    prompts = []
    with pipe_of(lambda prompt: prompts.append(prompt) or "yes", template) as pipe:
        call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
        pipe.generate([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert prompts == ['weather {"city": "Berlin"}']


def test_tools_of_a_chat_history_are_shown_and_parsed_only_when_asked():
    prompts = []

    def reply(prompt):
        prompts.append(prompt)
        return ANSWER

    with pipe_of(reply) as pipe:
        history = genai.ChatHistory([{"role": "user", "content": "How?"}])
        history.set_tools([WEATHER])
        history.set_extra_context({"mood": "(calm)"})
        plain = pipe.generate(history)
        assert plain.texts == [ANSWER]
        assert plain.messages == []
        assert plain.finish_reasons == ["stop"], "as in GenAI"
        parsed = pipe.generate(history, parse_tools=True)
        assert parsed.tool_calls[0][0].name == "weather"
        assert prompts[0] == prompts[1]
        assert prompts[0].startswith("[tool weather](calm)")
        pipe.generate(history, extra_context={"mood": "(gay)"}, tool_choice="none")
        assert prompts[2].startswith("(gay)")


def test_events_stream_and_make_the_message():
    with pipe_of(ANSWER) as pipe:
        handle = pipe.submit("How?", tools=[WEATHER])
        events = list(handle.events())
        begin = next(event for event in events if isinstance(event, CallBegin))
        assert isinstance(events[0], ContentDelta)
        assert sum(isinstance(event, ArgumentsDelta) for event in events) > 1, "arguments come in pieces"
        assert events[-1] == CallEnd(0)
        result = handle.result()
        assert message_of(events) == result.messages[0]
        assert result.tool_calls[0] == [ToolCall(begin.id, "weather", '{"city": "Berlin"}')]
        assert handle.finish_reason == "tool_call"
        with pytest.raises(GenerationConfigError, match="events of an answer that is not parsed: pass tools"):
            list(pipe.submit("How?").events())
        text = "".join(pipe.submit("How?", tools=[WEATHER]))
        assert text == ANSWER, "a handle that is read as text gives all that the model wrote"

        async def wait():
            return await pipe.submit("How?", tools=[WEATHER])

        assert asyncio.run(wait()).tool_calls[0][0].name == "weather"

        async def read():
            return [event async for event in pipe.submit("How?", tools=[WEATHER]).events_async()]

        assert message_of(asyncio.run(read())).tool_calls[0].parsed_arguments == {"city": "Berlin"}


def test_a_call_that_is_cut_off_is_content():
    with pipe_of(ANSWER) as pipe:
        result = pipe.generate("How?", tools=[WEATHER], max_new_tokens=20)
        assert result.finish_reasons == ["length"]
        assert result.tool_calls == [[]]
        assert result.messages[0].content == result.rstrip() or result.messages[0].content == result
        stopped = pipe.generate("How?", tools=[WEATHER], stop_strings={"Berlin"})
        assert stopped.finish_reasons == ["stop"]
        assert stopped.tool_calls == [[]]


def test_reasoning_that_the_prompt_opens():
    template = "{{ messages[0].content }}{% if add_generation_prompt %}<think>\n{% endif %}{# </think> #}"
    with pipe_of("I think.\n</think>\n\nYes.", template) as pipe:
        result = pipe.generate("Is it?", parse_tools=True)
        assert result.reasoning_content == ["I think."]
        assert result.messages[0].content == "Yes."
        tokens = pipe.generate(np.array([[5, 6, 7]]), parse_tools=True, max_new_tokens=30)
        assert tokens.messages[0].content.endswith("Yes."), "token ids have no prompt that could open it"


def test_several_answers_and_prompts_are_parsed_each():
    with pipe_of(ANSWER) as pipe:
        several = pipe.generate("How?", tools=[WEATHER], num_return_sequences=3, do_sample=True, rng_seed=1)
        assert [len(calls) for calls in several.tool_calls] == [1, 1, 1]
        assert len({calls[0].id for calls in several.tool_calls}) == 3
        assert [calls[0].name for calls in pipe.generate(["a", "b"], tools=[WEATHER]).tool_calls] == ["weather"] * 2


def test_markers_that_are_special_tokens_are_shown_and_others_are_not():
    tokenizer = genai.Tokenizer(str(demo_model_path()))
    special = SpecialTokens(tokenizer)
    ids = {text: tokenizer.get_vocab()[text.encode()] for text in ("<|user|>", "<|system|>", "</s>")}
    words = tokenizer.encode("The fox ran.", add_special_tokens=False).input_ids.data[0].tolist()
    tokens = [ids["<|system|>"], *words[:2], ids["<|user|>"], *words[2:], ids["</s>"]]
    assert all(map(special.is_special, ids.values()))
    assert not any(map(special.is_special, words))
    decode = special.decoder(["<|user|>", "<no such token>"], tokenizer.decode)
    before, after = tokenizer.decode(words[:2]), tokenizer.decode(words)
    assert decode(tokens) == before + "<|user|>" + after[len(before) :]
    assert special.decoder(["The"], tokenizer.decode) == tokenizer.decode, "nothing to show"


def test_a_call_between_special_tokens_is_found():
    """The tokenizer leaves special tokens out of its text; those that mark calls must be part of it."""
    tokenizer = genai.Tokenizer(str(demo_model_path()))
    markers = ["<|user|>", "<|system|>"]
    shown = SpecialTokens(tokenizer).decoder(markers, tokenizer.decode)
    text = '<|user|>{"name": "weather"}<|system|>'
    ids = tokenizer.encode(text, add_special_tokens=False).input_ids.data[0].tolist()
    assert shown(ids) == text
    assert tokenizer.decode(ids) == '{"name": "weather"}'


def test_calls_between_special_tokens_reach_events_and_results(monkeypatch):
    """As with a model whose markers are special tokens: here those of the demo model stand for them."""
    monkeypatch.setattr(formats, "TAGS", (("<|user|>", "<|system|>"),))
    template = (
        "{# <|user|> <|system|> #}{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ messages[0].content }}"
    )
    text = '<|user|>{"name": "weather", "arguments": {"city": "Berlin"}}<|system|>'
    with pipe_of("Look. " + text, template) as pipe:
        plain = pipe.generate("How?")
        assert "<|user|>" not in plain, "without tools special tokens are left out, as in GenAI"
        result = pipe.generate("How?", tools=[WEATHER])
        assert result == "Look. " + text, "markers are shown, and the end-of-sequence token is not"
        assert result.messages[0].content == "Look."
        assert result.tool_calls[0][0].parsed_arguments == {"city": "Berlin"}
        seen = []
        assert pipe.generate("How?", tools=[WEATHER], streamer=seen.append) == "".join(seen)
        assert list(pipe.submit("How?", tools=[WEATHER]).events())[-1] == CallEnd(0)
        assert pipe.generate("How?", tools=[WEATHER], stop_strings={"<|user|>"}) == "Look. "


@pytest.mark.parametrize(
    ("inputs", "options", "said"),
    [
        ("How?", {"tools": [{"name": ""}]}, r"tools=.*: must be a list of \{'type': 'function'"),
        ("How?", {"tools": "weather"}, "tools='weather'"),
        ("How?", {"tools": [WEATHER], "tool_choice": "always"}, "tool_choice='always': must be 'auto', 'none', 'required'"),
        ("How?", {"tool_choice": "required"}, "tool_choice='required' without tools"),
        ("How?", {"tools": [WEATHER], "tool_choice": {}}, "tool_choice={}: must be 'auto', 'none', 'required'"),
        ("How?", {"tools": [WEATHER], "tool_choice": {"type": "custom", "function": {"name": "weather"}}},
         "must be 'auto', 'none', 'required'"),
        ("How?", {"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "now"}}},
         "tool_choice names 'now': the tools are weather"),
        ("How?", {"tools": [WEATHER], "parse_tools": "yes"}, "parse_tools='yes'"),
        ("How?", {"extra_context": [1]}, r"extra_context=\[1\]: must be a dict"),
        ("How?", {"tools": [WEATHER], "apply_chat_template": False}, "tools without a chat template"),
        (np.array([[5]]), {"tools": [WEATHER]}, "tools without a chat template"),
        (np.array([[5]]), {"extra_context": {"a": 1}}, "extra_context without a chat template"),
    ],
)  # fmt: skip
def test_wrong_options_are_one_line(inputs, options, said):
    with pipe_of("yes") as pipe:
        with pytest.raises(GenerationConfigError, match=said) as error:
            pipe.generate(inputs, **options)
        one_line(error)
        assert pipe.generate("How?") == "yes"


ITEMS = (
    "{% for m in messages %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% for k, v in c.function.arguments | items %}{{ k }}{{ v }}{% endfor %}{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("arguments", ['"a"', "[1]", "5", "null", [1], 5])
def test_arguments_that_are_no_object_are_said_to_be_none(arguments):
    call = {"type": "function", "function": {"name": "weather", "arguments": arguments}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    with pipe_of("yes", ITEMS) as pipe:
        with pytest.raises(PromptError, match="the arguments of a call are no JSON object: ") as error:
            pipe.generate(messages)
        one_line(error)
        call["function"]["arguments"] = '{"city": "Rome"}'
        assert pipe.generate(messages).texts == ["yes"]


def test_wrong_conversations_are_one_line():
    with pipe_of("yes") as pipe:
        pipe.start_chat()
        with pytest.raises(GenerationConfigError, match="tools in a chat of start_chat"):
            pipe.generate("How?", tools=[WEATHER])
    for template in ("{{ messages[-1].content | length }}", "{{ messages[0].role }}"):
        with pipe_of("yes", template) as pipe:
            with pytest.raises(PromptError, match="the chat template shows no tools: leave them out, or set another"):
                pipe.generate("How?", tools=[WEATHER])
            history = genai.ChatHistory([{"role": "user", "content": "How?"}])
            history.set_tools([WEATHER])
            with pytest.raises(PromptError, match="the chat template shows no tools"):
                pipe.generate(history)
            assert pipe.generate("How?") == "yes"


@pytest.mark.parametrize("place", ["list", "file"])
def test_a_template_of_its_own_for_tools_is_used_with_tools(place, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(demo_model_path(), folder)
    default = "plain {% for m in messages %}{{ m.content }}{% endfor %}"
    with_tools = "tools {{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"
    if place == "list":
        named = [{"name": "default", "template": default}, {"name": "tool_use", "template": with_tools}]
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    else:
        (folder / "additional_chat_templates").mkdir()
        (folder / "additional_chat_templates" / "tool_use.jinja").write_text(with_tools)
    with StaticLLMPipeline(folder, "CPU") as pipe:
        tokenizer = pipe.get_tokenizer()
        plain = pipe.generate([{"role": "user", "content": "Hi"}], max_new_tokens=1, echo=True).texts[0]
        shown = pipe.generate([{"role": "user", "content": "Hi"}], max_new_tokens=1, echo=True, tools=[WEATHER]).texts[
            0
        ]
        history = genai.ChatHistory([{"role": "user", "content": "Hi"}])
        history.set_tools([WEATHER])
        assert pipe.generate(history, max_new_tokens=1, echo=True).texts[0] == shown
        assert "weather" not in plain
        assert shown.replace(" ", "").startswith('tools[{"')
        assert "weather" in shown
        tokenizer.chat_template = "mine {% for m in messages %}{{ m.content }}{% endfor %}{{ tools | tojson if tools }}"
        assert pipe.generate(history, max_new_tokens=1, echo=True).texts[0].startswith("mine"), "the user's own counts"


@pytest.mark.parametrize("id", ["call_é", "呼び出し_1", "😀", 'a"b', "a\\b", "\u2028", "call_1"])
@pytest.mark.parametrize("content", ["{{ m.content }}", "{{ m.content | tojson }}", "{{ m.content | tojson(true) }}"])
def test_ids_of_any_characters_are_written_where_the_template_shows_no_calls(id, content):
    prompts = []

    def reply(prompt):
        prompts.append(prompt)
        return "ok"

    with pipe_of(reply, f"{{% for m in messages %}}{content}{{% endfor %}}") as pipe:
        call = {"id": id, "type": "function", "function": {"name": "weather", "arguments": "{}"}}
        result = {"role": "tool", "tool_call_id": id, "content": "3"}
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [call]}, result]
        assert pipe.generate(messages).texts == ["ok"]
    if content == "{{ m.content }}":
        assert f'"id": {json.dumps(id, ensure_ascii=False)}' in prompts[0]


@pytest.mark.parametrize(
    "second", [WEATHER, WEATHER["function"], {"name": "weather", "parameters": {"type": "object"}}]
)
def test_two_tools_of_one_name_are_refused_by_the_name(second):
    other = {"type": "function", "function": {"name": "clock"}}
    with pipe_of(ANSWER) as pipe:
        for choice in ("auto", "required", "none"):
            with pytest.raises(GenerationConfigError, match="two functions named 'weather'") as caught:
                pipe.generate("How?", tools=[WEATHER, other, second], tool_choice=choice)
            assert one_line(caught)
        assert pipe.generate("How?", tools=[WEATHER, other]).tool_calls
