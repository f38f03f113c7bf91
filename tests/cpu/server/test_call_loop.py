"""Tests that a call which the server made can be sent back with its result, on every API and with templates that differ."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import openvino_genai as genai
import pytest
from support.server.served import serving

from staticllm import demo_model_path
from staticllm.server.models.served import ModelSpec
from staticllm.testing import fake_pipeline

FOLDER = Path(__file__).parents[2] / "_chat_templates" / "rewritten"
NAMES = (
    "short-ids",
    "null-content",
    "empty-content",
    "one-call",
    "braces",
    "tags-in-capitals",
    "alternating",
    "no-tools",
)
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_sun", "description": "The weather.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": FUNCTION}]
WRITTEN = {
    "short-ids": '[TOOL_CALLS] [{"name": "get_sun", "arguments": {"city": "Romulus"}}]',
    "null-content": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_sun\n```json\n"
    '{"city": "Romulus"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "empty-content": '{"name": "get_sun", "parameters": {"city": "Romulus"}}',
    "one-call": '{"name": "get_sun", "parameters": {"city": "Romulus"}}',
    "braces": '<|tool_call>call:get_sun{city:<|"|>Romulus<|"|>}<tool_call|>',
    "tags-in-capitals": '<TOOLCALL>[{"name": "get_sun", "arguments": {"city": "Romulus"}}]</TOOLCALL>',
    "alternating": '{"tool_calls": [{"name": "get_sun", "arguments": {"city": "Romulus"}}]}',
    "no-tools": '{"tool_calls": [{"name": "get_sun", "arguments": {"city": "Romulus"}}]}',
}


@pytest.fixture(scope="module")
def server():
    prompts = []

    def loader(name, template):
        def load(device, properties, on_progress):
            tokenizer = genai.Tokenizer(str(demo_model_path()))
            tokenizer.chat_template = template
            answer = WRITTEN[name]

            def reply(prompt):
                prompts.append(prompt)
                return "It is sunny." if "sunny 21" in prompt else answer

            return fake_pipeline(reply, tokenizer=tokenizer)

        return load

    templates = {name: (FOLDER / f"{name}.jinja").read_text("utf-8") for name in NAMES}
    specs = [ModelSpec(name, demo_model_path(), "chat") for name in NAMES]
    with serving(specs, pipelines={name: loader(name, text) for name, text in templates.items()}) as served:
        served.prompts = prompts
        yield served


def post(server, path, body):
    response = httpx.post(f"{server.url}{path}", json={"stream": False, **body}, timeout=60)
    assert response.status_code == 200, response.text
    return response.json()


def loop_over_chat(server, model):
    messages = [{"role": "user", "content": "How is it?"}]
    found = post(server, "/v1/chat/completions", {"model": model, "messages": messages, "tools": TOOLS})
    message = found["choices"][0]["message"]
    (call,) = message["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("get_sun", {"city": "Romulus"})
    messages += [message, {"role": "tool", "tool_call_id": call["id"], "content": "sunny 21"}]
    found = post(server, "/v1/chat/completions", {"model": model, "messages": messages, "tools": TOOLS})
    assert found["choices"][0]["message"]["content"] == "It is sunny."


def loop_over_responses(server, model):
    tools = [{"type": "function", **FUNCTION}]
    found = post(server, "/v1/responses", {"model": model, "input": "How is it?", "tools": tools})
    (call,) = (item for item in found["output"] if item["type"] == "function_call")
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "sunny 21"}
    body = {"model": model, "input": [result], "tools": tools, "previous_response_id": found["id"]}
    assert post(server, "/v1/responses", body)["output"][-1]["content"][0]["text"] == "It is sunny."
    whole = [{"role": "user", "content": "How is it?"}, *found["output"], result]
    found = post(server, "/v1/responses", {"model": model, "input": whole, "tools": tools})
    assert found["output"][-1]["content"][0]["text"] == "It is sunny."


def loop_over_ollama(server, model):
    messages = [{"role": "user", "content": "How is it?"}]
    message = post(server, "/api/chat", {"model": model, "messages": messages, "tools": TOOLS})["message"]
    assert message["tool_calls"][0]["function"]["arguments"] == {"city": "Romulus"}
    messages += [message, {"role": "tool", "tool_name": "get_sun", "content": "sunny 21"}]
    found = post(server, "/api/chat", {"model": model, "messages": messages, "tools": TOOLS})
    assert found["message"]["content"] == "It is sunny."


LOOPS = {"chat": loop_over_chat, "responses": loop_over_responses, "ollama": loop_over_ollama}


@pytest.mark.parametrize("api", LOOPS)
@pytest.mark.parametrize("model", NAMES)
def test_a_call_goes_back_with_its_result(server, model, api):
    if api == "ollama" and model in ("alternating", "no-tools"):
        return  # Ollama's own server refuses tools for such a template
    server.prompts.clear()
    LOOPS[api](server, model)
    prompt = server.prompts[-1]
    assert "get_sun" in prompt
    assert "Romulus" in prompt
    assert "sunny 21" in prompt
    assert "None" not in prompt


@pytest.mark.parametrize("model", NAMES)
@pytest.mark.parametrize("arguments", ['{"city": "Romu', "", "Romu"])
def test_a_call_that_was_cut_off_goes_back(server, model, arguments):
    call = {"id": "call_0123456789abcdef", "type": "function", "function": {"name": "get_sun", "arguments": arguments}}
    messages = [
        {"role": "user", "content": "How is it?"}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny 21"},
    ]  # fmt: skip
    server.prompts.clear()
    post(server, "/v1/chat/completions", {"model": model, "messages": messages, "tools": TOOLS})
    assert "get_sun" in server.prompts[-1]
    assert "Romu" in server.prompts[-1] or not arguments


@pytest.mark.parametrize("model", ["no-tools", "alternating", "one-call", "null-content"])
def test_empty_messages_are_allowed_anywhere(server, model):
    empty, question = {"role": "user", "content": ""}, {"role": "user", "content": "Who?"}
    answer = {"role": "assistant", "content": "Ada."}
    for messages in ([empty], [empty, answer, question], [question, answer, empty]):
        post(server, "/v1/chat/completions", {"model": model, "messages": messages})
        post(server, "/api/chat", {"model": model, "messages": messages})
