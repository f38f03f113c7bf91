"""Moves that the shipped policies have in common: orders, turns, and room when rows run short."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from staticllm.pipelines.programs.variants import plan_chunks
from staticllm.pipelines.scheduling.interface import Plan, RequestView, View


def in_order(requests: Iterable[RequestView]) -> list[RequestView]:
    """High priority first, then early arrival."""
    return sorted(requests, key=lambda request: (-request.priority, request.arrival, request.id))


def begun_first(view: View) -> list[RequestView]:
    """Prompts that may run: of equal priority, those that hold rows before those that do not.

    A prompt is admitted only if it will be able to decode, or if the host pool has room for it. Swapped out but left in the
    arena, it would hold slots that the decoding requests need next, and would be preempted and recomputed.
    """
    slots = view.free_slots - len(view.parked) - len(view.prefilling)
    parking = view.free_parked_rows - sum(request.num_tokens for request in view.prefilling)
    parking -= sum(request.num_rows for request in view.parked if request.in_arena)
    admitted = []
    for request in in_order(view.waiting):
        if slots <= 0 and request.num_tokens > parking:
            break
        parking -= 0 if slots > 0 else request.num_tokens
        slots -= 1
        admitted.append(request)
    everybody = (*view.prefilling, *admitted)
    return sorted(everybody, key=lambda request: (-request.priority, not request.num_rows, request.arrival, request.id))


def resumable(view: View) -> list[RequestView]:
    """Parked requests for which there are slots and rows, in order."""
    chosen: list[RequestView] = []
    if not view.free_slots:
        return chosen
    rows = view.free_rows - len(view.running)
    for request in in_order(view.parked)[: view.free_slots]:
        rows -= 1 + (0 if request.in_arena else request.num_rows)
        if rows < 0:
            break
        chosen.append(request)
    return chosen


def decode_plan(view: View, resume: list[RequestView] | None = None) -> Plan | None:
    """One row for everybody who decodes; None if nobody does. Where rows run short the youngest give theirs back."""
    resume = resumable(view) if resume is None else resume
    running = in_order((*view.running, *resume))
    if not running:
        return _resume_by_force(view)
    brought = sum(request.num_rows for request in resume if not request.in_arena)
    park: list[RequestView] = []
    evict: list[RequestView] = []
    for victim in _victims(view, keep=running[0]):
        freed = sum(request.own_rows for request in (*park, *evict))
        if len(running) + brought <= view.free_rows + freed:
            break
        fits = sum(request.num_rows for request in (*park, victim)) <= view.free_parked_rows
        (park if victim.state == "running" and fits else evict).append(victim)
        running = [request for request in running if request.id != victim.id]
    kept = {request.id for request in running}
    return Plan(
        decode=_ids(take_turns(view, running)),
        resume=tuple(request.id for request in resume if request.id in kept),
        park=_ids(park),
        evict=_ids(evict),
    )


def take_turns(view: View, running: list[RequestView]) -> list[RequestView]:
    """As many as one call holds; those who wait longest for a token if that is not everybody."""
    limit = view.device.max_decoding
    if len(running) <= limit:
        return running
    return sorted(running, key=lambda request: request.last_token_time or 0.0)[:limit]


def chunk_of(view: View, request: RequestView) -> int:
    """Tokens in the first of the cheapest calls that would run the rest of a prompt alone."""
    device = view.device
    chunks = plan_chunks(device.index, device.seconds, request.num_left, device.high_row, not request.num_rows)
    return chunks[0][1]


def fits(view: View, request: RequestView) -> bool:
    """Whether the rest of a prompt finds rows beside what decoding needs next."""
    return request.num_left + len(view.running) <= view.free_rows


def prefill_by_force(view: View, request: RequestView) -> Plan:
    """A chunk of one prompt alone, whoever must give rows back for it."""
    count = chunk_of(view, request)
    evict: list[RequestView] = []
    for victim in _victims(view, keep=request):
        if count <= view.free_rows + sum(other.own_rows for other in evict):
            break
        evict.append(victim)
    return Plan(prefill=((request.id, count),), evict=_ids(evict))


def _resume_by_force(view: View) -> Plan | None:
    """Nobody decodes and nobody can be resumed as things are: bring the first back, whoever holds rows meanwhile."""
    if not view.parked:
        return None
    first = in_order(view.parked)[0]
    needed = 1 + (0 if first.in_arena else first.num_rows)
    evict: list[RequestView] = []
    for victim in _victims(view, keep=first):
        if needed <= view.free_rows + sum(request.own_rows for request in evict):
            break
        evict.append(victim)
    return Plan(decode=(first.id,), resume=(first.id,), evict=_ids(evict))


def alone(view: View, request: RequestView) -> list[Plan]:
    """Plans that run nothing but one request, the longest first; all others give their rows back."""
    evict = tuple(other.id for other in view.requests if other.id != request.id and other.in_arena and other.num_rows)
    if request.state == "running":
        return [Plan(decode=(request.id,), evict=evict)]
    if request.state == "parked":
        return [Plan(decode=(request.id,), resume=(request.id,), evict=evict)]
    counts = sorted({rows for rows in view.device.index.widest if rows < request.num_left} | {request.num_left})
    return [Plan(prefill=((request.id, count),), evict=evict) for count in reversed(counts)]


def _victims(view: View, keep: RequestView) -> list[RequestView]:
    """Who gives rows back, first to last: parked in the arena, then unfinished prompts, then the youngest that decode."""
    groups = ([r for r in view.parked if r.in_arena], view.prefilling, view.running)
    return [request for group in groups for request in reversed(in_order(group)) if request.id != keep.id]


def _ids(requests: Iterable[RequestView]) -> tuple[int, ...]:
    return tuple(request.id for request in requests)


def with_prefill(plan: Plan, prefill: list[tuple[int, int]]) -> Plan:
    """The same plan with prompts riding along."""
    return replace(plan, prefill=tuple(prefill))
