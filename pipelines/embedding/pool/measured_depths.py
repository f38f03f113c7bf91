"""Measures queue depths on real instances: regression, stress test, and fine-tuning with all of them running."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from staticllm.system.threads import ThreadPool

from ..packing.tokenized_text import TokenizedText
from ..queue.loads import LENGTH
from ..windve.queue_depth import (
    STEP,
    Estimate,
    Run,
    depth,
    estimate,
    fine_tune,
    stress_test,
)
from .instances import Instance

TUNING_REPEATS = 2
"""Runs with all devices at each step of the fine-tuning."""
_COMMON_TOKENS = 100
"""Token ids of a model whose vocabulary is unknown."""

OnStage = Callable[[str], None]
"""Gets the name of the stage that begins."""


@dataclass(frozen=True)
class MeasuredDepth:
    """The queue depths of one device by each method of the paper."""

    estimate: Estimate
    """Has its line and the fine-tuned depth."""
    regression: int
    stress: int

    @property
    def tuned(self) -> int:
        """The depth with all devices running."""
        return self.estimate.depth


def run_alone(instance: Instance, length: int = LENGTH) -> Run:
    """Return what runs that many texts of ``length`` tokens at once on an instance, and returns the seconds."""
    texts = _texts(instance, length)

    def run(concurrency: int) -> float:
        start = time.perf_counter()
        instance.embed([texts] * concurrency)
        return time.perf_counter() - start

    return run


def _texts(instance: Instance, length: int) -> TokenizedText:
    ids = np.random.default_rng(0).integers(
        0, instance.info.vocab_size or _COMMON_TOKENS, min(length, instance.info.max_length)
    )
    return TokenizedText(ids.astype(np.int64))


def run_together(runs: Sequence[Run], depths: Sequence[int]) -> list[float]:
    """Run that many texts at once on each instance, all instances together; return the seconds of each."""
    used = [device for device, count in enumerate(depths) if count]
    seconds = [0.0] * len(runs)
    if not used:
        return seconds
    start = threading.Barrier(len(used))

    def run(device: int) -> float:
        start.wait()
        return runs[device](depths[device])

    with ThreadPool(len(used), "staticllm-depths") as threads:
        for device, taken in zip(used, threads.map(run, used), strict=True):
            seconds[device] = taken
    return seconds


def _least_together(runs: Sequence[Run], depths: Sequence[int]) -> list[float]:
    """Return the least seconds of each instance in several runs: other work only ever adds time."""
    repeats = [run_together(runs, depths) for _ in range(TUNING_REPEATS)]
    return [min(seconds) for seconds in zip(*repeats, strict=True)]


def regress(instance: Instance, limit_s: float, length: int = LENGTH) -> Estimate:
    """Return the estimate of one instance by regression; about 35 runs.

    Raises:
        StaticLLMError: the device failed.
    """
    return estimate(instance.name, run_alone(instance, length), limit_s)


def measure_depths(
    instances: Sequence[Instance],
    limit_s: float,
    on_stage: OnStage = lambda _: None,
    length: int = LENGTH,
    step: int | Sequence[int] = STEP,
) -> list[MeasuredDepth]:
    """Return the queue depths of the instances for texts of ``length`` tokens. Nothing else should run meanwhile.

    ``step`` is that of the stress tests, or one per instance.

    Raises:
        ConfigError: the limit is not positive.
        StaticLLMError: a device failed.
    """
    runs = [run_alone(instance, length) for instance in instances]
    estimates = []
    stress = []
    for instance, run in zip(instances, runs, strict=True):
        on_stage(f"profiling {instance.name}")
        estimates.append(estimate(instance.name, run, limit_s))
    steps = [step] * len(instances) if isinstance(step, int) else step
    for instance, run, each in zip(instances, runs, steps, strict=True):
        on_stage(f"stress test of {instance.name}")
        stress.append(stress_test(run, limit_s, each))
    on_stage("fine-tuning with all devices running")
    tuned = fine_tune(lambda depths: _least_together(runs, depths), estimates)
    return [
        MeasuredDepth(found, depth(found.line, limit_s), stressed)
        for found, stressed in zip(tuned, stress, strict=True)
    ]
