"""Adds proactive requests to the plans of reactive requests, within the bounds of the reactive requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from staticllm.core import Variant

from .device_share import TimeCredit
from .interface import JobView, Plan, RequestView, View
from .job_scheduler import (
    BOUND_USED,
    LATE,
    ChatActivity,
    has_just_decoded,
    slack_of,
    step_of,
    waited,
)
from .plans import (
    IllegalPlanError,
    admissible_prompts,
    check,
    decode_plan,
    in_order,
    longest_waiting,
    pack,
    to_swap_in,
)

LEAST_RATE = 0.5
"""The least rate of prompt tokens of a call of proactive requests alone, as a share of the best one."""
HARDLY_LONGER = 1.25
"""More proactive rows may make a decode step this many times as long, even where the step alone takes too long for others."""
MIN_SECONDS = 1e-9
"""Lower bound of divisors."""


class ProactiveRequests:
    """Schedules proactive requests together with reactive requests, for every policy that does not plan both classes itself.

    The policy plans only the reactive requests, with all KV slots and places that proactive requests can give up. Then:

    - While a reactive request waits for its first token or for a place, proactive rows use only the padding of its calls.
    - While reactive requests decode, a call takes as many proactive rows, of decode steps and prompts, as keep the time between
      two reactive tokens within ``token_bound``. If no program holds both, one proactive call runs between two reactive steps.
      Several short calls would fill the bound, and delay a user for work without a waiting user.
    - If no row is left, proactive requests get ``BEHIND_SHARE`` of the device time in separate calls. The same holds while jobs
      wait, which have precedence.

    A call with a proactive row and no reactive prompt takes at most ``longest_call``, so that a new prompt soon finds the
    device free, or it is the smallest call with half of the best token rate.
    """

    def __init__(self, activity: ChatActivity) -> None:
        self._activity = activity
        self._credit = TimeCredit()
        self._had_prompts = False  # the last call of proactive requests alone
        self._last_start = float("-inf")  # when it began

    def due(self, view: View) -> Plan | None:
        """Return a call of proactive requests alone if their share of the device time is due; else None."""
        has_bound = any(not each.is_proactive for each in view.running)
        longest = self._longest_call(view)
        found = self._alone(view, min(slack_of(view), longest) if has_bound else longest)
        if found is None or not self._credit.covers(found.seconds):
            return None
        keeps_bound = not has_bound or found.delay_seconds <= slack_of(view) - waited(view)
        is_late = self._credit.covers(LATE * found.seconds) and found.delay_seconds > slack_of(view)
        if not keeps_bound and not (is_late and has_just_decoded(view, view.now - step_of(view))):
            return None
        return self._begin(found, view)

    def note_job(self, job: JobView, view: View) -> None:
        """Count a job that runs before the proactive requests of a view."""
        self._credit.lead(job.seconds, is_followed=any(request.is_proactive for request in view.requests))

    def shortened(self, plan: Plan, view: View) -> Plan:
        """Return a plan without reactive requests whose prompts take no longer than ``longest_call``, if others are active."""
        self._credit.clear()
        limit = self._longest_shared_call(view)
        if not plan.prefill or _seconds(view, plan) <= limit:
            return plan
        sizes = [rows for rows in view.device.index.chunk_rows if len(plan.decode) < rows < plan.num_rows]
        cuts = [plan, *(_cut(plan, rows) for rows in reversed(sizes))]
        return _short([(cut, _seconds(view, cut)) for cut in cuts], limit) or plan

    def filled(self, plan: Plan, view: View) -> Plan:
        """Return a plan of reactive requests with proactive rows, without the proactive requests whose room it needs.

        If no program holds both, it is a call of only proactive requests within the bound, and ``plan`` runs later.

        Raises:
            IllegalPlanError: a bug; the plan breaks a rule even without proactive rows.
        """
        room = _Room(plan, view)
        made = room.plan()
        rest = room.rest()
        limit = self._limit(plan, view)
        found = self._with_rows(made, rest, max(limit, _seconds(view, plan)))
        if limit and made == plan and (alone := self._between(found, plan, view)) is not None:
            return self._begin(alone, view)
        found = found if _is_legal(found, view) else check(made, view)
        num_proactive = sum(request.is_proactive for request in view.requests)
        num_taken = found.num_sequences - plan.num_sequences
        self._credit.lead(_seconds(view, plan), is_followed=num_taken < num_proactive)
        return found

    def _between(self, found: Plan, plan: Plan, view: View) -> _Alone | None:
        """Return a call of proactive requests alone before the decode step ``found``, for what no row of that step is left for.

        None if all have rows, if there was such a call since the last step, or if this one would not keep the bound.
        """
        if not has_just_decoded(view, self._last_start):
            return None
        needs_prompts = found.decode != plan.decode
        if found.prefill or (needs_prompts and not (view.of_class(is_proactive=True).prefilling or view.waiting)):
            return None
        slack = slack_of(view) - waited(view)
        alone = self._alone(view, min(slack, self._longest_call(view)))
        if alone is None or alone.delay_seconds > slack or (needs_prompts and alone.plan.decode):
            return None
        return alone

    def _longest_call(self, view: View) -> float:
        """Return the longest time that a call of proactive requests should take beside reactive ones, s."""
        return min(self._activity.longest_job(view.now), view.token_bound.seconds)

    def _longest_shared_call(self, view: View) -> float:
        """Return the longest time of a call while no reactive request is there, s; infinite if none is expected."""
        limit = self._activity.longest_job(view.now)
        expected = any(each.priority >= 0 and each.ready_at is not None for each in view.idle)
        return min(limit, view.token_bound.seconds * BOUND_USED) if expected else limit

    def _limit(self, plan: Plan, view: View) -> float:
        """Return how long the next call may take with proactive rows, s; 0 if it may not take longer than without."""
        reactive = view.of_class(is_proactive=False)
        if plan.prefill or reactive.waiting or reactive.prefilling or reactive.swapped or plan.swap_out or plan.preempt:
            return 0.0
        slack = slack_of(view) + step_of(view) - waited(view)
        longest = max(self._longest_call(view), HARDLY_LONGER * _seconds(view, plan))
        return max(0.0, min(slack, longest))

    def _with_rows(self, plan: Plan, rest: View, limit: float) -> Plan:
        """Return the plan with as many rows of the proactive requests in ``rest`` as one call of ``limit`` seconds holds."""
        swap_in = to_swap_in(rest)
        brought = {request.id: 0 if request.in_arena else request.num_computed for request in swap_in}
        candidates = longest_waiting(rest, [*rest.running, *swap_in])
        filled = plan
        for count in range(len(candidates), 0, -1):
            chosen = [request.id for request in candidates[:count]]
            come = tuple(id for id in chosen if id in brought)
            trial = replace(plan, decode=(*plan.decode, *chosen), swap_in=(*plan.swap_in, *come))
            needed = trial.num_rows + sum(brought[id] for id in come)
            if needed <= rest.free_slots and _seconds(rest, trial) <= limit:
                filled = trial
                break
        return self._with_prompts(filled, rest, limit)

    def _with_prompts(self, plan: Plan, rest: View, limit: float) -> Plan:
        """Return the plan with the most rows of proactive prompts that one call of ``limit`` seconds holds."""
        backlog = admissible_prompts(rest)
        calls = _calls(rest, backlog, plan)
        return next((call for call, seconds in calls if seconds <= limit), plan)

    def _alone(self, view: View, limit: float) -> _Alone | None:
        """Return a call of proactive requests alone: prompts and decode steps by turns, in ``limit`` seconds if any can be.

        None if the KV slots suffice for none.
        """
        reactive = view.of_class(is_proactive=False)
        num_running = len(reactive.running)
        rest = replace(
            view.of_class(is_proactive=True),
            max_num_seqs=max(0, view.max_num_seqs - num_running),
            free_slots=max(0, view.free_slots - num_running),
        )
        decode = decode_plan(rest) if rest.running or rest.free_seqs else _borrowed(rest, reactive)
        decode = _shortest(rest, decode, limit)
        prompts = _short(_calls(rest, admissible_prompts(rest), Plan()), limit)
        plan = decode if prompts is None or (decode is not None and self._had_prompts) else prompts
        if plan is None or not _is_legal(plan, view):
            return None
        seconds = _seconds(view, plan)
        num_blocks = 1 if plan.decode else view.device.num_blocks
        delay = seconds if num_blocks == 1 else seconds / num_blocks + step_of(view)
        return _Alone(plan, seconds, delay + _swap_seconds(view, plan))

    def _begin(self, call: _Alone, view: View) -> Plan:
        self._had_prompts = bool(call.plan.prefill)
        self._last_start = view.now
        self._credit.pay(call.seconds)
        return call.plan


@dataclass(frozen=True)
class _Alone:
    """A call of proactive requests alone: its duration, and how long it keeps reactive requests from a decode step, in s."""

    plan: Plan
    seconds: float
    delay_seconds: float


def reactive_view(view: View) -> View:
    """Return a view of only the reactive requests, in which all slots that proactive requests can give up are free."""
    proactive = view.of_class(is_proactive=True).requests
    stored = sum(request.num_computed for request in proactive if not request.in_arena)
    return replace(
        view.of_class(is_proactive=False),
        free_slots=view.free_slots + sum(request.own_slots for request in proactive),
        free_host_slots=view.free_host_slots + stored,
    )


class _Room:
    """The room that a plan of reactive requests needs, and the proactive requests that make it: the latest of the lowest priority
    first. They are swapped out if the host pool has room, else preempted."""

    def __init__(self, plan: Plan, view: View) -> None:
        self._plan = plan
        self._view = view
        self._swap_out = list[RequestView]()
        self._preempt = list[RequestView]()
        known = {request.id: request for request in view.requests}
        gone = [known[id] for id in (*plan.swap_out, *plan.preempt)]
        come = [known[id] for id in plan.swap_in]
        self._free = view.free_slots + sum(request.own_slots for request in gone)
        self._brought = sum(request.num_computed for request in come if not request.in_arena)
        self._host_room = view.free_host_slots - sum(known[id].num_computed for id in plan.swap_out)
        left = {request.id for request in gone}
        reactive = [each for each in view.running if not each.is_proactive and each.id not in left]
        self._num_running = len(reactive) + len(come)
        self._proactive = view.of_class(is_proactive=True)
        self._make_host_room()
        self._make_places()
        self._make_slots()

    def plan(self) -> Plan:
        """Return the plan with the swaps and preemptions that make room for it."""
        return replace(
            self._plan,
            swap_out=(*self._plan.swap_out, *(request.id for request in self._swap_out)),
            preempt=(*self._plan.preempt, *(request.id for request in self._preempt)),
        )

    def rest(self) -> View:
        """Return the proactive requests that stay, and the slots and places that are left for them and for the plan's rows."""
        gone = self._gone
        kept = self._proactive
        reserved = max(0, self._num_running - len(self._plan.decode))
        return replace(
            kept,
            waiting=_without(kept.waiting, gone),
            prefilling=_without(kept.prefilling, gone),
            running=_without(kept.running, gone),
            swapped=_without(kept.swapped, gone),
            max_num_seqs=max(0, self._view.max_num_seqs - self._num_running),
            free_slots=max(0, self._free - self._brought - reserved),
            free_host_slots=max(0, self._host_room),
        )

    @property
    def _gone(self) -> set[int]:
        return {request.id for request in (*self._swap_out, *self._preempt)}

    def _make_host_room(self) -> None:
        stored = [request for request in self._proactive.swapped if not request.in_arena]
        for request in reversed(in_order(stored)):
            if self._host_room >= 0:
                return
            self._host_room += request.num_computed
            self._preempt.append(request)

    def _make_places(self) -> None:
        running = list(reversed(in_order(self._proactive.running)))
        excess = self._num_running + len(running) - self._view.max_num_seqs
        for request in running[: max(0, excess)]:
            self._take(request)

    def _make_slots(self) -> None:
        groups = (
            [request for request in self._proactive.swapped if request.in_arena],
            self._proactive.prefilling,
            self._proactive.running,
        )
        for request in (request for group in groups for request in reversed(in_order(group))):
            if self._plan.num_rows + self._brought <= self._free:
                return
            if request.id not in self._gone:
                self._take(request)

    def _take(self, request: RequestView) -> None:
        """Take the slots of a request, and its place if it is running."""
        if request in self._proactive.running and request.num_computed <= self._host_room:
            self._host_room -= request.num_computed
            self._swap_out.append(request)
        else:
            self._preempt.append(request)
        self._free += request.own_slots


def _borrowed(rest: View, reactive: View) -> Plan | None:
    """Return a decode step of the proactive request that has waited longest, in the place of a reactive one.

    That one is swapped out, and has its place back in the next plan. None if no request waits, or the host pool has no room.
    """
    waiting = sorted(rest.swapped, key=lambda request: request.last_token_time or 0.0)
    running = sorted(reactive.running, key=lambda request: (request.priority, -(request.last_token_time or 0.0)))
    if not waiting or not running or running[0].num_computed > reactive.free_host_slots:
        return None
    return Plan(decode=(waiting[0].id,), swap_in=(waiting[0].id,), swap_out=(running[0].id,))


def _swap_seconds(view: View, plan: Plan) -> float:
    """Return the seconds that it takes to give a borrowed place, and to give it back."""
    if not plan.swap_out:
        return 0.0
    moved = {*plan.swap_out, *plan.swap_in}
    return 2 * view.device.swap_seconds * sum(each.num_computed for each in view.requests if each.id in moved)


def _is_legal(plan: Plan, view: View) -> bool:
    try:
        check(plan, view)
    except IllegalPlanError:
        return False
    return True


def _without(requests: Iterable[RequestView], ids: set[int]) -> tuple[RequestView, ...]:
    return tuple(request for request in requests if request.id not in ids)


def _is_fresh(view: View, plan: Plan) -> bool:
    """Return whether no request of the plan's call has KV slots. Prompts that are not in the view have some."""
    if plan.decode:
        return False
    computed = {request.id: request.num_computed for request in (*view.waiting, *view.prefilling)}
    return all(computed.get(id, 1) == 0 for id, _ in plan.prefill)


def _variant(view: View, plan: Plan) -> Variant | None:
    return view.device.call(plan.num_rows, plan.num_sequences, _is_fresh(view, plan))


def _seconds(view: View, plan: Plan) -> float:
    """Return the expected duration of a plan's call, s; infinite if no program holds it."""
    variant = _variant(view, plan)
    return float("inf") if variant is None else view.device.seconds(variant)


def _cut(plan: Plan, num_rows: int) -> Plan:
    """Return the plan with its first ``num_rows`` rows."""
    left = num_rows - len(plan.decode)
    prefill = list[tuple[int, int]]()
    for request, count in plan.prefill:
        if left > 0:
            prefill.append((request, min(count, left)))
        left -= count
    return replace(plan, prefill=tuple(prefill))


def _calls(view: View, backlog: list[RequestView], beside: Plan) -> list[tuple[Plan, float]]:
    """Return the calls of all sizes that hold prompts beside the rows of a plan, and their seconds, the largest first."""
    found = list[tuple[Plan, float]]()
    device = view.device
    is_fresh = not beside.num_rows and bool(backlog) and not backlog[0].num_computed
    for rows in reversed(device.index.widest if backlog else ()):
        widest = device.index.at(rows, device.index.widest[rows], device.high_slot, is_fresh)
        if widest is None or rows <= beside.num_rows or widest.sequences <= beside.num_sequences:
            continue
        prompts = pack(view, backlog, beside, widest)
        if prompts:
            call = replace(beside, prefill=(*beside.prefill, *prompts))
            found.append((call, _seconds(view, call)))
    return found


def _short(calls: list[tuple[Plan, float]], limit: float) -> Plan | None:
    """Return the first of these calls, the largest first, that takes ``limit`` seconds, or the smallest; None without a call.

    Calls with less than ``LEAST_RATE`` of the best rate of prompt tokens do not count: a token at a time would waste the device.
    """
    rates = [
        (sum(count for _, count in call.prefill) / max(seconds, MIN_SECONDS), call, seconds) for call, seconds in calls
    ]
    best = max((rate for rate, *_ in rates), default=0.0)
    efficient = [(call, seconds) for rate, call, seconds in rates if rate and rate >= LEAST_RATE * best]
    return next((call for call, seconds in efficient if seconds <= limit), efficient[-1][0] if efficient else None)


def _shortest(view: View, plan: Plan | None, limit: float) -> Plan | None:
    """Return a decode step with as many of its rows as ``limit`` seconds hold, or as take hardly longer than a single one."""
    if plan is None:
        return None
    first = replace(plan, decode=plan.decode[:1])
    longest = max(limit, HARDLY_LONGER * _seconds(view, first))
    for count in range(len(plan.decode), 1, -1):
        trial = replace(plan, decode=plan.decode[:count])
        if _seconds(view, trial) <= longest:
            return trial
    return first
