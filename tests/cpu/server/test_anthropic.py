"""`/v1/messages`: the forms of Anthropic's API, as messages and as streams."""

from __future__ import annotations

import json

import httpx
import pytest
from support.models.echo_model import asking, load_echo
from support.server.served import serving

from staticllm import demo_model_path
from staticllm.server.models.served import ModelSpec

CLIENT = httpx.Client(timeout=60, trust_env=False)
STORY = [{"role": "user", "content": "Tell me a story about a fox."}]
TOOLS = [
    {
        "name": "get_weather",
        "description": "the weather of a city",
        "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    }
]


def sent(served, path="/v1/messages", headers=None, **changes):
    body = {"model": "demo", "max_tokens": 16, "messages": STORY, **changes}
    return CLIENT.post(served.url + path, json=body, headers=headers)


def answered(served, **changes):
    found = sent(served, **changes)
    assert found.status_code == 200, found.text
    return found.json()


def events(served, **changes):
    """Return the events of a stream, each of which has the name of its type."""
    with CLIENT.stream("POST", served.url + "/v1/messages", json={
        "model": "demo", "max_tokens": 16, "messages": STORY, "stream": True, **changes
    }) as response:  # fmt: skip
        lines = [line for line in response.iter_lines() if line and not line.startswith(":")]
    found = [json.loads(line.removeprefix("data: ")) for line in lines[1::2]]
    assert [line.removeprefix("event: ") for line in lines[::2]] == [event["type"] for event in found]
    return found


def joined(found):
    """Return the content of a stream."""
    blocks = []
    for event in found:
        if event["type"] == "content_block_start":
            assert event["index"] == len(blocks)
            blocks.append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            block, delta = blocks[event["index"]], event["delta"]
            if delta["type"] == "input_json_delta":
                block["json"] += delta["partial_json"]
            else:
                key = delta["type"].removesuffix("_delta")
                block[key] += delta[key]
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text or "{}")
    return blocks


def test_a_message_has_the_form_of_anthropic_and_a_stream_the_same_content(served):
    found = answered(served)
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", "demo")
    assert (found["stop_reason"], found["stop_sequence"]) == ("max_tokens", None)
    (block,) = found["content"]
    assert block["type"] == "text" and block["text"]
    assert found["usage"]["output_tokens"] == 16
    streamed = events(served)
    assert streamed[0]["type"] == "message_start" and streamed[0]["message"]["content"] == []
    assert joined(streamed) == found["content"]
    assert streamed[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert streamed[-2]["usage"]["output_tokens"] == 16
    assert streamed[-1] == {"type": "message_stop"}
    opened = [event["index"] for event in streamed if event["type"] == "content_block_start"]
    assert opened == [event["index"] for event in streamed if event["type"] == "content_block_stop"]


def test_it_is_the_answer_of_the_other_apis(served):
    chat = CLIENT.post(
        served.url + "/v1/chat/completions",
        json={"model": "demo", "max_tokens": 16, "messages": [{"role": "system", "content": "Be brief."}, *STORY]},
    ).json()
    for system in ("Be brief.", [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]):
        found = answered(served, system=system)
        assert found["content"][0]["text"] == chat["choices"][0]["message"]["content"]
        usage = found["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
        counted = sent(served, "/v1/messages/count_tokens", system=system).json()
        assert counted == {"input_tokens": chat["usage"]["prompt_tokens"]}


def test_a_stop_sequence_is_named(served):
    text = answered(served, max_tokens=40)["content"][0]["text"]
    word = text.split()[5]
    found = answered(served, max_tokens=40, stop_sequences=["never said", word])
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", word)
    assert found["content"][0]["text"] == text[: text.index(word)]


def test_tools_are_called_and_their_results_are_read(served):
    changes = {"max_tokens": 60, "tools": TOOLS, "tool_choice": {"type": "tool", "name": "get_weather"}}
    found = answered(served, **changes)
    (call,) = found["content"]
    assert found["stop_reason"] == "tool_use"
    assert (call["type"], call["name"]) == ("tool_use", "get_weather") and isinstance(call["input"]["city"], str)
    (streamed,) = joined(events(served, **changes))
    assert (streamed["name"], streamed["input"]) == (call["name"], call["input"])
    result = {"type": "tool_result", "tool_use_id": call["id"], "content": [{"type": "text", "text": "sunny"}]}
    conversation = [
        *STORY,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "x"}, *found["content"]]},
        {"role": "user", "content": [result, {"type": "text", "text": "Say it."}]},
    ]
    assert answered(served, messages=conversation, tools=TOOLS)["content"]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_text_calls_and_broken_calls_are_blocks_of_their_own(is_streamed):
    good = 'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    broken = 'Well.\n<tool_call>\n{"name": "get_weather", "argum'
    with serving([ModelSpec("demo", demo_model_path(), "chat")], {"demo": load_echo}) as served:
        for answer, kinds in ((good, ["text", "tool_use"]), (broken, ["text"])):
            changes = {"messages": asking(answer), "tools": TOOLS, "max_tokens": 400}
            blocks = joined(events(served, **changes)) if is_streamed else answered(served, **changes)["content"]
            assert [block["type"] for block in blocks] == kinds
            if len(kinds) == 2:
                assert blocks[0]["text"].strip() == "Let me see." and blocks[1]["input"] == {"city": "Oslo"}


def result_of(*parts):
    return {
        "messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": list(parts)}]}]
    }


@pytest.mark.parametrize(
    ("changes", "status", "kind"),
    [
        (result_of({"type": 5}), 400, "invalid_request_error"),
        (result_of({}), 400, "invalid_request_error"),
        (result_of(1, 2), 400, "invalid_request_error"),
        ({"model": "nobody"}, 404, "not_found_error"),
        ({"max_tokens": 0}, 400, "invalid_request_error"),
        ({"messages": []}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "invalid_request_error"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400, "invalid_request_error"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, 400, "invalid_request_error"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, 400, "invalid_request_error"),
    ],
)
def test_errors_have_the_form_of_anthropic(served, changes, status, kind):
    found = sent(served, **changes)
    assert found.status_code == status
    body = found.json()
    assert (body["type"], body["error"]["type"]) == ("error", kind) and "\n" not in body["error"]["message"]


def test_keys_come_in_the_header_of_anthropic():
    with serving(api_keys=("secret",)) as served:
        wrong = sent(served, headers={"x-api-key": "wrong"})
        assert (wrong.status_code, wrong.json()["error"]["type"]) == (401, "authentication_error")
        assert sent(served, headers={"x-api-key": "secret"}).status_code == 200
        assert sent(served, headers={"x-api-key": "secret", "Authorization": "Basic eDp5"}).status_code == 200
