"""Sends thousands of requests, made by schemathesis of the served schema: no status above 499, no hang, nothing left over."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import threading
import zlib
from collections import Counter
from typing import Any, NamedTuple

import httpx
import hypothesis
import psutil
import pytest
from support.encoders.encoder_directories import a_directory
from support.server.served import serving

from staticllm.server.models.served import demo_spec, model_spec

schemathesis = pytest.importorskip("schemathesis")

SECONDS = 60
SHORT = {"max_tokens": 3, "max_completion_tokens": 3, "max_output_tokens": 3}
FORMATS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/api/chat", "/api/generate")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    specs = [demo_spec(), model_spec(f"tiny={a_directory(tmp_path_factory.mktemp('embedder'))}")]
    with serving(specs) as served:
        httpx.post(served.url + "/v1/embeddings", json={"model": "tiny", "input": "x"}, timeout=SECONDS)
        yield served


def shortened(path, body):
    """Return a body whose answers are short, and half of whose models are known: else most requests would end early."""
    if not isinstance(body, dict):
        return body
    found = dict(body)
    for name, value in SHORT.items():
        if isinstance(found.get(name), int) and found[name] > value:
            found[name] = value
    if path in FORMATS and not any(name in found for name in SHORT):
        found["options" if path.startswith("/api") else SHORT_OF[path]] = (
            {"num_predict": 3} if path.startswith("/api") else 3
        )
    if "model" in found and zlib.crc32(repr(sorted(found, key=str)).encode()) % 2:
        found["model"] = "tiny" if "embed" in path else "demo"
    return found


SHORT_OF = {"/v1/chat/completions": "max_tokens", "/v1/completions": "max_tokens", "/v1/responses": "max_output_tokens"}


def operations(served):
    schema = schemathesis.openapi.from_url(served.url + "/openapi.json")
    return [operation.ok() for operation in schema.get_all_operations()]


class Sent(NamedTuple):
    """A request that was sent, as ``httpx.Client.request`` takes it, and the status of its answer."""

    path: str
    arguments: dict[str, Any]
    status: int


def sent(client, path, arguments):
    """Send a request and check its answer."""
    return checked(path, arguments, client.request(**arguments, timeout=SECONDS))


def checked(path, arguments, response):
    """Check that an answer is none of the server's own faults, and has one line if it is a refusal."""
    body = arguments["content"]
    assert response.status_code < 500, (path, body, response.text[:500])
    if response.status_code >= 400:
        error = response.json()["error"]
        message = error if isinstance(error, str) else error["message"]
        assert message, (path, body, message)
        assert "\n" not in message, (path, body, message)
        assert "Traceback" not in message, (path, body, message)
    return Sent(path, arguments, response.status_code)


def sent_case(served, client, case):
    """Send a case; return None if no client can send it."""
    path, method = case.path, case.method.upper()
    body = shortened(path, case.body) if method == "POST" else b""
    try:
        data = body if isinstance(body, bytes) else json.dumps(body).encode("utf-8", "surrogatepass")
        arguments = {
            "method": method, "url": served.url + case.formatted_path, "params": case.query or None, "content": data,
            "headers": {"Content-Type": "application/json"} if body else {},
        }  # fmt: skip
        response = client.request(**arguments, timeout=SECONDS)
    except (httpx.InvalidURL, UnicodeEncodeError, ValueError, TypeError):
        return None
    return checked(path, arguments, response)  # outside: an answer that is no JSON is a fault


def run(served, num_examples, mode):
    """Make requests of each operation and return those that were sent."""
    found: list[Sent] = []
    settings = hypothesis.settings(
        max_examples=num_examples, deadline=None, suppress_health_check=list(hypothesis.HealthCheck), database=None,
        derandomize=True, phases=[hypothesis.Phase.generate],
    )  # fmt: skip
    with httpx.Client() as client:
        for operation in operations(served):

            @settings
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            def send(case):
                if one := sent_case(served, client, case):
                    found.append(one)

            with contextlib.suppress(hypothesis.errors.Unsatisfiable):  # what has no parameters cannot be sent wrongly
                send()
    return found


def held():
    process = psutil.Process()
    gc.collect()
    return process.num_fds() if hasattr(process, "num_fds") else process.num_handles()


@pytest.mark.slow
@pytest.mark.timeout(1200)  # on two cores that other lanes use as well
def test_thousands_of_generated_requests_leave_nothing_over(served):
    modes = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
    count = int(os.environ.get("STATICLLM_CONFORMANCE", "60"))
    # what is made on first use: 100 to 280 MB, most of it for sizes of calls
    requests = [one for mode in modes for one in run(served, count, mode)]
    files, threads = held(), threading.active_count()
    memory = psutil.Process().memory_info().rss
    total: Counter[tuple[str, int]] = Counter()
    with httpx.Client() as client:
        for one in requests * 3:  # to make a request takes several times as long as to answer it
            total[one.path, sent(client, one.path, one.arguments).status] += 1
    print(dict(sorted(total.items())))
    assert sum(total.values()) > 2000
    assert {path for path, status in total if status == 200} >= set(FORMATS), "some requests of each kind were served"
    served.wait_until_idle()
    assert held() <= files + 8
    pool = (
        served.settings.num_threads + 2
    )  # its threads, the stop checker's and the loader's start when they are needed
    assert threading.active_count() <= threads + pool
    assert psutil.Process().memory_info().rss - memory < 256 << 20


def test_each_operation_takes_a_few_generated_requests(served):
    requests = run(served, 4, schemathesis.GenerationMode.POSITIVE)
    assert {one.path for one in requests} >= set(FORMATS)
    served.wait_until_idle()
