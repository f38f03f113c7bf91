"""Simulates FlexNPU's Table 4: one device, 200 requests at 4 per second, at most 4 running, static against dynamic co-location.

The costs of a prompt and of a decode step are computed from the static column. Each of the 4 running places serves one request
after another. Its cycle of ``4 * output / throughput`` seconds consists of a prompt and ``output - 1`` published TPOTs, during
which the other three places run one prompt each. A line through the means of both prompt lengths gives 0.117 s per call and
0.125 ms per token. (Without filling and draining at the edges of a run it would be 0.102 s, and the TTFT of 256 tokens in the
dynamic column would be 15 % too low. No other cell depends on it as much.)

``PREFILL_SHARE`` is fitted to the TTFT of 1024/256 in the dynamic column. It is the share of the AI cores that prefill gets while
decode runs; in the paper both are separate processes. The part of a prompt's cost that depends on its tokens is work for the
cores and takes ``1 / share`` times as long, while decode uses the other cores. During the constant part of a call's cost
(launching kernels) decode uses all cores.

The TTFT of the static column is predicted, and so is the dynamic column except the fitted cell. The throughput and TPOT of the
static column are reproduced, up to the deviation from the line. Arrivals are Poisson, stretched to 50 s as in vLLM's benchmark,
and averaged over two seeds, as the paper averages two runs. In the dynamic column TPOT excludes the time to the second token, in
which a request is swapped.

This is a reading, not what the paper says. Its dynamic column contradicts itself if TPOT is the mean of all tokens after the
first: ``Published.hidden_seconds`` computes what is missing. The simulated time to the second token is what fills the gap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from staticllm.core import Variant
from staticllm.pipelines.programs.variant_index import VariantIndex
from staticllm.pipelines.scheduling.interface import Policy
from staticllm.pipelines.scheduling.policies.dynamic import Dynamic
from staticllm.pipelines.scheduling.policies.fcfs import Fcfs
from staticllm.pipelines.scheduling.request_table import Limits
from staticllm.pipelines.simulator.cluster import colocated
from staticllm.pipelines.simulator.simulated_device import DeviceModel
from staticllm.pipelines.simulator.summary import Summary, summarize
from staticllm.pipelines.simulator.workload import Lengths, poisson

NUM_REQUESTS, RATE, MAX_SEQS = 200, 4.0, 4
SEEDS = (0, 1)
PREFILL_SHARE = 0.60
EAGER_TTFT_MS = 1.0
"""A target that is always missed, so that prompts run as they arrive, without a batching delay."""


@dataclass(frozen=True)
class Published:
    """One configuration of one column: lengths in tokens, throughput in tokens per second, times in ms."""

    prompt: int
    output: int
    throughput: float
    ttft_ms: float
    tpot_ms: float

    @property
    def name(self) -> str:
        """The lengths of prompt and answer, as in the paper."""
        return f"{self.prompt}/{self.output}"

    @property
    def run_seconds(self) -> float:
        """The seconds of the whole run by the throughput."""
        return NUM_REQUESTS * self.output / self.throughput

    @property
    def latency_seconds(self) -> float:
        """The mean seconds from arrival to the last token by TTFT and TPOT."""
        return (self.ttft_ms + (self.output - 1) * self.tpot_ms) / 1e3

    @property
    def hidden_seconds(self) -> float:
        """The seconds by which the mean latency must exceed that of TTFT and TPOT for the throughput to be possible.

        No order of requests has an earlier mean end than one after another, at the throughput of the run; on average they
        arrive in the middle of ``NUM_REQUESTS / RATE`` seconds. Below 0 the three figures fit.
        """
        earliest = self.run_seconds * (NUM_REQUESTS + 1) / (2 * NUM_REQUESTS)
        return earliest - NUM_REQUESTS / RATE / 2 - self.latency_seconds


STATIC = (
    Published(256, 256, 186.305, 109941.5, 20.9980),
    Published(256, 1024, 195.275, 488099.0, 20.3510),
    Published(1024, 256, 177.310, 118164.5, 21.8010),
    Published(1024, 1024, 189.215, 506536.5, 20.8925),
)
DYNAMIC = (
    Published(256, 256, 192.950, 331.0, 20.5530),
    Published(256, 1024, 194.250, 331.5, 20.5340),
    Published(1024, 256, 183.270, 8568.5, 21.5550),
    Published(1024, 1024, 189.515, 8311.5, 21.0415),
)
FITTED = DYNAMIC[2]


class Deviations(NamedTuple):
    """The deviations of a simulated cell from the published one, in percent of the published figures."""

    throughput: float
    ttft: float
    tpot: float


@dataclass(frozen=True)
class Cell:
    """One configuration of one column, simulated: throughput in tokens per second, times in ms."""

    published: Published
    throughput: float
    ttft_ms: float
    tpot_ms: float
    second_token_ms: float
    is_dynamic: bool

    @property
    def deviations(self) -> Deviations:
        """The deviations of throughput, TTFT and TPOT."""
        p = self.published
        pairs = ((self.throughput, p.throughput), (self.ttft_ms, p.ttft_ms), (self.tpot_ms, p.tpot_ms))
        return Deviations(*(100 * (simulated / published - 1) for simulated, published in pairs))


def table_4(outputs: tuple[int, ...] = (256, 1024), seeds: tuple[int, ...] = SEEDS) -> Iterator[Cell]:
    """Simulate the cells with these output lengths, the static column first; each takes seconds."""
    for column in (STATIC, DYNAMIC):
        for row in column:
            if row.output in outputs:
                yield _cell(row, column is DYNAMIC, seeds)


def _cell(row: Published, is_dynamic: bool, seeds: tuple[int, ...]) -> Cell:
    model = (_shared_model if is_dynamic else _static_model)(row.prompt, row.output)
    policy = Dynamic if is_dynamic else Fcfs
    runs = [_run(model, policy, row, seed) for seed in seeds]
    return Cell(
        row,
        sum(run.tokens_per_second for run in runs) / len(runs),
        sum(run.ttft_ms for run in runs) / len(runs),
        sum(run.decode_tpot_ms if is_dynamic else run.tpot_ms for run in runs) / len(runs),
        sum(run.second_token_ms for run in runs) / len(runs),
        is_dynamic,
    )


def _run(model: DeviceModel, policy: Callable[[], Policy], row: Published, seed: int) -> Summary:
    lengths = Lengths.fixed(row.prompt, row.output)
    arrivals = poisson(RATE, NUM_REQUESTS, lengths, seed, is_span_fixed=True)
    return summarize(colocated(model, policy).run(arrivals).requests)


def prompt_line() -> tuple[float, float]:
    """Return the cost of a prompt, a line through the means of both lengths: seconds per call, and seconds per token."""
    short, long = (_mean([_prompt_seconds(row) for row in STATIC if row.prompt == prompt]) for prompt in (256, 1024))
    per_token = (long - short) / (1024 - 256)
    return short - 256 * per_token, per_token


def step_seconds(prompt: int, output: int) -> float:
    """Return the seconds of a decode step alone: the static TPOT without the prompts of the other three places."""
    (row,) = (row for row in STATIC if (row.prompt, row.output) == (prompt, output))
    return row.tpot_ms / 1e3 - (MAX_SEQS - 1) * _prompt_seconds(row) / (output - 1)


def _prompt_seconds(row: Published) -> float:
    """Return the seconds of a prompt: the cycle of one running place without its decode steps."""
    return MAX_SEQS * row.output / row.throughput - (row.output - 1) * row.tpot_ms / 1e3


def _static_model(prompt: int, output: int) -> DeviceModel:
    fixed, per_token = prompt_line()
    alone = fixed + per_token * prompt
    return _model(prompt, output, alone, {})


def _shared_model(prompt: int, output: int) -> DeviceModel:
    """Return a device with mixed calls, each with one decode step and the part of a prompt that runs during that step."""
    fixed, per_token = prompt_line()
    step, alone = step_seconds(prompt, output), fixed + per_token * prompt
    cores = per_token * prompt / PREFILL_SHARE
    beside = fixed + cores
    num_steps = round((fixed + cores * (1 - PREFILL_SHARE)) / step)
    rows = MAX_SEQS + -(-prompt // num_steps)
    return _model(prompt, output, alone, {(rows, MAX_SEQS + 1): beside / num_steps})


def _model(prompt: int, output: int, alone: float, mixed: dict[tuple[int, int], float]) -> DeviceModel:
    max_seq_len = prompt + output
    kv_slots = 2 * MAX_SEQS * max_seq_len
    costs = {
        Variant(prompt, 0): alone,
        Variant(prompt, kv_slots): alone,
        Variant(MAX_SEQS, kv_slots, MAX_SEQS): step_seconds(prompt, output),
        **{Variant(rows, kv_slots, sequences): seconds for (rows, sequences), seconds in mixed.items()},
    }
    return DeviceModel(
        VariantIndex(costs),
        costs.__getitem__,
        Limits(MAX_SEQS, ttft_ms=EAGER_TTFT_MS),
        kv_slots,
        host_kv_slots=NUM_REQUESTS * max_seq_len,
        max_seq_len=max_seq_len,
    )


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
