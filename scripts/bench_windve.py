"""Measures WINDVE on two groups of cores as devices: A, which embeds packed texts, and B, a slower device beside it.

    python scripts/bench_windve.py MODEL_DIR                        # both parts; 2 to 6 minutes
    python scripts/bench_windve.py MODEL_DIR --quick --json out.json

A is the last core and B the first. With AMX or AVX-512 bf16, A computes in bf16 and B in f32, with the same programs. Elsewhere
both compute in f32, and B is slower because of its programs: a row of A holds two texts of 75 tokens (150), a row of B only one
(149), so about half of what B computes is padding. The depths are those of the paper: lockstep, 75 tokens, limit T. Poisson:
queries of 75 tokens at 1.5 times the rate that A embeds at its peak; a query is late if its vector comes more than T after it was
due.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from staticllm.devices import get_core
from staticllm.errors import BusyError
from staticllm.pipelines.embedding.embedding_request import EmbeddingRequest, RequestFuture
from staticllm.pipelines.embedding.encoder_kind import EncoderChoices
from staticllm.pipelines.embedding.packing.tokenized_text import TokenizedText
from staticllm.pipelines.embedding.pool.failures import DevicePool
from staticllm.pipelines.embedding.pool.instances import Instance
from staticllm.pipelines.embedding.pool.measured_depths import MeasuredDepth, measure_depths, run_alone
from staticllm.pipelines.embedding.pool.pool_loader import load_instances, make_pool
from staticllm.pipelines.embedding.pool.pool_plan import PolicyName, PoolPlan
from staticllm.pipelines.embedding.pool.thread_driver import ThreadDriver
from staticllm.pipelines.embedding.queue.device_queue import Busy, Query
from staticllm.pipelines.embedding.queue.loads import LENGTH
from staticllm.pipelines.embedding.queue.text_queue import TextQueue
from staticllm.pipelines.embedding.windve.detector import Detection, UsedDevice

FAST_SIZES = ((1, 75), (1, 150), (2, 150), (4, 150))
SLOW_SIZES = ((1, 149),)
LOAD = 1.5
POLICIES: tuple[PolicyName, ...] = ("windve", "predicted")
STEPS = 8, 2
"""Steps of the stress tests of A and B, as in the paper's own figures."""


def manager_seconds(queue: TextQueue, arrivals: NDArray[np.float64]) -> float:
    """Return the processor seconds that a manager takes per query by itself, on a virtual clock with the state's costs.

    In service, the few calls of each query run with cold caches, and a virtual machine counts the time of others as its own:
    there the same calls seem to take several times as long.
    """
    devices = queue.devices
    ends: dict[int, float] = {}
    start = time.process_time()
    for number, now in enumerate(arrivals.tolist()):
        while ends and min(ends.values()) <= now:
            device = min(ends, key=ends.__getitem__)
            queue.finish(device)
            _begin(queue, device, ends.pop(device), ends)
        place = queue.place(Query(number, now, LENGTH), now)
        if not isinstance(place, Busy) and not devices[place].running:
            _begin(queue, place, now, ends)
    return (time.process_time() - start) / len(arrivals)


def _begin(queue: TextQueue, device: int, now: float, ends: dict[int, float]) -> None:
    if queue.begin(device, now):
        ends[device] = now + queue.devices[device].left(now)


@dataclass(frozen=True)
class Depths:
    """The depths of both devices for one limit, and the gain of B: its tuned depth as a share of A's."""

    limit_ms: float
    devices: tuple[MeasuredDepth, ...]
    gain: float
    alpha_ratio: float


@dataclass(frozen=True)
class Load:
    """One run with Poisson arrivals: queries in time per second, late ones of the admitted, busy ones of all.

    ``manager_ms`` is the processor time of the queue manager alone per query, ``service_ms`` the median of everything that
    submitting a query takes.
    """

    policy: str
    devices: str
    in_time_rate: float
    late: float
    busy: float
    manager_ms: float
    service_ms: float


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="directory of an encoder")
    parser.add_argument("--limit-ms", type=float, help="T; default: the time of 10 queries on B")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each run with Poisson arrivals  [8]")
    parser.add_argument("--repeats", type=int, default=3, help="alternations of the Poisson runs  [3]")
    parser.add_argument("--quick", action="store_true", help="one alternation of 3 s, and no depths at 2 T")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    if options.quick:
        options.seconds, options.repeats = 3.0, 1
    first, *_, last = sorted(os.sched_getaffinity(0))
    if first == last:
        sys.exit("two cores are needed, one per device")
    a, b = UsedDevice(f"CPU#{last}", "CPU", (last,)), UsedDevice(f"CPU#{first}", "CPU", (first,))
    plan = PoolPlan(Detection((a, b)), {used.name: choices_of(a, used) for used in (a, b)})
    loaded = load_instances(options.model, plan)
    try:
        figures = measure(loaded.instances, options)
    finally:
        loaded.close()
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2), encoding="utf-8")


def choices_of(fast: UsedDevice, used: UsedDevice) -> EncoderChoices:
    """Return the settings of A, or those that make B slower."""
    has_bf16 = "BF16" in get_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    precision = "bf16" if has_bf16 and used == fast else "f32"
    sizes = FAST_SIZES if has_bf16 or used == fast else SLOW_SIZES
    return EncoderChoices(max_length=sizes[-1][1], sizes=sizes, properties={"INFERENCE_PRECISION_HINT": precision})


def measure(instances: Sequence[Instance], options: argparse.Namespace) -> dict[str, object]:
    """Return all figures as JSON, and print them."""
    limit_s = options.limit_ms / 1e3 if options.limit_ms else 10 * time_of_one(instances[1])
    depths = [measure_limit(instances, limit_s * factor) for factor in ((1,) if options.quick else (1, 2))]
    for measured in depths:
        print_depths(measured)
    estimates = [device.estimate for device in depths[0].devices]
    if not estimates[0].depth:
        sys.exit(f"A embeds no query within {limit_s * 1e3:.0f} ms: raise --limit-ms, or run it on a quiet machine")
    rate = LOAD * estimates[0].depth / limit_s
    print(f"\nPoisson, {rate:.0f} queries per second (150 % of A's peak), T = {limit_s * 1e3:.0f} ms")
    print(f"{'policy':<12}{'devices':<9}{'in time/s':>10}{'late':>8}{'busy':>8}{'manager ms':>12}{'service ms':>12}")
    runs: list[Load] = []
    for repeat in range(options.repeats):
        for policy in POLICIES:
            for count in (1, 2):
                used, found = instances[:count], estimates[:count]
                gaps = np.random.default_rng(repeat).exponential(1 / rate, round(rate * options.seconds))
                manager_s = min(
                    manager_seconds(make_pool(used, policy, limit_s, 1 << 20, found).queue, np.cumsum(gaps))
                    for _ in range(5)
                )
                state = make_pool(used, policy, limit_s, 1 << 20, found)
                runs.append(run_poisson(state, policy, limit_s, gaps, manager_s))
    loads = [median_of([run for run in runs if (run.policy, run.devices) == key]) for key in keys_of(runs)]
    for load in loads:
        print(
            f"{load.policy:<12}{load.devices:<9}{load.in_time_rate:>10.1f}{load.late:>8.1%}{load.busy:>8.1%}"
            f"{load.manager_ms:>12.3f}{load.service_ms:>12.3f}"
        )
    by = {(load.policy, load.devices): load.in_time_rate for load in loads}
    gains = {policy: by[policy, "A+B"] / max(by[policy, "A"], 1e-9) for policy in POLICIES}
    print("in-time rate with B / without: " + ", ".join(f"{name} {gain:.2f}" for name, gain in gains.items()))
    return {"depths": [asdict(found) for found in depths], "loads": [asdict(load) for load in loads], "gains": gains}


def time_of_one(instance: Instance) -> float:
    """Return the seconds of one query."""
    return min(run_alone(instance)(1) for _ in range(5))


def measure_limit(instances: Sequence[Instance], limit_s: float) -> Depths:
    """Return the depths at one limit."""
    show = partial(print, end="\r", file=sys.stderr)
    devices = tuple(measure_depths(instances, limit_s, lambda stage: show(f"{stage:<60}"), step=STEPS))
    alphas = [device.estimate.line.alpha for device in devices]
    show(" " * 60)
    gain = devices[1].tuned / max(1, devices[0].tuned)
    return Depths(limit_s * 1e3, devices, gain, alphas[0] / alphas[1])


def print_depths(found: Depths) -> None:
    """Print the depths at one limit."""
    print(f"\nT = {found.limit_ms:.0f} ms")
    print(
        f"{'device':<8}{'alpha ms':>10}{'beta ms':>10}{'r2':>9}{'regression':>12}{'stress':>8}{'tuned':>7}{'regr/tuned':>12}"
    )
    for name, device in zip("AB", found.devices, strict=True):
        line, ratio = device.estimate.line, device.regression / max(1, device.tuned)
        print(
            f"{name:<8}{line.alpha * 1e3:>10.2f}{line.beta * 1e3:>10.2f}{device.estimate.r2:>9.4f}{device.regression:>12}"
            f"{device.stress:>8}{device.tuned:>7}{ratio:>12.2f}"
        )
    share = found.gain / found.alpha_ratio
    print(f"gain of B {found.gain:.1%}, ratio of the alphas {found.alpha_ratio:.1%}, gain / ratio {share:.2f}")


class Answers:
    """The seconds from the due time of each query to its vector."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.num_left = 0
        self._changed = threading.Condition()

    def expect(self) -> None:
        """One more query is submitted."""
        with self._changed:
            self.num_left += 1

    def forget(self) -> None:
        """The last query was refused."""
        with self._changed:
            self.num_left -= 1

    def take(self, due: float, future: RequestFuture) -> None:
        """A query has its vector, unless it was refused: that ends its future too."""
        if future.cancelled():
            return
        with self._changed:
            self.seconds.append(time.perf_counter() - due)
            self.num_left -= 1
            self._changed.notify()

    def wait(self) -> None:
        """Wait for all vectors."""
        with self._changed:
            if not self._changed.wait_for(lambda: not self.num_left, 60):
                raise RuntimeError(f"{self.num_left} queries have no vector after 60 s")


def run_poisson(
    state: DevicePool, policy: PolicyName, limit_s: float, gaps: NDArray[np.float64], manager_s: float
) -> Load:
    """Serve queries with ``gaps`` in s between them. The instances stay open, so that all runs have the same ones."""
    info = state.devices[0].instance.info
    text = TokenizedText(np.random.default_rng(0).integers(0, info.vocab_size or 100, LENGTH))
    pool, answers, num_busy, service = ThreadDriver(state), Answers(), 0, list[float]()
    begin = time.perf_counter() + 0.1
    try:
        for due in begin + np.cumsum(gaps):
            time.sleep(max(0.0, due - time.perf_counter()))
            start = time.thread_time()
            request = EmbeddingRequest([text], info.width, priority=1)
            request.arrival = min(request.arrival, float(due))
            answers.expect()
            request.future.add_quick_callback(partial(answers.take, float(due), request.future))
            try:
                pool.submit(request)
            except BusyError:
                num_busy += 1
                answers.forget()
            service.append(time.thread_time() - start)
        answers.wait()
    finally:
        pool.detach()
    taken, num_all = np.array(answers.seconds), len(gaps)
    in_time = int((taken <= limit_s).sum())
    return Load(
        policy,
        "A" if len(state.devices) == 1 else "A+B",
        in_time / float(gaps.sum()),
        1 - in_time / max(1, len(taken)),
        num_busy / num_all,
        1e3 * manager_s,
        1e3 * float(np.median(service)),
    )


def keys_of(runs: Sequence[Load]) -> list[tuple[str, str]]:
    """Return the kinds of runs in their order."""
    return list(dict.fromkeys((run.policy, run.devices) for run in runs))


def median_of(runs: Sequence[Load]) -> Load:
    """Return the run with the median rate."""
    return sorted(runs, key=lambda run: run.in_time_rate)[len(runs) // 2]


if __name__ == "__main__":
    main()
