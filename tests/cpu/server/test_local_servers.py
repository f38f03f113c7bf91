"""Tests what LM Studio's and llama.cpp's clients look for: lists of models, properties, timings and the progress of prompts."""

from __future__ import annotations

import json

import httpx
import pytest
from support.server.served import serving

from staticllm import StaticLLMPipeline, demo_model_path

QUESTION = [{"role": "user", "content": "What is an NPU?"}]
LONG = "The fox went to the river and saw a bear. "


@pytest.fixture(scope="module")
def served():
    def load(device, properties, on_progress):
        return StaticLLMPipeline(demo_model_path(), device, PREFILL_ROWS=[16], MAX_PROMPT_LEN=1024)

    with serving(pipelines={"demo": load}) as served:
        yield served


def streamed(served, path, **body):
    with httpx.stream(
        "POST", served.url + path, json={"model": "demo", "stream": True, **body}, timeout=60
    ) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def test_lm_studios_list_says_type_state_and_length(served):
    (listed,) = httpx.get(served.url + "/api/v0/models", timeout=60).json()["data"]
    assert listed == httpx.get(served.url + "/api/v0/models/demo", timeout=60).json()
    assert listed["type"] == "llm"
    assert listed["state"] == "loaded"
    assert listed["capabilities"] == []
    assert listed["max_context_length"] == listed["loaded_context_length"] == served.pipeline().config.max_seq_len
    assert (listed["arch"], listed["quantization"]) == ("openvino", "I8")
    error = httpx.get(served.url + "/api/v0/models/nobody", timeout=60)
    assert error.status_code == 404
    assert error.json()["error"]["code"] == "model_not_found"


def test_a_model_is_described_before_it_is_loaded():
    with serving(is_lazy=True) as served:
        (listed,) = httpx.get(served.url + "/api/v0/models", timeout=60).json()["data"]
        assert listed["state"] == "not-loaded"
        assert listed["max_context_length"] == 2048, "as long as it will be once it is loaded"
        assert httpx.get(served.url + "/props", timeout=60).json()["is_sleeping"] is True
        assert httpx.get(served.url + "/api/ps", timeout=60).json() == {"models": []}
        assert served.pipeline() is None


def test_props_are_those_of_the_model_without_its_path(served):
    found = httpx.get(served.url + "/props", timeout=60).json()
    assert found["default_generation_settings"]["n_ctx"] == served.pipeline().config.max_seq_len
    assert found["default_generation_settings"]["params"]["temperature"] == 0
    assert found["default_generation_settings"]["params"]["top_k"] < 2**31
    assert found["total_slots"] == 16
    assert "<|assistant|>" in found["chat_template"]
    assert (found["bos_token"], found["eos_token"]) == ("<s>", "</s>")
    assert str(demo_model_path()) not in json.dumps(found)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_timings_are_in_the_last_chunk_and_in_whole_answers(served, path):
    text = {"messages": QUESTION} if "chat" in path else {"prompt": "The fox went"}
    body = {"max_tokens": 12, "ignore_eos": True, **text}
    httpx.post(served.url + path, json=body, timeout=60)
    found = httpx.post(served.url + path, json=body, timeout=60).json()
    timings, usage = found["timings"], found["usage"]
    assert timings["cache_n"] == usage["prompt_tokens_details"]["cached_tokens"] > 0
    assert timings["cache_n"] + timings["prompt_n"] == usage["prompt_tokens"]
    assert timings["predicted_n"] == usage["completion_tokens"] == 12
    assert timings["predicted_per_second"] == pytest.approx(11e3 / timings["predicted_ms"])
    assert all(value > 0 for value in timings.values())
    *others, last = streamed(served, path, **body)
    assert last["timings"]["predicted_n"] == 12
    assert not any("timings" in chunk for chunk in others)
    *others, last = streamed(served, path, **body, stream_options={"include_usage": True})
    assert last["timings"]["predicted_n"] == 12
    assert not any("timings" in chunk for chunk in others)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_progress_of_a_prompt_is_streamed_if_asked_for(served, path):
    words = f"{path} " + LONG * 40
    text = {"messages": [{"role": "user", "content": words}]} if "chat" in path else {"prompt": words}
    chunks = streamed(served, path, **text, max_tokens=4, return_progress=True, cache_prompt=True)
    progress = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert progress[0]["processed"] < progress[-1]["processed"] == progress[-1]["total"] > 300
    assert [one["processed"] for one in progress] == sorted({one["processed"] for one in progress})
    assert [one["time_ms"] for one in progress] == sorted(one["time_ms"] for one in progress)
    assert all(one["cache"] <= one["processed"] for one in progress)
    first = next(index for index, chunk in enumerate(chunks) if said(chunk))
    assert not any("prompt_progress" in chunk for chunk in chunks[first:])
    again = streamed(served, path, **text, max_tokens=4, return_progress=True)
    cached = [chunk["prompt_progress"]["cache"] for chunk in again if "prompt_progress" in chunk]
    assert cached[-1] > 300
    assert not any("prompt_progress" in chunk for chunk in streamed(served, path, **text, max_tokens=4))


def said(chunk):
    choice = chunk["choices"][0]
    return choice.get("text") or choice.get("delta", {}).get("content")


def test_a_client_that_goes_while_its_prompt_runs_is_cancelled(served):
    body = {"prompt": "gone " + LONG * 60, "max_tokens": 400, "stream": True, "return_progress": True}
    with httpx.stream("POST", served.url + "/v1/completions", json=body, timeout=60) as response:
        next(response.iter_lines())
    served.wait_until_idle()


def test_a_named_session_keeps_its_prefix_while_others_come_and_go():
    def load(device, properties, on_progress):
        return StaticLLMPipeline(demo_model_path(), device, MAX_PROMPT_LEN=256, KV_SLOTS=400, HOST_KV_SLOTS=800)

    def ask(served, words, **headers):
        messages = [{"role": "user", "content": words}]
        body = {"messages": messages, "max_tokens": 4}
        return httpx.post(served.url + "/v1/chat/completions", json=body, headers=headers, timeout=60).json()["usage"]

    with serving(pipelines={"demo": load}) as served:
        for name, words in (("x-session-affinity", "A " + LONG * 10), ("x-other", "B " + LONG * 10)):
            ask(served, words, **{name: "my talk"})
        for number in range(12):
            ask(served, f"{number} others " + LONG * 10)
        named = ask(served, "A " + LONG * 10 + "And then?", **{"x-session-affinity": "my talk"})
        unnamed = ask(served, "B " + LONG * 10 + "And then?")
        assert named["prompt_tokens_details"]["cached_tokens"] > 100
        assert unnamed["prompt_tokens_details"]["cached_tokens"] < 20
