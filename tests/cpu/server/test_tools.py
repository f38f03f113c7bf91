"""Tests calls of tools and reasoning through OpenAI's client, with a template that shows tools and thinks."""

from __future__ import annotations

import json

import openvino_genai as genai
import pytest
from support.server.served import serving

from staticllm import StaticLLMPipeline, demo_model_path
from staticllm.testing import fake_pipeline

openai = pytest.importorskip("openai")
jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

CITY = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": CITY}}]
TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    '{# <tool_call>{"name": "f", "arguments": {}}</tool_call> <think> </think> #}'
)
QUESTION = [{"role": "user", "content": "How is the weather?"}]


def tokenizer():
    made = genai.Tokenizer(str(demo_model_path()))
    made.chat_template = TEMPLATE
    return made


def client_of(served):
    return openai.OpenAI(base_url=served.url + "/v1", api_key="any", max_retries=0)


@pytest.fixture(scope="module")
def client():
    def load(device, properties, on_progress):
        return StaticLLMPipeline(demo_model_path(), device, tokenizer=tokenizer())

    with serving(pipelines={"demo": load}) as served, client_of(served) as client:
        yield client


def streamed(client, **options):
    """Return the message that the chunks of a stream make, and the reason of its end."""
    message, calls, reason = {"content": "", "reasoning_content": ""}, {}, None
    for chunk in client.chat.completions.create(stream=True, **options):
        choice = chunk.choices[0]
        assert len(choice.delta.tool_calls or []) <= 1, "clients take the first list as it is"
        message["content"] += choice.delta.content or ""
        message["reasoning_content"] += getattr(choice.delta, "reasoning_content", None) or ""
        for call in choice.delta.tool_calls or []:
            known = calls.setdefault(call.index, {"id": call.id, "name": call.function.name, "arguments": ""})
            assert known["id"], "the first chunk of a call names it"
            known["arguments"] += call.function.arguments or ""
        reason = choice.finish_reason or reason
    return message, [calls[index] for index in sorted(calls)], reason


def test_a_required_call_satisfies_its_schema(client):
    options = {
        "model": "demo", "messages": QUESTION, "tools": TOOLS, "tool_choice": "required", "temperature": 1.2, "seed": 2,
        "max_tokens": 300,
    }  # fmt: skip
    found = client.chat.completions.create(**options).choices[0]
    assert found.finish_reason == "tool_calls"
    assert found.message.content is None
    assert found.message.tool_calls
    for call in found.message.tool_calls:
        assert call.function.name == "weather"
        assert call.id
        jsonschema.validate(json.loads(call.function.arguments), CITY)
    message, calls, reason = streamed(client, **options)
    assert reason == "tool_calls"
    assert not message["content"].strip()
    assert [call["arguments"] for call in calls] == [call.function.arguments for call in found.message.tool_calls]


def test_a_named_function_is_called_and_its_result_is_taken(client):
    choice = {"type": "function", "function": {"name": "weather"}}
    options = {"model": "demo", "tools": TOOLS, "max_tokens": 200}
    message = client.chat.completions.create(messages=QUESTION, tool_choice=choice, **options).choices[0].message
    (call,) = message.tool_calls
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    found = client.chat.completions.create(messages=[*QUESTION, message, result], tool_choice="none", **options)
    assert found.choices[0].finish_reason in ("stop", "length")


@pytest.fixture(scope="module")
def fake():
    """A server whose answer is the text of the last message."""

    def load(device, properties, on_progress):
        return fake_pipeline(lambda prompt: prompt.rsplit("ANSWER:", 1)[1], tokenizer=tokenizer())

    with serving(pipelines={"demo": load}) as served, client_of(served) as client:
        yield client


def test_reasoning_is_apart_from_content(fake):
    asked = [{"role": "user", "content": "Q ANSWER:<think>first this</think>then that"}]
    options = {"model": "demo", "messages": asked, "max_tokens": 64}
    found = fake.chat.completions.create(**options).choices[0].message
    assert (found.content.strip(), found.reasoning_content.strip()) == ("then that", "first this")
    message, calls, reason = streamed(fake, **options)
    assert (message["content"].strip(), message["reasoning_content"].strip()) == ("then that", "first this")
    assert not calls
    assert reason == "stop"


def test_two_calls_and_a_broken_one(fake):
    one = '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "days": 2}}</tool_call>'
    asked = [{"role": "user", "content": f"Q ANSWER:{one}{one.replace('Rome', 'Oslo')}"}]
    options = {"model": "demo", "messages": asked, "tools": TOOLS, "max_tokens": 200}
    found = fake.chat.completions.create(**options).choices[0]
    cities = [json.loads(call.function.arguments)["city"] for call in found.message.tool_calls]
    assert cities == ["Rome", "Oslo"]
    assert found.finish_reason == "tool_calls"
    _, calls, reason = streamed(fake, **options)
    assert [json.loads(call["arguments"])["city"] for call in calls] == cities
    assert reason == "tool_calls"
    broken = [{"role": "user", "content": 'Q ANSWER:<tool_call>{"name": "weather", oh no</tool_call> sorry'}]
    found = fake.chat.completions.create(**{**options, "messages": broken}).choices[0]
    assert found.message.tool_calls is None
    assert "sorry" in found.message.content
    assert found.finish_reason == "stop"


@pytest.mark.parametrize("tools", [{"tools": TOOLS}, {}])
def test_a_call_is_content_where_tool_choice_is_none(fake, tools):
    call = '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "days": 2}}</tool_call>'
    asked = [{"role": "user", "content": f"Q ANSWER:<think>hm</think>{call}"}]
    options = {"model": "demo", "messages": asked, "tool_choice": "none", "max_tokens": 200, **tools}
    found = fake.chat.completions.create(**options).choices[0]
    assert (found.message.content, found.message.tool_calls, found.finish_reason) == (call, None, "stop")
    assert found.message.reasoning_content == "hm"
    message, calls, reason = streamed(fake, **options)
    assert (message["content"], calls, reason) == (call, [], "stop")


def answers_of(fake, text, **options):
    """Return (calls, content, reason) of the answer ``text``: whole and streamed by chats, whole and streamed by responses."""
    given = {
        "model": "demo",
        "max_tokens": 400,
        "messages": [{"role": "user", "content": f"Q ANSWER:{text}"}],
        **options,
    }
    choice = fake.chat.completions.create(**given).choices[0]
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or []]
    yield calls, choice.message.content or "", choice.finish_reason
    message, calls, reason = streamed(fake, **given)
    yield [(call["name"], call["arguments"]) for call in calls], message["content"], reason
    flat = {"model": "demo", "input": f"Q ANSWER:{text}", "max_output_tokens": 400, "tools": FLAT, **options}
    flat["tools"] = FLAT
    events = list(fake.responses.create(stream=True, **flat))
    for found in (fake.responses.create(**flat), events[-1].response):
        assert found.parallel_tool_calls == options.get("parallel_tool_calls", True)
        calls = [(item.name, item.arguments) for item in found.output if item.type == "function_call"]
        texts = [item.content[0].text for item in found.output if item.type == "message"]
        yield calls, "".join(texts), "tool_calls" if calls and found.status == "completed" else "stop"


ARGUMENTS = [f'{{"city": "{city}", "days": 2}}' for city in ("Rome", "Oslo", "Bonn")]
WRITTEN = [f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>' for arguments in ARGUMENTS]
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("is_parallel", [True, None, False])
def test_calls_are_several_unless_the_request_wants_one(fake, choice, is_parallel):
    """Then the answer ends with the first, whatever the model would write after it."""
    text = "\n".join(WRITTEN) + ("" if choice == "required" else " and so on")
    options = {"tools": TOOLS, "tool_choice": choice}
    options |= {} if is_parallel is None else {"parallel_tool_calls": is_parallel}
    wanted = [("weather", arguments) for arguments in ARGUMENTS[: 1 if is_parallel is False else 3]]
    content = "and so on" if choice == "auto" and is_parallel is not False else ""
    found = [(calls, text.strip(), reason) for calls, text, reason in answers_of(fake, text, **options)]
    assert found == [(wanted, content, "tool_calls")] * 4


def test_no_token_is_computed_behind_the_only_call(fake):
    asked = [{"role": "user", "content": "Q ANSWER:" + "\n".join(WRITTEN) + " word" * 300}]
    options = {"model": "demo", "messages": asked, "tools": TOOLS, "max_tokens": 900}
    several = fake.chat.completions.create(**options).usage.completion_tokens
    one = fake.chat.completions.create(parallel_tool_calls=False, **options).usage.completion_tokens
    assert one < several / 4


@pytest.mark.parametrize(
    "text", ['{"name": "weather", "arguments": %s}', '\n[{"name": "weather", "parameters": %s}]\n']
)
def test_an_answer_that_is_the_json_of_a_fitting_call_is_one(fake, text):
    """Small models write it, whatever the template shows."""
    found = list(answers_of(fake, text % ARGUMENTS[0], tools=TOOLS))
    assert found == [([("weather", ARGUMENTS[0])], "", "tool_calls")] * 4
    misspelled = text.replace("weather", "wether") % ARGUMENTS[0]
    for other in (misspelled, text % '{"city": "Rome"}', text % '{"city": 1, "days": 2}', text % ARGUMENTS[0] + "."):
        assert list(answers_of(fake, other, tools=TOOLS)) == [([], other, "stop")] * 4


def test_half_characters_never_reach_a_client(fake):
    text = "naïve café 🦊🐻 東京 – done"
    options = {"model": "demo", "messages": [{"role": "user", "content": f"Q ANSWER:{text}"}], "max_tokens": 200}
    for is_by_token in (False, True):  # with log-probabilities, tokens that are ready together are chunks of their own
        chunks = fake.chat.completions.create(stream=True, logprobs=is_by_token, **options)
        pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
        assert "".join(pieces).strip() == text
        assert not any("\ufffd" in piece for piece in pieces)
    assert len(pieces) > 10
