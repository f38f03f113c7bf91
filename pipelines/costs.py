"""What each variant costs, in seconds. Measured at warm-up, kept current by every run."""

from __future__ import annotations

from staticllm.core import Variant

NEW_SHARE = 0.1
"""Weight of a new measurement: slow enough to ride out a noisy call, fast enough to follow a throttling machine."""


class CostTable:
    """Seconds a call, for each variant; a rough guess by size until something was measured."""

    def __init__(self) -> None:
        self._seconds: dict[Variant, float] = {}

    def __call__(self, variant: Variant) -> float:
        if variant in self._seconds:
            return self._seconds[variant]
        return (8 + variant.rows) * (1 + (variant.capacity + variant.rows) / 8192) * 1e-3

    def update(self, variant: Variant, seconds: float) -> None:
        """Mix one measurement in."""
        known = self._seconds.get(variant, seconds)
        self._seconds[variant] = known + NEW_SHARE * (seconds - known)
