"""Helpers that the shipped policies share, and the rules that every plan must follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from staticllm.core import Variant

from ..programs.variant_index import plan_chunks
from .interface import CallView, Plan, RequestStatus, RequestView, View

MAX_WAIT_SECONDS = 1.0
"""Longest total wait before one call that a policy may ask for, in seconds."""
Order = Callable[[Iterable[RequestView]], list[RequestView]]


def in_order(requests: Iterable[RequestView]) -> list[RequestView]:
    """Return the requests sorted by priority, the highest first, then by arrival."""
    return sorted(requests, key=lambda request: (-request.priority, request.arrival, request.id))


def admissible_prompts(view: View) -> list[RequestView]:
    """Return prefilling and admitted waiting requests, sorted by priority, then those with KV slots first, then by arrival.

    A waiting request is admitted only if it can be running after its prompt, or if the host pool has room for it. A swapped
    request that stays in the arena would hold slots that running requests need next, and would be preempted and recomputed.
    Client requests are always admitted: after their prompts they are idle, and their slots count as free.
    """
    num_seqs = view.free_places
    host_room = view.free_host_slots - sum(
        request.num_tokens for request in view.prefilling if not request.is_client_driven
    )
    host_room -= sum(
        request.num_computed for request in view.swapped if request.in_arena and not request.is_client_driven
    )
    admitted = list[RequestView]()
    is_full = False
    for request in in_order(view.waiting):
        is_full = is_full or (not request.is_client_driven and num_seqs <= 0 and request.num_tokens > host_room)
        if request.is_client_driven:
            admitted.append(request)
        elif not is_full:
            host_room -= 0 if num_seqs > 0 else request.num_tokens
            num_seqs -= 1
            admitted.append(request)
    return sorted(
        (*view.prefilling, *admitted),
        key=lambda request: (-request.priority, not request.num_computed, request.arrival, request.id),
    )


def to_swap_in(view: View, order: Order = in_order) -> list[RequestView]:
    """Return the swapped requests that can be running now, in ``order``, within ``max_num_seqs`` and the free KV slots."""
    chosen: list[RequestView] = []
    if not view.free_seqs:
        return chosen
    slots = view.free_slots - len(view.running)
    for request in _next_placed(view, order):
        slots -= 1 + (0 if request.in_arena else request.num_computed)
        if slots < 0:
            break
        chosen.append(request)
    return chosen


def _next_placed(view: View, order: Order) -> list[RequestView]:
    """Return the swapped requests for which there are places, in ``order``, but of equal priority those that keep theirs first.

    The last place goes to the first in ``order``: a client sequence takes it for one token. So none waits for one client sequence
    after another.
    """
    requests = order(view.swapped)
    first = sorted(requests, key=lambda request: (-request.priority, request.is_client_driven))[
        : max(0, view.free_seqs - 1)
    ]
    taken = {request.id for request in first}
    return [*first, *(request for request in requests if request.id not in taken)][: view.free_seqs]


def decode_plan(
    view: View, swap_in: list[RequestView] | None = None, exchanged: Sequence[RequestView] = ()
) -> Plan | None:
    """Return a decode step of all running requests and of ``swap_in`` (by default ``to_swap_in(view)``).

    The running requests in ``exchanged`` give their places to those in ``swap_in``; the host pool must have room for them.

    If KV slots run short, requests are swapped out, or preempted if the host pool is full, in the order of ``_victims``. If no
    request is running or in ``swap_in``, the first swapped request is swapped in by preemption; None if none is swapped.
    """
    swap_in = to_swap_in(view) if swap_in is None else swap_in
    given = {request.id for request in exchanged}
    running = in_order(request for request in (*view.running, *swap_in) if request.id not in given)
    if not running:
        return _swap_in_with_preemption(view)
    brought = sum(request.num_computed for request in swap_in if not request.in_arena)
    swap_out = list(exchanged)
    preempt: list[RequestView] = []
    freed = sum(request.own_slots for request in exchanged)
    host_room = view.free_host_slots - sum(request.num_computed for request in exchanged)
    kept = {request.id for request in running}
    needs_room = len(kept) + brought > view.free_slots + freed
    for victim in _victims(view, keep=running[0]) if needs_room else ():
        if len(kept) + brought <= view.free_slots + freed:
            break
        if victim.id in given:
            continue
        if victim.status == RequestStatus.RUNNING and victim.num_computed <= host_room:
            host_room -= victim.num_computed
            swap_out.append(victim)
        else:
            preempt.append(victim)
        freed += victim.own_slots
        kept.discard(victim.id)
    running = [request for request in running if request.id in kept]
    return Plan(
        decode=_ids(longest_waiting(view, running)),
        swap_in=tuple(request.id for request in swap_in if request.id in kept),
        swap_out=_ids(swap_out),
        preempt=_ids(preempt),
    )


def longest_waiting(view: View, running: list[RequestView]) -> list[RequestView]:
    """Return all of ``running``; if one call cannot hold all, the requests that have waited longest for a token."""
    limit = view.device.max_decoding
    if len(running) <= limit:
        return running
    return sorted(running, key=lambda request: request.last_token_time or 0.0)[:limit]


def chunk_of(view: View, request: RequestView) -> int:
    """Return the number of tokens in the first call if the rest of a prompt runs alone in the cheapest calls."""
    device = view.device
    is_fresh = not request.num_computed
    num_leaving = device.leaving_slots
    chunks = plan_chunks(device.index, device.seconds, request.num_left, device.high_slot, is_fresh, num_leaving)
    return chunks[0][1]


def fits(view: View, request: RequestView) -> bool:
    """Return whether there are free KV slots for the rest of a prompt and for the next token of every running request."""
    return request.num_left + len(view.running) <= view.free_slots


def prefill_with_preemption(view: View, request: RequestView) -> Plan:
    """Return a plan with a chunk of one prompt alone, which preempts as many other requests as its KV slots require."""
    count = chunk_of(view, request)
    return Plan(prefill=((request.id, count),), preempt=_ids(_preempted(view, request, count)))


def _preempted(view: View, keep: RequestView, needed: int) -> list[RequestView]:
    """Return the requests without which ``needed`` KV slots are free, as far as there are enough; never ``keep``."""
    free = view.free_slots
    found = list[RequestView]()
    for victim in _victims(view, keep):
        if needed <= free:
            break
        free += victim.own_slots
        found.append(victim)
    return found


def _swap_in_with_preemption(view: View) -> Plan | None:
    """Return a plan that swaps in the first swapped request, and preempts others for its KV slots; None if none is swapped, or
    if they are not enough and a prompt can run instead.

    Used if no request is running and the free slots are not enough to swap one in.
    """
    if not view.swapped:
        return None
    first = in_order(view.swapped)[0]
    needed = 1 + (0 if first.in_arena else first.num_computed)
    preempt = _preempted(view, first, needed)
    if view.prefilling and needed > view.free_slots + sum(victim.own_slots for victim in preempt):
        return None  # shared slots: each of several holders alone would free none
    return Plan(decode=(first.id,), swap_in=(first.id,), preempt=_ids(preempt))


def alone(view: View, request: RequestView) -> list[Plan]:
    """Return plans that run only this request and preempt all others, the call with the most tokens first."""
    preempt = tuple(
        other.id for other in view.requests if other.id != request.id and other.in_arena and other.num_computed
    )
    if request.status == RequestStatus.RUNNING:
        return [Plan(decode=(request.id,), preempt=preempt)]
    if request.status == RequestStatus.SWAPPED:
        return [Plan(decode=(request.id,), swap_in=(request.id,), preempt=preempt)]
    counts = sorted({rows for rows in view.device.index.widest if rows < request.num_left} | {request.num_left})
    return [Plan(prefill=((request.id, count),), preempt=preempt) for count in reversed(counts)]


def _victims(view: View, keep: RequestView) -> list[RequestView]:
    """Return the requests that may lose their KV slots: swapped ones in the arena, then prefilling, then running ones.

    Within a group the latest arrival of the lowest priority goes first.
    """
    groups = ([r for r in view.swapped if r.in_arena], view.prefilling, view.running)
    return [request for group in groups for request in reversed(in_order(group)) if request.id != keep.id]


def _ids(requests: Iterable[RequestView]) -> tuple[int, ...]:
    return tuple(request.id for request in requests)


def with_prefill(plan: Plan, prefill: list[tuple[int, int]]) -> Plan:
    """Return the same plan with these ``(request, tokens)`` pairs of prompts in its call."""
    return replace(plan, prefill=tuple(prefill))


def pack(view: View, backlog: Iterable[RequestView], plan: Plan, variant: Variant) -> list[tuple[int, int]]:
    """Return ``(request, tokens)`` pairs of prompts that fit into a call of ``variant`` with ``plan``, in backlog order.

    A prompt gets rows only if the arena has free KV slots for all of it and for the next token of every running request. A
    variant with a ``kv_len`` of 0 takes only prompts without computed tokens.
    """
    rows = variant.rows - plan.num_rows
    sequences = variant.sequences - plan.num_sequences
    brought = {request.id: request.num_computed for request in view.swapped if not request.in_arena}
    free = (
        view.free_slots - plan.num_rows - len(view.running) - sum(brought.get(request, 0) for request in plan.swap_in)
    )
    chosen: list[tuple[int, int]] = []
    for request in backlog:
        if rows <= 0 or len(chosen) >= sequences:
            break
        if request.num_computed and not variant.kv_len:
            continue
        if request.num_left > free:
            break
        count = min(rows, request.num_left)
        chosen.append((request.id, count))
        rows -= count
        free -= request.num_left
    if rows and view.device.index.needs_real_rows:
        return []  # idle rows would change a recurrent state
    return chosen


class IllegalPlanError(Exception):
    """A plan that breaks a rule; ``rule`` is its name."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"rule {rule!r}: {detail}")
        self.rule = rule


def check(plan: object, view: View) -> Plan:
    """Return ``plan`` if it is a ``Plan`` and breaks no rule.

    Raises:
        IllegalPlanError: it is not a ``Plan``, or it breaks a rule; the error names the rule.
    """
    if not isinstance(plan, Plan):
        raise IllegalPlanError("is-a-plan", f"plan() returned a {type(plan).__name__}, not a Plan")
    if plan.wait_until is not None:
        return _check_wait(plan, view)
    if plan.job is not None:
        return _check_job(plan, view)
    try:
        known = {request.id: request for request in view.requests}
        _check_requests(plan, known)
        _check_resources(plan, view, known)
    except (TypeError, ValueError) as error:
        raise IllegalPlanError(
            "is-a-plan", f"the plan holds something other than request ids and counts: {error}"
        ) from None
    return plan


def check_between_blocks(plan: object, view: View, call: CallView) -> Plan:
    """Return ``plan`` if it is a ``Plan`` that may run between two blocks of ``call``.

    Raises:
        IllegalPlanError: it is not a ``Plan``, or it breaks a rule; the error names the rule.
    """
    if not isinstance(plan, Plan):
        raise IllegalPlanError("is-a-plan", f"between_blocks() returned a {type(plan).__name__}, not a Plan")
    if plan != Plan(decode=plan.decode):
        raise IllegalPlanError("only-decodes", "a plan between two blocks does more than decode")
    found = check(plan, view)
    if call.step(len(plan.decode)) is None:
        raise IllegalPlanError(
            "holds-between", f"{len(plan.decode)} requests decode between two blocks, at most {call.max_decoding} can"
        )
    return found


def check_wait_so_far(plan: Plan, start: float) -> None:
    """Check that the waits before one call, the first of which began at ``start``, are short enough in all.

    Raises:
        IllegalPlanError: they are not.
    """
    if plan.wait_until is not None and plan.wait_until > start + MAX_WAIT_SECONDS:
        waited = plan.wait_until - start
        raise IllegalPlanError(
            "waits-briefly", f"{waited:g} s of waiting before one call, at most {MAX_WAIT_SECONDS:g} s"
        )


def _check_wait(plan: Plan, view: View) -> Plan:
    if replace(plan, wait_until=None) != Plan():
        raise IllegalPlanError("waits-alone", "the plan waits and has requests or a job")
    if not view.idle:
        raise IllegalPlanError("waits-for-idle", "the plan waits although no request is idle")
    if (
        isinstance(plan.wait_until, bool)
        or not isinstance(plan.wait_until, (int, float))
        or not plan.wait_until > view.now
    ):
        raise IllegalPlanError(
            "waits-ahead", f"the plan waits until {plan.wait_until!r}, which is not after {view.now}"
        )
    return plan


def _check_job(plan: Plan, view: View) -> Plan:
    if plan != Plan(job=plan.job):
        raise IllegalPlanError("one-model-a-call", f"the plan has job {plan.job!r} and requests in one call")
    if plan.job not in {job.id for job in view.jobs}:
        raise IllegalPlanError("known-jobs", f"the plan names job {plan.job!r}, which does not wait")
    return plan


def _check_requests(plan: Plan, known: dict[int, RequestView]) -> None:
    moves = [("decode", plan.decode), ("swap_in", plan.swap_in), ("swap_out", plan.swap_out), ("preempt", plan.preempt)]
    for name, ids in (*moves, ("prefill", tuple(request for request, _ in plan.prefill))):
        for request in ids:
            if request not in known:
                raise IllegalPlanError("known-requests", f"{name} names request {request!r}, which does not exist")
        if len(set(ids)) != len(ids):
            raise IllegalPlanError("named-once", f"{name} names a request twice")
    _check_swaps(plan, known)
    gone = {*plan.swap_out, *plan.preempt}
    for request, count in plan.prefill:
        if known[request].status not in (RequestStatus.WAITING, RequestStatus.PREFILLING) or request in gone:
            raise IllegalPlanError("prefill-unfinished", f"request {request} has no prompt left to run")
        if not isinstance(count, int) or not 1 <= count <= known[request].num_left:
            left = known[request].num_left
            raise IllegalPlanError("prefill-count", f"{count!r} tokens of request {request}, which has {left} left")


def _check_swaps(plan: Plan, known: dict[int, RequestView]) -> None:
    for request in plan.swap_in:
        if known[request].status != RequestStatus.SWAPPED:
            raise IllegalPlanError("swap-in-swapped", f"request {request} is swapped in but was not swapped out")
    for request in plan.swap_out:
        if known[request].status != RequestStatus.RUNNING:
            raise IllegalPlanError("swap-out-running", f"request {request} is swapped out but not running")
    gone = {*plan.swap_out, *plan.preempt}
    if set(plan.swap_out) & set(plan.preempt) or set(plan.swap_in) & set(plan.preempt):
        raise IllegalPlanError("one-fate", "a request is preempted and swapped at once")
    for request in plan.decode:
        if request in gone or (known[request].status != RequestStatus.RUNNING and request not in plan.swap_in):
            raise IllegalPlanError("decode-running", f"request {request} decodes but is not running")


def _check_resources(plan: Plan, view: View, known: dict[int, RequestView]) -> None:
    if not plan.num_rows:
        raise IllegalPlanError("runs-something", "the plan runs no token although there are requests")
    num_running = len({request.id for request in view.running} - {*plan.swap_out, *plan.preempt}) + len(plan.swap_in)
    if num_running > view.max_num_seqs:
        raise IllegalPlanError(
            "max-num-seqs", f"{num_running} requests would be running, MAX_NUM_SEQS is {view.max_num_seqs}"
        )
    freed = sum(known[request].own_slots for request in (*plan.swap_out, *plan.preempt))
    brought = sum(known[request].num_computed for request in plan.swap_in if not known[request].in_arena)
    if plan.num_rows + brought > view.free_slots + freed and not _has_arena_alone(plan, view):
        raise IllegalPlanError(
            "free-slots",
            f"{plan.num_rows + brought} KV slots are needed, {view.free_slots + freed} are free: swap out or preempt a request",
        )
    swapped_slots = sum(known[request].num_computed for request in plan.swap_out)
    left = [known[request] for request in plan.preempt if not known[request].in_arena]
    host_room = view.free_host_slots + sum(request.num_computed for request in left)
    if swapped_slots > host_room:
        raise IllegalPlanError(
            "host-slots",
            f"{swapped_slots} KV slots would be swapped out, the host pool has room for {host_room}",
        )
    fresh = not plan.decode and all(not known[request].num_computed for request, _ in plan.prefill)
    if view.device.call(plan.num_rows, plan.num_sequences, fresh) is None:
        raise IllegalPlanError(
            "holds", f"no program holds {plan.num_rows} rows of {plan.num_sequences} sequences in one call"
        )


def _has_arena_alone(plan: Plan, view: View) -> bool:
    """Return whether a plan runs one request and preempts all others in the arena.

    Slots that the others share are then free, too, though no ``own_slots`` counts them; the arena holds any one sequence.
    """
    running = {*plan.decode, *plan.swap_in, *(request for request, _ in plan.prefill)}
    holders = {request.id for request in view.requests if request.in_arena and request.num_computed}
    return bool(plan.preempt) and len(running) == 1 and holders <= {*running, *plan.preempt}
