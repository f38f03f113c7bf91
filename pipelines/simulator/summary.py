"""Computes latency, throughput and fairness of a run from its records, which are the same for simulated and measured runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

import numpy as np

from ..profiling.records import JobRecord, RequestRecord, StepRecord
from ..profiling.stats import percentile


@dataclass(frozen=True)
class Run:
    """The records of a simulation: one per request, in the order of arrival, and the calls and jobs of each device."""

    requests: tuple[RequestRecord, ...]
    steps: tuple[tuple[StepRecord, ...], ...]
    jobs: tuple[tuple[JobRecord, ...], ...] = ()


@dataclass(frozen=True)
class Summary:
    """The figures of one run: ``*_ms`` in milliseconds, and rates over the ``seconds`` from the first arrival to the last
    token.
    """

    num_requests: int
    num_tokens: int
    seconds: float
    tokens_per_second: float
    requests_per_second: float
    ttft_ms: float
    ttft_p50_ms: float
    ttft_p95_ms: float
    tpot_ms: float
    """The mean time per token after the first."""
    decode_tpot_ms: float
    """The mean time per token after the second."""
    second_token_ms: float
    """The time from the first to the second token, during which a request may be swapped."""
    longest_gap_ms: float
    """The longest time between two tokens of one request."""
    gap_p95_ms: float
    """The 95th percentile of the longest gaps of all requests."""
    latency_ms: float
    """The time from arrival to the last token."""
    latency_p95_ms: float
    fairness: float
    """Jain's index (Jain, Chiu, Hawe: A Quantitative Measure of Fairness, DEC-TR-301, 1984) of the requests' speeds, in tokens
    of prompt and answer per second of latency: 1 if all are equal, 1/n if one request gets everything."""


@dataclass(frozen=True)
class RunSummary(Summary):
    """The figures of one simulated run."""

    busy: float
    """The share of ``seconds`` in which a device was running, a mean over the devices."""
    job_share: float = 0.0
    """The share in which it ran jobs of another model."""
    num_drafted: int = 0
    """Tokens that were drafted and checked."""
    num_accepted: int = 0
    """Drafted tokens that were accepted."""

    def as_dict(self) -> dict[str, float]:
        """Return the figures of one policy that ``staticllm simulate --json`` prints."""
        return asdict(self)


def summarize(requests: Sequence[RequestRecord]) -> Summary:
    """Return the figures of all requests with at least one token; ``num_requests`` also counts the others."""
    served = [request for request in requests if request.token_times]
    times = [request.token_times for request in served]
    first = min((request.arrival for request in served), default=0.0)
    seconds = max((t[-1] for t in times), default=0.0) - first
    num_tokens = sum(map(len, times))
    ttft = [request.ttft for request in served if request.ttft is not None]
    gaps = [request.longest_gap or 0.0 for request in served]
    latency = [request.token_times[-1] - request.arrival for request in served]
    sizes = [request.num_prompt + len(request.token_times) for request in served]
    return Summary(
        num_requests=len(requests),
        num_tokens=num_tokens,
        seconds=seconds,
        tokens_per_second=num_tokens / seconds if seconds else 0.0,
        requests_per_second=len(served) / seconds if seconds else 0.0,
        ttft_ms=_mean(ttft) * 1e3,
        ttft_p50_ms=percentile(ttft, 0.5) * 1e3,
        ttft_p95_ms=percentile(ttft, 0.95) * 1e3,
        tpot_ms=_mean([request.tpot for request in served if request.tpot is not None]) * 1e3,
        decode_tpot_ms=_mean([(t[-1] - t[1]) / (len(t) - 2) for t in times if len(t) > 2]) * 1e3,
        second_token_ms=_mean([t[1] - t[0] for t in times if len(t) > 1]) * 1e3,
        longest_gap_ms=max(gaps, default=0.0) * 1e3,
        gap_p95_ms=percentile(gaps, 0.95) * 1e3,
        latency_ms=_mean(latency) * 1e3,
        latency_p95_ms=percentile(latency, 0.95) * 1e3,
        fairness=jain([size / max(spent, 1e-12) for size, spent in zip(sizes, latency, strict=True)]),
    )


def summarize_run(run: Run) -> RunSummary:
    """Return the figures of a simulated run: those of its requests, and the mean share of time in which its devices ran."""
    summary = summarize(run.requests)
    jobs = [busy_share(jobs, summary.seconds) for jobs in run.jobs]
    shares = [busy_share(steps, summary.seconds) for steps in run.steps]
    drafts = [draft for steps in run.steps for step in steps for draft in step.drafts]
    return RunSummary(
        **asdict(summary), busy=_mean(shares) + _mean(jobs), job_share=_mean(jobs),
        num_drafted=sum(drafted for _, drafted, _ in drafts), num_accepted=sum(accepted for *_, accepted in drafts),
    )  # fmt: skip


def summarize_classes(run: Run) -> dict[str, RunSummary]:
    """Return the figures of reactive and of proactive requests; empty unless there are both."""
    classes = {
        name: tuple(request for request in run.requests if request.is_proactive is is_proactive)
        for name, is_proactive in (("reactive", False), ("proactive", True))
    }
    if not all(classes.values()):
        return {}
    return {name: summarize_run(replace(run, requests=requests)) for name, requests in classes.items()}


def jain(values: Sequence[float]) -> float:
    """Return Jain's index of fairness: 1 if all values are equal, ``1 / n`` if all but one are 0."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def steady_rate(requests: Sequence[RequestRecord], skip: float = 0.2) -> float:
    """Return the requests per second without the filling and draining of the devices.

    It is the slope of the number of ended requests over time, without the first and the last share ``skip`` of them, so that
    requests that end in groups do not distort it.
    """
    ends = np.sort([request.token_times[-1] for request in requests if request.token_times])
    window = ends[int(len(ends) * skip) : int(len(ends) * (1 - skip))]
    if len(window) < 2 or window[0] == window[-1]:
        return 0.0
    return float(np.polyfit(window - window[0], np.arange(len(window)), 1)[0])


def mean_slots(steps: Sequence[StepRecord], skip: float = 0.2) -> float:
    """Return the mean number of KV slots of one device's arena in use, over the time of its calls and the pauses between them.

    The first and the last share ``skip`` of the time are left out, in which the device fills and drains.
    """
    if not steps:
        return 0.0
    span = steps[-1].end - steps[0].start
    begin = steps[0].start + skip * span
    end = steps[-1].end - skip * span
    moments = [max(begin, min(end, step.end)) for step in steps]
    held = [step.slots_in_use * (until - since) for step, (since, until) in zip(steps, pairwise(moments), strict=False)]
    return sum(held) / (end - begin) if end > begin else 0.0


def busy_share(calls: Sequence[StepRecord | JobRecord], seconds: float) -> float:
    """Return the share of ``seconds`` in which a device ran these calls."""
    return sum(call.seconds for call in calls) / seconds if seconds else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
