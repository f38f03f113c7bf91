"""Turns the records of device calls into the history of each request."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from staticllm.pipelines.profiling.records import RequestRecord, StepRecord

Kind: TypeAlias = Literal["queued", "prefill", "decode", "swapped"]


@dataclass(frozen=True)
class Span:
    """The state of a request from ``start`` to ``end`` (seconds on the clock of the records).

    ``rows`` is the number of its tokens in the device call; 0 for "queued" and "swapped".
    """

    kind: Kind
    start: float
    end: float
    rows: int = 0


def spans_of(steps: Sequence[StepRecord], requests: Iterable[RequestRecord]) -> dict[int, list[Span]]:
    """Return the spans of every request by its id, each list in the order of time.

    A request that has not ended, or whose end was not recorded, has the spans of its calls. Between two spans a request holds
    KV slots but is not part of a call.
    """
    ended = {request.id: request for request in requests}
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
        start, end = since.pop(number), ended[number].ended if number in ended else None
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
