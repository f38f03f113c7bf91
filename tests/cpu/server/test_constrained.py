"""Tests that what a grammar wrote is the content on every API, whatever it looks like and whatever the template begins."""

from __future__ import annotations

import json

import httpx
import openvino_genai as genai
import pytest
from support.server.served import serving

from staticllm import StaticLLMPipeline, demo_model_path
from staticllm.server.models.served import ModelSpec

pytest.importorskip("llguidance")

pytestmark = pytest.mark.usefixtures("shared_programs")

TURNS = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
TEMPLATES = {
    "thinks": TURNS
    + "{# <tool_call>{}</tool_call> </think> #}{% if enable_thinking is not false %}<think>\n{% endif %}",
    "llama": TURNS + '{# <|python_tag|> {"name": "f", "parameters": {}} #}',
    "hermes": TURNS + '{# <tool_call>{"name": "f", "arguments": {}}</tool_call> <think> </think> #}',
    "functionary": TURNS + "{# >>>all #}>>>",
    "harmony": TURNS + "{# <|channel|> <|message|> #}<|start|>assistant",
}
CONSTANTS = [
    {"name": "Ada", "parameters": {"born": 1815}},
    "a <think>b</think> c",
    '<tool_call>{"name": "Ada", "arguments": {}}</tool_call>',
    "\n>>>Ada\n{}",
    "<|channel|>final<|message|>x<|end|>",
    " a ",
]
QUESTION = [{"role": "user", "content": "Who?"}]


@pytest.fixture(scope="module")
def server():
    def loader(template):
        def load(device, properties, on_progress):
            tokenizer = genai.Tokenizer(str(demo_model_path()))
            tokenizer.chat_template = template
            return StaticLLMPipeline(demo_model_path(), device, tokenizer=tokenizer)

        return load

    specs = [ModelSpec(name, demo_model_path(), "chat") for name in TEMPLATES]
    with serving(specs, pipelines={name: loader(template) for name, template in TEMPLATES.items()}) as served:
        yield served


def lines_of(response):
    assert response.status_code == 200, response.text
    data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith(("data: {", "{"))]
    return list(map(json.loads, data))


def chat(url, model, schema, is_streamed, **more):
    body = {
        "model": model, "messages": QUESTION, "max_tokens": 500, "temperature": 1.3, "seed": 3, "stream": is_streamed,
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}, **more,
    }  # fmt: skip
    found = lines_of(httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120))
    if not is_streamed:
        (choice,) = found[0]["choices"]
        assert not choice["message"].get("tool_calls")
        return choice["message"]["content"], choice["finish_reason"]
    choices = [chunk["choices"][0] for chunk in found if chunk["choices"]]
    assert not any("tool_calls" in choice["delta"] for choice in choices)
    return "".join(choice["delta"].get("content") or "" for choice in choices), choices[-1]["finish_reason"]


def responses(url, model, schema, is_streamed):
    body = {
        "model": model, "input": "Who?", "max_output_tokens": 500, "temperature": 1.3, "seed": 3, "stream": is_streamed,
        "text": {"format": {"type": "json_schema", "name": "x", "schema": schema}},
    }  # fmt: skip
    found = lines_of(httpx.post(f"{url}/v1/responses", json=body, timeout=120))
    whole = found[-1]["response"] if is_streamed else found[0]
    assert whole["status"] == "completed"
    assert not any(item["type"] == "function_call" for item in whole["output"])
    (text,) = (part["text"] for item in whole["output"] if item["type"] == "message" for part in item["content"])
    if is_streamed:
        assert text == "".join(event["delta"] for event in found if event["type"] == "response.output_text.delta")
    return text, "stop"


def ollama(url, model, schema, is_streamed, path):
    prompt = {"messages": QUESTION} if path == "chat" else {"prompt": "Who?"}
    options = {"num_predict": 500, "temperature": 1.3, "seed": 3}
    body = {"model": model, "format": schema, "options": options, "stream": is_streamed, **prompt}
    found = lines_of(httpx.post(f"{url}/api/{path}", json=body, timeout=120))
    parts = [each["message"] if path == "chat" else each for each in found]
    assert not any(part.get("tool_calls") for part in parts)
    return "".join(part["content" if path == "chat" else "response"] for part in parts), found[-1]["done_reason"]


ASKS = {
    "chat": chat,
    "responses": responses,
    "ollama chat": lambda *rest: ollama(*rest, "chat"),
    "ollama generate": lambda *rest: ollama(*rest, "generate"),
}


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("api", ASKS)
@pytest.mark.parametrize("model", TEMPLATES)
def test_a_constant_comes_back_as_the_content(server, model, api, is_streamed):
    """Two constants each, so that every template, API and way of answering meets all of them, and each template each twice."""
    first = list(ASKS).index(api) + list(TEMPLATES).index(model) + is_streamed
    for value in CONSTANTS[first % 3 :: 3]:
        content, reason = ASKS[api](server.url, model, {"const": value}, is_streamed)
        assert json.loads(content) == value
        assert reason == "stop"


@pytest.mark.parametrize("model", ["thinks", "harmony", "functionary"])
def test_stop_strings_count_only_in_what_the_grammar_writes(server, model):
    """The model writes the layout ``\\n\\n`` after its reasoning, or an opening with "a" in it."""
    for stop in ("\n\n", "|", "all", "fin"):
        content, reason = chat(server.url, model, {"const": "one"}, False, stop=stop)
        assert (content, reason) == ('"one"', "stop")
    content, reason = chat(server.url, model, {"const": "one"}, False, stop="ne")
    assert (content, reason) == ('"o', "stop")


def test_a_template_that_does_not_think_now_has_no_reasoning_before_the_constant(server):
    content, _ = chat(
        server.url, "thinks", {"const": "a <think>b</think> c"}, False, chat_template_kwargs={"enable_thinking": False},
        max_tokens=20,
    )  # fmt: skip
    assert json.loads(content) == "a <think>b</think> c"


def test_tools_beside_a_schema_leave_the_content_alone(server):
    tools = [{"type": "function", "function": {"name": "Ada", "parameters": {"type": "object"}}}]
    for model in ("llama", "hermes"):
        content, reason = chat(server.url, model, {"const": CONSTANTS[0]}, False, tools=tools)
        assert (json.loads(content), reason) == (CONSTANTS[0], "stop")
