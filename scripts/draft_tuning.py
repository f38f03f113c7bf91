"""Shows which numbers of the planner of drafts matter: the speed of simulated answers with each of them halved and doubled.

python scripts/draft_tuning.py

An answer is a text that is easy or hopeless to draft, or changes between both, on devices where a drafted row costs little or
much. The planner is the real one; the device is a table of costs with noise. A speed is the number of tokens per decode step; a
figure is its change for texts of a kind. Other random numbers change the speed of fair texts by some 6 %, and of others by 1 %.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from staticllm.core import Variant
from staticllm.pipelines.engine.speculation import draft_planner
from staticllm.pipelines.engine.speculation.draft_planner import DraftPlan, DraftPlanner, DraftTuning, PlainCall
from staticllm.pipelines.generation.drafts import AnswerDrafts, Draft, DraftParams
from staticllm.testing import fake_runner

NUM_ROWS = (1, 2, 4, 8, 16)
KV_LEN = 1 << 13
NUM_TOKENS = 400
SEEDS = range(3)
ROW_COSTS = (0.02, 0.15)
"""What one more row costs, in decode steps."""
STEPS = (2e-3, 30e-3)
"""Seconds of a decode step."""
TEXTS: Mapping[str, Callable[[int], float]] = {
    "easy": lambda place: 0.9,
    "fair": lambda place: 0.5,
    "hopeless": lambda place: 0.02,
    "changing": lambda place: 0.9 if place // 100 % 2 else 0.05,
    "late": lambda place: 0.95 if place > 250 else 0.02,
}
"""The probability that a drafted token is accepted, by its place in the answer."""


@dataclass
class Guesses:
    """Proposes tokens of which each is right by chance."""

    can_pause = True
    chance: random.Random
    num_asked: int = 0

    def propose(self, tokens: Any, limit: int) -> Draft:
        self.num_asked += 1
        return Draft((1,) * limit, "lookup 3") if self.chance.random() < 0.8 else Draft()

    def observe(self, num_proposed: int, num_accepted: int) -> None: ...

    def forget(self) -> None: ...


@dataclass
class Case:
    """A text on a device. ``is_slow_first``: the first calls of a size take ten times as long."""

    text: str
    row_cost: float
    step: float
    is_slow_first: bool
    seconds: dict[Variant, float] = field(default_factory=dict)

    def speed(self, seed: int) -> float:
        """Return the tokens per decode step of two answers, one after the other."""
        chance = random.Random(seed)
        variants = [Variant(rows, KV_LEN, rows) for rows in NUM_ROWS]
        self.seconds = {variant: self.step * (1 + self.row_cost * (variant.rows - 1)) for variant in variants}
        runner = fake_runner(variants)
        runner.costs.set(variants[0], self.step)
        for variant in variants[1:]:
            runner.costs.set(variant, self.seconds[variant])
            if self.is_slow_first:
                runner.costs.doubt(variant)
        planner = DraftPlanner(runner, KV_LEN)
        spent = sum(self._answer(planner, chance) for _ in range(2))
        return 2 * NUM_TOKENS * self.step / spent

    def _answer(self, planner: DraftPlanner, chance: random.Random) -> float:
        drafts = AnswerDrafts(DraftParams(), [])
        guesses = Guesses(chance)
        drafts.drafters.append(guesses)
        state = SimpleNamespace(id=0, tokens=[1], num_left=NUM_TOKENS, vocab_size=9, drafts=drafts)
        plain = planner._runner.index.smallest(1, 1, 1)
        assert plain is not None
        call = PlainCall(plain, 1, 1, 1, 1)
        spent = 0.0
        while state.num_left > 0:
            plan = DraftPlan(call, plain)
            asked = guesses.num_asked
            is_due = drafts.count_step()
            if is_due:
                plan = planner.plan([state], call)  # type: ignore[list-item]
            seconds = self._call(planner, plan.variant, chance)
            length = len(plan.drafts[0].tokens) if plan.drafts else 0
            right = TEXTS[self.text](len(state.tokens))
            accepted = next((i for i in range(length) if chance.random() >= right), length)
            if is_due:
                planner.observe(plan, accepted, seconds)
                if length:
                    drafts.observe(plan.drafts[0], accepted)
            else:
                planner.skip()
            spent += seconds + (1e-4 if guesses.num_asked > asked else 0.0)
            state.tokens += [1] * (accepted + 1)
            state.num_left -= accepted + 1
        return spent

    def _call(self, planner: DraftPlanner, variant: Variant, chance: random.Random) -> float:
        device = self.seconds[variant] * (1 + abs(chance.gauss(0, 0.03)) + (chance.random() < 0.02) * 0.5)
        costs = planner._runner.costs
        if not costs.is_stable(variant):
            device *= 10 if self.is_slow_first and not costs._num_updates.get(variant, 0) else 1
        costs.update(variant, device)
        return device + 2e-4


def cases() -> list[Case]:
    return [
        Case(text, row_cost, step, is_slow)
        for text in TEXTS
        for row_cost in ROW_COSTS
        for step in STEPS
        for is_slow in (False, True)
    ]


def speeds(tuning: DraftTuning) -> list[float]:
    with patch.object(draft_planner, "TUNING", tuning):
        return [statistics.mean(case.speed(seed) for seed in SEEDS) for case in cases()]


def main() -> None:
    before = speeds(DraftTuning())
    print(f"mean speed {statistics.geometric_mean(before):.3f}, worst {min(before):.3f}")
    for name, number in asdict(DraftTuning()).items():
        for factor in (0.5, 2.0):
            value = type(number)(number * factor)
            changed: dict[str, Any] = {name: value}
            pairs = zip(before, speeds(replace(DraftTuning(), **changed)), strict=True)
            changes = [100 * (after / each - 1) for each, after in pairs]
            means = {
                text: statistics.mean(c for c, case in zip(changes, cases(), strict=True) if case.text == text)
                for text in TEXTS
            }
            print(
                f"{name} {value:g}: " + ", ".join(f"{text} {mean:+.1f} %" for text, mean in means.items()),
                flush=True,
            )


if __name__ == "__main__":
    main()
