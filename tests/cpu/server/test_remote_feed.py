"""Tests the feed of the scheduler over an engine in another process: requests, calls, one numbering, and that it ends."""

from __future__ import annotations

import json
import os
import signal
import threading

import httpx
import pytest
from support.attach.daemons import wait_for
from support.server.served import serving

from staticllm.cli.servers import lines_of

jsonschema = pytest.importorskip("jsonschema")

FEED, CHAT = "/api/scheduler", "/v1/chat/completions"
SECONDS = 120
BODY = {"messages": [{"role": "user", "content": "A secret prompt."}], "ignore_eos": True}
PROPERTIES = {"PROGRAMS": "shared", "MIN_RESPONSE_LEN": 4000, "MAX_NUM_SEQS": 2}
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def schema(root):
    """The schema of the feed, as documented."""
    return json.loads((root / "docs" / "reference" / "scheduler_feed.schema.json").read_text(encoding="utf-8"))


def stream(url, number, leave):
    """Read a long answer to a prompt that is not cached, until ``leave`` is set."""
    prompt = [{"role": "user", "content": f"{number} secret " + "fox " * 20}]
    body = {**BODY, "messages": prompt, "stream": True, "max_tokens": 3900}
    with httpx.stream("POST", url + CHAT, json=body, timeout=SECONDS) as one:
        for _ in one.iter_lines():
            if leave.is_set():
                return


def test_a_worker_tells_what_runs_and_what_each_call_held(run_folder, schema):
    with (
        serving(runs_in="worker", properties=PROPERTIES, max_per_client=2) as served,
        httpx.Client(timeout=SECONDS) as client,
    ):
        seen, calls, ended = [], {}, {}

        def feed():
            found = client.get(served.url + FEED, params={"after": seen[-1]["cursor"] if seen else 0}).json()
            jsonschema.validate(found, schema)
            for entry, known in [(call, calls) for call in found["calls"]] + [(one, ended) for one in found["ended"]]:
                assert entry["number"] not in known, "each is told once"
                known[entry["number"]] = entry
            seen.append(found)
            return found

        def is_watched():
            """Ask for a short answer, and return the calls that are told."""
            client.post(served.url + CHAT, json={**BODY, "max_tokens": 2})
            return feed()["calls"]

        wait_for(is_watched, SECONDS)
        wait_for(lambda: not feed()["requests"], SECONDS)
        short = set(ended)
        leave = threading.Event()

        threads = [threading.Thread(target=stream, args=(served.url, number, leave)) for number in range(4)]
        for thread in threads:
            thread.start()
        try:
            wait_for(lambda: len(feed()["requests"]) == 2 and len(seen[-1]["waiting_ms"]) == 2, SECONDS)
            wait_for(lambda: feed() and all(each["output_tokens"] > 5 for each in seen[-1]["requests"]), SECONDS)
            ids = {each["id"] for each in seen[-1]["requests"]}
            assert [each["status"] for each in seen[-1]["requests"]] == ["running"] * 2
            assert len(seen[-1]["waiting_ms"]) == 2
            assert all(0 <= each["arrival"] <= seen[-1]["now"] for each in seen[-1]["requests"]), "one clock"
            assert seen[-1]["limits"]["kv_slots"] > 0
            wait_for(
                lambda: feed() and ids <= {number for call in calls.values() for number in call["decode"]}, SECONDS
            )
            assert ids <= {number for call in calls.values() for number, _ in call["prefill"]}
            shown = "\n".join(lines_of(served.url, seen[-1], seen[-2]))
            assert "2 running" in shown
            assert "KV slots" in shown
        finally:
            leave.set()
            for thread in threads:
                thread.join(SECONDS)
        wait_for(lambda: not feed()["requests"] and len(ended.keys() - short) == 4, SECONDS)
        assert {one["reason"] for one in ended.values()} <= {"cancelled", "length"}
        assert all(0 <= call["start"] <= seen[-1]["now"] for call in calls.values())
        assert "secret" not in json.dumps(seen)


def test_numbers_go_on_when_a_worker_is_started_again(run_folder):
    with serving(runs_in="worker", properties=PROPERTIES) as served, httpx.Client(timeout=SECONDS) as client:

        def feed(after):
            return client.get(served.url + FEED, params={"after": after}).json()

        def ask():
            return client.post(served.url + CHAT, json={**BODY, "max_tokens": 5}).status_code

        feed(0)
        assert ask() == 200
        wait_for(lambda: feed(0)["ended"], SECONDS)
        before = feed(0)
        model = served.state.hub.models["demo"]
        first = model.home.pid
        os.kill(first, signal.SIGTERM if os.name == "nt" else signal.SIGKILL)
        wait_for(lambda: model.home.pid not in (None, first) and not model.is_lost, SECONDS)
        feed(before["cursor"])
        wait_for(lambda: ask() == 200 and feed(before["cursor"])["ended"], SECONDS)
        after = feed(before["cursor"])
        numbers = [entry["number"] for entry in after["calls"] + after["ended"]]
        assert min(numbers) == before["cursor"] + 1
        assert len(set(numbers)) == len(numbers)


def test_the_first_reading_tells_what_ran_before_it(run_folder):
    with serving(runs_in="worker", properties=PROPERTIES) as served, httpx.Client(timeout=SECONDS) as client:
        assert client.post(served.url + CHAT, json={**BODY, "max_tokens": 5}).status_code == 200
        found = client.get(served.url + FEED).json()
        assert len(found["calls"]) == found["totals"]["calls"] > 0
