"""WINDVE's queue depths: how many queries at once a device embeds within the latency limit, and the file of estimates."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta

from staticllm.errors import ConfigError
from staticllm.system.files import read_regular, write_whole
from staticllm.system.typed import json_of, typed

from ...costs.model import NEW_SHARE, averaged, nonnegative_least_squares
from ..queue.loads import Line

NUM_LEVELS, NUM_REPEATS = 5, 5
"""Concurrencies that are profiled, and runs at each of them. The paper says "a limited number" of runs."""
STEP = 8
"""The paper's step of the stress test."""
MAX_DEPTH = 1 << 16
"""The largest queue depth, for devices whose latency does not grow."""
MAX_TUNING_RUNS = 64
_EPSILON = 1e-9
"""Rounding errors must not cost a query: (1 - 0.4) / 0.1 is less than 6."""

VERSION = 1
MAX_BYTES = 1 << 20
MAX_SECONDS = 1e6
_REMEDY = "delete the file, and the queue depths are measured again"

Run = Callable[[int], float]
"""Runs that many queries at once on one device, and returns the seconds until the last one ends."""
RunTogether = Callable[[Sequence[int]], Sequence[float]]
"""Runs that many queries at once on each device, all devices together, and returns the seconds of each device."""


@dataclass(frozen=True)
class Estimate:
    """The line of one device, fitted to its profile."""

    name: str
    line: Line
    r2: float
    """The share of the variance that the line explains."""
    limit_s: float
    tuned: int | None = None
    """The queue depth found by fine-tuning for ``limit_s``, if it was."""

    @property
    def depth(self) -> int:
        """The queue depth: the fine-tuned one, else that of the regression."""
        return depth(self.line, self.limit_s) if self.tuned is None else self.tuned

    @property
    def sustained_rate(self) -> float:
        """Queries per second, without end, that all meet the limit: by the line through the fine-tuned depth, if there is one."""
        if self.tuned is None:
            return sustained_rate(self.line, self.limit_s)
        if not self.tuned:
            return 0.0
        ratio = self.limit_s / self.line.seconds(self.tuned) if self.tuned != depth(self.line, self.limit_s) else 1.0
        slowed = replace(self.line, alpha=self.line.alpha * ratio, beta=self.line.beta * ratio)
        return min(sustained_rate(slowed, self.limit_s), self.tuned / self.limit_s)

    def for_limit(self, limit_s: float) -> Estimate:
        """Return the estimate for another limit: the line stays, and the fine-tuned depth is good for its own limit only."""
        return self if limit_s == self.limit_s else replace(self, limit_s=limit_s, tuned=None)

    def recalibrated(self, ratio: float) -> Estimate:
        """Return the estimate for a device that takes ``ratio`` times as long as when it was profiled."""
        line = replace(self.line, alpha=self.line.alpha * ratio, beta=self.line.beta * ratio)
        tuned = (
            None
            if self.tuned is None
            else self.tuned * depth(line, self.limit_s) // max(1, depth(self.line, self.limit_s))
        )
        return replace(self, line=line, tuned=tuned)


def depth(line: Line, limit_s: float) -> int:
    """Return the burst concurrency: the largest number of queries at once that all end within the limit (equations 7 to 12)."""
    if line.beta > limit_s:
        return 0
    if line.alpha * MAX_DEPTH <= limit_s - line.beta:
        return MAX_DEPTH
    return max(0, math.floor((limit_s - line.beta) / line.alpha + _EPSILON))


def sustained_rate(line: Line, limit_s: float) -> float:
    """Return the queries per second, arriving evenly, of which none exceeds the limit.

    A query may arrive just after a batch has begun, so it waits for that batch and then takes part in one as long: each may take
    half of the limit. A burst (``depth``) may be larger, because nothing runs when it arrives; its queries per second are the
    most that are returned.
    """
    half = limit_s / 2
    if line.beta >= half:
        return 0.0
    rate = (half - line.beta) / line.alpha / half if line.alpha else math.inf
    return min(rate, depth(line, limit_s) / limit_s)


def choose_levels(run: Run, limit_s: float, count: int = NUM_LEVELS, most: int = 1024) -> list[int]:
    """Return ``count`` concurrencies from 1 to the first power of two that misses the limit, at most ``most``."""
    top = 1
    while top < most and run(top) <= limit_s:
        top = min(2 * top, most)
    return sorted({round(level) for level in np.linspace(1, max(top, 2), count)})


def profile(run: Run, levels: Sequence[int], repeats: int = NUM_REPEATS) -> dict[int, list[float]]:
    """Return the seconds of each run at each concurrency. The levels take turns, so that a slow moment does not hit one alone."""
    seconds: dict[int, list[float]] = {level: [] for level in levels}
    for _ in range(repeats):
        for level in levels:
            seconds[level].append(run(level))
    return seconds


def fit(profiled: Mapping[int, Sequence[float]]) -> tuple[Line, float]:
    """Return the line through the least seconds of each concurrency, by least squares, and its r².

    Neither alpha nor beta is negative. The least of several runs is taken because other work only ever adds time.

    Raises:
        ConfigError: fewer than two concurrencies were profiled, or a time is not positive.
    """
    levels = sorted(level for level, seconds in profiled.items() if len(seconds))
    if len(levels) < 2:
        raise ConfigError(f"a profile of {len(levels)} concurrencies: a line needs two or more")
    values = np.array([min(profiled[level]) for level in levels], np.float64)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ConfigError(f"a profile with {values.tolist()} s: every time must be more than 0")
    columns = np.stack([np.array(levels, np.float64), np.ones(len(levels))], axis=1)
    alpha, beta = nonnegative_least_squares(columns, values)
    errors = float(((columns @ np.array([alpha, beta]) - values) ** 2).sum())
    variance = float(((values - values.mean()) ** 2).sum())
    return Line(float(alpha), float(beta)), 1 - errors / variance if variance else 1.0


def estimate(name: str, run: Run, limit_s: float) -> Estimate:
    """Profile a device alone and return its estimate. ``run`` is called about 35 times.

    Raises:
        ConfigError: the limit or a measured time is not positive.
    """
    if not 0 < limit_s < math.inf:
        raise ConfigError(f"a latency limit of {limit_s:g} s: must be more than 0")
    line, r2 = fit(profile(run, choose_levels(run, limit_s)))
    return Estimate(name, line, r2, limit_s)


def stress_test(run: Run, limit_s: float, step: int = STEP, most: int = 4096) -> int:
    """Return the last concurrency that met the limit, raised by ``step`` until one misses it; 0 if the first does."""
    concurrency = 0
    while concurrency + step <= most and run(concurrency + step) <= limit_s:
        concurrency += step
    return concurrency


def fine_tune(run: RunTogether, estimates: Sequence[Estimate]) -> list[Estimate]:
    """Return the estimates with the largest depths at which all devices, running together, meet their limits.

    The devices are in order of preference. First every depth whose device is late is lowered, then one after another is raised:
    the first device keeps its depth. Steps are as wide as the line says, and 1 within 1.5 alpha of the limit. After
    ``MAX_TUNING_RUNS`` runs the largest depths that were in time are returned.
    """
    tuning = _Tuning(run, estimates)
    depths = tuning.lower([found.depth for found in estimates])
    for device in range(len(depths)):
        depths = tuning.raise_depth(depths, device)
    return [replace(found, tuned=tuned) for found, tuned in zip(estimates, depths, strict=True)]


class _Tuning:
    """The runs of one fine-tuning."""

    def __init__(self, run: RunTogether, estimates: Sequence[Estimate]) -> None:
        self._run = run
        self._estimates = estimates
        self._num_runs = 0

    def lower(self, depths: list[int]) -> list[int]:
        """Return depths that are in time: those of late devices are lowered until they are, by at most half in one step."""
        while any(depths) and self._num_runs < MAX_TUNING_RUNS:
            spare = self._spare(depths)
            if min(spare) >= 0:
                return depths
            depths = [
                found - min(self._step(device, spare[device]), (found + 1) // 2) if spare[device] < 0 else found
                for device, found in enumerate(depths)
            ]
        return depths if not any(depths) else [0] * len(depths)

    def raise_depth(self, depths: list[int], device: int) -> list[int]:
        """Return depths in time, with that of one device as large as can be."""
        spare = self._spare(depths) if depths[device] else [0.0] * len(depths)
        while depths[device] and self._num_runs < MAX_TUNING_RUNS:
            step = self._step(device, spare[device])
            tried = [*depths[:device], depths[device] + step, *depths[device + 1 :]]
            found = self._spare(tried)
            if min(found) >= 0:
                depths = tried
                spare = found
            elif step == 1:
                return depths
            else:
                spare = [0.0] * len(depths)  # the line promised too much: go on in steps of 1
        return depths

    def _spare(self, depths: Sequence[int]) -> list[float]:
        """Return the seconds by which each device meets its limit."""
        self._num_runs += 1
        seconds = self._run(depths)
        pairs = zip(self._estimates, seconds, depths, strict=True)
        return [found.limit_s - taken if depth else found.limit_s for found, taken, depth in pairs]

    def _step(self, device: int, spare: float) -> int:
        alpha = self._estimates[device].line.alpha
        return max(1, int(abs(spare) / alpha)) if alpha and abs(spare) > 1.5 * alpha else 1


class Recalibration:
    """Follows a device while it serves: how long its batches take, compared with its line."""

    def __init__(self, found: Estimate) -> None:
        self._found = found
        self._ratio = 1.0

    @property
    def estimate(self) -> Estimate:
        """The estimate as the device is now."""
        return self._found.recalibrated(self._ratio)

    def update(self, concurrency: int, seconds: float) -> None:
        """Take the seconds of one batch into account."""
        predicted = self._found.line.seconds(concurrency)
        if predicted > 0 and seconds > 0:
            self._ratio = averaged(self._ratio, seconds / predicted, NEW_SHARE)


def write_estimates(path: str | os.PathLike[str], key: str, estimates: Sequence[Estimate]) -> None:
    """Write the estimates. ``key`` names everything that they depend on: model, machine, length of the texts.

    Raises:
        OSError: the file cannot be written; the previous file is unchanged.
    """
    devices = [
        {"name": e.name, "alpha": e.line.alpha, "beta": e.line.beta, "exponent": e.line.exponent, "r2": e.r2,
         "limit_s": e.limit_s, "tuned": e.tuned}
        for e in estimates
    ]  # fmt: skip
    text = json.dumps({"version": VERSION, "key": key, "devices": devices}, indent=2, allow_nan=False)
    write_whole(path, text.encode())


def read_estimates(path: str | os.PathLike[str], key: str | None = None) -> tuple[Estimate, ...]:
    """Return the estimates in a file; empty if there is no file, or if it was written with another ``key``.

    Raises:
        ConfigError: the file cannot be read, is damaged or holds impossible values; the error names the first.
    """
    place = Path(path)
    try:
        content = json_of(read_regular(place, MAX_BYTES))
        if (
            key is not None
            and isinstance(content, dict)
            and content.get("version") == VERSION
            and content.get("key") != key
        ):
            return ()
        found = typed(content, _Stored)
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise ConfigError(f"{place.name}: cannot be read ({error.strerror or error}); {_REMEDY}") from None
    except ValueError as error:
        raise ConfigError(f"{place.name}: {error}; {_REMEDY}") from None
    for device in found.devices:
        if device.alpha + device.beta == 0:
            raise ConfigError(f"{place.name}: alpha or beta of {device.name!r} must be more than 0; {_REMEDY}")
    if len({device.name for device in found.devices}) < len(found.devices):
        raise ConfigError(f"{place.name}: names a device twice; {_REMEDY}")
    return tuple(device.estimate() for device in found.devices)


_Seconds = Annotated[float, Meta(ge=0, le=MAX_SECONDS)]


@dataclass(frozen=True)
class _StoredDevice:
    name: Annotated[str, Meta(min_length=1)]
    alpha: _Seconds
    beta: _Seconds
    exponent: _Seconds
    r2: Annotated[float, Meta(ge=-MAX_SECONDS, le=MAX_SECONDS)]
    limit_s: Annotated[float, Meta(gt=0, le=MAX_SECONDS)]
    tuned: Annotated[int, Meta(ge=0, le=MAX_DEPTH)] | None = None

    def estimate(self) -> Estimate:
        return Estimate(self.name, Line(self.alpha, self.beta, self.exponent), self.r2, self.limit_s, self.tuned)


@dataclass(frozen=True)
class _Stored:
    version: Literal[1]  # VERSION
    devices: list[_StoredDevice]
    key: str = ""
