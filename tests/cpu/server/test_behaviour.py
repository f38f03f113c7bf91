"""Tests how the server behaves with many, slow and leaving clients: cancellation, full queues, fairness, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from support.attach.daemons import wait_for
from support.server.served import serving

from staticllm.pipelines.diagnostics.reference import EXACT
from staticllm.server.models.served import ModelSpec, ServedModel, demo_spec, load_pipeline

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.usefixtures("shared_programs")

CHAT = "/v1/chat/completions"
LONG = {"MIN_RESPONSE_LEN": 6000}
"""Answers of this length take seconds, in which a test can act."""


def body(text="Tell me a story.", count=5000, **more):
    return {
        "model": "demo",
        "messages": [{"role": "user", "content": text}],
        "max_tokens": count,
        "ignore_eos": True,
        **more,
    }


def chunks_of(response):
    """Yield the chunks of a stream, and "[DONE]"."""
    for line in response.iter_lines():
        if line.startswith("data: "):
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


@pytest.fixture(scope="module")
def served():
    with serving(properties=LONG) as served:
        yield served


def test_closing_a_stream_cancels_before_the_next_device_call(served):
    with httpx.stream("POST", served.url + CHAT, json=body(stream=True), timeout=60) as response:
        for number, _ in enumerate(chunks_of(response)):
            if number == 5:
                break
    served.wait_until_idle()
    assert served.pipeline().stats().finish_reasons.get("cancelled") == 1


def test_only_streams_that_were_closed_count_as_cancelled(served):
    def cancelled():
        (line,) = (
            line
            for line in httpx.get(served.url + "/metrics", timeout=60).text.splitlines()
            if line.startswith("staticllm_cancelled_requests_total")
        )
        return float(line.split()[1])

    before = cancelled()
    with httpx.stream(
        "POST",
        served.url + CHAT,
        json=body(count=5, stream=True),
        headers={"Connection": "close"},
        timeout=60,
    ) as whole:
        assert list(chunks_of(whole))[-1] == "[DONE]"
    served.wait_until_idle()
    assert cancelled() == before
    with httpx.stream("POST", served.url + CHAT, json=body(stream=True), timeout=60) as response:
        next(chunks_of(response))
    served.wait_until_idle()
    assert cancelled() == before + 1


def test_an_answer_that_fails_is_a_chunk_with_an_error(served, monkeypatch):
    from staticllm.errors import DeviceError
    from staticllm.pipelines.text.output_processor import OutputProcessor

    push, seen = OutputProcessor.push, []

    def failing(self, token):
        seen.append(token)
        if len(seen) > 4:
            raise DeviceError("the device failed")
        return push(self, token)

    monkeypatch.setattr(OutputProcessor, "push", failing)
    with httpx.stream("POST", served.url + CHAT, json=body(stream=True), timeout=60) as response:
        *_, error, done = chunks_of(response)
    assert done == "[DONE]"
    assert error["error"]["message"] == "the device failed"
    assert error["error"]["type"] == "server_error"
    monkeypatch.undo()
    served.wait_until_idle()


def test_closing_a_request_that_is_answered_whole_cancels_it(served):
    before = served.pipeline().stats().finish_reasons.get("cancelled", 0)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(served.url + CHAT, json=body(), timeout=0.5)
    served.wait_until_idle()
    assert served.pipeline().stats().finish_reasons["cancelled"] == before + 1


def test_closing_some_of_many_streams_leaves_the_others_alone(served):
    alone = (
        served.pipeline()
        .generate([{"role": "user", "content": "Number 3"}], max_new_tokens=150, ignore_eos=True)
        .texts[0]
    )

    async def read(client, number):
        stream = await client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": f"Number {number}"}],
            max_tokens=150,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if number % 3 and len(text) > 20:
                await stream.close()
                break
        return text

    async def read_all():
        async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="any", max_retries=0) as client:
            return await asyncio.gather(*(read(client, number) for number in range(10)))

    assert asyncio.run(read_all())[3] == alone
    served.wait_until_idle()


def test_several_answers_of_a_closed_stream_all_end(served):
    with httpx.stream("POST", served.url + CHAT, json=body(n=5, temperature=1.0, stream=True), timeout=60) as response:
        seen = set()
        for chunk in chunks_of(response):
            seen |= {choice["index"] for choice in chunk["choices"] if choice["delta"].get("content")}
            if seen == set(range(5)):
                break
    served.wait_until_idle()


def test_a_client_that_never_reads_is_served_and_forgotten(served):
    """Its answer waits in the buffers, or for it; when it leaves, nothing is left over."""
    with httpx.stream("POST", served.url + CHAT, json=body(count=400, stream=True), timeout=60):
        time.sleep(1)
    served.wait_until_idle()


def test_a_full_queue_is_429_with_the_time_to_wait():
    with serving(properties={**LONG, "MAX_NUM_SEQS": 1}, max_waiting=1) as served:
        limits = served.state.hub.models["demo"].admission.limits
        assert (limits.max_running, limits.max_per_client) == (2, 1)
        with contextlib.ExitStack() as stack:
            running = stack.enter_context(httpx.stream("POST", served.url + CHAT, json=body(stream=True), timeout=60))
            assert running.status_code == 200
            with ThreadPoolExecutor(1) as pool:
                waiting = pool.submit(httpx.post, served.url + CHAT, json=body(count=2), timeout=60)
                admission = served.state.hub.models["demo"].admission
                while admission.num_waiting < 1:
                    time.sleep(0.01)
                for stream in (False, True):
                    refused = httpx.post(served.url + CHAT, json=body(count=2, stream=stream), timeout=60)
                    assert refused.status_code == 429
                    assert int(refused.headers["retry-after"]) >= 1
                    assert refused.json()["error"]["type"] == "rate_limit_error"
                    assert "--max-waiting" in refused.json()["error"]["message"]
                running.close()
                assert waiting.result().status_code == 200
        served.wait_until_idle()
        metrics = httpx.get(served.url + "/metrics", timeout=60).text
        assert 'staticllm_rejected_requests_total{knob="--max-waiting",reason="busy"} 2.0' in metrics


def test_a_request_may_have_more_answers_than_the_queue_has_places():
    with serving(properties={"MAX_NUM_SEQS": 2}, max_waiting=1) as served:
        found = httpx.post(served.url + CHAT, json={**body("Hello", 2), "n": 16}, timeout=60)
        assert found.status_code == 200, found.text
        assert len(found.json()["choices"]) == 16
        served.wait_until_idle()


def test_a_client_that_floods_does_not_starve_another():
    """With two keys, the second client's single request overtakes the queue of the first one."""
    with serving(properties={**LONG, "MAX_NUM_SEQS": 4}, api_keys=("flood", "other"), max_waiting=64) as served:
        ended = []

        def ask(key, number):
            headers = {"Authorization": f"Bearer {key}"}
            found = httpx.post(served.url + CHAT, json=body(f"{number}", 120), headers=headers, timeout=120)
            assert found.status_code == 200
            ended.append(key)

        with ThreadPoolExecutor(24) as pool:
            floods = [pool.submit(ask, "flood", number) for number in range(20)]
            admission = served.state.hub.models["demo"].admission
            while admission.num_waiting < 10:
                time.sleep(0.005)
            assert admission.num_running == 4, "nobody else is known"
            pool.submit(ask, "other", 0).result()
            place = len(ended)
            for future in floods:
                future.result()
        assert place <= 10, f"it was number {place} of 21"
        served.wait_until_idle()


def test_silent_streams_have_comment_lines():
    """While the only place is taken, nothing is sent; a long prompt or a slow device is silent after the headers."""
    with serving(properties=LONG, ping_seconds=0.05) as served:
        pipeline = served.pipeline()
        release = threading.Event()
        with httpx.stream("POST", served.url + CHAT, json=body(count=300, stream=True), timeout=60) as response:
            lines = response.iter_lines()
            next(lines)
            pipeline.engine.call_soon(lambda: release.wait(1.0))
            seen = [line for line in lines if line]
        assert ": ping" in seen
        assert seen[-1] == "data: [DONE]"
        release.set()


def test_a_stop_finishes_what_runs_and_refuses_new_requests():
    with serving(properties=LONG, grace=60.0) as served:
        with httpx.stream("POST", served.url + CHAT, json=body(count=600, stream=True), timeout=60) as response:
            chunks = chunks_of(response)
            next(chunks)
            served.server.stop_soon()
            wait_for(lambda: served.state.lifecycle.is_stopping, 60)
            refused = httpx.post(served.url + CHAT, json=body(count=2), timeout=60)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "stopping"
            assert "retry-after" in refused.headers
            health = httpx.get(served.url + "/health", timeout=60)
            assert health.status_code == 503
            assert health.json()["status"] == "stopping"
            *_, last, done = chunks
        assert done == "[DONE]"
        assert last["choices"][0]["finish_reason"] == "length"
        tokens = served.state.metrics.text().decode()
        assert 'staticllm_output_tokens_total{model="demo"} 600.0' in tokens
        served.thread.join(30)
        assert not served.thread.is_alive()


def test_after_the_grace_answers_are_cut_off_with_a_reason():
    with serving(properties=LONG, grace=0.3) as served:
        start = time.monotonic()
        with httpx.stream("POST", served.url + CHAT, json=body(stream=True), timeout=60) as response:
            chunks = chunks_of(response)
            next(chunks)
            served.server.stop_soon()
            *_, last, done = chunks
        assert done == "[DONE]"
        assert last["choices"][0]["finish_reason"] == "length"
        assert time.monotonic() - start < 10
        served.thread.join(30)
        assert not served.thread.is_alive()


def test_health_says_what_is_loading():
    release = threading.Event()

    def load(device, properties, on_progress):
        pipeline = load_pipeline(demo_spec(), device, properties, lambda event: None)
        release.wait(30)
        return pipeline

    context = serving(pipelines={"demo": load}, is_lazy=True)
    with context as served, ThreadPoolExecutor(1) as pool:
        assert httpx.get(served.url + "/health", timeout=60).json() == {"status": "ok", "loading": []}
        waiting = pool.submit(httpx.post, served.url + CHAT, json=body(count=2), timeout=60)
        wait_for(lambda: served.state.hub.loading, 60)
        health = httpx.get(served.url + "/health", timeout=60)
        assert health.status_code == 503
        assert health.json()["status"] == "loading"
        assert health.json()["loading"][0]["model"] == "demo"
        assert httpx.get(served.url + "/v1/models", timeout=60).json()["data"][0]["status"] == "loading"
        release.set()
        assert waiting.result().status_code == 200
        assert httpx.get(served.url + "/health", timeout=60).status_code == 200


def three_specs():
    return [ModelSpec(name, demo_spec().path, "chat") for name in ("a", "b", "c")]


def named(name, count=3, **more):
    return {**body("Hello", count, **more), "model": name}


def test_models_are_unloaded_least_recently_used_first():
    size = ServedModel(demo_spec()).estimate("CPU", {**EXACT, **LONG})
    with serving(three_specs(), properties=LONG, memory_limit=2 * size + (1 << 20)) as served:
        hub = served.state.hub

        def loaded():
            return {name for name, model in hub.models.items() if model.pipeline is not None}

        for name in ("a", "b", "a"):
            assert httpx.post(served.url + CHAT, json=named(name), timeout=60).status_code == 200
        assert loaded() == {"a", "b"}
        assert httpx.post(served.url + CHAT, json=named("c"), timeout=60).status_code == 200
        assert loaded() == {"a", "c"}
        with contextlib.ExitStack() as stack:  # both are in use: nothing can be unloaded
            for name in ("a", "c"):
                stack.enter_context(
                    httpx.stream("POST", served.url + CHAT, json=named(name, 5000, stream=True), timeout=60)
                )
            refused = httpx.post(served.url + CHAT, json=named("b"), timeout=60)
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "no_memory"
            assert "retry-after" in refused.headers


def test_a_model_that_never_fits_is_refused():
    with serving(three_specs(), memory_limit=1 << 20, is_lazy=True) as served:
        refused = httpx.post(served.url + CHAT, json=named("a"), timeout=60)
        assert refused.status_code == 400
        assert "--memory-limit-mb is 1" in refused.json()["error"]["message"]


def test_an_idle_model_is_unloaded_and_loaded_again():
    with serving(idle_unload=0.3) as served:
        first = httpx.post(served.url + CHAT, json=body(count=6), timeout=60).json()
        wait_for(lambda: served.pipeline() is None, 20)
        again = httpx.post(served.url + CHAT, json=body(count=6), timeout=60).json()
        assert again["choices"] == first["choices"]


def test_a_model_that_fails_to_load_is_an_answer():
    def load(device, properties, on_progress):
        from staticllm.errors import DeviceError

        raise DeviceError("the device is on holiday")

    with serving(pipelines={"demo": load}, is_lazy=True) as served:
        for _ in range(2):
            failed = httpx.post(served.url + CHAT, json=body(count=2), timeout=60)
            assert failed.status_code == 500
            assert failed.json()["error"]["message"] == "the device is on holiday"


def test_a_stop_ends_a_loading_in_progress():
    from staticllm.core import ProgressEvent

    ended = threading.Event()

    def load(device, properties, on_progress):
        try:
            for number in range(3000):
                on_progress(ProgressEvent("compile", number, 3000, 0.0))
                time.sleep(0.01)
        finally:
            ended.set()

    with serving(pipelines={"demo": load}, is_lazy=True) as served, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(httpx.post, served.url + CHAT, json=body(count=2), timeout=60)
        wait_for(lambda: served.state.hub.loading, 60)
        start = time.monotonic()
        served.server.stop_soon()
        assert waiting.result().status_code == 503
        assert ended.is_set()
        assert time.monotonic() - start < 10
