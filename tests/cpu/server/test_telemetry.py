"""Tests the access log and OpenTelemetry's spans: what they say of each request, and that they hold no text of prompts."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import httpx
import pytest
from support.encoders.encoder_directories import a_directory
from support.server.served import serving

from staticllm.errors import ConfigError
from staticllm.server.app import make_sinks
from staticllm.server.models.served import demo_spec, model_spec
from staticllm.server.settings import ServerSettings

SECRET = "purple elephants"
CHAT = {"model": "demo", "messages": [{"role": "user", "content": f"Tell me of {SECRET}."}], "max_tokens": 5}


def send_requests(url):
    """Send one request of each kind that the log must tell apart."""
    client = httpx.Client(timeout=60)
    headers = {"x-session-affinity": "talk 1"}
    client.post(url + "/v1/chat/completions", json={**CHAT, "temperature": 0.5, "seed": 3}, headers=headers)
    client.post(url + "/chat/completions", json={**CHAT, "stream": True})
    client.post(url + "/v1/chat/completions", json={**CHAT, "nonsense": SECRET})
    client.get(url + "/v1/models")
    with client.stream("POST", url + "/v1/completions", json={"prompt": SECRET, "max_tokens": 800, "stream": True,
                                                             "ignore_eos": True}) as response:  # fmt: skip
        next(response.iter_lines())
    client.post(url + "/v1/embeddings", json={"model": "tiny", "input": SECRET})
    client.post(url + "/api/chat", json={**CHAT, "max_tokens": None, "options": {"num_predict": 4}})
    client.close()


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    path = folder / "access.jsonl"
    (folder / "embedder").mkdir()
    specs = [demo_spec(), model_spec(f"tiny={a_directory(folder / 'embedder')}")]
    with serving(specs, access_log=str(path)) as served:
        send_requests(served.url)
        served.wait_until_idle()
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def lines(log):
    found = [json.loads(line) for line in log.splitlines()]
    return [line for line in found if line["path"] != "/health"]


def test_each_request_is_a_line(lines):
    assert [line["path"] for line in lines].count("/v1/chat/completions") == 3, "without /v1 it is the same path"
    assert [line["status"] for line in lines] == [200, 200, 400, 200, 200, 200, 200]
    assert all(line["client"] == "address 127.0.0.1" and line["duration_ms"] > 0 for line in lines)


def test_a_line_says_what_was_generated(lines):
    whole, streamed, refused, listed, gone, embedded, ollama = lines
    for line in (whole, streamed):
        assert line["model"] == "demo"
        assert line["output_tokens"] == 5
        assert line["finish_reasons"] == ["length"]
        assert 0 < line["ttft_ms"] <= line["duration_ms"]
        assert line["bytes"] > 100
    assert whole["session"] == "talk 1"
    assert streamed["cached_tokens"] > 0
    assert refused["error"] == "unknown_parameter"
    assert "model" not in refused
    assert listed["method"] == "GET"
    assert "prompt_tokens" not in listed
    assert gone["disconnected"] is True
    assert "finish_reasons" not in gone
    assert embedded["model"] == "tiny"
    assert embedded["prompt_tokens"] > 1
    assert ollama["output_tokens"] == 4


def test_the_log_has_no_text_of_prompts(log):
    assert SECRET not in log
    assert "elephant" not in log


def test_a_log_that_cannot_be_written_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match="--access-log"):
        make_sinks(ServerSettings(access_log=str(tmp_path / "missing" / "log")))


def test_the_log_goes_to_standard_error_if_asked_for(capfd):
    with serving(is_lazy=True, access_log="-") as served:
        httpx.get(served.url + "/v1/models", timeout=60)
    assert '"path":"/v1/models"' in capfd.readouterr().err


@pytest.fixture
def collector(monkeypatch):
    """A collector of OTLP over HTTP, and what it has received."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            data = self.rfile.read(int(self.headers["content-length"]))
            received.append((self.path, ExportTraceServiceRequest.FromString(data)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield received
    server.shutdown()
    server.server_close()
    thread.join()


def spans_of(received):
    assert {path for path, _ in received} == {"/v1/traces"}
    return [
        span
        for _, request in received
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def value_of(value):
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [value_of(each) for each in found.values] if kind == "array_value" else found


def test_spans_have_the_attributes_of_the_conventions(collector):
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    with serving(has_spans=True) as served:
        url = served.url + "/v1/chat/completions"
        headers = {"traceparent": parent, "x-session-affinity": "talk 1"}
        found = httpx.post(url, json={**CHAT, "temperature": 0.5, "seed": 3}, headers=headers, timeout=60).json()
        httpx.post(url, json={**CHAT, "nonsense": SECRET}, timeout=60)
        httpx.get(served.url + "/v1/models", timeout=60)
        begin = time.time()
    span, refused = spans_of(collector)
    assert (span.name, span.kind) == ("chat demo", 2)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == tuple(parent.split("-")[1:3])
    attributes = {each.key: value_of(each.value) for each in span.attributes}
    usage = found["usage"]
    assert attributes["gen_ai.operation.name"] == "chat"
    assert attributes["gen_ai.provider.name"] == "staticllm"
    assert attributes["gen_ai.request.model"] == attributes["gen_ai.response.model"] == "demo"
    assert attributes["gen_ai.request.temperature"] == 0.5
    assert attributes["gen_ai.request.seed"] == 3
    assert attributes["gen_ai.request.max_tokens"] == 5
    assert attributes["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 5
    assert attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert attributes["gen_ai.conversation.id"] == "talk 1"
    assert attributes["http.response.status_code"] == 200
    assert 0 < span.end_time_unix_nano - span.start_time_unix_nano < 60e9
    assert span.end_time_unix_nano / 1e9 <= begin + 1
    attributes = {each.key: value_of(each.value) for each in refused.attributes}
    assert attributes["error.type"] == "unknown_parameter"
    assert attributes["http.response.status_code"] == 400
    assert SECRET not in str(collector)


def test_names_of_attributes_are_those_of_the_conventions():
    names = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
    from staticllm.server.spans import attributes_of
    from staticllm.server.telemetry import PARAMETERS, HttpRecord

    record = HttpRecord(
        "POST", "/v1/completions", model="demo", session="s", prompt_tokens=3, output_tokens=2, first_token=1e9,
        finish_reasons=["stop"], parameters=dict.fromkeys(PARAMETERS, 2),
    )  # fmt: skip
    known = {value for name, value in vars(names).items() if name.startswith("GEN_AI") and isinstance(value, str)}
    assert {name for name in attributes_of(record) if name.startswith("gen_ai.")} <= known


def test_without_the_package_the_option_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "staticllm.server.spans", None)
    with pytest.raises(ConfigError, match=r"staticllm\[otel\]"):
        make_sinks(ServerSettings(has_spans=True))
