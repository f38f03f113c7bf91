"""The simulator against the engine: the same requests at the same moments, on this machine and on the virtual clock."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from staticllm.core import FinishReason, Variant
from staticllm.errors import StaticLLMError
from staticllm.pipelines.llm_pipeline import StaticLLMPipeline
from staticllm.pipelines.profiling.records import RequestRecord, StepRecord
from staticllm.pipelines.programs.cost_model import CostModel
from staticllm.pipelines.scheduling.request_table import Limits
from staticllm.pipelines.simulator.cost_model import HostCost
from staticllm.pipelines.simulator.scenario import Scenario
from staticllm.pipelines.simulator.simulated_device import DeviceModel
from staticllm.pipelines.simulator.summary import Summary, summarize
from staticllm.pipelines.simulator.workload import Arrival, Lengths, burst, poisson
from staticllm.pipelines.text.handle import GenerationHandle

WORKLOADS = ((64, 64), (64, 256), (256, 64), (256, 256))
MAX_SEQS = 4
LOAD = 0.6
"""Share of the rate at which the queue would never empty: near it, TTFT says more about the arrivals than about the engine."""
CALIBRATION_REQUESTS = 8
FIGURES = ("tokens_per_second", "ttft_ms", "tpot_ms")
POLL_SECONDS = 0.02
MANY_WAITING = 1 << 20

Trace = list[StepRecord | RequestRecord]


@dataclass(frozen=True)
class Check:
    """One workload under one policy, on both sides. ``predicted`` with costs that were measured on other requests before,
    ``replayed`` with those of the very run: what is off there is the simulator's doing, not the machine's."""

    policy: str
    prompt: int
    output: int
    rate: float
    measured: Summary
    predicted: Summary
    replayed: Summary

    @property
    def deviations(self) -> dict[str, float]:
        """Of the prediction, in percent of what was measured."""
        return deviations(self.predicted, self.measured)


def deviations(simulated: Summary, measured: Summary) -> dict[str, float]:
    """Throughput, TTFT and TPOT, in percent of what was measured."""
    return {name: (getattr(simulated, name) / getattr(measured, name) - 1) * 100 for name in FIGURES}


def validate(
    model: str | os.PathLike[str],
    device: str,
    policies: Sequence[str],
    num_requests: int,
    rate: float | None,
    seed: int,
    on_check: Callable[[Check, DeviceModel], None] = lambda check, model: None,
) -> list[Check]:
    """Calibrate, predict, then measure: four workloads under each policy.

    Args:
        model: A model directory.
        device: The OpenVINO device.
        policies: Names.
        num_requests: Requests of each workload.
        rate: Requests a second; None for 60 % of what the simulator says that the device can do.
        seed: Of the arrivals, the same on both sides.
        on_check: Called with each check when it is done, and with the device as it was calibrated for it.
    """
    checks: list[Check] = []
    for policy in policies:
        with _load(model, device, policy) as pipe:
            for workload in WORKLOADS:
                check, calibrated = _check(pipe, policy, workload, num_requests, rate, seed)
                checks.append(check)
                on_check(check, calibrated)
    return checks


def _check(
    pipe: StaticLLMPipeline,
    policy: str,
    workload: tuple[int, int],
    num_requests: int,
    rate: float | None,
    seed: int,
) -> tuple[Check, DeviceModel]:
    lengths = Lengths.fixed(*workload)
    rate = rate or LOAD * _saturated(calibrate(pipe, burst(CALIBRATION_REQUESTS, lengths), seed), policy, lengths)
    arrivals = poisson(rate, num_requests, lengths, seed, is_span_fixed=True)
    model = calibrate(pipe, arrivals, seed)
    predicted = _simulate(model, policy, arrivals)
    trace = serve(pipe, arrivals, seed)
    replayed = _simulate(replace(_model_of(pipe, trace), known=model.known), policy, arrivals)
    return Check(policy, *workload, rate, summarize(_requests(trace)), predicted, replayed), model


def calibrate(pipe: StaticLLMPipeline, arrivals: Sequence[Arrival], seed: int = 0) -> DeviceModel:
    """A device that costs what the engine's own records say, after a rehearsal with other prompts.

    It also takes the first inference at each size out of what is measured later: the simulator knows nothing of those.
    """
    return _model_of(pipe, serve(pipe, arrivals, seed + 1))


def _model_of(pipe: StaticLLMPipeline, trace: Trace) -> DeviceModel:
    config, runner = pipe.config, pipe.engine.runner
    limits = Limits(MAX_SEQS, config.ttft_ms, config.tpot_ms)
    rows = runner.cache.slots.num_slots
    known = runner.costs.measured
    cost, host = measured_costs(trace, known), measured_host(trace)
    return DeviceModel(runner.index, cost, limits, rows, config.num_host_slots, config.max_seq_len, host, known)


def measured_costs(trace: Trace, known: Mapping[Variant, float]) -> CostModel:
    """The mean of every variant that ran, which is what adds up to a throughput, and what is known of the others.

    The first call of each is left out: it may have been the first inference at a new shape.
    """
    seconds: dict[Variant, list[float]] = {}
    for step in _steps(trace):
        seconds.setdefault(step.variant, []).append(step.seconds)
    means = {variant: sum(v[1:]) / (len(v) - 1) for variant, v in seconds.items() if len(v) > 1}
    once = {variant: v[0] for variant, v in seconds.items() if variant not in known}
    return CostModel({**once, **known, **means})


def measured_host(trace: Trace) -> HostCost:
    """What lies between two calls while somebody waits or runs: so much a call, a row and a sequence, by least squares."""
    alive = [(request.arrival, request.token_times[-1]) for request in _requests(trace)]
    gaps: list[float] = []
    sizes: list[tuple[float, float, float]] = []
    for before, after in pairwise(_steps(trace)):
        if any(arrival <= before.end and last >= after.start for arrival, last in alive):
            gaps.append(after.start - before.end)
            num_decode = len(before.decode)
            sizes.append((1.0, num_decode + before.prefill_rows, num_decode + len(before.prefill)))
    if not gaps:
        return HostCost()
    step, row, sequence = _least_squares(np.array(sizes), np.array(gaps))
    return HostCost(step, row, sequence, _answer(trace), _wake(trace, alive))


def _answer(trace: Trace) -> float:
    """The mean time from the end of a call to the tokens that it brought."""
    ends = np.array([step.end for step in _steps(trace)])
    times = np.array([moment for request in _requests(trace) for moment in request.token_times])
    calls = np.searchsorted(ends, times) - 1  # the last call that had ended
    return float(np.mean((times - ends[calls])[calls >= 0]))


def _wake(trace: Trace, alive: Sequence[tuple[float, float]]) -> float | None:
    """The mean time to its first call of a request that found nobody there; None if none did."""
    waits = [
        request.started - request.arrival
        for request in _requests(trace)
        if request.started and not any(arrival < request.arrival <= last for arrival, last in alive)
    ]
    return sum(waits) / len(waits) if waits else None


def _least_squares(columns: NDArray[np.float64], values: NDArray[np.float64]) -> list[float]:
    """Weights of the columns, none negative: the most negative one is left out until there is none."""
    kept = list(range(columns.shape[1]))
    weights: NDArray[np.float64] = np.zeros(0)
    while kept:
        weights = np.asarray(np.linalg.lstsq(columns[:, kept], values, rcond=None)[0], np.float64)
        if weights.min() >= 0:
            break
        del kept[int(weights.argmin())]
    found = dict(zip(kept, weights.tolist(), strict=True))
    return [found.get(column, 0.0) for column in range(columns.shape[1])]


def serve(pipe: StaticLLMPipeline, arrivals: Sequence[Arrival], seed: int) -> Trace:
    """Submit every request at its moment and wait. Nobody reads answers meanwhile: text would be decoded beside the engine.

    Raises:
        StaticLLMError: a request failed.
    """
    rng = np.random.default_rng(seed)
    profiler, trace = pipe.engine.profiler, list[StepRecord | RequestRecord]()
    prompts = [rng.integers(0, 100, (1, arrival.num_prompt)) for arrival in arrivals]  # ids that every vocabulary has
    handles: list[GenerationHandle] = []
    profiler.trace = trace
    start = time.perf_counter()
    for arrival, prompt in zip(arrivals, prompts, strict=True):
        time.sleep(max(0.0, start + arrival.time - time.perf_counter()))
        handles.append(pipe.submit(prompt, max_new_tokens=arrival.num_output, ignore_eos=True))
    while len(_requests(trace)) < len(handles):
        time.sleep(POLL_SECONDS)
    profiler.trace = None
    for request, handle in zip(_requests(trace), handles, strict=True):
        if request.reason == FinishReason.ERROR:
            handle.output()
            raise StaticLLMError(f"request {request.id} failed")
    return trace


def _load(model: str | os.PathLike[str], device: str, policy: str) -> StaticLLMPipeline:
    """Without prefix caching, which the simulator has not."""
    longest_prompt, longest_output = max(prompt for prompt, _ in WORKLOADS), max(output for _, output in WORKLOADS)
    return StaticLLMPipeline(
        model, device, MAX_PROMPT_LEN=longest_prompt, MIN_RESPONSE_LEN=longest_output, MAX_NUM_SEQS=MAX_SEQS,
        PREFIX_CACHING=False, MAX_WAITING=MANY_WAITING, SCHEDULER=policy,
    )  # fmt: skip


def _saturated(model: DeviceModel, policy: str, lengths: Lengths) -> float:
    return _simulate(model, policy, burst(8 * MAX_SEQS, lengths)).requests_per_second


def _simulate(model: DeviceModel, policy: str, arrivals: Sequence[Arrival]) -> Summary:
    return summarize(Scenario(model, tuple(arrivals)).run(policy).requests)


def _steps(trace: Trace) -> list[StepRecord]:
    return [record for record in trace if isinstance(record, StepRecord)]


def _requests(trace: Trace) -> list[RequestRecord]:
    return [record for record in trace if isinstance(record, RequestRecord)]
