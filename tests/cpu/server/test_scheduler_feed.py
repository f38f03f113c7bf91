"""Tests the feed of the scheduler: its documented form, its cursor, and that a model that does not answer stops nobody."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from support.attach.daemons import wait_for
from support.server.served import serving

from staticllm.server.models.served import ModelSpec, demo_spec

jsonschema = pytest.importorskip("jsonschema")

pytestmark = pytest.mark.usefixtures("shared_programs")

FEED, CHAT = "/api/scheduler", "/v1/chat/completions"
LONG = {"MIN_RESPONSE_LEN": 3000, "MAX_NUM_SEQS": 2}


def body(text="A secret prompt.", count=2500, **more):
    return {"messages": [{"role": "user", "content": text}], "max_tokens": count, "ignore_eos": True, **more}


@pytest.fixture(scope="module")
def served():
    with serving(properties=LONG, max_per_client=2) as served:
        yield served


def feed(served, **query):
    answer = httpx.get(served.url + FEED, params=query, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def end_of(served):
    """Read all pages, and return the cursor after the last one."""
    found = feed(served)
    while found["calls"] or found["ended"]:
        found = feed(served, after=found["cursor"])
    return found["cursor"]


@pytest.fixture(scope="module")
def schema(root):
    """The schema of the feed, as documented."""
    return json.loads((root / "docs" / "reference" / "scheduler_feed.schema.json").read_text(encoding="utf-8"))


def test_it_tells_what_runs_and_what_waits_without_text(served, schema):
    found = []
    begin = end_of(served)
    streams = [
        threading.Thread(target=httpx.post, args=(served.url + CHAT,), kwargs={"json": body(), "timeout": 60})
        for _ in range(4)
    ]
    for stream in streams:
        stream.start()

    def two_run():
        found.append(feed(served, after=begin))
        jsonschema.validate(found[-1], schema)
        requests = found[-1]["requests"]
        return len(requests) == 2 and all(each["output_tokens"] > 5 for each in requests)

    wait_for(two_run, 60)
    last = found[-1]
    assert [each["status"] for each in last["requests"]] == ["running", "running"]
    assert len(last["waiting_ms"]) == 2
    assert all(each["max_output_tokens"] == 2500 and each["ttft_ms"] > 0 for each in last["requests"])
    assert all(each["computed_tokens"] >= each["prompt_tokens"] for each in last["requests"])
    ids = {each["id"] for each in last["requests"]}
    assert ids <= {number for call in last["calls"] for number in call["decode"]}
    assert last["limits"]["num_seqs"] == 2
    assert last["limits"]["kv_slots"] >= last["calls"][-1]["slots_in_use"] > 0
    assert "secret" not in json.dumps(found)
    assert "address" not in json.dumps(found)
    for state in list(served.state.lifecycle._running):
        state.cancel()
    for stream in streams:
        while stream.is_alive():
            for state in list(served.state.lifecycle._running):
                state.cancel()
            stream.join(0.05)
    served.wait_until_idle()
    end = feed(served, after=last["cursor"])
    jsonschema.validate(end, schema)
    assert end["requests"] == end["waiting_ms"] == []
    assert {each["reason"] for each in end["ended"]} == {"cancelled"}


def test_the_cursor_gives_each_call_once(served):
    cursor = end_of(served)
    httpx.post(served.url + CHAT, json=body(count=20), timeout=60)
    served.wait_until_idle()
    first = feed(served, after=cursor)
    (answer,) = first["ended"]
    assert answer["output_tokens"] == 20
    assert sum(answer["id"] in call["decode"] for call in first["calls"]) == 19
    gaps = [call["gap_ms"] for call in first["calls"] if answer["id"] in call["decode"]]
    assert all(gap > 0 for gap in gaps)
    assert answer["longest_gap_ms"] > 0
    assert (
        sum(count for call in first["calls"] for _, count in call["prefill"])
        == answer["prompt_tokens"] - answer["cached_tokens"]
    )
    again = feed(served, after=first["cursor"])
    assert again["calls"] == again["ended"] == []
    assert again["totals"]["requests"] == first["totals"]["requests"]
    assert feed(served, after=10**12)["calls"], "a cursor that was never given gets all"


def test_numbers_go_on_when_a_model_is_loaded_again(served):
    httpx.post(served.url + CHAT, json=body(count=3), timeout=60)
    before = end_of(served)
    model = served.state.hub.models["demo"]

    async def unload():
        async with served.state.hub._lock:
            await served.state.hub._unload(model)

    asyncio.run_coroutine_threadsafe(unload(), served.loop).result(30)
    unloaded = feed(served)
    assert unloaded["totals"] is None
    assert unloaded["models"][0]["status"] == "unloaded"
    httpx.post(served.url + CHAT, json=body(count=3), timeout=60)
    after = feed(served, after=before)
    assert after["cursor"] >= before
    httpx.post(served.url + CHAT, json=body(count=3), timeout=60)
    assert feed(served, after=after["cursor"])["calls"][0]["number"] > after["cursor"]


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("after=-1", "after"),
        ("after=x", "after"),
        ("after=1e3", "after"),
        ("after=" + "9" * 40, "after"),
        ("text=1", "text"),
    ],
)
def test_wrong_queries_are_refused_with_their_name(served, query, param):
    answer = httpx.get(served.url + FEED + "?" + query, timeout=60)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_only_chat_models_have_a_scheduler(tmp_path):
    specs = [demo_spec(), ModelSpec("embedder", tmp_path, "embedding")]
    with serving(specs, is_lazy=True) as served:
        assert httpx.get(served.url + FEED, params={"model": "missing"}, timeout=60).status_code == 404
        refused = httpx.get(served.url + FEED, params={"model": "embedder"}, timeout=60)
        assert refused.status_code == 400
        assert refused.json()["error"]["code"] == "wrong_model_kind"
        assert [each["type"] for each in feed(served)["models"]] == ["chat", "embedding"]


def test_many_readers_get_the_same(served):
    cursor = end_of(served)
    httpx.post(served.url + CHAT, json=body(count=30), timeout=60)
    served.wait_until_idle()
    found = []
    threads = [threading.Thread(target=lambda: found.append(feed(served, after=cursor)["calls"])) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert all(calls == found[0] for calls in found)
    assert len(found[0]) >= 30


def test_a_model_that_does_not_answer_holds_no_thread_of_the_others(monkeypatch):
    """As one whose process hangs: metrics and the feed are an error after a time, and answers go on."""
    monkeypatch.setattr("staticllm.server.app.LOOK_SECONDS", 0.3)
    gate = threading.Event()
    with serving(num_threads=1) as served:
        stats = served.pipeline().stats
        monkeypatch.setattr(served.pipeline(), "stats", lambda: (gate.wait(60), stats())[1])
        try:
            for _ in range(4):
                found = httpx.get(served.url + "/metrics", timeout=60)
                assert found.status_code == 503
                assert found.json()["error"]["code"] == "process_silent"
            asked = httpx.post(served.url + "/v1/chat/completions", json={**body(count=2), "stream": False}, timeout=60)
            assert asked.status_code == 200
        finally:
            gate.set()


def test_submitting_to_a_model_that_does_not_answer_leaves_threads_to_others(monkeypatch):
    gate, begun = threading.Event(), []
    with serving(num_threads=2) as served, ThreadPoolExecutor(3) as pool:
        submit = served.pipeline().submit
        monkeypatch.setattr(
            served.pipeline(),
            "submit",
            lambda *given, **more: (begun.append(1), gate.wait(60), submit(*given, **more))[2],
        )
        whole = {**body(count=2), "stream": False}
        try:
            with contextlib.suppress(httpx.ReadTimeout):  # it keeps its thread, also after its client has gone
                httpx.post(served.url + CHAT, json=whole, timeout=0.3)
            asked = [pool.submit(httpx.post, served.url + CHAT, json=whole, timeout=60) for _ in range(3)]
            assert httpx.post(served.url + "/tokenize", json={"content": "a"}, timeout=10).status_code == 200
            assert len(begun) == 1
        finally:
            gate.set()
        assert [each.result().status_code for each in asked] == [200] * 3
        served.wait_until_idle()
