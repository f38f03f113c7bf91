"""Runs a pipeline's programs before the first request, to pack their weights and to measure the first costs."""

from __future__ import annotations

from collections.abc import Mapping

from staticllm.core import OnProgress, ProgressEvent, Variant
from staticllm.pipelines.programs.bind import BoundPrograms
from staticllm.pipelines.programs.cost_model import CostModel

LONG_SECONDS = 0.25
"""Seconds; a variant of a shared program whose run is expected to take longer is not warmed up."""
NEAR_ROWS, FAR_ROWS, FAR_KV_LEN = (1, 4, 16, 64, 256), (1, 4, 64), 1024
"""Sizes from which all costs are estimated."""
QUICK_SECONDS = 0.05
"""Seconds; a variant whose first run is shorter is timed again, because most of a first run is one-time work."""


def warm_up(
    bound: BoundPrograms,
    known_costs: Mapping[Variant, float],
    on_progress: OnProgress,
    kept_costs: Mapping[Variant, float] | None = None,
) -> CostModel:
    """Run variants once, so that no request waits for a first inference; time the quick ones a second time.

    Each program runs at least once. A shared program runs at a few sizes, with small and large KV lengths, as long as a run is
    expected to take less than ``LONG_SECONDS``: its first run at a new size costs 10 % more than the next one
    (docs/measurements.md), and the costs of all other sizes are estimated from these. If ``known_costs`` (seconds) are given,
    each program runs once, to pack its weights. ``kept_costs`` (seconds) were measured at leisure by an earlier process.
    """
    if known_costs or kept_costs:
        costs = _first_runs(bound, known_costs, on_progress)
        costs.adopt({variant: seconds for variant, seconds in (kept_costs or {}).items() if variant in bound})
        return costs
    costs = CostModel()
    chosen = _worth_running(bound)
    packed: set[int] = set()
    for index, variant in enumerate(chosen, 1):
        first, key = 0.0, id(bound.compiled(variant))
        if key not in packed or bound.is_static(variant) or costs(variant) < LONG_SECONDS:
            program = bound[variant]
            first = program.run()
            is_worth_it = first < QUICK_SECONDS or key not in packed  # a program's first run packs its weights
            costs.update(variant, program.run() if is_worth_it else first)
            packed.add(key)
        on_progress(ProgressEvent("warm-up", index, len(chosen), first, variant))
    return costs


def _first_runs(bound: BoundPrograms, known_costs: Mapping[Variant, float], on_progress: OnProgress) -> CostModel:
    costs = CostModel({variant: seconds for variant, seconds in known_costs.items() if variant in bound})
    first = list({id(bound.compiled(variant)): variant for variant in reversed(list(bound))}.values())[::-1]
    for index, variant in enumerate(first, 1):
        seconds = bound[variant].run()
        on_progress(ProgressEvent("warm-up", index, len(first), seconds, variant))
    return costs


def _worth_running(programs: BoundPrograms) -> list[Variant]:
    """Return the variants to time, in the order of the programs: decoding first."""
    chosen: dict[tuple[int, bool], Variant] = {}
    for variant in sorted(programs, key=lambda variant: (variant.kv_len, variant.sequences)):
        is_far = variant.kv_len >= FAR_KV_LEN
        if variant.rows in (FAR_ROWS if is_far else NEAR_ROWS):
            chosen.setdefault((variant.rows, is_far), variant)
    return [variant for variant in programs if variant in chosen.values() or programs.is_static(variant)]
