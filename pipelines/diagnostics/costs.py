"""Compares the costs by which chunks and policies are planned with timed calls."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from staticllm.core import Variant

from ..engine.engine import Engine

RUNS = 3
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class CostComparison:
    """The cost of one variant."""

    variant: str
    rows: int
    kv_len: int
    planned_ms: float
    """What plans assume."""
    timed_ms: float
    """The median of timed calls."""
    is_estimate: bool
    """Whether the variant itself was never timed before; its cost follows from others."""

    @property
    def error(self) -> float:
        """The relative error of the planned cost."""
        return self.planned_ms / self.timed_ms - 1


def wait_for_costs(engine: Engine, seconds: float, on_progress: Callable[[int, int], None] = lambda *_: None) -> bool:
    """Leave the engine idle until all wanted costs are measured, at most ``seconds``; return whether they are.

    Args:
        on_progress: Gets the numbers of costs that are measured and wanted.
    """
    until = time.monotonic() + seconds
    total = engine.run_between_steps(lambda: engine.runner.probe.num_left)
    with engine.step_host.costs_awaited():
        while engine.runner.probe.num_left and time.monotonic() < until:
            on_progress(total - engine.runner.probe.num_left, total)
            time.sleep(POLL_SECONDS)
    return not engine.runner.probe.num_left


def compare_costs(engine: Engine, on_progress: Callable[[int, int], None] = lambda *_: None) -> list[CostComparison]:
    """Time calls of every size of prompts and decode steps of an idle engine, and compare them with its costs.

    Prompts are timed without a past and over the second KV length, and follow a call of another size, like the chunks of real
    prompts. The inputs are stale, and nothing of the calls is kept.

    Raises:
        ClosedError: the engine was closed.
    """
    variants = engine.run_between_steps(lambda: _compared(engine.runner.index.variants))
    found: list[CostComparison] = []
    for number, variant in enumerate(variants):
        on_progress(number, len(variants))
        found.append(engine.run_between_steps(partial(_compare, engine, variant)))
    return found


def _compare(engine: Engine, variant: Variant) -> CostComparison:
    runner = engine.runner
    planned = runner.costs(variant)
    is_estimate = variant not in runner.costs.measured
    timed = statistics.median(runner.probe.seconds_of(variant) for _ in range(RUNS))
    return CostComparison(str(variant), variant.rows, variant.kv_len, planned * 1e3, timed * 1e3, is_estimate)


def _compared(variants: tuple[Variant, ...]) -> list[Variant]:
    kv_lens = sorted({variant.kv_len for variant in variants if variant.kv_len})
    second = kv_lens[min(1, len(kv_lens) - 1)] if kv_lens else 0
    alone = [variant for variant in variants if variant.sequences == 1 and variant.kv_len in (0, second)]
    packed = [variant for variant in variants if 1 < variant.rows == variant.sequences and variant.kv_len == second]
    return sorted({*alone, *packed})
