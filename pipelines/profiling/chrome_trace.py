"""Converts records to Chrome trace events and back (the "Trace Event Format" that Perfetto and chrome://tracing read).

Process 1 is the device: one slice per call, with those between its blocks inside it, counters, and the host's work around each
call. Process 2 has one track per request.
``from_chrome`` reads only slices of the categories ``call``, ``job`` and ``request``; all other events are for viewers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeAlias

from staticllm.core import FinishReason, Variant

from .records import HostTimes, JobRecord, RequestRecord, StepRecord

Event: TypeAlias = dict[str, Any]
Clock: TypeAlias = Callable[[float], int]  # from seconds to ns after the first moment of the trace
DEVICE, REQUESTS = 1, 2
HOST_TRACK = 1
SCHEMA = 5


@dataclass(frozen=True)
class Recorded:
    """The content of a document: device calls, requests that have ended, the number of missing older records, and jobs."""

    steps: list[StepRecord]
    requests: list[RequestRecord]
    num_dropped: int
    jobs: list[JobRecord]


def to_chrome(
    steps: Sequence[StepRecord], requests: Sequence[RequestRecord], num_dropped: int = 0, jobs: Sequence[JobRecord] = ()
) -> dict[str, Any]:
    """Return the document of these records. ``ts`` and ``dur`` are microseconds; the earliest moment of all records is 0."""
    begins = [*(step.start for step in steps), *(job.start for job in jobs), *(request.arrival for request in requests)]
    zero = min(begins, default=0.0)

    def clock(seconds: float) -> int:
        return round((seconds - zero) * 1e9)

    events = [
        *_names(),
        *(event for step in steps for event in _step_events(step, clock)),
        *(_job_event(job, clock) for job in jobs),
        *(event for request in requests for event in _request_events(request, clock)),
        # spans come last, because viewers draw the first of several slices that begin together outermost
        *_span_events(steps, requests, clock),
    ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"producer": "staticllm", "schema": SCHEMA, "dropped_records": num_dropped},
    }


def from_chrome(document: Any) -> Recorded:
    """Return the records in a document that ``to_chrome`` made. Moments count from 0 s and are exact to a nanosecond.

    Raises:
        LookupError, TypeError, ValueError: the document is not one of ``to_chrome``.
    """
    calls = [event for event in document["traceEvents"] if event.get("cat") == "call"]
    ends = [event for event in document["traceEvents"] if event.get("cat") == "request"]
    num_dropped = int(document.get("otherData", {}).get("dropped_records", 0))
    jobs = [_job(event) for event in document["traceEvents"] if event.get("cat") == "job"]
    return Recorded([_step(event) for event in calls], [_request(event) for event in ends], num_dropped, jobs)


def _names() -> Iterator[Event]:
    for pid, name in ((DEVICE, "device"), (REQUESTS, "requests")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    for track, name in ((0, "calls"), (HOST_TRACK, "host")):
        yield {"ph": "M", "name": "thread_name", "pid": DEVICE, "tid": track, "args": {"name": name}}


def _slice(name: str, category: str, pid: int, tid: int, start: int, end: int, args: dict[str, Any]) -> Event:
    """Return a slice from ``start`` to ``end``, in whole ns: with later rounding, two adjacent slices could overlap."""
    return {
        "ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid,
        "ts": start / 1e3, "dur": max(0, end - start) / 1e3, "args": args,
    }  # fmt: skip


def _step_events(step: StepRecord, clock: Clock) -> Iterator[Event]:
    variant = step.variant
    args = {
        "rows": variant.rows, "kv_len": variant.kv_len, "sequences": variant.sequences,
        "extra_logits": variant.extra_logits, "drafts": [list(draft) for draft in step.drafts],
        "draft_ns": round(step.draft_seconds * 1e9),
        "prefill": [list(pair) for pair in step.prefill], "decode": list(step.decode), "padding": step.padding_rows,
        "slots_in_use": step.slots_in_use, "waiting": step.num_waiting, "running": step.num_running,
        "num_swapped": step.num_swapped, "swapped": list(step.swapped), "preempted": list(step.preempted),
        "failed": step.has_failed, "host_ns": None if step.host is None else _host_ns(step.host),
        "inserted": step.num_inserted, "paused_ns": round(step.paused_seconds * 1e9), "is_inserted": step.is_inserted,
    }  # fmt: skip
    start = clock(step.start)
    name = f"{variant} failed" if step.has_failed else str(variant)
    yield _slice(name, "call", DEVICE, 0, start, clock(step.end), args)
    yield from _host_events(step, clock)
    for request in step.preempted:
        yield _mark("preempted", "preempted", request, start)
    counters = {
        "slots in use": {"slots": step.slots_in_use},
        "running": {"requests": step.num_running},
        "waiting": {"requests": step.num_waiting},
        "swapped": {"requests": step.num_swapped},
    }
    for name, value in counters.items():
        yield {"ph": "C", "name": name, "pid": DEVICE, "ts": start / 1e3, "args": value}


def _job_event(job: JobRecord, clock: Clock) -> Event:
    args = {"source": job.source, "parts": job.num_parts}
    return _slice(f"job of model {job.source}", "job", DEVICE, 0, clock(job.start), clock(job.end), args)


def _host_ns(host: HostTimes) -> dict[str, int]:
    return {field.name: round(getattr(host, field.name) * 1e9) for field in fields(host)}


def _host_events(step: StepRecord, clock: Clock) -> Iterator[Event]:
    """Yield slices of the engine's work before and after the call, on a track of their own."""
    if step.host is None:
        return
    host = step.host
    end = step.end
    moments = {
        "plan": (step.start - host.prepare - host.plan, step.start - host.prepare),
        "prepare": (step.start - host.prepare, step.start),
        "commit": (end, end + host.commit),
        "sampling": (end + host.commit, end + host.commit + host.sampling),
    }
    for name, (first, last) in moments.items():
        yield _slice(name, "host", DEVICE, HOST_TRACK, max(0, clock(first)), max(0, clock(last)), {})


def _span_events(steps: Sequence[StepRecord], requests: Sequence[RequestRecord], clock: Clock) -> Iterator[Event]:
    for number, spans in spans_of(steps, requests).items():
        name = {"name": f"request {number}"}
        yield {"ph": "M", "name": "thread_name", "pid": REQUESTS, "tid": number, "args": name}
        for span in spans:
            args = {"rows": span.rows} if span.rows else {}
            yield _slice(span.kind, "track", REQUESTS, number, clock(span.start), clock(span.end), args)


def _request_events(request: RequestRecord, clock: Clock) -> Iterator[Event]:
    """Yield the slice that encloses all others of a request, and the mark at its end."""
    args = {
        "prompt_tokens": request.num_prompt, "cached_tokens": request.num_cached, "reason": str(request.reason),
        "started_ns": _optional(clock, request.started), "ended_ns": _optional(clock, request.ended),
        "token_times_ns": [clock(moment) for moment in request.token_times],
    }  # fmt: skip
    last = max(moment for moment in (request.arrival, request.ended, *request.token_times) if moment is not None)
    name = f"request {request.id}"
    start = clock(request.arrival)
    end = clock(last)
    yield _slice(name, "request", REQUESTS, request.id, start, end, args)
    yield _mark(str(request.reason), "end", request.id, end)


def _mark(name: str, category: str, request: int, moment: int) -> Event:
    """Return a mark on the track of a request; ``moment`` in ns."""
    return {
        "ph": "i", "name": name, "cat": category, "s": "t", "pid": REQUESTS, "tid": request, "ts": moment / 1e3,
    }  # fmt: skip


def _optional(clock: Clock, seconds: float | None) -> int | None:
    return None if seconds is None else clock(seconds)


def _step(event: Event) -> StepRecord:
    args = event["args"]
    return StepRecord(
        start=event["ts"] / 1e6,
        seconds=event["dur"] / 1e6 - args["paused_ns"] / 1e9,
        variant=Variant(args["rows"], args["kv_len"], args["sequences"], args["extra_logits"]),
        decode=tuple(args["decode"]),
        prefill=tuple((number, count) for number, count in args["prefill"]),
        slots_in_use=args["slots_in_use"],
        num_waiting=args["waiting"],
        num_swapped=args["num_swapped"],
        num_running=args["running"],
        swapped=tuple(args["swapped"]),
        preempted=tuple(args["preempted"]),
        has_failed=args["failed"],
        host=_host(args["host_ns"]),
        drafts=tuple((number, count, accepted) for number, count, accepted in args["drafts"]),
        draft_seconds=args["draft_ns"] / 1e9,
        paused_seconds=args["paused_ns"] / 1e9,
        num_inserted=args["inserted"],
        is_inserted=args["is_inserted"],
    )


def _job(event: Event) -> JobRecord:
    args = event["args"]
    return JobRecord(event["ts"] / 1e6, event["dur"] / 1e6, args["source"], args["parts"])


def _host(parts: dict[str, int] | None) -> HostTimes | None:
    if parts is None:
        return None
    return HostTimes(**{name: value / 1e9 for name, value in parts.items()})


def _request(event: Event) -> RequestRecord:
    args = event["args"]
    started = args["started_ns"]
    ended = args["ended_ns"]
    return RequestRecord(
        id=event["tid"],
        arrival=event["ts"] / 1e6,
        started=None if started is None else started / 1e9,
        token_times=tuple(moment / 1e9 for moment in args["token_times_ns"]),
        num_prompt=args["prompt_tokens"],
        num_cached=args["cached_tokens"],
        reason=FinishReason(args["reason"]),
        ended=None if ended is None else ended / 1e9,
    )


Kind: TypeAlias = Literal["queued", "prefill", "decode", "swapped"]


@dataclass(frozen=True)
class Span:
    """The state of a request from ``start`` to ``end`` (seconds on the clock of the records)."""

    kind: Kind
    start: float
    end: float
    rows: int = 0
    """The number of its tokens in the device call; 0 for "queued" and "swapped"."""


def spans_of(steps: Sequence[StepRecord], requests: Iterable[RequestRecord]) -> dict[int, list[Span]]:
    """Return the spans of every request by its id, each list in the order of time.

    A request that has not ended, or whose end was not recorded, has the spans of its calls. Between two spans a request holds
    KV slots but is not part of a call.
    """
    ended = {request.id: request for request in requests}
    steps = sorted(steps, key=lambda step: step.start)  # a call between the blocks of another one ends before that
    spans: dict[int, list[Span]] = defaultdict(list)
    for request in ended.values():
        until = request.ended if request.started is None else request.started
        if until is not None:
            spans[request.id].append(Span("queued", request.arrival, max(until, request.arrival)))
    for step in steps:
        for number, count in step.prefill:
            spans[number].append(Span("prefill", step.start, step.end, count))
        drafted = {number: count for number, count, _ in step.drafts}
        for number in step.decode:
            spans[number].append(Span("decode", step.start, step.end, 1 + drafted.get(number, 0)))
    for number, span in (*_swapped(steps, ended), *_preempted(steps, ended)):
        spans[number].append(span)
    return {number: sorted(spans[number], key=lambda span: (span.start, span.end)) for number in sorted(spans)}


def _swapped(steps: Sequence[StepRecord], ended: dict[int, RequestRecord]) -> Iterable[tuple[int, Span]]:
    """Yield a span per swapped request, from the start of the first call that lists it to that of the first that does not."""
    since: dict[int, float] = {}

    def span(number: int, now: float) -> tuple[int, Span]:
        start = since.pop(number)
        end = ended[number].ended if number in ended else None
        return number, Span("swapped", start, max(start, now if end is None else min(now, end)))

    for step in steps:
        yield from [span(number, step.start) for number in set(since) - set(step.swapped)]
        for number in step.swapped:
            since.setdefault(number, step.start)
    if steps:
        yield from [span(number, steps[-1].end) for number in list(since)]


def _preempted(steps: Sequence[StepRecord], ended: dict[int, RequestRecord]) -> Iterable[tuple[int, Span]]:
    """Yield a span per preempted request, from the call before which it lost its KV slots to its next call or its end."""
    since: dict[int, float] = {}
    for step in steps:
        since.update(dict.fromkeys(step.preempted, step.start))
        for number in since.keys() & {*step.decode, *(number for number, _ in step.prefill)}:
            yield number, Span("queued", since.pop(number), step.start)
    for number, start in since.items():
        end = ended[number].ended if number in ended else steps[-1].end
        yield number, Span("queued", start, max(start, end or start))
