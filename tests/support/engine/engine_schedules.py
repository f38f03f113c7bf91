"""Schedules of requests for tests of the engine: bursts, cancellations, broken policies, and clients that feed tokens."""

from __future__ import annotations

import itertools
from collections import Counter

from support.engine.engine_drafters import drafting_request
from support.engine.output_queues import outputs_of

from staticllm.core import MaskKind
from staticllm.errors import NumericalError
from staticllm.pipelines.scheduling.interface import Plan
from staticllm.pipelines.scheduling.planner import make_policy
from staticllm.testing import POISON, fake_answer

MASKS = (MaskKind(), MaskKind(9))
ADAPTERS = ((), (1.0, 0.0), (0.5, 0.0), (0.25, 1.0))
"""What requests of a schedule may use of the two adapters of the fake model."""


def change(view):
    object.__setattr__(view, "free_slots", 1 << 20)
    view.device.index.buckets.clear()
    return Plan(prefill=tuple((request.id, request.num_left) for request in view.requests))


HOSTILE = {
    "raise": lambda view: 1 // 0,
    "endless": lambda view: Plan(decode=itertools.count()),
    "nonsense": lambda view: Plan(decode=(-1,), preempt=tuple(request.id for request in view.requests)),
    "change": change,
}
"""What a broken policy might do: raise, return no valid plan, or change its view."""


def assert_slots_counted(engine):
    """Assert that what a policy is told about slots is what counting the slots of all sequences gives."""
    manager, slots = engine.core.device.kv_manager, engine.runner.cache.slots
    idle = [*manager.prefix.idle_sequences(), *manager.idle.sequences]
    active = {state.id: state.kv.sequence for state in manager.states.values() if state.kv.sequence is not None}
    assert all(sequence.is_idle for sequence in idle)
    assert not any(sequence.is_idle for sequence in active.values())
    holders = Counter(slot for sequence in active.values() for slot in sequence.slots.tolist())
    assert manager.free_slots == slots.num_slots - len(holders)
    manager.count_own_slots()
    for id, sequence in active.items():
        assert manager.states[id].info.own_slots == sum(holders[slot] == 1 for slot in sequence.slots.tolist())


class Disturbed:
    """A shipped policy, some of whose plans are replaced by ones that swap out, preempt, or skip a request.

    Between two blocks it lets requests decode two times of three, all that can or the first one.
    """

    def __init__(self, name, moves):
        self.policy, self.moves, self.used, self.num_between = make_policy(name), list(moves), set(), 0

    def between_blocks(self, view, call):
        self.num_between += 1
        count = (0, 1, min(call.max_decoding, view.free_slots))[self.num_between % 3]
        return Plan(decode=tuple(request.id for request in view.running[:count])) if count and view.running else None

    def plan(self, view):
        plan = self.policy.plan(view)
        move = self.moves.pop() if self.moves else None
        if move in HOSTILE:
            return HOSTILE[move](view)
        if move is None or plan.swap_out or plan.preempt or plan.swap_in or not plan.decode:
            return plan
        victim, *others = sorted(plan.decode)
        if not others and not plan.prefill:
            return plan
        self.used.add(move)
        if move == "skip":
            return Plan(decode=tuple(others), prefill=plan.prefill)
        num_slots = next(request.num_computed for request in view.running if request.id == victim)
        if move == "swap_out" and num_slots <= view.free_host_slots:
            return Plan(decode=tuple(others), prefill=plan.prefill, swap_out=(victim,))
        return Plan(decode=tuple(others), prefill=plan.prefill, preempt=(victim,))


class Schedule:
    """Requests that arrive in bursts, with common prefixes, cancellations, non-finite numbers, and drafts of several kinds."""

    def __init__(self, schedule):
        self.requests, self.arrivals = [], []
        adapters = itertools.cycle(ADAPTERS[index] for index in schedule.get("adapters") or [0])
        for family, length, num_new, arrival in schedule["prompts"]:
            shared = [100 * family + i for i in range(min(length, 20))]
            prompt = [*shared, *(300 + 7 * len(self.requests) + i for i in range(length - len(shared)))]
            if len(self.requests) in schedule["poisoned"]:
                prompt[-1] = POISON
            kind = schedule["drafters"][len(self.requests)] if "drafters" in schedule else "none"
            self.requests.append(drafting_request(prompt, num_new, kind, MASKS, adapters=next(adapters)))
            self.arrivals.append(arrival)
        self.prompts = [list(request.tokens) for request in self.requests]
        self.cancels, self.cancelled = dict(schedule["cancels"]), set()

    def arrive(self, engine, step):
        engine.steps.add([r for r, arrival in zip(self.requests, self.arrivals, strict=True) if arrival == step])
        for index, request in enumerate(self.requests):
            if self.cancels.get(index) == step and self.arrivals[index] <= step:
                request.cancel()
                self.cancelled.add(index)

    def check(self, is_recurrent):
        for index, (request, prompt) in enumerate(zip(self.requests, self.prompts, strict=True)):
            *tokens, end = outputs_of(request)
            was_cancelled = index in self.cancelled and end.reason == "cancelled"
            if POISON in prompt:
                assert not tokens
                assert isinstance(end.error, NumericalError) or was_cancelled
                continue
            answer = fake_answer(
                prompt, request.request.max_new_tokens, MASKS, is_recurrent, adapters=request.request.adapters
            )[len(prompt) :]
            assert [token.id for token in tokens] == answer[: len(tokens)]
            is_whole = len(tokens) == request.request.max_new_tokens and end.reason == "length"
            assert end.error is None, end.error
            assert is_whole or was_cancelled
