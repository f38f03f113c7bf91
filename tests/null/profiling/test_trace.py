"""Tests traces: records become Chrome events and spans of requests, and survive saving and loading."""

import json
import warnings
from dataclasses import astuple, replace
from itertools import pairwise

import numpy as np
import pytest

from staticllm.core import FinishReason, Variant
from staticllm.errors import ConfigError, StaticLLMError
from staticllm.pipelines.profiling.chrome_trace import spans_of, to_chrome
from staticllm.pipelines.profiling.records import HostTimes, RequestRecord, StepRecord
from staticllm.pipelines.profiling.stats import Profiler, breakdowns_of
from staticllm.pipelines.profiling.trace import Trace, recording
from staticllm.pipelines.scheduling.interface import Plan
from staticllm.pipelines.scheduling.planner import POLICIES, make_policy
from staticllm.testing import fake_answer, fake_engine, fake_request, run_to_end


def served(name="prefill_first", count=9, max_num_seqs=3, new=7):
    """Return the trace of ``count`` requests without common prefixes, and the requests."""
    engine = fake_engine(make_policy(name), max_num_seqs)
    requests = [fake_request([50 * i + k for k in range(5 + 3 * i)], new) for i in range(count)]
    with recording(engine.core.profiler) as trace:
        run_to_end(engine, requests)
    assert engine.core.profiler.trace is None
    return trace, requests


def call(start, prefill=(), decode=(), swapped=()):
    return StepRecord(start, 0.5, Variant(16, 64, 6), decode, prefill, 3, 1, len(swapped), len(decode), swapped)


def slices(document, category):
    return [event for event in document["traceEvents"] if event.get("cat") == category]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_trace_holds_every_step_and_every_row(name):
    trace, requests = served(name)
    document = json.loads(json.dumps(to_chrome(trace.steps, trace.requests)))
    calls, spans = slices(document, "call"), slices(document, "track")
    assert len(calls) == len(trace.steps) > 9
    for event in calls:
        args = event["args"]
        rows = sum(count for _, count in args["prefill"]) + len(args["decode"])
        assert rows > 0
        assert rows + args["padding"] == args["rows"]
    for request in requests:
        mine = [event for event in spans if event["tid"] == request.id]
        rows = {
            kind: sum(e["args"].get("rows", 0) for e in mine if e["name"] == kind) for kind in ("prefill", "decode")
        }
        assert rows == {
            "prefill": len(request.request.prompt) - request.num_cached,
            "decode": request.num_generated - 1,
        }
        assert sum(event["name"] == "queued" for event in mine) == 1


def test_the_document_has_the_format_that_viewers_read():
    trace, requests = served()
    document = to_chrome(trace.steps, trace.requests)
    assert set(document) == {"traceEvents", "displayTimeUnit", "otherData"}
    for event in document["traceEvents"]:
        assert event["ph"] in "XMCi"
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert event["ph"] == "M" or event["ts"] >= 0
        assert event["ph"] != "X" or (event["dur"] >= 0 and isinstance(event["tid"], int))
        assert event["ph"] != "C" or all(value >= 0 for value in event["args"].values())
    counters = {event["name"] for event in document["traceEvents"] if event["ph"] == "C"}
    assert counters == {"slots in use", "running", "waiting", "swapped"}
    assert [e["name"] for e in slices(document, "end")] == ["length"] * len(requests)
    named = {e["args"]["name"] for e in document["traceEvents"] if e["name"] == "thread_name"}
    assert named == {"calls", "host", *(f"request {request.id}" for request in requests)}


def test_a_trace_is_equal_after_saving_and_loading(tmp_path):
    trace, _ = served()
    trace.save(tmp_path / "trace.json")
    again = Trace.load(tmp_path / "trace.json")
    zero = min(request.arrival for request in trace.requests)
    for before, after in zip(trace.steps, again.steps, strict=True):
        assert (after.start, after.seconds) == pytest.approx((before.start - zero, before.seconds), abs=2e-9)
        assert astuple(after.host) == pytest.approx(astuple(before.host), abs=2e-9)
        assert after == replace(before, start=after.start, seconds=after.seconds, host=after.host)
    for before, after in zip(trace.requests, again.requests, strict=True):
        assert after.token_times == pytest.approx([moment - zero for moment in before.token_times], abs=2e-9)
        assert after.ended == pytest.approx(before.ended - zero, abs=2e-9)
        assert (after.id, after.num_prompt, after.num_cached) == (before.id, before.num_prompt, before.num_cached)
        assert after.reason is before.reason
    again.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "trace.json").read_text()


def interrupted():
    """Return the records of a call with a prompt, between whose blocks two steps ran; these are recorded first."""
    inserted = [
        replace(call(start, decode=(7,), swapped=(8,)), seconds=0.05, is_inserted=True) for start in (1.1, 1.300000001)
    ]
    whole = replace(call(1.0, prefill=((9, 16),), swapped=(8,)), seconds=0.4, paused_seconds=0.11, num_inserted=2)
    return [*inserted, whole, call(1.6, decode=(7,))]


def test_calls_between_the_blocks_of_another_lie_within_it(tmp_path):
    steps = interrupted()
    document = to_chrome(steps, [])
    first, second, whole, _ = slices(document, "call")
    ends = [event["ts"] + event["dur"] for event in (first, second, whole)]
    assert whole["ts"] < first["ts"] < ends[0] < second["ts"] < ends[1] < ends[2]
    assert ends[2] - whole["ts"] == pytest.approx(0.51e6)
    Trace(steps).save(tmp_path / "trace.json")
    again = Trace.load(tmp_path / "trace.json").steps
    assert [(s.num_inserted, s.is_inserted) for s in again] == [(0, True), (0, True), (2, False), (0, False)]
    assert [s.seconds for s in again] == pytest.approx([s.seconds for s in steps], abs=2e-9)
    assert [s.paused_seconds for s in again] == pytest.approx([0, 0, 0.11, 0], abs=2e-9)
    spans = spans_of(steps, [])
    assert [(span.kind, span.start) for span in spans[9]] == [("prefill", 1.0)]
    assert [(span.kind, span.start, span.end) for span in spans[8]] == [("swapped", 1.0, 1.6)], "once, not three times"


def test_the_time_of_calls_between_blocks_counts_once():
    profiler = Profiler()
    host = HostTimes(0.0, 0.0, 0.0, 0.0)
    for step in interrupted():
        profiler.record(replace(step, host=host))
    stats = profiler.stats()
    assert (stats.num_steps, stats.num_inserted) == (4, 2)
    assert stats.device_seconds == pytest.approx(0.05 + 0.05 + 0.4 + 0.5)
    assert stats.prefill_share == pytest.approx(0.4)
    (_, decode) = breakdowns_of([replace(step, host=host) for step in interrupted()])
    assert decode.ms["other"] == pytest.approx(1e3 * (1.6 - 1.51) / 3), (
        "blocks of the other call are no time of the host"
    )


def test_spans_show_when_a_request_was_swapped():
    steps = [call(1, prefill=((7, 4),)), call(2, decode=(8,), swapped=(7,)), call(3, decode=(8,), swapped=(7,))]
    steps += [call(4, decode=(7, 8)), call(5, decode=(8,), swapped=(7,))]
    request = RequestRecord(7, 0.25, 1.0, (1.6,), 4, 0, FinishReason.CANCELLED, ended=5.25)
    spans = spans_of(steps, [request])
    assert [(span.kind, span.start, span.end) for span in spans[7]] == [
        ("queued", 0.25, 1), ("prefill", 1, 1.5), ("swapped", 2, 4), ("decode", 4, 4.5), ("swapped", 5, 5.25),
    ]  # fmt: skip
    assert [span.kind for span in spans[8]] == ["decode"] * 4, "no record of its end: only its steps are known"


def test_slices_of_one_track_never_overlap_in_part():
    """The moments are not exact floats: a viewer drops a slice that overlaps another one by a rounding error."""
    steps = [call(0.1 * k, decode=(7,), swapped=(8,)) for k in range(1, 40)]
    steps = [StepRecord(s.start, 0.1, *list(vars(s).values())[2:]) for s in steps]
    requests = [RequestRecord(number, 0.03, 0.1, (0.2, 4.1), 4, 0, FinishReason.LENGTH, 4.1) for number in (7, 8)]
    document = to_chrome(steps, requests)
    for number in (7, 8):
        mine = [e for c in ("request", "track") for e in slices(document, c) if e["tid"] == number]
        whole, *inner = [(round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3)) for e in mine]
        assert whole[0] == inner[0][0]
        assert inner[-1][1] <= whole[1]
        assert all(before[1] <= after[0] for before, after in pairwise(inner))


def test_a_request_that_never_ran_was_queued_until_its_end():
    engine = fake_engine(make_policy("fcfs"))
    request = fake_request([1, 2], 3)
    request.cancel(None, FinishReason.CANCELLED)
    with recording(engine.core.profiler) as trace:
        run_to_end(engine, [request])
    ((span,),) = spans_of(trace.steps, trace.requests).values()
    assert span.kind == "queued"
    assert span.end >= span.start == request.request.arrival
    assert slices(to_chrome(trace.steps, trace.requests), "end")[0]["name"] == "cancelled"


def test_a_full_trace_drops_the_oldest_records_with_a_warning(tmp_path):
    engine = fake_engine(make_policy("fcfs"))
    with (
        pytest.warns(UserWarning, match="lost its .* oldest records, it holds 5"),
        recording(engine.core.profiler, 5) as trace,
    ):
        run_to_end(engine, [fake_request([1, 2], 12)])
    assert len(trace.steps) == 4
    assert len(trace.requests) == 1
    assert trace.num_dropped == 8
    trace.save(tmp_path / "trace.json")
    assert Trace.load(tmp_path / "trace.json").num_dropped == 8


def test_nothing_is_recorded_outside_the_block():
    engine = fake_engine(make_policy("fcfs"))
    run_to_end(engine, [fake_request([1, 2], 4)])
    with warnings.catch_warnings(), recording(engine.core.profiler) as trace:
        warnings.simplefilter("error")
        with pytest.raises(StaticLLMError, match="already"), recording(engine.core.profiler):
            pass
        run_to_end(engine, [fake_request([3, 4], 4)])
    num_steps = len(trace.steps)
    run_to_end(engine, [fake_request([5, 6], 4)])
    assert len(trace.steps) == num_steps == 4


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (None, "No such file"),
        ("", "not JSON"),
        ("[1, 2]", "not a trace"),
        ("{}", "not a trace"),
        ('{"traceEvents": [{"ph": "X", "cat": "call"}]}', "not a trace"),
        ('{"traceEvents": [{"ph": "X", "cat": "gpu", "name": "kernel"}]}', "no device calls"),
        ('{"traceEvents": []}', "no device calls"),
    ],
)
def test_a_file_without_a_trace_is_refused(tmp_path, text, word):
    if text is not None:
        (tmp_path / "trace.json").write_text(text)
    with pytest.raises(ConfigError, match=word) as caught:
        Trace.load(tmp_path / "trace.json")
    assert "staticllm trace record" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_trace_that_cannot_be_written_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="choose another path"):
        served()[0].save(tmp_path)
    with (
        pytest.raises(ConfigError, match="max_records=0"),
        recording(fake_engine(make_policy("fcfs")).core.profiler, 0),
    ):
        pass


def test_the_most_records_may_be_a_number_of_numpy():
    with recording(fake_engine(make_policy("fcfs")).core.profiler, np.int64(3)) as trace:
        pass
    assert trace._records.maxlen == 3


class Fickle:
    """A policy that preempts the first request once, after its second token."""

    def __init__(self):
        self.has_preempted = False

    def plan(self, view):
        if view.running and view.running[0].num_generated == 2 and not self.has_preempted:
            self.has_preempted = True
            first, other = sorted((*view.running, *view.waiting), key=lambda request: request.id)
            return Plan(preempt=(first.id,), prefill=((other.id, other.num_left),))
        waiting = (*view.prefilling, *view.waiting)
        if waiting and not view.running:
            return Plan(prefill=((waiting[0].id, waiting[0].num_left),))
        return Plan(decode=tuple(request.id for request in view.running))


def test_a_preempted_request_is_queued_again():
    engine = fake_engine(Fickle())
    first, other = fake_request([1, 2, 3], 4), fake_request([7, 8], 2)
    with recording(engine.core.profiler) as trace:
        run_to_end(engine, [first, other])
    engine.close()
    assert first.tokens == fake_answer([1, 2, 3], 4)
    assert engine.core.profiler.stats().num_preemptions == 1
    (step,) = [step for step in trace.steps if step.preempted]
    spans = spans_of(trace.steps, trace.requests)[first.id]
    assert [span.kind for span in spans] == ["queued", "prefill", "decode", "queued", "prefill", "decode"]
    assert spans[3].start == step.start
    assert spans[3].end == spans[4].start > step.start
    document = to_chrome(trace.steps, trace.requests)
    (mark,) = slices(document, "preempted")
    (event,) = [event for event in slices(document, "call") if event["args"]["preempted"] == [first.id]]
    assert mark["tid"] == first.id
    assert mark["ts"] == event["ts"]
    assert step.preempted == (first.id,)


def test_a_failed_call_is_in_the_trace_but_not_in_the_statistics(monkeypatch):
    engine = fake_engine(make_policy("fcfs"))
    run, calls = engine.runner.run, []

    def fails_once(*args):
        calls.append(args)
        if len(calls) == 2:
            raise RuntimeError("the driver was reset")
        return run(*args)

    monkeypatch.setattr(engine.runner, "run", fails_once)
    with recording(engine.core.profiler) as trace:
        run_to_end(engine, [fake_request([1, 2], 3)])
        run_to_end(engine, [fake_request([5, 6], 3)])
    assert [step.has_failed for step in trace.steps] == [False, True, False, False, False]
    assert trace.steps[1].decode
    assert slices(to_chrome(trace.steps, []), "call")[1]["name"].endswith("failed")
    stats = engine.core.profiler.stats()
    assert (stats.num_steps, stats.num_failed_steps) == (5, 1)
    assert stats.device_seconds == pytest.approx(sum(s.seconds for s in trace.steps if not s.has_failed))


def test_running_requests_do_not_count_as_waiting():
    engine = fake_engine(make_policy("fcfs"), 1)
    with recording(engine.core.profiler) as trace:
        run_to_end(engine, [fake_request([1, 2], 2), fake_request([5, 6], 2)])
    assert [step.num_waiting for step in trace.steps] == [1, 1, 0, 0]


def test_host_times_are_slices_before_and_after_their_call():
    host = HostTimes(plan=0.01, prepare=0.02, commit=0.03, sampling=0.04)
    document = to_chrome([replace(call(1, decode=(7,)), host=host), replace(call(2, decode=(7,)), host=host)], [])
    last = {
        event["name"]: (event["ts"], event["dur"]) for event in slices(document, "host")
    }  # the times of the second call
    expected = {"plan": (0.97, 0.01), "prepare": (0.98, 0.02), "commit": (1.5, 0.03), "sampling": (1.53, 0.04)}
    assert last == {name: pytest.approx((1e6 * start, 1e6 * dur)) for name, (start, dur) in expected.items()}
