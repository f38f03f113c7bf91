"""Fields without an effect are taken: documented defaults that clients send, and options of the model's own
generation_config.json that a request over HTTP decides itself."""

from __future__ import annotations

import json
import shutil

import httpx
import pytest
from support.encoders.encoder_directories import a_directory
from support.server.served import serving

from staticllm import demo_model_path
from staticllm.server.models.served import demo_spec, model_spec

pytestmark = pytest.mark.usefixtures("shared_programs")

USER = {"role": "user", "content": "Hello"}
CHAT = {"model": "demo", "messages": [USER], "max_tokens": 4}
PATHS = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {"model": "demo", "prompt": "Hello", "max_tokens": 4},
    "/v1/responses": {"model": "demo", "input": "Hello", "max_output_tokens": 4},
    "/api/chat": {"model": "demo", "messages": [USER], "stream": False, "options": {"num_predict": 4}},
    "/api/generate": {"model": "demo", "prompt": "Hello", "stream": False, "options": {"num_predict": 4}},
    "/v1/embeddings": {"model": "tiny", "input": "a"},
    "/api/embed": {"model": "tiny", "input": "a"},
}
SHARED = {
    "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "n": 1, "seed": None, "stop": None, "stream": False,
    "stream_options": None, "temperature": 1, "top_p": 1, "user": "",
}  # fmt: skip
DEFAULTS = {
    "/v1/chat/completions": [SHARED, {
        "audio": None, "function_call": "none", "functions": [], "logprobs": False, "max_completion_tokens": None, "metadata": {},
        "modalities": ["text"], "parallel_tool_calls": True, "prediction": None, "prompt_cache_key": "",
        "prompt_cache_retention": None,
        "reasoning_effort": None, "response_format": {"type": "text"}, "safety_identifier": "", "service_tier": "auto",
        "stop": "", "store": False, "stream_options": {"include_usage": False}, "tool_choice": "auto", "tools": [],
        "top_logprobs": 0, "verbosity": "medium", "web_search_options": None,
    }, {"stop": [], "tool_choice": "none", "tools": None, "function_call": "auto"}, {"max_tokens": 4.0, "n": 1.0, "top_k": -1.0}],
    "/v1/completions": [SHARED, {"best_of": 1, "echo": False, "logprobs": None, "suffix": "", "stop": "",
                                 "stream_options": {"include_usage": False}}, {"suffix": None, "stop": []}],
    "/v1/responses": [{
        "background": False, "conversation": None, "context_management": None, "include": [], "instructions": None,
        "max_tool_calls": None, "metadata": {}, "parallel_tool_calls": True, "previous_response_id": None, "prompt": None,
        "prompt_cache_key": None, "reasoning": {"effort": None, "summary": None}, "safety_identifier": None,
        "service_tier": "auto", "store": True, "stream": False, "stream_options": None, "temperature": 1,
        "text": {"format": {"type": "text"}, "verbosity": "medium"}, "tool_choice": "auto", "tools": [], "top_logprobs": 0.0,
        "top_p": 1, "truncation": "disabled", "user": "",
    }, {"max_tool_calls": 5, "stream_options": {"include_obfuscation": True}, "stop": ""}],
    "/api/chat": [{"format": "", "keep_alive": None, "tools": [], "think": None, "truncate": True, "shift": True,
                   "logprobs": False, "top_logprobs": 0, "options": {
                       "num_keep": 4, "seed": -1, "num_predict": 4, "top_k": 40, "top_p": 0.9, "min_p": 0.0, "typical_p": 1.0,
                       "tfs_z": 1.0, "repeat_last_n": 64, "temperature": 0.8, "repeat_penalty": 1.1, "presence_penalty": 0.0,
                       "frequency_penalty": 0.0, "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "stop": [],
                       "penalize_newline": True, "numa": False, "num_ctx": 2048, "num_batch": 512, "num_gpu": -1, "main_gpu": 0,
                       "low_vram": False, "use_mmap": None, "use_mlock": False, "num_thread": 0}},
                  {"options": None}, {"options": {"stop": "", "num_predict": 4.0}}],
    "/api/generate": [{"suffix": "", "system": "", "template": "", "context": [], "raw": False, "format": "", "images": [],
                       "keep_alive": "5m", "think": False, "options": {"num_predict": 4}}],
    "/v1/embeddings": [{"encoding_format": "float", "dimensions": None, "user": ""}, {"dimensions": 8.0}],
    "/api/embed": [{"truncate": True, "dimensions": 8.0, "keep_alive": None, "options": {}}, {"input": []}],
}  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    own = shutil.copytree(demo_model_path(), tmp_path_factory.mktemp("own") / "model")
    path = own / "generation_config.json"
    asked = {"num_beams": 3, "num_return_sequences": 2, "min_new_tokens": 50, "num_assistant_tokens": 5}
    path.write_text(json.dumps({**json.loads(path.read_text()), **asked}))
    specs = [
        demo_spec(),
        model_spec(f"own={own}"),
        model_spec(f"tiny={a_directory(tmp_path_factory.mktemp('embedder'))}"),
    ]
    with serving(specs) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    with httpx.Client(base_url=served.url, timeout=120) as client:
        yield client


@pytest.mark.parametrize("path", DEFAULTS)
def test_documented_defaults_may_be_sent(client, path):
    for change in DEFAULTS[path]:
        found = client.post(path, json={**PATHS[path], **change})
        assert found.status_code == 200, found.text
        for name in change:
            if name not in PATHS[path]:
                alone = client.post(path, json={**PATHS[path], name: change[name]})
                assert alone.status_code == 200, alone.text
    everything = {name: None for change in DEFAULTS[path] for name in change if name not in PATHS[path]}
    assert client.post(path, json={**PATHS[path], **everything}).status_code == 200


def drawn(client, path, seed):
    body = {**PATHS[path], "temperature": 1.5}
    for name in ("max_tokens", "max_output_tokens"):
        if name in body:
            body[name] = 24
    if path.startswith("/api"):
        body = {**PATHS[path], "options": {"num_predict": 24, "temperature": 1.5, "seed": seed}}
        found = client.post(path, json=body).json()
        return found["message"]["content"] if "message" in found else found["response"]
    found = client.post(path, json={**body, "seed": seed}).json()
    if "choices" not in found:
        return found["output"][0]["content"][0]["text"]
    return found["choices"][0].get("text") or found["choices"][0]["message"]["content"]


@pytest.mark.parametrize("path", list(PATHS)[:5])
def test_a_negative_seed_is_random_in_every_api(client, path):
    for seed in (-1, -(2**62)):
        assert len({drawn(client, path, seed) for _ in range(6)}) > 1
    assert len({drawn(client, path, 0) for _ in range(3)}) == 1
    assert len({drawn(client, path, 7.0) for _ in range(2)}) == 1


@pytest.mark.parametrize(
    "body", [{}, {"stream": True}, {"temperature": 0.5}, {"n": 2, "temperature": 1}, {"logprobs": True}]
)
def test_the_number_of_answers_is_that_of_the_request(client, body):
    """Whatever the model's own generation_config.json says about beams, answers and least lengths."""
    found = client.post("/v1/chat/completions", json={**CHAT, "model": "own", **body})
    assert found.status_code == 200, found.text
    if not body.get("stream"):
        assert len(found.json()["choices"]) == body.get("n", 1)
    for path in ("/api/chat", "/v1/responses", "/v1/completions"):
        stream = {"stream": bool(body.get("stream"))}
        assert client.post(path, json={**PATHS[path], "model": "own", **stream}).status_code == 200


@pytest.mark.parametrize("given", [[], [[]], [[], []], [5], [[5]]])
def test_no_texts_are_refused_in_one_line(client, given):
    found = client.post("/v1/embeddings", json={"model": "tiny", "input": given})
    assert found.status_code == 400
    error = found.json()["error"]
    assert error["param"].startswith("input")
    assert "\n" not in error["message"]
    assert ("at least 1 item" in error["message"]) == (given in ([], [[]], [[], []])), error["message"]


def test_the_schema_says_what_the_server_checks(client):
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    forms = schemas["EmbeddingsRequest"]["properties"]["input"]["anyOf"]
    assert all(form.get("minItems") == 1 for form in forms if form["type"] == "array")
    assert schemas["RerankRequest"]["properties"]["documents"]["minItems"] == 1
    assert schemas["ChatRequest"]["additionalProperties"] is False
    assert "additionalProperties" not in schemas["ChatMessage"]
