"""What each variant costs, in seconds. Measured at warm-up, kept current by every run, estimated where never measured."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from staticllm.core import Variant

NEW_SHARE = 0.1
"""Weight of a new measurement: slow enough to ride out a noisy call, fast enough to follow a throttling machine."""
FIRST_SHARE = 0.5
"""Weight of the first one against the estimate: it may have been a first inference at a new shape."""


class CostModel:
    """Seconds a call, for each variant. What was not measured is estimated from all that was.

    The estimate is a sum of what a call does: a constant (reading the weights), rows, attention over rows and KV length,
    copying the past, logits; fitted to the measurements by least squares of relative errors, no part negative.
    """

    def __init__(self, seconds: Mapping[Variant, float] | None = None) -> None:
        self._seconds: dict[Variant, float] = dict(seconds or {})
        self._estimates: dict[Variant, float] = {}
        self._parts: NDArray[np.float64] | None = None

    def __call__(self, variant: Variant) -> float:
        known = self._seconds.get(variant) or self._estimates.get(variant)
        if known is None:
            known = self._estimates[variant] = self._estimate(variant)
        return known

    @property
    def measured(self) -> dict[Variant, float]:
        """What was measured."""
        return dict(self._seconds)

    def update(self, variant: Variant, seconds: float) -> None:
        """Mix one measurement in."""
        known = self._seconds.get(variant)
        if known is not None:
            self._seconds[variant] = known + NEW_SHARE * (seconds - known)
            return
        guess = self(variant) if len(self._seconds) >= len(_features(variant)) else seconds
        self._seconds[variant] = guess + FIRST_SHARE * (seconds - guess)
        self._estimates, self._parts = {}, None

    def _estimate(self, variant: Variant) -> float:
        if not self._seconds:
            return float(_features(variant) @ UNMEASURED)
        if self._parts is None:
            self._parts = _fit(self._seconds)
        return max(float(_features(variant) @ self._parts), 1e-6)


def _features(variant: Variant) -> NDArray[np.float64]:
    rows, kv_len = variant.rows, variant.kv_len
    return np.array([1.0, rows, rows * (kv_len + rows), kv_len, variant.sequences])


UNMEASURED = np.array([8e-3, 1e-3, 1.2e-7, 1e-6, 0.0])
"""Before anything is measured: reading the weights is worth eight rows."""


def _fit(seconds: Mapping[Variant, float]) -> NDArray[np.float64]:
    """Least squares with all parts at least 0: the most negative part is left out until none is."""
    features = np.array([_features(variant) for variant in seconds])
    values = np.array(list(seconds.values()))
    if len(values) < features.shape[1]:
        scale = float(np.median(values / (features @ UNMEASURED)))
        return UNMEASURED * scale
    weighted, targets = features / values[:, None], np.ones(len(values))
    kept = list(range(features.shape[1]))
    while True:
        parts, *_ = np.linalg.lstsq(weighted[:, kept], targets, rcond=None)
        if (parts >= 0).all() or len(kept) == 1:
            break
        del kept[int(np.argmin(parts * np.abs(weighted[:, kept]).mean(axis=0)))]
    whole = np.zeros(features.shape[1])
    whole[kept] = np.maximum(parts, 0)
    return whole
