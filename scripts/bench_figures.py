"""Holds the figures of a benchmark by measure, peer and round, and computes medians and ratios of them."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

BEST = "best genai"
GENAI = ("genai", "genai f32", "batching", "batching f32")
"""The settings of GenAI on the CPU; ``best genai`` is the best of those that ran, for each measure."""


class Figures:
    """The measurements: ``values[measure][peer]`` is a list with one figure per round."""

    def __init__(self, values: Mapping[str, Mapping[str, list[float]]] | None = None) -> None:
        self.values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for measure, found in (values or {}).items():
            self.values[measure].update(found)

    def add(self, measure: str, peer: str, value: float) -> None:
        self.values[measure][peer].append(value)

    def median(self, measure: str, peer: str) -> float | None:
        found = self.of(measure, peer)
        return statistics.median(found) if found else None

    def of(self, measure: str, peer: str) -> list[float]:
        """Return the figures of each round; those of ``best genai`` are the figures of the setting with the best median."""
        name = self.best(measure) if peer == BEST else peer
        return list(self.values.get(measure, {}).get(name or "", []))

    def best(self, measure: str, among: Iterable[str] = GENAI) -> str | None:
        """Return the peer with the best median, the highest for throughput and the lowest for all else; None if none ran."""
        found = self.values.get(measure, {})
        medians = {name: statistics.median(found[name]) for name in among if found.get(name)}
        if not medians:
            return None
        return (max if is_rate(measure) else min)(medians, key=medians.__getitem__)

    def ratio(self, mine: Figure, other: Figure) -> float | None:
        """Return the median of the ratios of each round; None if one of the two was not measured."""
        pairs = list(zip(self.of(mine.measure, mine.peer), self.of(other.measure, other.peer), strict=False))
        return statistics.median(a / b for a, b in pairs) if pairs else None


@dataclass(frozen=True)
class Figure:
    """The name of one median: what was measured, and of which peer."""

    measure: str
    peer: str = "ours"


def is_rate(measure: str) -> bool:
    """Return whether more is better."""
    return measure.startswith("clients")
