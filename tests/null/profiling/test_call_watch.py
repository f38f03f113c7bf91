"""Tests that a profiler keeps its last records beside a trace, and that a watch numbers them and finds gaps."""

from __future__ import annotations

import pytest

from staticllm.core import FinishReason, Variant
from staticllm.pipelines.profiling.call_watch import KEPT, CallWatch, RecentCalls
from staticllm.pipelines.profiling.records import KEPT_RECORDS, EngineProgress, JobRecord, RequestRecord, StepRecord
from staticllm.pipelines.profiling.stats import Profiler


def step(start, decode=(), prefill=(), seconds=0.01, **more):
    return StepRecord(start, seconds, Variant(16, 64, 8), tuple(decode), tuple(prefill), slots_in_use=7, **more)


def ended(number, times, arrival=0.0):
    return RequestRecord(number, arrival, times[0] - 0.01, tuple(times), 5, 2, FinishReason.STOP, times[-1])


class Watched:
    """A profiler whose watch is read to the end."""

    def __init__(self):
        self.profiler = Profiler()
        self.watch = CallWatch(self.profiler.ring, lambda: 0.0)

    def add(self, *records):
        for record in records:
            self.profiler.record(record)

    def entries(self, after=0):
        found, has_more = [], True
        while has_more:
            page = self.watch.after(after, EngineProgress((), 64), self.profiler.stats())
            found += page["entries"]
            after, has_more = page["cursor"], page["more"]
        return found


def test_a_profiler_keeps_records_beside_its_trace():
    profiler = Profiler()
    profiler.trace = []
    profiler.record(step(1.0, [1]))
    profiler.trace = None
    profiler.record(step(2.0, [1]))
    assert len(profiler.ring.after(0).records) == 2
    assert profiler.stats().num_steps == 2


def test_statistics_count_every_record_of_a_ring_that_was_full():
    profiler = Profiler()
    for number in range(2 * KEPT_RECORDS + 10):
        profiler.record(step(number, [1]))
    assert profiler.stats().num_steps == 2 * KEPT_RECORDS + 10
    new = profiler.ring.after(5)
    assert (len(new.records), new.end, new.num_dropped) == (KEPT_RECORDS, 2 * KEPT_RECORDS + 10, KEPT_RECORDS + 5)


def test_a_watch_tells_calls_and_answers_once_by_their_number():
    watched = Watched()
    watched.add(step(101.0, prefill=[(1, 4)], num_waiting=2), JobRecord(101.5, 0.1, 0, 3))
    watched.add(ended(1, [101.2, 101.3, 101.6], arrival=101.0))
    call, answer = watched.entries()
    assert (call["number"], call["start"], call["ms"], call["prefill"], call["waiting"]) == (
        1,
        101.0,
        10.0,
        [[1, 4]],
        2,
    )
    assert (answer["number"], answer["ttft_ms"], answer["tpot_ms"], answer["longest_gap_ms"]) == (
        2,
        200.0,
        200.0,
        300.0,
    )
    assert (answer["end"], answer["reason"], answer["cached_tokens"], answer["output_tokens"]) == (101.6, "stop", 2, 3)
    assert watched.entries(after=2) == []
    watched.add(step(102.0, [2]))
    assert [call["number"] for call in watched.entries(after=2)] == [3]


def test_a_watch_tells_which_calls_ran_between_the_blocks_of_another():
    watched = Watched()
    watched.add(step(1.1, [1], is_inserted=True), step(1.0, prefill=[(2, 9)], num_inserted=1, paused_seconds=0.02))
    inserted, whole = watched.entries()
    assert (inserted["inserted"], inserted["is_inserted"]) == (0, True)
    assert (whole["inserted"], whole["is_inserted"], whole["ms"]) == (1, False, 10.0)


def test_the_gap_of_a_call_is_the_longest_time_since_a_previous_token():
    watched = Watched()
    for record in (
        step(1.00, prefill=[(1, 4)]),
        step(1.05, [1], prefill=[(2, 4)]),
        step(1.20, [1, 2]),
        step(1.30, [1], prefill=[(2, 4)], preempted=(2,)),  # the second computes its tokens again
        step(1.50, [1, 2]),
        step(1.60, [2], has_failed=True),
    ):
        watched.add(record)
    assert [call["gap_ms"] for call in watched.entries()] == [
        None, pytest.approx(50), pytest.approx(150), pytest.approx(100), pytest.approx(300), None,
    ]  # fmt: skip


def test_a_request_is_forgotten_after_its_last_call_which_is_recorded_after_its_end():
    watched = Watched()
    for number in range(20_000):
        watched.add(step(number, prefill=[(number, 4)]))
        watched.add(ended(number, [number + 0.1, number + 0.2]))
        watched.add(step(number + 0.1, [number]))
        if number % 1000 == 0:
            watched.entries(10**9)
    assert watched.entries()[-1]["gap_ms"] == pytest.approx(100)
    assert len(watched.watch.last_tokens) <= 1
    assert len(watched.watch.decoding) <= 1


def test_what_nobody_reads_is_dropped_and_counted():
    watched = Watched()
    watched.add(step(0.0, [1]))
    watched.entries()
    for number in range(KEPT_RECORDS + 10):
        watched.add(step(number, [1]))
    assert KEPT >= KEPT_RECORDS, "the log throws nothing away that the ring has"
    page = watched.watch.after(1, EngineProgress((), 64), watched.profiler.stats())
    found = watched.entries(after=1)
    end = KEPT_RECORDS + 11
    assert [found[0]["number"], found[-1]["number"]] == [end - KEPT + 1, end]
    assert page["dropped"] == end - KEPT - 1
    lost = Watched()
    lost.add(step(0.0, [1]))
    lost.entries()
    lost.add(*(step(number, [2]) for number in range(KEPT_RECORDS)), step(1e6, [1]))
    assert lost.entries()[-1]["gap_ms"] is None, "the calls between are not known"


def test_a_hole_between_entries_is_counted_in_its_page_only():
    log = RecentCalls()
    log.add({"id": 1})
    log.skip(5)
    log.add({"id": 2})
    log.skip(2)
    assert [(log.after(number).num_dropped, len(log.after(number).entries)) for number in (0, 1, 3, 6, 7, 9)] == [
        (7, 2), (7, 1), (5, 1), (2, 1), (2, 0), (0, 0),
    ]  # fmt: skip
    page = log.after(0, lambda entries: entries[:1])
    assert (page.cursor, page.num_dropped, page.has_more) == (1, 0, True)
    assert (log.after(1).cursor, log.after(1).has_more) == (9, False)


def test_a_cursor_of_another_watch_gets_everything():
    watched = Watched()
    watched.add(step(1.0, [1]))
    page = watched.watch.after(500, EngineProgress((), 64), watched.profiler.stats())
    assert (page["cursor"], page["dropped"], len(page["entries"])) == (1, 0, 1)
