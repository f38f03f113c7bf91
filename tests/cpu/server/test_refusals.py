"""Tests what the server refuses, and how: each with its status and one line that names the reason."""

from __future__ import annotations

import gc
import json
import socket
import time

import httpx
import pytest
from support.server.served import serving

from staticllm.errors import StaticLLMError
from staticllm.server.http.errors import ApiError

pytestmark = pytest.mark.usefixtures("shared_programs")

HELLO = {"model": "demo", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def served():
    with serving(max_body=1 << 20, header_seconds=1.0, body_seconds=1.0) as served:
        yield served


@pytest.fixture(scope="module")
def client(served):
    with httpx.Client(base_url=served.url, timeout=60) as client:
        yield client


def error_of(response, status):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "\n" not in error["message"]
    return error


CHAT = "/v1/chat/completions"


def test_too_many_texts_are_refused_as_such(client):
    error = error_of(client.post("/v1/embeddings", json={"model": "demo", "input": ["a"] * 2049}), 400)
    assert error["param"] == "input"
    assert "at most 2048" in error["message"]


@pytest.mark.parametrize(
    "change",
    [
        {"stream": True, "stream_options": {"include_usage": None}},
        {"messages": [{"role": "user", "content": "a", "tool_calls": None, "name": None}]},
        {"response_format": {"type": "text", "json_schema": None}},
        {"temperature": None},
        {"top_p": 0},
        {"min_p": 1},
    ],
)
def test_null_counts_as_absent_and_ends_of_ranges_are_taken(client, change):
    assert client.post(CHAT, json={**HELLO, **change}).status_code == 200


@pytest.mark.parametrize(
    "change, param, words",
    [
        ({"max_token": 4}, "max_token", "Unknown parameter: 'max_token'"),
        ({"web_search_options": {}}, "web_search_options", "Unknown parameter"),
        ({"tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}]}, "tools.0.function", "paramters"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "bishop", "content": "a"}]}, "messages.0.role", "Input should be"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"top_logprobs": 3}, "top_logprobs", "without logprobs"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differ"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "without stream"),
        ({"tool_choice": "required"}, "tool_choice", "without tools"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"99999999": 1}}, None, "99999999"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}}, None, ""),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages.0.content.0", "only text",
        ),
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.1}, "repeat_penalty", "the same"),
        ({"mirostat": 1, "temperature": 1.0}, None, "mirostat"),
    ],
)  # fmt: skip
def test_an_impossible_request_is_refused_by_name(client, change, param, words):
    error = error_of(client.post(CHAT, json={**HELLO, **change}), 400)
    assert words in error["message"]
    assert param is None or error["param"] == param
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    "change",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"safety_identifier": "x", "prompt_cache_key": "y", "parallel_tool_calls": False, "verbosity": "low"},
        {"functions": None, "audio": None},
    ],
)
def test_known_fields_without_a_meaning_here_are_accepted(client, change):
    assert client.post(CHAT, json={**HELLO, **change}).status_code == 200


@pytest.mark.parametrize("body", ["", "{", "[]", '"text"', "\xff", "[" * 100_000, '{"a":' * 5000, '{"n": NaN}'])
def test_a_body_that_is_no_json_object_is_refused(client, body):
    error = error_of(client.post(CHAT, content=body.encode("latin-1")), 400)
    assert error["code"] in ("invalid_json", "unknown_parameter")


def test_a_long_prompt_is_refused_with_both_numbers(client, served):
    limit = served.pipeline().config.max_prompt_len
    long = {**HELLO, "messages": [{"role": "user", "content": "fox " * 3 * limit}]}
    for stream in (False, True):
        error = error_of(client.post(CHAT, json={**long, "stream": stream}), 400)
        assert error["code"] == "context_length_exceeded"
        assert error["message"].startswith(
            f"This model's maximum context length is {limit} tokens. However, your messages"
        )
        found = client.post("/tokenize", json={"messages": long["messages"]}).json()
        assert f"have {found['count']} tokens" in error["message"]


@pytest.mark.parametrize(
    "path, field",
    [
        ("/v1/chat/completions", "messages"),
        ("/v1/completions", "prompt"),
        ("/v1/responses", "input"),
        ("/api/chat", ""),
    ],
)
def test_a_prompt_of_any_length_is_too_long_in_the_same_way(path, field):
    """Also one with more characters than a chat template may make."""
    with serving(max_body=16 << 20) as served:
        for size in (3000, 3 << 20):
            text = "a " * size
            given = {"messages": [{"role": "user", "content": text}], "prompt": text, "input": text}
            body = {"model": "demo", "truncate": False} if not field else {"model": "demo"}
            response = httpx.post(
                served.url + path, json={**body, field or "messages": given[field or "messages"]}, timeout=60
            )
            assert response.status_code == 400
            assert "This model's maximum context length is " in response.text
            if field:
                error = error_of(response, 400)
                assert error["code"] == "context_length_exceeded"
                assert error["param"] == field
                assert field in error["message"]


def test_an_unknown_model_is_not_found(client):
    error = error_of(client.post(CHAT, json={**HELLO, "model": "../../etc"}), 404)
    assert error["code"] == "model_not_found"
    assert "'demo'" in error["message"]
    assert error_of(client.get("/v1/models/other"), 404)["code"] == "model_not_found"
    error = error_of(client.post("/v1/embeddings", json={"model": "demo", "input": "a"}), 400)
    assert error["code"] == "wrong_model_kind"


def test_a_path_with_a_line_break_gets_one_line(client):
    for path in ("/no%0Asuch", "/v1/models/%0A%C4%87", "/api/%E2%80%A8"):
        assert len(error_of(client.get(path), 404)["message"].splitlines()) == 1


def test_unknown_paths_and_methods_say_what_is_there(client):
    assert "/openapi.json" in error_of(client.get("/v1/audio/speech"), 404)["message"]
    assert "/v1/chat/completions" in client.get("/openapi.json").json()["paths"]
    assert error_of(client.get(CHAT), 405)["code"] == "method_not_allowed"
    assert error_of(client.get("/v1/../../etc/passwd"), 404)


@pytest.mark.parametrize(
    "path", ["/v1/chat/completions/", "/chat/completions", "/chat/completions/", "//v1/chat/completions"]
)
def test_paths_without_the_version_and_with_a_slash_are_known(served, path):
    with httpx.Client(timeout=60) as client:
        assert client.post(served.url + path, json=HELLO).status_code == 200


def test_models_are_listed_at_every_form_of_the_path(client):
    for path in ("/v1/models", "/models", "/v1/models/", "/models/"):
        (entry,) = client.get(path).json()["data"]
        assert entry["id"] == "demo"
        assert entry["object"] == "model"
        assert entry["type"] == "chat"
    assert client.get("/models/demo").json()["max_model_len"] == 2048  # what the model was made for


def test_a_large_body_is_refused_before_it_is_read(client):
    large = {**HELLO, "messages": [{"role": "user", "content": "a" * (2 << 20)}]}
    assert error_of(client.post(CHAT, json=large), 413)["code"] == "request_too_large"

    def pieces():
        for _ in range(32):
            yield b" " * (64 << 10)

    assert error_of(client.post(CHAT, content=pieces()), 413)["code"] == "request_too_large"


WIDE = 50_000


@pytest.mark.parametrize(
    "path, wide",
    [
        ("/v1/completions", {"prompt": [None] * WIDE}),
        ("/v1/completions", {"prompt": [[None]] * WIDE}),
        (CHAT, {**HELLO, "messages": [{"role": "user", "content": [1] * WIDE}]}),
        (CHAT, {**HELLO, "messages": [1] * WIDE}),
        (CHAT, {**HELLO, "tools": [[]] * WIDE}),
        (CHAT, {**HELLO, **{f"field {number}": 1 for number in range(WIDE)}}),
        (CHAT, {**HELLO, "logit_bias": {f"{number}": "x" for number in range(WIDE)}}),
        ("/v1/embeddings", {"input": [None] * WIDE}),
        ("/v1/responses", {"input": [1] * WIDE}),
        ("/api/chat", {"messages": [1] * WIDE}),
    ],
)
def test_a_wide_body_is_refused_without_an_error_for_each_element(path, wide):
    """Lists end at their first error, and of many errors of an object none becomes a Python object."""
    from pydantic import ValidationError

    from staticllm.server import endpoint
    from staticllm.server.http.errors import ApiError
    from staticllm.server.ollama.fields import OllamaChatRequest
    from staticllm.server.openai.chat import ChatRequest
    from staticllm.server.openai.completions import CompletionRequest
    from staticllm.server.openai.encoders import EmbeddingsRequest
    from staticllm.server.responses.fields import ResponsesRequest

    kinds = {
        "/v1/completions": CompletionRequest, CHAT: ChatRequest, "/v1/embeddings": EmbeddingsRequest,
        "/v1/responses": ResponsesRequest, "/api/chat": OllamaChatRequest,
    }  # fmt: skip
    with pytest.raises(ApiError) as refused:
        endpoint.parsed(kinds[path], json.dumps(wide).encode())
    assert refused.value.status == 400
    with pytest.raises(ValidationError) as found:
        kinds[path].model_validate(wide)
    count = found.value.error_count()
    if "field 0" in wide or "logit_bias" in wide:
        assert str(count) in str(refused.value)
    else:
        assert count < 20


def talk(url, data, seconds=5.0):
    """Send bytes to a server, and return all that it sends until it closes the connection."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=seconds) as connection:
        connection.sendall(data)
        received = b""
        while part := connection.recv(65536):
            received += part
    return received


def test_slow_headers_close_the_connection(served):
    start = time.monotonic()
    assert talk(served.url, b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n") == b""
    assert talk(served.url, b"") == b""
    assert 1.5 < time.monotonic() - start < 5


def test_a_slow_body_gets_a_timeout(served):
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{"
    assert b" 408 " in talk(served.url, head).split(b"\r\n")[0]


def test_endless_headers_close_the_connection(served):
    try:
        answer = talk(served.url, b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: " + b"a" * 1_000_000)
    except ConnectionError:  # closed while we still sent
        return
    assert b" 400 " in answer.split(b"\r\n")[0]


LOCAL = ["app://obsidian.md", "tauri://localhost", "file://", "vscode-webview://abc", "vscode-file://vscode-app", "http://localhost:3000",
         "http://127.0.0.1:5173", "http://tauri.localhost", "http://[::1]:80"]  # fmt: skip
FOREIGN = [
    "https://evil.example",
    "http://localhost.evil.example",
    "http://127.0.0.1.evil.example",
    "https://app.example",
    "null",
    "NULL",
]


@pytest.mark.parametrize("origin", LOCAL)
def test_pages_of_this_machine_may_send_requests(client, origin):
    asked = {
        "Origin": origin,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }
    response = client.options(CHAT, headers=asked)
    assert response.status_code == 204
    assert response.content == b""
    assert response.headers["access-control-allow-origin"] == origin
    assert response.headers["access-control-allow-headers"] == "authorization"
    found = client.post(CHAT, json=HELLO, headers={"Origin": origin})
    assert found.status_code == 200
    assert found.headers["access-control-allow-origin"] == origin


@pytest.mark.parametrize("origin", FOREIGN)
def test_foreign_pages_are_refused(client, origin):
    asked = {"Origin": origin, "Access-Control-Request-Method": "POST"}
    preflight = client.options(CHAT, headers=asked)
    assert error_of(preflight, 403)["code"] == "origin_not_allowed"
    assert "access-control-allow-origin" not in preflight.headers
    plain = client.post(CHAT, content=json.dumps(HELLO), headers={"Origin": origin, "Content-Type": "text/plain"})
    assert error_of(plain, 403)["code"] == "origin_not_allowed"


@pytest.mark.parametrize(
    "settings", [{"api_keys": ("key",)}, {"allowed_origins": ("null",)}, {"allowed_origins": ("*",)}]
)
def test_files_may_send_requests_with_a_key_or_if_the_server_says_so(settings):
    """Sandboxed frames of any page have their origin, too: without a key they read no answers."""
    with serving(**settings) as served:
        asked = {"Origin": "null", "Access-Control-Request-Method": "GET"}
        assert httpx.options(served.url + "/v1/models", headers=asked, timeout=60).status_code == 204
        headers = {"Origin": "null", "Authorization": "Bearer key"}
        found = httpx.get(served.url + "/v1/models", headers=headers, timeout=60)
        assert found.status_code == 200
        assert found.headers["access-control-allow-origin"] in ("null", "*")
        without = httpx.get(served.url + "/v1/models", headers={"Origin": "null"}, timeout=60)
        assert without.status_code == (401 if "api_keys" in settings else 200)


def test_a_host_name_that_was_rebound_is_refused(client, served):
    port = served.url.rsplit(":", 1)[1]
    headers = {"Host": f"evil.example:{port}", "Origin": f"http://evil.example:{port}"}
    assert error_of(client.post(CHAT, json=HELLO, headers=headers), 403)["code"] == "host_not_allowed"


def test_keys_are_checked():
    with serving(api_keys=("first-key", "second-key"), allowed_origins=("https://chat.example",)) as served:
        assert httpx.get(served.url + "/health", timeout=60).status_code == 200
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "first-key"},
            {"Authorization": "Bearer first-key-and-more"},
        ):
            for path in ("/v1/models", "/metrics", "/models", "/unknown"):
                response = httpx.get(served.url + path, headers=headers, timeout=60)
                assert error_of(response, 401)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
        for key in ("first-key", "second-key"):
            headers = {"Authorization": f"Bearer {key}", "Origin": "https://chat.example"}
            response = httpx.get(served.url + "/v1/models", headers=headers, timeout=60)
            assert response.status_code == 200
            assert response.headers["access-control-allow-origin"] == "https://chat.example"
        refused = httpx.get(served.url + "/v1/models", headers={"Origin": "https://chat.example"}, timeout=60)
        assert refused.status_code == 401
        assert "access-control-allow-origin" in refused.headers


def test_no_prompt_is_in_a_log(served, client, caplog):
    caplog.set_level("DEBUG", logger="staticllm")
    caplog.set_level("DEBUG", logger="uvicorn")
    secret = "xylophone-1234"
    client.post(CHAT, json={**HELLO, "messages": [{"role": "user", "content": secret}]})
    client.post(CHAT, json={**HELLO, secret: 1})
    assert secret not in caplog.text


def test_the_schema_describes_every_endpoint(client):
    schema = client.get("/openapi.json").json()
    assert {"/v1/chat/completions", "/v1/embeddings", "/v1/models", "/health"} <= set(schema["paths"])
    references = set()

    def collect(value):
        if isinstance(value, dict):
            references.add(value.get("$ref"))
            list(map(collect, value.values()))
        elif isinstance(value, list):
            list(map(collect, value))

    collect(schema)
    known = {f"#/components/schemas/{name}" for name in schema["components"]["schemas"]}
    assert {"#/components/schemas/ChatRequest"} <= references - {None} <= known


@pytest.mark.parametrize(
    ("path", "change"),
    [
        (CHAT, {"nonsense": 1}),
        (CHAT, {"messages": [{"role": "user", "content": "a " * 9000}]}),
        (CHAT, {"messages": HELLO["messages"] * 20_000}),
        ("/v1/responses", {"input": "a " * 9000}),
        ("/v1/completions", {"prompt": ["a", "a " * 9000], "stream": True}),
    ],
)
def test_what_was_refused_is_free_before_the_garbage_collector_runs(client, path, change):
    body = {"model": "demo", **(HELLO if path == CHAT else {}), **change}
    gc.collect()
    gc.disable()
    try:
        assert "error" in client.post(path, json=body).text
        errors = [each for each in gc.get_objects() if isinstance(each, (ApiError, StaticLLMError))]
        assert not [each for each in errors if each.__traceback__ is not None], (
            "their frames have the body and its tokens"
        )
    finally:
        gc.enable()
