"""What each variant costs, in seconds. Measured at warm-up, kept current by every run."""

from __future__ import annotations

from staticllm.core import Variant

NEW_SHARE = 0.1
"""Weight of a new measurement: slow enough to ride out a noisy call, fast enough to follow a throttling machine."""


class CostTable:
    """Seconds a call, for each variant. What was not measured is scaled from the nearest size that was."""

    def __init__(self) -> None:
        self._seconds: dict[Variant, float] = {}

    def __call__(self, variant: Variant) -> float:
        if variant in self._seconds:
            return self._seconds[variant]
        if not self._seconds:
            return _relative(variant) * 1e-3
        near = min(
            self._seconds, key=lambda other: (abs(other.rows - variant.rows), abs(other.capacity - variant.capacity))
        )
        return self._seconds[near] * _relative(variant) / _relative(near)

    def update(self, variant: Variant, seconds: float) -> None:
        """Mix one measurement in."""
        known = self._seconds.get(variant, seconds)
        self._seconds[variant] = known + NEW_SHARE * (seconds - known)


def _relative(variant: Variant) -> float:
    """How costs grow with the sizes, roughly: reading the weights is worth 8 rows, 8192 rows of past double a call."""
    return (8 + variant.rows) * (1 + (variant.capacity + variant.rows) / 8192)
