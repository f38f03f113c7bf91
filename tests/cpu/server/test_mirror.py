"""Tests how the calls of an engine are told in bounded pieces, also to another process, and mirrored."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

from staticllm.core import FinishReason, Variant
from staticllm.pipelines.profiling.call_watch import KEPT, MAX_ENTRIES, MAX_REQUESTS, CallWatch
from staticllm.pipelines.profiling.records import (
    KEPT_RECORDS,
    EngineProgress,
    RequestProgress,
    RequestRecord,
    StepRecord,
)
from staticllm.pipelines.profiling.stats import Profiler
from staticllm.server import feed as feed_module
from staticllm.server.feed import Mirror, SchedulerFeed
from staticllm.server.models.tenants import TenantShares
from staticllm.wire.messages import Kind, Message, decode, encode

PAUSE = 1e-9


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
        self.engine, self.asked = engine, []
        self.calls = CallWatch(engine.profiler.ring, time.perf_counter)

    def calls_after(self, number):
        self.asked.append(number)
        body = self.calls.after(number, self.engine.progress(), self.engine.stats())
        return decode(encode(Message(Kind.OK, body=body))).body


def test_calls_and_answers_are_mirrored_in_their_order_with_numbers_of_their_own():
    engine = Engine(num_requests=1)
    process, mirror = Process(engine), Mirror(origin=0.5)
    assert mirror.read(process.calls_after, PAUSE).num_slots == 64
    engine.step(start=1.0)
    engine.profiler.record(RequestRecord(1, 0.9, 1.0, (1.01,), 5, 2, FinishReason.STOP, 1.02))
    engine.step(start=2.0, decode=(2,))
    state = mirror.read(process.calls_after, PAUSE)
    found = mirror.log.after(0)
    assert [(call["number"], call["start"]) for call in found.entries if "rows" in call] == [(1, 0.5), (3, 1.5)]
    assert [(one["number"], one["end"], one["reason"]) for one in found.entries if "rows" not in one] == [
        (2, 0.52, "stop")
    ]
    assert state.stats.num_steps == 2
    assert state.stats.num_requests == 1
    assert [(one.id, one.arrival, one.first_token) for one in state.requests] == [(0, 5.0, None)]
    mirror.read(process.calls_after, PAUSE)
    assert mirror.log.after(found.cursor).entries == []


def test_an_answer_is_bounded_and_the_next_one_goes_on():
    count = 1024
    engine = Engine(num_requests=5000)
    process, mirror = Process(engine), Mirror(origin=0.0)
    mirror.read(process.calls_after, PAUSE)
    for start in range(count):
        engine.step(float(start), decode=range(1000))  # 12 MB in all: encode refuses a message of more than 1 MiB
    seen = 0
    for _ in range(count):
        state = mirror.read(process.calls_after, PAUSE)
        assert len(state.requests) == MAX_REQUESTS
        found = mirror.log.after(seen)
        assert found.num_dropped == 0
        seen = found.cursor
        if seen == count:
            break
    assert [call["start"] for call in mirror.log.after(0).entries] == [float(start) for start in range(count)]
    assert len(process.asked) > count / MAX_ENTRIES


def test_a_reader_that_begins_gets_the_log_in_pages():
    engine = Engine()
    process, feed = Process(engine), SchedulerFeed()
    for start in range(2 * feed_module.MAX_ENTRIES + 7):
        engine.step(float(start))
    spec = SimpleNamespace(name="demo")
    limits = SimpleNamespace(max_running=1, max_per_client=1, max_waiting=1)
    admission = SimpleNamespace(waiting_since=(), limits=limits, shares=TenantShares())
    loaded = SimpleNamespace(admission=admission, num_seqs=1, home=None)
    model = SimpleNamespace(spec=spec, loaded=loaded, admissions=(admission,), calls_after=process.calls_after)
    cursor, sizes, numbers = 0, [], []
    while not sizes or sizes[-1]:
        found = feed.reader(model, cursor)()
        assert found["dropped"] == 0
        sizes.append(len(found["calls"]) + len(found["ended"]))
        numbers += [call["number"] for call in found["calls"]]
        cursor = found["cursor"]
    assert sizes == [feed_module.MAX_ENTRIES, feed_module.MAX_ENTRIES, 7, 0]
    assert numbers == list(range(1, 2 * feed_module.MAX_ENTRIES + 8))


def test_what_was_lost_before_it_was_read_is_counted():
    engine = Engine()
    process, mirror = Process(engine), Mirror(origin=0.0)
    engine.step()
    mirror.read(process.calls_after, PAUSE)
    engine.step()
    mirror.read(process.calls_after, PAUSE)
    for start in range(KEPT + 10):
        engine.step(float(start))
    for _ in range(KEPT // MAX_ENTRIES):
        mirror.read(process.calls_after, PAUSE)
    found = mirror.log.after(1)
    assert found.num_dropped == 11
    assert len(found.entries) == KEPT
    assert found.cursor == KEPT + 12


def test_a_hole_behind_calls_that_are_kept_is_counted_once():
    engine = Engine()
    process, mirror = Process(engine), Mirror(origin=0.0)
    engine.step()
    mirror.read(process.calls_after, PAUSE)
    for start in range(KEPT_RECORDS + 10):
        engine.step(float(start))
    seen, dropped, told = 0, [], 0
    for _ in range(KEPT // MAX_ENTRIES):
        mirror.read(process.calls_after, PAUSE)
        found = mirror.log.after(seen)
        dropped.append(found.num_dropped)
        told += len(found.entries)
        seen = found.cursor
    assert [each for each in dropped if each] == [10]
    assert told == KEPT_RECORDS + 1, "the first call, and what the ring still had"
    assert seen == KEPT_RECORDS + 11


def test_what_ran_before_the_first_reading_and_is_lost_is_counted():
    engine = Engine()
    process, mirror = Process(engine), Mirror(origin=0.0)
    mirror.read(process.calls_after, PAUSE)
    for start in range(KEPT_RECORDS + 10):
        engine.step(float(start))
    found = process.calls_after(0)
    assert found["dropped"] == 10
    for _ in range(KEPT // MAX_ENTRIES):
        mirror.read(process.calls_after, PAUSE)
    found = mirror.log.after(0)
    assert (found.num_dropped, len(found.entries), found.cursor) == (10, KEPT_RECORDS, KEPT_RECORDS + 10)


def test_another_process_begins_again_and_the_numbers_here_go_on():
    mirror = Mirror(origin=0.0)
    first, second = Process(Engine()), Process(Engine())
    for process, count in ((first, 3), (second, 5)):
        process.calls_after(0)
        for start in range(count):
            process.engine.step(float(start))
        mirror.read(process.calls_after, PAUSE)
    assert [call["start"] for call in mirror.log.after(0).entries] == [0.0, 1.0, 2.0, 0.0, 1.0, 2.0, 3.0, 4.0]
    assert mirror.log.after(3).cursor == 8


def test_another_clock_is_translated():
    class Elsewhere(Process):
        def calls_after(self, number):
            found = super().calls_after(number)
            return {**found, "now": found["now"] - 1000.0}

    engine = Engine(num_requests=1)
    process, mirror = Elsewhere(engine), Mirror(origin=0.0)
    mirror.read(process.calls_after, PAUSE)
    engine.step(start=1.0)
    (request,) = mirror.read(process.calls_after, PAUSE).requests
    (call,) = mirror.log.after(0).entries
    assert call["start"] == pytest.approx(1001.0, abs=1)
    assert request.arrival == pytest.approx(1005.0, abs=1)


def test_a_process_that_does_not_answer_holds_one_thread_only():
    engine, gate, is_asked = Engine(), threading.Event(), threading.Event()
    process, mirror = Process(engine), Mirror(origin=0.0)
    known = mirror.read(process.calls_after, PAUSE)

    class Stuck:
        def calls_after(self, number):
            is_asked.set()
            assert gate.wait(60)
            return process.calls_after(number)

    thread = threading.Thread(target=mirror.read, args=(Stuck().calls_after, PAUSE))
    thread.start()
    try:
        assert is_asked.wait(60)
        start = time.monotonic()
        assert mirror.read(Stuck().calls_after, PAUSE) is known
        assert time.monotonic() - start < 30
    finally:
        gate.set()
        thread.join()


def test_a_daemon_of_an_earlier_version_is_not_known():
    class Earlier:
        def calls_after(self, number):
            return {"pid": 1, "models": []}

    assert Mirror(origin=0.0).read(Earlier().calls_after) is None
