"""Text between two others (`suffix`, `/infill`), and the most likely tokens beside the chosen ones, in all APIs."""

from __future__ import annotations

import json
import math

import httpx
import pytest

from staticllm.pipelines.text import infill

CLIENT = httpx.Client(timeout=60, trust_env=False)
STORY = [{"role": "user", "content": "Tell me a story about a fox."}]


@pytest.fixture
def marked(served, monkeypatch):
    """The server, three of whose model's tokens are taken for markers."""
    served.wait_until_ready()
    names = {token: name for name, token in served.pipeline().get_tokenizer().get_vocab().items()}
    monkeypatch.setattr(infill, "MARKERS", (tuple(names[token] for token in (300, 301, 302)),))
    return served


def post(served, path, **body):
    return CLIENT.post(served.url + path, json={"model": "demo", "temperature": 0, **body})


def test_the_prompt_is_both_texts_between_the_markers(marked):
    tokenizer = marked.pipeline().get_tokenizer()

    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False).input_ids.data[0].tolist()

    found = infill.infill_prompt(tokenizer, "Once upon", " the end.")
    assert list(found.ids) == [300, *ids("Once upon"), 301, *ids(" the end."), 302]
    assert {300, 301, 302} <= found.stops


def test_three_doors_write_the_same_text(marked):
    pipe = marked.pipeline()
    wanted = pipe.submit("Once upon", suffix=" the end.", apply_chat_template=False, max_new_tokens=12).output().text
    text = post(marked, "/v1/completions", prompt="Once upon", suffix=" the end.", max_tokens=12).json()
    assert text["choices"][0]["text"] == wanted
    ollama = CLIENT.post(
        marked.url + "/api/generate",
        json={"model": "demo", "prompt": "Once upon", "suffix": " the end.", "stream": False,
              "options": {"num_predict": 12, "temperature": 0}},
    ).json()  # fmt: skip
    assert ollama["response"] == wanted
    asked = {"input_prefix": "Once ", "prompt": "upon", "input_suffix": " the end.", "n_predict": 12}
    found = post(marked, "/infill", **asked).json()
    assert (found["content"], found["stop"], found["tokens_predicted"]) == (wanted, True, 12)
    with CLIENT.stream("POST", marked.url + "/infill", json={"temperature": 0, "stream": True, **asked}) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: {")]
    chunks = [json.loads(line) for line in lines]
    assert "".join(chunk["content"] for chunk in chunks) == wanted
    assert [chunk["stop"] for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    more = post(marked, "/infill", **asked, input_extra=[{"filename": "a.txt", "text": "A fox."}]).json()
    assert more["tokens_evaluated"] > found["tokens_evaluated"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/infill", {"input_prefix": "a", "input_suffix": "b"}),
        ("/infill", {}),
        ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ("/v1/completions", {"prompt": [1, 2], "suffix": "b"}),
        ("/v1/completions", {"prompt": "a", "suffix": "b", "echo": True}),
    ],
)
def test_a_model_without_markers_and_odd_requests_are_refused(served, path, body):
    found = post(served, path, **body)
    assert found.status_code == 400 and "\n" not in found.json()["error"]["message"]


def check_top(entry, count):
    """Check an entry of a greedy answer: the chosen token is the first of the most likely ones."""
    top = entry["top_logprobs"]
    assert len(top) == count and top[0]["logprob"] == entry["logprob"]
    values = [each["logprob"] for each in top]
    assert values == sorted(values, reverse=True) and sum(map(math.exp, values)) <= 1 + 1e-6


@pytest.mark.parametrize("count", [1, 5, 20])
def test_chats_have_the_most_likely_tokens(served, count):
    body = {"messages": STORY, "max_tokens": 6, "logprobs": True, "top_logprobs": count}
    (choice,) = post(served, "/v1/chat/completions", **body).json()["choices"]
    for entry in choice["logprobs"]["content"]:
        check_top(entry, count)
        assert entry["top_logprobs"][0]["bytes"] == entry["bytes"]
    with CLIENT.stream("POST", served.url + "/v1/chat/completions", json={
        "model": "demo", "temperature": 0, "stream": True, **body
    }) as response:  # fmt: skip
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    streamed = [entry for chunk in chunks for entry in (chunk["logprobs"] or {}).get("content", ())]
    for mine, other in zip(streamed, choice["logprobs"]["content"], strict=True):
        assert mine["token"] == other["token"] and mine["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
    assert post(served, "/v1/chat/completions", **{**body, "logprobs": False}).status_code == 400


def test_the_other_apis_have_them_too(served):
    (choice,) = post(served, "/v1/completions", prompt="Once upon", max_tokens=4, logprobs=3).json()["choices"]
    found = choice["logprobs"]
    for token, logprob, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert len(top) == 3 and max(top.values()) == logprob and token.strip() in {each.strip() for each in top}
    (plain,) = post(served, "/v1/completions", prompt="Once upon", max_tokens=4, logprobs=0).json()["choices"]
    assert plain["logprobs"]["top_logprobs"] is None
    response = CLIENT.post(
        served.url + "/v1/responses",
        json={"model": "demo", "temperature": 0, "input": "Hello", "max_output_tokens": 16, "top_logprobs": 2,
              "include": ["message.output_text.logprobs"]},
    ).json()  # fmt: skip
    for entry in response["output"][0]["content"][0]["logprobs"]:
        check_top(entry, 2)
    ollama = CLIENT.post(
        served.url + "/api/chat",
        json={"model": "demo", "messages": STORY, "stream": False, "logprobs": True, "top_logprobs": 2,
              "options": {"num_predict": 4, "temperature": 0}},
    ).json()  # fmt: skip
    for entry in ollama["logprobs"]:
        check_top(entry, 2)
