"""Measures the variants that have not run yet, while the engine has nothing to do."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from staticllm.core import Variant
from staticllm.pipelines.programs.cost_model import CostModel

logger = logging.getLogger(__name__)

RUNS = 2
"""Runs of each variant. The last one counts: a first run at a new number of rows also prepares the program's nodes."""


class Measurable(Protocol):
    """A program that can be timed without a request."""

    def time_unless(self, is_needed: Callable[[], bool]) -> float | None:
        """Run with whatever the buffers hold. Return the seconds, or None if the run was cancelled."""
        ...


class CostProbe:
    """The variants of a pipeline whose costs are worth measuring, in the order of their use. Runs on the engine's thread.

    Nothing is committed, so the KV cache does not change. The costs of the remaining variants are estimated from these.
    """

    def __init__(self, programs: Mapping[Variant, Measurable], costs: CostModel) -> None:
        self._programs, self._costs = programs, costs
        self._todo: list[Variant] = []

    @property
    def is_done(self) -> bool:
        """Whether no variant is left to measure."""
        return not self._todo

    def choose(self, variants: Iterable[Variant]) -> None:
        """Measure those of ``variants`` that were not measured and are worth it."""
        measured = self._costs.measured
        self._todo = [variant for variant in reversed(worth_measuring(variants)) if variant not in measured]

    def measure_next(self, is_needed: Callable[[], bool]) -> None:
        """Time the next variant, and add its cost. As soon as ``is_needed`` is true, the run is cancelled; it is tried again.

        A variant that fails is left out: the requests that use it will report the error.
        """
        if not self._todo:
            return
        variant, seconds = self._todo[-1], None
        try:
            for _ in range(RUNS):
                seconds = self._programs[variant].time_unless(is_needed)
                if seconds is None:
                    return
        except Exception:
            logger.warning("the cost of %s could not be measured", variant, exc_info=True)
        self._todo.pop()
        if seconds is not None:
            self._costs.set(variant, seconds)


def worth_measuring(variants: Iterable[Variant]) -> list[Variant]:
    """Return the variants from which the costs of all others follow.

    These are, with the shortest and the longest KV length that each size has: prompts alone, decoding, and mixed calls with the
    most sequences; then prompts alone with every KV length.
    """
    known = [variant for variant in variants if variant.num_logits == variant.sequences]
    most: dict[int, int] = {}
    for variant in known:
        most[variant.rows] = max(variant.sequences, most.get(variant.rows, 0))
    ends: dict[tuple[int, int], set[int]] = {}
    for variant in known:
        kv_lens = ends.setdefault((variant.rows, variant.sequences), {variant.kv_len})
        own = sorted({*kv_lens, variant.kv_len})
        ends[variant.rows, variant.sequences] = {own[0], own[-1]}

    def turn(variant: Variant) -> int | None:
        is_end = variant.kv_len in ends[variant.rows, variant.sequences]
        if variant.sequences == 1 and not variant.kv_len:
            return 0
        if is_end and variant.rows == variant.sequences:
            return 1
        if is_end and variant.sequences in (1, most[variant.rows]):
            return 2
        return 3 if variant.sequences == 1 else None

    turns = {variant: turn(variant) for variant in known}
    return sorted((v for v in known if turns[v] is not None), key=lambda v: (turns[v], v.rows, v.kv_len))
