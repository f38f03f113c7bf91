"""Compares the simulator with the engine: the same requests at the same times, on the virtual clock and on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from staticllm.core import FinishReason, Variant
from staticllm.errors import StaticLLMError

from ..costs.model import CostModel, nonnegative_least_squares
from ..llm_pipeline import StaticLLMPipeline
from ..profiling.records import Record, RequestRecord, StepRecord
from ..scheduling.request_table import Limits
from ..text.handle import GenerationHandle
from .cluster import Scenario
from .cost_model import HostCost
from .simulated_device import DeviceModel
from .summary import Summary, summarize
from .workload import Arrival, Lengths, burst, poisson

WORKLOADS = ((64, 64), (64, 256), (256, 64), (256, 256))
MAX_SEQS = 4
LOAD = 0.6
"""The default rate as a share of the maximum rate. Near the maximum, TTFT depends more on the arrivals than on the engine."""
CALIBRATION_REQUESTS = 8
FIGURES = ("tokens_per_second", "ttft_ms", "tpot_ms")
POLL_SECONDS = 0.02
MANY_WAITING = 1 << 20

Records = list[Record]


@dataclass(frozen=True)
class Check:
    """One workload under one policy, measured and simulated."""

    policy: str
    prompt: int
    """In tokens, like ``output``."""
    output: int
    rate: float
    """In requests per second."""
    measured: Summary
    predicted: Summary
    """Uses costs that were measured before, on other requests."""
    replayed: Summary
    """Uses the costs of the measured run itself, so that its deviations are the simulator's and not the machine's."""

    @property
    def deviations(self) -> dict[str, float]:
        """The deviations of the prediction, in percent of the measurement."""
        return deviations(self.predicted, self.measured)


def deviations(simulated: Summary, measured: Summary) -> dict[str, float]:
    """Return the deviations of simulated throughput, TTFT and TPOT, in percent of the measurement."""
    return {name: (getattr(simulated, name) / getattr(measured, name) - 1) * 100 for name in FIGURES}


def validate(
    model: str | os.PathLike[str],
    device: str,
    policies: Sequence[str],
    num_requests: int,
    rate: float | None,
    seed: int,
) -> Iterator[tuple[Check, DeviceModel]]:
    """Calibrate, predict and measure four workloads under each policy; yield each check and the device calibrated for it.

    ``rate`` is in requests per second; None for 60 % of the maximum rate that the simulator finds.

    Args:
        seed: The seed of the arrivals, which are the same for the simulator and the engine.

    Raises:
        StaticLLMError: the model cannot be loaded, or a request failed.
    """
    for policy in policies:
        with _load(model, device, policy) as pipe:
            for workload in WORKLOADS:
                yield _check(pipe, policy, workload, num_requests, rate, seed)


def _check(
    pipe: StaticLLMPipeline, policy: str, workload: tuple[int, int], num_requests: int, rate: float | None, seed: int
) -> tuple[Check, DeviceModel]:
    lengths = Lengths.fixed(*workload)
    rate = rate or LOAD * _saturated(calibrate(pipe, burst(CALIBRATION_REQUESTS, lengths), seed), policy, lengths)
    arrivals = poisson(rate, num_requests, lengths, seed, is_span_fixed=True)
    model = calibrate(pipe, arrivals, seed)
    predicted = _simulate(model, policy, arrivals)
    records = serve(pipe, arrivals, seed)
    replayed = _simulate(replace(_model_of(pipe, records), known=model.known), policy, arrivals)
    return Check(policy, *workload, rate, summarize(_requests(records)), predicted, replayed), model


def calibrate(pipe: StaticLLMPipeline, arrivals: Sequence[Arrival], seed: int = 0) -> DeviceModel:
    """Return a device with the engine's costs for the same arrivals with other prompts; this warms up every shape, too."""
    return _model_of(pipe, serve(pipe, arrivals, seed + 1))


def _model_of(pipe: StaticLLMPipeline, records: Records) -> DeviceModel:
    config = pipe.config
    runner = pipe.engine.runner
    limits = Limits(MAX_SEQS, config.ttft_ms, config.tpot_ms, config.gap_ms)
    num_slots = runner.cache.slots.num_slots
    known = runner.costs.measured
    cost = measured_costs(records, known)
    host = measured_host(records)
    return DeviceModel(runner.index, cost, limits, num_slots, config.num_host_slots, config.max_seq_len, host, known)


def measured_costs(records: Records, known: Mapping[Variant, float]) -> CostModel[Variant]:
    """Return the mean seconds of every variant that ran, without its first call, and the ``known`` costs of the others."""
    seconds: dict[Variant, list[float]] = {}
    for step in _steps(records):
        seconds.setdefault(step.variant, []).append(step.seconds)
    means = {variant: sum(v[1:]) / (len(v) - 1) for variant, v in seconds.items() if len(v) > 1}
    once = {variant: v[0] for variant, v in seconds.items() if variant not in known}
    return CostModel({**once, **known, **means})


def measured_host(records: Records) -> HostCost:
    """Return the time between two calls while requests exist, as costs per call, row and sequence fitted by least squares."""
    alive = [(request.arrival, request.token_times[-1]) for request in _requests(records)]
    gaps: list[float] = []
    sizes: list[tuple[float, float, float]] = []
    for before, after in pairwise(_steps(records)):
        if any(arrival <= before.end and last >= after.start for arrival, last in alive):
            gaps.append(after.start - before.end)
            num_decode = len(before.decode)
            sizes.append((1.0, num_decode + before.prefill_rows, num_decode + len(before.prefill)))
    if not gaps:
        return HostCost()
    step, row, sequence = nonnegative_least_squares(np.array(sizes), np.array(gaps)).tolist()
    return HostCost(step, row, sequence, _answer(records), _wake(records, alive))


def _answer(records: Records) -> float:
    """Return the mean seconds from the end of a call to the moment of its tokens."""
    ends = np.array([step.end for step in _steps(records)])
    times = np.array([moment for request in _requests(records) for moment in request.token_times])
    calls = np.searchsorted(ends, times) - 1  # the last call that had ended
    return float(np.mean((times - ends[calls])[calls >= 0]))


def _wake(records: Records, alive: Sequence[tuple[float, float]]) -> float | None:
    """Return the mean seconds from arrival to first call of requests that arrived alone; None if there were none."""
    waits = [
        request.started - request.arrival
        for request in _requests(records)
        if request.started and not any(arrival < request.arrival <= last for arrival, last in alive)
    ]
    return sum(waits) / len(waits) if waits else None


def serve(pipe: StaticLLMPipeline, arrivals: Sequence[Arrival], seed: int) -> Records:
    """Submit every request at its time, wait for all, and return the records of the engine.

    Raises:
        StaticLLMError: a request failed.
    """
    rng = np.random.default_rng(seed)
    profiler = pipe.engine.core.profiler
    records = list[Record]()
    prompts = [rng.integers(0, 100, (1, arrival.num_prompt)) for arrival in arrivals]  # ids in every vocabulary
    handles: list[GenerationHandle] = []
    profiler.trace = records
    start = time.perf_counter()
    for arrival, prompt in zip(arrivals, prompts, strict=True):
        time.sleep(max(0.0, start + arrival.time - time.perf_counter()))
        handles.append(pipe.submit(prompt, max_new_tokens=arrival.num_output, ignore_eos=True))
    # answers are read at the end: detokenization would compete with the engine for the CPU
    while len(_requests(records)) < len(handles):
        time.sleep(POLL_SECONDS)
    profiler.trace = None
    for request, handle in zip(_requests(records), handles, strict=True):
        if request.reason == FinishReason.ERROR:
            handle.output()
            raise StaticLLMError(f"request {request.id} failed")
    return records


def _load(model: str | os.PathLike[str], device: str, policy: str) -> StaticLLMPipeline:
    """Load the pipeline without prefix caching, which the simulator does not model."""
    longest_prompt = max(prompt for prompt, _ in WORKLOADS)
    longest_output = max(output for _, output in WORKLOADS)
    return StaticLLMPipeline(
        model, device, MAX_PROMPT_LEN=longest_prompt, MIN_RESPONSE_LEN=longest_output, MAX_NUM_SEQS=MAX_SEQS,
        PREFIX_CACHING=False, MAX_WAITING=MANY_WAITING, SCHEDULER=policy,
    )  # fmt: skip


def _saturated(model: DeviceModel, policy: str, lengths: Lengths) -> float:
    return _simulate(model, policy, burst(8 * MAX_SEQS, lengths)).requests_per_second


def _simulate(model: DeviceModel, policy: str, arrivals: Sequence[Arrival]) -> Summary:
    return summarize(Scenario(model, tuple(arrivals)).run(policy).requests)


def _steps(records: Records) -> list[StepRecord]:
    return [record for record in records if isinstance(record, StepRecord)]


def _requests(records: Records) -> list[RequestRecord]:
    return [record for record in records if isinstance(record, RequestRecord)]
