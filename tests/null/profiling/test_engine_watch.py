"""Tests that a profiler hands its records to a watcher, beside a trace, and that a watch numbers them and finds gaps."""

from __future__ import annotations

import pytest

from staticllm.core import FinishReason, Variant
from staticllm.pipelines.profiling.engine_watch import KEPT, MAX_PENDING, EngineWatch
from staticllm.pipelines.profiling.records import JobRecord, RequestRecord, StepRecord
from staticllm.pipelines.profiling.stats import Profiler


def step(start, decode=(), prefill=(), seconds=0.01, **more):
    return StepRecord(start, seconds, Variant(16, 64, 8), tuple(decode), tuple(prefill), slots_in_use=7, **more)


def ended(number, times, arrival=0.0):
    return RequestRecord(number, arrival, times[0] - 0.01, tuple(times), 5, 2, FinishReason.STOP, times[-1])


def test_a_profiler_hands_records_to_its_trace_and_to_its_watcher():
    profiler = Profiler()
    profiler.trace, profiler.watcher = [], []
    profiler.record(step(1.0, [1]))
    profiler.trace = None
    profiler.record(step(2.0, [1]))
    assert len(profiler.watcher) == 2
    assert profiler.stats().num_steps == 2


def test_a_watch_tells_calls_and_answers_once_by_their_number():
    watch = EngineWatch(5, origin=100.0)
    watch.append(step(101.0, prefill=[(1, 4)], num_waiting=2))
    watch.append(JobRecord(101.5, 0.1, 0, 3))
    watch.append(ended(1, [101.2, 101.3, 101.6], arrival=101.0))
    found = watch.since(0)
    (call,), (answer,) = found.calls, found.ended
    assert (call["number"], call["start"], call["ms"], call["prefill"], call["waiting"]) == (5, 1.0, 10.0, [[1, 4]], 2)
    assert (answer["number"], answer["ttft_ms"], answer["tpot_ms"], answer["longest_gap_ms"]) == (
        6,
        200.0,
        200.0,
        300.0,
    )
    assert (answer["end"], answer["reason"], answer["cached_tokens"], answer["output_tokens"]) == (1.6, "stop", 2, 3)
    assert found.cursor == 6
    assert found.num_dropped == 0
    again = watch.since(found.cursor)
    assert (again.calls, again.ended, again.cursor) == ([], [], 6)
    watch.append(step(102.0, [2]))
    assert [call["number"] for call in watch.since(6).calls] == [7] == [watch.next_number - 1]


def test_the_gap_of_a_call_is_the_longest_time_since_a_previous_token():
    watch = EngineWatch(1, origin=0.0)
    for record in (
        step(1.00, prefill=[(1, 4)]),
        step(1.05, [1], prefill=[(2, 4)]),
        step(1.20, [1, 2]),
        step(1.30, [1], prefill=[(2, 4)], preempted=(2,)),  # the second computes its tokens again
        step(1.50, [1, 2]),
        step(1.60, [2], has_failed=True),
    ):
        watch.append(record)
    assert [call["gap_ms"] for call in watch.since(0).calls] == [
        None, pytest.approx(50), pytest.approx(150), pytest.approx(100), pytest.approx(300), None,
    ]  # fmt: skip


def test_a_request_is_forgotten_after_its_last_call_which_is_recorded_after_its_end():
    watch = EngineWatch(1, origin=0.0)
    for number in range(20_000):
        watch.append(step(number, prefill=[(number, 4)]))
        watch.append(ended(number, [number + 0.1, number + 0.2]))
        watch.append(step(number + 0.1, [number]))
        watch.next_number  # noqa: B018 - it takes what is pending
    assert len(watch._last_tokens) <= 1
    assert len(watch._decoding) <= 1
    assert watch.since(0).calls[-1]["gap_ms"] == pytest.approx(100)


def test_what_nobody_reads_is_dropped_and_counted():
    watch = EngineWatch(1, origin=0.0)
    for number in range(MAX_PENDING + 10):
        watch.append(step(number, [1]))
    found = watch.since(1)
    assert len(found.calls) == KEPT
    assert found.cursor == MAX_PENDING + 10
    assert found.calls[-1]["number"] == found.cursor
    assert found.calls[0]["number"] == found.cursor - KEPT + 1
    assert found.num_dropped == found.cursor - KEPT - 1
    watch.restart()
    watch.append(step(1e6, [1]))
    assert [call["gap_ms"] for call in watch.since(found.cursor).calls] == [None]


def test_a_cursor_of_another_watch_gets_everything():
    watch = EngineWatch(1, origin=0.0)
    watch.append(step(1.0, [1]))
    found = watch.since(500)
    assert found.cursor == 1
    assert found.num_dropped == 0
    assert len(found.calls) == 1
