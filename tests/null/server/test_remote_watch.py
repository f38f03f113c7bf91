"""Tests how calls of an engine in another process are watched there, sent in bounded pieces, and mirrored here."""

from __future__ import annotations

import threading
import time

import pytest

from staticllm.core import FinishReason, Variant
from staticllm.daemon.models import language_model
from staticllm.daemon.models.language_model import CallWatch
from staticllm.pipelines.profiling.engine_watch import KEPT
from staticllm.pipelines.profiling.progress import EngineProgress, RequestProgress
from staticllm.pipelines.profiling.records import RequestRecord, StepRecord
from staticllm.pipelines.profiling.stats import Profiler
from staticllm.server.feed import mirror as remote_watch
from staticllm.server.feed.mirror import RemoteWatch
from staticllm.wire.messages import Kind, Message, decode, encode


class Engine:
    """An engine without a device."""

    def __init__(self, num_requests=0):
        self.profiler = Profiler()
        self._requests = tuple(
            RequestProgress(number, "running", 5.0, 5.5, None, 4, 1, 3, 0, 10, 0) for number in range(num_requests)
        )

    def progress(self):
        return EngineProgress(self._requests, 64)

    def stats(self):
        return self.profiler.stats()

    def step(self, start=1.0, decode=(1,)):
        self.profiler.record(StepRecord(start, 0.01, Variant(16, 64, 8), tuple(decode), (), slots_in_use=7))


class Process:
    """Another process with an engine: what it answers goes over the wire."""

    def __init__(self, engine):
        self.calls, self.asked = CallWatch(engine), []

    def calls_after(self, number):
        self.asked.append(number)
        return decode(encode(Message(Kind.OK, body=self.calls.after(number)))).body


@pytest.fixture(autouse=True)
def no_pause(monkeypatch):
    monkeypatch.setattr(remote_watch, "PULL_SECONDS", 0.0)


def test_calls_and_answers_are_mirrored_in_their_order_with_numbers_of_their_own():
    engine = Engine(num_requests=1)
    process, mirror = Process(engine), RemoteWatch(origin=0.5)
    assert mirror.read(process).num_slots == 64
    engine.step(start=1.0)
    engine.profiler.record(RequestRecord(1, 0.9, 1.0, (1.01,), 5, 2, FinishReason.STOP, 1.02))
    engine.step(start=2.0, decode=(2,))
    state = mirror.read(process)
    found = mirror.log.since(0)
    assert [(call["number"], call["start"]) for call in found.calls] == [(1, 0.5), (3, 1.5)]
    assert [(one["number"], one["end"], one["reason"]) for one in found.ended] == [(2, 0.52, "stop")]
    assert state.stats.num_steps == 2 and state.stats.num_requests == 1
    assert [(one.id, one.arrival, one.first_token) for one in state.requests] == [(0, 5.0, None)]
    mirror.read(process)
    assert mirror.log.since(found.cursor).calls == []


def test_an_answer_is_bounded_and_the_next_one_goes_on():
    engine = Engine(num_requests=5000)
    process, mirror = Process(engine), RemoteWatch(origin=0.0)
    mirror.read(process)
    for start in range(KEPT):
        engine.step(float(start), decode=range(1000))  # 12 MB in all: encode refuses a message of more than 1 MiB
    seen = 0
    for _ in range(KEPT):
        state = mirror.read(process)
        assert len(state.requests) == language_model.MAX_REQUESTS
        found = mirror.log.since(seen)
        assert found.num_dropped == 0
        seen = found.cursor
        if seen == KEPT:
            break
    assert [call["start"] for call in mirror.log.since(0).calls] == [float(start) for start in range(KEPT)]
    assert len(process.asked) > KEPT / language_model.MAX_ENTRIES


def test_what_was_lost_before_it_was_read_is_counted():
    engine = Engine()
    process, mirror = Process(engine), RemoteWatch(origin=0.0)
    engine.step()
    mirror.read(process)
    engine.step()
    mirror.read(process)
    for start in range(KEPT + 10):
        engine.step(float(start))
    for _ in range(2):
        mirror.read(process)
    found = mirror.log.since(1)
    assert found.num_dropped == 10 and len(found.calls) == KEPT and found.cursor == KEPT + 11


def test_the_engine_is_watched_only_while_somebody_asks(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(language_model.time, "monotonic", lambda: now[0])
    engine = Engine()
    watch = CallWatch(engine)
    engine.step()
    assert engine.profiler.watcher is None and watch.after(0)["entries"] == []
    now[0] += language_model.WATCH_SECONDS - 1
    engine.step()
    assert len(watch.after(0)["entries"]) == 1
    now[0] += language_model.WATCH_SECONDS + 1
    engine.step()
    assert engine.profiler.watcher is None, "nobody asked"
    assert len(watch.after(0)["entries"]) == 1
    engine.step()
    assert len(watch.after(0)["entries"]) == 2


def test_another_process_begins_again_and_the_numbers_here_go_on():
    mirror = RemoteWatch(origin=0.0)
    first, second = Process(Engine()), Process(Engine())
    for process, count in ((first, 3), (second, 5)):
        process.calls.after(0)
        for start in range(count):
            process.calls._engine.step(float(start))
        mirror.read(process)
    assert [call["start"] for call in mirror.log.since(0).calls] == [0.0, 1.0, 2.0, 0.0, 1.0, 2.0, 3.0, 4.0]
    assert mirror.log.since(3).cursor == 8


def test_another_clock_is_translated():
    class Elsewhere(Process):
        def calls_after(self, number):
            found = super().calls_after(number)
            return {**found, "now": found["now"] - 1000.0}

    engine = Engine(num_requests=1)
    process, mirror = Elsewhere(engine), RemoteWatch(origin=0.0)
    mirror.read(process)
    engine.step(start=1.0)
    (request,) = mirror.read(process).requests
    (call,) = mirror.log.since(0).calls
    assert call["start"] == pytest.approx(1001.0, abs=1) and request.arrival == pytest.approx(1005.0, abs=1)


def test_a_process_that_does_not_answer_holds_one_thread_only():
    engine, gate, is_asked = Engine(), threading.Event(), threading.Event()
    process, mirror = Process(engine), RemoteWatch(origin=0.0)
    known = mirror.read(process)

    class Stuck:
        def calls_after(self, number):
            is_asked.set()
            assert gate.wait(60)
            return process.calls_after(number)

    thread = threading.Thread(target=mirror.read, args=(Stuck(),))
    thread.start()
    try:
        assert is_asked.wait(60)
        start = time.monotonic()
        assert mirror.read(Stuck()) is known and time.monotonic() - start < 30
    finally:
        gate.set()
        thread.join()


def test_a_daemon_of_an_earlier_version_is_not_known():
    class Earlier:
        def calls_after(self, number):
            return {"pid": 1, "models": []}

    assert RemoteWatch(origin=0.0).read(Earlier()) is None
