"""Tests `staticllm serve` as a process: its options, its first line, and signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from support.command_line import in_here

from staticllm.server.http.lifecycle import Lifecycle, LifecycleMiddleware


def start(*arguments, **environment):
    return subprocess.Popen(
        [sys.executable, "-m", "staticllm", "serve", *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGTERM to send")
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_until_a_signal(tmp_path, stop):
    keys = tmp_path / "keys"
    keys.write_text("from-the-file\n\n")
    process = start("--port", "0", "--api-key-file", str(keys), "--lazy", "--grace", "30")
    try:
        url, names = process.stdout.readline().split()
        assert names == "demo"
        assert url.endswith("/v1")
        headers = {"Authorization": "Bearer from-the-file"}
        body = {"messages": [{"role": "user", "content": "What is an NPU?"}], "stream": True}
        with httpx.stream("POST", url + "/chat/completions", json=body, headers=headers, timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(stop)
            *_, last = (line for line in lines if line)
        assert last == "data: [DONE]"
        assert process.wait(30) == 0
        assert "What is an NPU" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT to send")
def test_a_second_signal_cuts_answers_off(tmp_path):
    process = start("--port", "0", "--grace", "60", "-p", "MIN_RESPONSE_LEN=30000")
    try:
        url = process.stdout.readline().split()[0]
        body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 30000, "ignore_eos": True}
        with ThreadPoolExecutor(1) as pool, httpx.Client(timeout=60) as client:
            whole = pool.submit(client.post, url + "/chat/completions", json=body)
            with client.stream("POST", url + "/chat/completions", json={**body, "stream": True}) as response:
                lines = response.iter_lines()
                next(lines)
                process.send_signal(signal.SIGINT)
                time.sleep(0.2)
                process.send_signal(signal.SIGINT)
                *_, last = (line for line in lines if line)
            assert last == "data: [DONE]"
            assert whole.result(60).json()["choices"][0]["finish_reason"] == "length"
        assert process.wait(30) == 130
        assert "Traceback" not in process.stderr.read()
    finally:
        process.kill()
        process.communicate()


def test_a_request_that_does_not_end_in_time_gets_an_error_of_the_api():
    async def test():
        lifecycle, sent, refused = Lifecycle(), [], []

        async def send(message):
            sent.append(message)

        async def app(scope, receive, send):
            await asyncio.Event().wait()

        scope = {"type": "http", "path": "/v1/models", "headers": []}
        layer = LifecycleMiddleware(app, lifecycle, refused.append)
        task = asyncio.ensure_future(layer(scope, None, send))
        await asyncio.sleep(0)
        lifecycle.is_stopping = True
        task.cancel()
        await task
        assert [error.code for error in refused] == ["stopping"]
        assert lifecycle.num_requests == 0
        assert sent[0]["status"] == 503
        assert json.loads(sent[1]["body"])["error"]["code"] == "stopping"

    asyncio.run(test())


def test_the_key_can_be_in_the_environment():
    process = start("--port", "0", "--lazy", STATICLLM_API_KEY="of-the-environment")
    try:
        url = process.stdout.readline().split()[0]
        assert httpx.get(url + "/models", timeout=60).status_code == 401
        assert (
            httpx.get(url + "/models", headers={"Authorization": "Bearer of-the-environment"}, timeout=60).status_code
            == 200
        )
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--host", "0.0.0.0"], "there is no API key"),
        (["--api-key", "two words"], "API key"),
        (["--api-key-file", "missing"], "cannot be read"),
        (["no-such-folder"], "no model directory"),
        (["--host", "no such host", "--insecure"], "cannot be used"),
        (["-p", "NO_SUCH=1"], "NO_SUCH"),  # before a port is opened
        (["--host", "256.1.1.1", "--insecure"], "cannot be used"),
    ],
)
def test_mistakes_get_one_line(arguments, words):
    done = in_here("serve", "--port", "0", *arguments)
    assert done.returncode == 1
    assert not done.stdout
    assert done.stderr.startswith("Error: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_it_ends_if_its_first_model_cannot_be_loaded():
    process = start("--port", "0", "-p", "INFERENCE_PRECISION_HINT=i4")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "demo" in out
    assert err.splitlines()[-1].startswith("Error: ")
    assert "INFERENCE_PRECISION_HINT" in err.splitlines()[-1]
    assert "Traceback" not in err


def test_it_ends_if_its_first_model_is_larger_than_the_limit():
    process = start("--port", "0", "--memory-limit-mb", "1")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert err.splitlines()[-1].startswith("Error: ")
    assert "--memory-limit-mb" in err.splitlines()[-1]
    assert "Traceback" not in err


def test_two_models_of_one_name_are_refused(root):
    from staticllm import demo_model_path

    process = start("--port", "0", str(demo_model_path()), str(demo_model_path()))
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "two models are named 'demo_model'" in err
