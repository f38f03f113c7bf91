"""Dynamic co-location of prefill and decode (FlexNPU, sections 3.3 and 3.4)."""

from __future__ import annotations

from dataclasses import dataclass

from staticllm.pipelines.scheduling.interface import Device, Plan, RequestView, View
from staticllm.pipelines.scheduling.policies.common import (
    admissible_prompts,
    chunk_of,
    decode_plan,
    fits,
    prefill_with_preemption,
    with_prefill,
)
from staticllm.pipelines.scheduling.policies.packing import pack

GAP_STEPS, GAP_SECONDS = 8, 0.1
"""Without a target for TPOT nobody waits longer for a token than so many decode steps, or than a reader notices."""
CROWDED_GAP = 2
"""That bound is so much longer while as many wait for their first token as get tokens."""
URGENT_GAP = 4
"""Without a target for TPOT, a prompt that would miss its target for TTFT may stretch that bound so far."""
FULL_ENOUGH = 0.8
"""With every slot taken, prompts wait for company until a call runs them at this share of the best rate there is."""
BATCHING_DELAY_STEPS = 16
"""But not longer than this many decode steps; with a target for TTFT, than a quarter of it."""
ABOUT_AS_FAST = 1.25
"""Among calls that get through the prompts within this many times the shortest time, the cheapest is taken."""
SLACK_USED = 0.8
"""Costs are estimates: so much of the time that is left is planned with."""
MIN_PREFILL_SHARE = 0.2
"""Prompts get at least this share of the device, also where no call for them fits the target for TPOT."""


@dataclass(frozen=True)
class Option:
    """A call with prompts in it: what it takes, and what the prompts add to what would run anyway.

    ``rest`` is what it leaves of prompts that it begins, and ``rest_seconds`` what that will take: a fresh prompt runs without
    looking at the arena, its rest does not.
    """

    plan: Plan
    seconds: float
    added: float
    num_tokens: int
    most_tokens: int  # that a call of this size could hold, of prompts like these
    rest: int
    rest_seconds: float

    @property
    def rate(self) -> float:
        """Prompt tokens a second of device time, until the prompts in it are through."""
        return (self.num_tokens + self.rest) / max(self.added + self.rest_seconds, 1e-9)

    @property
    def best_rate(self) -> float:
        """The rate of this size when it is full."""
        return self.most_tokens / max(self.added, 1e-9)


class Dynamic:
    """Prefill and decode as two components that share one device, without a fixed split.

    A prompt runs when it arrives, also if every slot is taken: its rows then wait outside the arena. Of all calls that can
    run prompts now, alone or beside answers, the one with the most prompt tokens a second of device time is chosen, as the
    measured costs have it. Decode is never kept waiting longer than ``tpot_ms``. A free slot makes prompts urgent; without
    one they wait for company, as long as ``ttft_ms`` allows.
    """

    def __init__(self) -> None:
        self._prefill_end = float("-inf")
        self._prefill_seconds = 0.0
        self._declined: tuple[int, ...] = ()  # prompts that were left to wait for company

    def plan(self, view: View) -> Plan:
        """The call with the best use for the device now."""
        backlog = admissible_prompts(view)
        decode = decode_plan(view)
        if decode is None:
            return self._alone(view, backlog)
        step = _seconds(view, decode)
        if not backlog or decode.swap_out or decode.preempt or self._is_still_waiting(view, backlog, step):
            return decode
        slack = self._slack(view, decode, backlog)
        options = _options(view, backlog, decode, step)
        if not options:
            return decode
        fitting = [option for option in options if option.seconds <= slack * SLACK_USED]
        if not fitting:
            return self._least(view, options, decode)
        soon = _soon_enough(view, backlog, fitting, step)
        best = max(soon, key=lambda option: option.rate)
        if not view.free_seqs and not _is_worth_it(view, backlog, fitting, step):
            self._declined = tuple(request.id for request in backlog)
            return decode
        return self._begin(view, best)

    def _is_still_waiting(self, view: View, backlog: list[RequestView], step: float) -> bool:
        """The same prompts as in the plan before, which left them to wait: nothing has to be weighed anew."""
        if view.free_seqs or tuple(request.id for request in backlog) != self._declined:
            return False
        return view.now - min(request.arrival for request in backlog) < _batching_delay(view, step)

    def _alone(self, view: View, backlog: list[RequestView]) -> Plan:
        """Nobody decodes: the fastest way through the prompts."""
        if len(backlog) == 1 and fits(view, backlog[0]):
            return Plan(prefill=((backlog[0].id, chunk_of(view, backlog[0])),))
        options = _options(view, backlog, Plan(), 0.0)
        if not options:
            return prefill_with_preemption(view, backlog[0])
        return self._begin(view, max(options, key=lambda option: option.rate))

    def _slack(self, view: View, decode: Plan, backlog: list[RequestView]) -> float:
        """Seconds until somebody who decodes has waited as long for a token as may be."""
        times = [r.last_token_time for r in view.running if r.last_token_time is not None]
        waited = view.now - min(times) if times else 0.0
        if view.tpot_ms is not None:
            return view.tpot_ms / 1e3 - waited
        gap = max(GAP_STEPS * _seconds(view, decode), GAP_SECONDS)
        if len(backlog) >= decode.num_rows:
            gap *= CROWDED_GAP
        if view.ttft_ms is not None and view.now - backlog[0].arrival > view.ttft_ms / 2e3:
            gap *= URGENT_GAP
        return gap - waited

    def _least(self, view: View, options: list[Option], decode: Plan) -> Plan:
        """No call with prompts fits: decode, but not for ever."""
        least = min(options, key=lambda option: (option.seconds, -option.num_tokens))
        rest = view.now - self._prefill_end
        times = [r.last_token_time for r in view.running if r.last_token_time is not None]
        has_just_decoded = not times or min(times) >= self._prefill_end
        share = self._prefill_seconds / (self._prefill_seconds + rest) if rest > 0 else 1.0
        if has_just_decoded and share < MIN_PREFILL_SHARE:
            return self._begin(view, least)
        return decode

    def _begin(self, view: View, option: Option) -> Plan:
        self._prefill_seconds = option.added
        self._prefill_end = view.now + option.seconds
        return option.plan


def _seconds(view: View, plan: Plan) -> float:
    variant = view.device.call(plan.num_rows, plan.num_sequences)
    return view.device.seconds(variant) if variant else 0.0


def _options(view: View, backlog: list[RequestView], decode: Plan, step: float) -> list[Option]:
    """Every size of call, with as many prompts in it as it holds: alone (the decode step follows), and beside answers."""
    device, options = view.device, []
    is_fresh = not backlog[0].num_computed
    later = _seconds_a_token(device)
    worth = step * decode.num_rows / max(decode.num_rows + _to_come(view, backlog), 1)
    for rows in device.index.widest:
        options.append(_option(view, backlog, Plan(), (rows, is_fresh), 0.0, step, later) if rows > 1 else None)
        if rows > decode.num_rows > 0:
            options.append(_option(view, backlog, decode, (rows, False), worth, 0.0, later))
    found = [option for option in options if option is not None]
    if not found:  # there are no programs but for single rows
        alone = _option(view, backlog, Plan(), (1, False), 0.0, step, later)
        found = [alone] if alone else []
    return found


def _to_come(view: View, backlog: list[RequestView]) -> int:
    """Prompts that one call could bring into free slots. A decode step before that must be repeated for them."""
    room, count = max(view.device.index.widest), 0
    for request in backlog[: view.free_seqs]:
        room -= request.num_left
        count += room >= 0
    return count


def _option(
    view: View,
    backlog: list[RequestView],
    beside: Plan,
    size: tuple[int, bool],
    saved: float,
    after: float,
    later: float,
) -> Option | None:
    """Prompts in a call of so many rows, beside answers (whose own call is ``saved``) or alone (it comes ``after``)."""
    (rows, is_fresh), device = size, view.device
    widest = device.index.at(rows, device.index.widest[rows], device.high_slot, is_fresh)
    prompts = pack(view, backlog, beside, widest) if widest else []
    count = beside.num_sequences + len(prompts)
    variant = device.index.of_rows(rows, count, device.high_slot, is_fresh) if prompts else None
    if variant is None or widest is None:
        return None
    seconds = device.seconds(variant)
    left = {request.id: request.num_left for request in backlog}
    most = min(rows - beside.num_rows, (widest.sequences - beside.num_sequences) * max(left.values()))
    rest = sum(left[request] - count for request, count in prompts)
    num_tokens = sum(count for _, count in prompts)
    return Option(with_prefill(beside, prompts), seconds + after, seconds - saved, num_tokens, most, rest, rest * later)


def _seconds_a_token(device: Device) -> float:
    """What a prompt token costs at best when the arena must be looked at."""
    seen = [(rows, device.index.of_rows(rows, 1, device.high_slot)) for rows in device.index.widest]
    return min((device.seconds(variant) / rows for rows, variant in seen if variant), default=0.0)


def _soon_enough(view: View, backlog: list[RequestView], options: list[Option], step: float) -> list[Option]:
    """Options that would have run all prompts before patience ends, or about as fast as any does.

    A few tokens beside every decode step cost next to nothing, and would take for ever.
    """
    left = sum(request.num_left for request in backlog)
    times = [max(left / option.num_tokens, 1.0) * option.seconds for option in options]
    bound = max(ABOUT_AS_FAST * min(times), _batching_delay(view, step) - (view.now - backlog[0].arrival))
    return [option for option, time in zip(options, times, strict=True) if time <= bound]


def _batching_delay(view: View, step: float) -> float:
    return BATCHING_DELAY_STEPS * step if view.ttft_ms is None else view.ttft_ms / 4e3


def _is_worth_it(view: View, backlog: list[RequestView], options: list[Option], step: float) -> bool:
    """With every slot taken: whether prompts have waited long enough, or fill a call nearly as well as any could."""
    if view.now - min(request.arrival for request in backlog) >= _batching_delay(view, step):
        return True
    return max(o.rate for o in options) >= FULL_ENOUGH * max(o.best_rate for o in options)
