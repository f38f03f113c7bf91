"""The cost model holds the seconds per call of each variant, measured in every run and estimated for variants that never ran."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from staticllm.core import ProgramVariant, Work

NEW_SHARE = 0.1
"""Weight of a new measurement: low, to ignore noise, but enough to follow a throttled machine within 20 calls. Until a cost is
stable, a faster call replaces it."""
COMMON_SHARE = 0.5
"""Share of each change that all other costs follow: a machine whose speed changes within seconds changes it for all calls, and
variants that are not chosen would keep the costs of another minute."""
SLOWEST = 3.0
"""Cap on a measurement, as a multiple of the known cost: another program may have delayed the call."""
FIRST_SHARE = 0.5
"""Weight of the first measurement against the estimate: it may be the first inference at a new shape."""

STABLE_CALLS = 5
"""Calls after which the first measurement, taken beside other work, no longer matters."""
LEAST_OF_NEAREST = 0.25
"""Lower bound of an estimate, as a share of the nearest measurement."""
MIN_SECONDS = 1e-6
NUM_RECENT, FEWEST_RECENT, LATE_SHARE = 64, 20, 0.05
"""Calls whose ratios to their expected costs are kept; how many must be known; the share that may be longer than ``overrun``."""
MOST_OVERRUN = 2.0
SMOOTHING = 0.2
"""Weight of the newest call in the expected duration of the next call of the same shapes."""
MOST_SCALED = 2.0
"""The factor by which a call's seconds are scaled at most for doing more or less than its variant."""
MAX_SHAPES = 256
"""Size limit of a model's table of durations by shape."""

V = TypeVar("V", bound=ProgramVariant)


def averaged(known: float | None, newest: float, weight: float) -> float:
    """Return the exponential moving average after a ``newest`` value; that value if nothing is ``known``."""
    return newest if known is None else known + weight * (newest - known)


class CostModel(Generic[V]):
    """Seconds per call of each variant. A variant that was not measured is estimated from those that were.

    The fitted cost is a sum over the parts of ``work``, fitted by least squares of relative errors; no part is negative. The
    estimate of a variant is the measured cost of the nearest variant with as many rows, plus the difference of the two fitted
    costs; without such a variant it is the fitted cost.

    What is kept of a variant are its seconds on a machine of ``_speed`` 1; all costs follow changes of that speed.
    """

    def __init__(self, seconds: Mapping[V, float] | None = None) -> None:
        self._seconds: dict[V, float] = dict(seconds or {})
        self._work: Callable[[V], Work] = lambda variant: variant.work
        self._speed = 1.0
        self._num_updates = dict.fromkeys(self._seconds, 1)
        self._adopted: set[V] = set()
        self._estimates: dict[V, float] = {}
        self._parts: NDArray[np.float64] | None = None
        self._ratios = deque[float](maxlen=NUM_RECENT)

    def __call__(self, variant: V) -> float:
        known = self._seconds.get(variant) or self._estimates.get(variant)
        if known is None:
            known = self._estimate(variant)
            self._estimates[variant] = known
        return known * self._speed

    def weigh_by(self, work: Callable[[V], Work]) -> None:
        """Estimate by these parts of a call, where they are others than the variants say."""
        self._work = work
        self._estimates = {}
        self._parts = None

    @property
    def measured(self) -> dict[V, float]:
        """The seconds per call of the variants that were measured."""
        return {variant: self._speed * seconds for variant, seconds in self._seconds.items()}

    @property
    def stable(self) -> dict[V, float]:
        """The seconds per call of the variants whose costs are stable."""
        return {variant: seconds for variant, seconds in self.measured.items() if self.is_stable(variant)}

    @property
    def overrun(self) -> float:
        """How many times their expected seconds the slowest twentieth of the recent calls took, from 1 to ``MOST_OVERRUN``.

        It is above 1 where other programs use the device, or the cores that it needs.
        """
        if len(self._ratios) < FEWEST_RECENT:
            return 1.0
        slow = sorted(self._ratios)[-1 - int(LATE_SHARE * len(self._ratios))]
        return min(max(slow, 1.0), MOST_OVERRUN)

    @property
    def adopted(self) -> frozenset[V]:
        """The variants whose costs an earlier process measured, and this one has not measured while the engine was idle."""
        return frozenset(self._adopted)

    def adopt(self, seconds: Mapping[V, float]) -> None:
        """Take over stable costs, in seconds, that an earlier process measured."""
        for variant, known in seconds.items():
            self.set(variant, known)
        self._adopted |= set(seconds)

    def is_stable(self, variant: V) -> bool:
        """Whether the cost was measured while the engine was idle, or by at least ``STABLE_CALLS`` calls."""
        return self._num_updates.get(variant, 0) >= STABLE_CALLS

    def doubt(self, variant: V) -> None:
        """Keep the cost of a variant until it is measured again, since its program was replaced or the machine changed."""
        self._num_updates[variant] = 0
        self._adopted.discard(variant)

    def update(self, variant: V, seconds: float, work: Work | None = None) -> None:
        """Mix one measurement, in seconds, into the variant's cost; ``work``: what the call did, if not all of the variant's."""
        if work is not None and len(self._seconds) >= len(work):
            done = max(float(np.dot(self._fitted, work)), MIN_SECONDS)
            scale = float(np.dot(self._fitted, self._work(variant))) / done
            seconds *= min(max(scale, 1 / MOST_SCALED), MOST_SCALED)
        self._num_updates[variant] = self._num_updates.get(variant, 0) + 1
        if variant not in self._seconds:
            guess = self(variant) if len(self._seconds) >= len(variant.work) else seconds
            self._keep(variant, averaged(guess, seconds, FIRST_SHARE))
            return
        known = self(variant)
        is_stable = self.is_stable(variant)
        if seconds < known and not is_stable:  # the first run at a size may be very slow
            self._keep(variant, seconds)
            return
        mixed = averaged(known, min(seconds, SLOWEST * known), NEW_SHARE)
        if is_stable:
            self._ratios.append(seconds / known)
            self._speed *= averaged(1.0, mixed / known, COMMON_SHARE)
        self._seconds[variant] = mixed / self._speed

    def set(self, variant: V, seconds: float) -> None:
        """Replace a variant's cost by a measurement, in seconds."""
        self._num_updates[variant] = STABLE_CALLS
        self._adopted.discard(variant)
        self._keep(variant, seconds)

    def _keep(self, variant: V, seconds: float) -> None:
        self._seconds[variant] = seconds / self._speed
        self._estimates = {}
        self._parts = None

    def least(self, variant: V) -> float:
        """Return a variant's cost, or what the stable costs of others suggest if its own is not stable and higher.

        The only call of a variant may have been its first one, which prepares the program and can take several times as long.
        """
        known = self(variant)
        others = {other: seconds for other, seconds in self.stable.items() if other != variant}
        if self.is_stable(variant) or len(others) < len(variant.work):
            return known
        return min(known, self._estimated(variant, others, self._fit(others)))

    def _estimate(self, variant: V) -> float:
        if not self._seconds:
            return float(np.dot(self._work(variant), variant.WORK_SECONDS))
        return self._estimated(variant, self._seconds, self._fitted)

    @property
    def _fitted(self) -> NDArray[np.float64]:
        """The seconds of each part of a call, fitted to all that is known."""
        if self._parts is None:
            self._parts = self._fit(self._seconds)
        return self._parts

    def _estimated(self, variant: V, seconds: Mapping[V, float], parts: NDArray[np.float64]) -> float:
        """Return the cost of a variant by those of others, and by the seconds of each part that were fitted to them."""
        fitted = float(np.dot(self._work(variant), parts))
        alike = [known for known in seconds if known.rows == variant.rows]
        if alike:
            nearest = min(alike, key=lambda known: self._distance(known, variant))
            known = seconds[nearest]
            fitted = max(known + fitted - float(np.dot(self._work(nearest), parts)), known * LEAST_OF_NEAREST)
        return max(fitted, MIN_SECONDS)

    def _distance(self, known: V, variant: V) -> list[float]:
        """Return how much two variants differ in each part, the last part first."""
        parts = zip(self._work(known)[::-1], self._work(variant)[::-1], strict=True)
        return [abs(one - other) for one, other in parts]

    def _fit(self, seconds: Mapping[V, float]) -> NDArray[np.float64]:
        return _fit({variant: self._work(variant) for variant in seconds}, seconds)


def _fit(works: Mapping[V, Work], seconds: Mapping[V, float]) -> NDArray[np.float64]:
    """Return the seconds of each part of a call, ``[n]``, fitted to measured seconds per call by relative errors."""
    work = np.array(list(works.values()))
    values = np.array(list(seconds.values()))
    if len(values) < work.shape[1]:
        guess = np.array(next(iter(seconds)).WORK_SECONDS)
        return guess * float(np.median(values / (work @ guess)))
    return nonnegative_least_squares(work / values[:, None], np.ones(len(values)))


def nonnegative_least_squares(columns: NDArray[np.float64], values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return weights ``[n]`` of ``columns [m, n]``, none negative, whose weighted sum is close to ``values [m]``.

    Drop the column with the most negative contribution (weight times mean size) and fit again, until no weight is negative.
    Unlike Lawson and Hanson's method this may miss the optimum; it needs at most n fits.
    """
    kept = list(range(columns.shape[1]))
    while True:
        weights, *_ = np.linalg.lstsq(columns[:, kept], values, rcond=None)
        if (weights >= 0).all() or len(kept) == 1:
            break
        del kept[int(np.argmin(weights * np.abs(columns[:, kept]).mean(axis=0)))]
    found = np.zeros(columns.shape[1])
    found[kept] = np.maximum(weights, 0)
    return found


class CallCosts:
    """The expected duration of the calls of one model, by the shapes of their inputs. Any thread may call the methods."""

    def __init__(self) -> None:
        self._seconds: dict[object, float] = {}
        self._last = 0.0

    def expected(self, shapes: object) -> float:
        """Return the expected seconds of a call; that of the last call for new shapes."""
        return self._seconds.get(shapes, self._last)

    def add(self, shapes: object, seconds: float) -> None:
        known = self._seconds.get(shapes)
        if known is None and len(self._seconds) >= MAX_SHAPES:
            self._seconds.clear()
        self._last = averaged(known, seconds, SMOOTHING)
        self._seconds[shapes] = self._last
