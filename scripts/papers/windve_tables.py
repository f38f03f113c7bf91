"""Reproduces WINDVE's Tables I to III, its savings and the statements about Figure 5 from the paper's own parameters.

The paper gives beta of each device (Figure 4), but no alpha. For each device, both regression depths of Table III bound alpha,
because the depth is floor((T - beta) / alpha). The two intervals overlap for all four devices, and the middle of the overlap
is used here. It gives the eight regression depths exactly, and they are fitted in that sense. The lines then predict the stress
tests, Table I without fine-tuning, and the statements about Figure 5, for which a query of L tokens costs (L / 75)^1.15 times as
much. Tables I and II are reproduced from the fine-tuned depths by running Algorithm 1 on that many queries at once; the depths
are data. Figure 6 (numbers of cores) is not reproduced: its cliffs contradict the linear model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from windve_simulation import SimulatedDevice, lockstep_concurrency, lockstep_seconds

from staticllm.pipelines.embedding.queue.loads import Line
from staticllm.pipelines.embedding.windve.deployment_cost import saving
from staticllm.pipelines.embedding.windve.queue_depth import depth, stress_test

LENGTH_EXPONENT = 1.15
"""Fitted by eye to the statements about Figure 5: slightly more than linear, because attention grows with the square."""
LIMITS_S = (1.0, 2.0)
LONG_TEXT = 500
"""Tokens of the texts in Figure 5."""
ERRORS = (
    "22/96 = 22.9 %, not 22.3 % (abstract, Table I, conclusions); 30/112 = 26.8 % and 6/128 = 4.7 % are cut off, not rounded",
    "an average deployment saves 18.6 % too, not 22.3 %: a throughput of 1.229 times needs 1/1.229 of the machines (equation 5)",
    "abstract and conclusions claim up to 22.3 %, but Table II has 26.7 % (jina)",
    "the gain is 1.20 times in the contributions and 1.22 times in the abstract; Table I has 118/96 = 1.23 times",
    "the CPU is an E5-2680 with 48 cores in the testbed, and an E5 2690 in all tables, figures and texts of results",
    "Algorithm 1 only adds to npu_queue_length and cpu_queue_length: nothing says when they fall, so as printed every query is "
    "refused after the first C_NPU + C_CPU",
    "T has two meanings: the queries that an instance processes per second on average (equation 5), and the latency that is "
    "allowed (from equation 7 on)",
    "equation 4 rounds the number of queries that another may wait for up, so that the wait exceeds its limit unless it is a "
    "whole number; n is not used again",
    "the third observation about Table I compares bge and jina, so it is about Table II; and the model that it calls faster has "
    "570 million parameters against 326",
    "Table I has 1 query for Kunpeng at 1 s, Table III has 2",
    "the CPUs' stress tests 6, 18, 2 and 12 are not multiples of the step 8",
    "22/96 = 0.229 exceeds the bound 0.21 of equation 19 (the ratio of alphas); 20/96 from the regression does not",
    "the fine-tuned depths 44 (V100, 1 s) and 22 (Xeon, 2 s) need 1.06 s and 2.12 s on the paper's own lines",
    "the load runs in lockstep: a query that arrives while a batch runs waits for it, so it takes up to T + beta",
    "the estimator counts queries of one length, not tokens",
    "the cliff in Figure 6 (no gain below 44 of 48 cores) contradicts the linear model (one query takes 0.40 s with 48)",
)
"""Errors and gaps of the paper, which the tests do not copy."""


@dataclass(frozen=True)
class PublishedDevice:
    """One device in Figure 4 and Table III: beta in seconds, and its depths at 1 s and at 2 s."""

    name: str
    beta: float
    regression: tuple[int, int]
    stress: tuple[int, int]
    tuned: tuple[int, int]

    @property
    def alphas(self) -> tuple[float, float]:
        """The interval of alpha, its lower end excluded, that gives both regression depths."""
        bounds = [
            ((t - self.beta) / (c + 1), (t - self.beta) / c) for t, c in zip(LIMITS_S, self.regression, strict=True)
        ]
        return max(low for low, _ in bounds), min(high for _, high in bounds)

    @property
    def line(self) -> Line:
        """The line with the middle of that interval, for texts of every length."""
        return Line(sum(self.alphas) / 2, self.beta, LENGTH_EXPONENT)


V100 = PublishedDevice("V100", 0.27, (40, 96), (40, 88), (44, 96))
XEON = PublishedDevice("Xeon", 0.32, (8, 20), (6, 18), (8, 22))
ATLAS = PublishedDevice("Atlas", 0.24, (84, 195), (80, 176), (84, 172))
KUNPENG = PublishedDevice("Kunpeng", 0.85, (2, 15), (2, 12), (2, 8))
DEVICES = (V100, XEON, ATLAS, KUNPENG)
PAIRS = ((V100, XEON), (ATLAS, KUNPENG))
ALPHA_RATIOS = (0.21, 0.12)
"""Ratios of the alphas of each pair, as published."""


@dataclass(frozen=True)
class PublishedGain:
    """A column of Table I (bge) or II (jina): the concurrency of the main device and of the CPU, and the gain in percent."""

    model: str
    main: str
    helping: str
    limit_s: float
    concurrency: tuple[int, int]
    gain: float


GAINS = (
    PublishedGain("bge", "V100", "Xeon", 1.0, (44, 8), 18.2),
    PublishedGain("bge", "V100", "Xeon", 2.0, (96, 22), 22.3),
    PublishedGain("bge", "Atlas", "Kunpeng", 1.0, (84, 1), 1.2),
    PublishedGain("bge", "Atlas", "Kunpeng", 2.0, (172, 8), 4.7),
    PublishedGain("jina", "V100", "Xeon", 1.0, (48, 11), 22.9),
    PublishedGain("jina", "V100", "Xeon", 2.0, (112, 30), 26.7),
    PublishedGain("jina", "Atlas", "Kunpeng", 1.0, (128, 6), 4.6),
    PublishedGain("jina", "Atlas", "Kunpeng", 2.0, (256, 20), 7.8),
)


@dataclass(frozen=True)
class DepthRow:
    """A cell of Table III: ours from the line, with the seconds that the line needs for the published fine-tuned depth."""

    device: str
    limit_s: float
    regression: int
    published_regression: int
    stress: int
    published_stress: int
    published_tuned: int
    seconds_at_tuned: float


@dataclass(frozen=True)
class GainRow:
    """A column of Table I or II. Gains in percent; ``predicted`` is computed from the regression depths, None without lines."""

    published: PublishedGain
    alone: int
    together: int
    gain: float
    predicted: float | None


@dataclass(frozen=True)
class SavingRow:
    """The saving of a model's best column, in percent: ours, and as published for a peak and for an average deployment."""

    model: str
    saving: float
    published_peak: float
    published_average: float


@dataclass(frozen=True)
class LongTextRow:
    """A statement about Figure 5, texts of 500 tokens: queries of each device within the limit, and the text's claim."""

    limit_s: float
    main: int
    helping: int
    claim: str


def table_3() -> list[DepthRow]:
    """Return Table III: the regression depths of the lines, and stress tests that run on them."""
    return [
        DepthRow(
            device.name,
            limit_s,
            depth(device.line, limit_s),
            device.regression[index],
            stress_test(device.line.seconds, limit_s),
            device.stress[index],
            device.tuned[index],
            _lockstep_seconds(device, device.tuned[index]),
        )
        for index, limit_s in enumerate(LIMITS_S)
        for device in DEVICES
    ]


def tables_1_and_2() -> list[GainRow]:
    """Return Tables I and II: queries at once that Algorithm 1 admits with the fine-tuned depths, without and with the CPU."""
    return [_gain(column) for column in GAINS]


def savings() -> list[SavingRow]:
    """Return the savings, which the paper takes from the columns at 2 s of the V100."""
    rows = (("bge", 18.6, 22.3), ("jina", 21.1, 26.7))
    found = {column.model: column.concurrency for column in GAINS if column.main == "V100" and column.limit_s == 2.0}
    return [SavingRow(model, 100 * saving(*found[model]), peak, average) for model, peak, average in rows]


def long_texts() -> list[LongTextRow]:
    """Return the statements about Figure 5, from the lines of V100 and Xeon."""
    claims = ("no additional query", "2 additional queries, 20 %")
    return [
        LongTextRow(limit_s, _depth_of_long(V100, limit_s), _depth_of_long(XEON, limit_s), claim)
        for limit_s, claim in zip(LIMITS_S, claims, strict=True)
    ]


def _gain(column: PublishedGain) -> GainRow:
    pair = {device.name: device for device in DEVICES}
    main, helping = pair[column.main], pair[column.helping]
    devices = [
        SimulatedDevice(device.name, device.line.new_load, tuned)
        for device, tuned in zip((main, helping), column.concurrency, strict=True)
    ]
    alone, together = lockstep_concurrency(devices[:1]), lockstep_concurrency(devices)
    predicted = None
    if column.model == "bge":
        predicted = 100 * depth(helping.line, column.limit_s) / depth(main.line, column.limit_s)
    return GainRow(column, alone, together, 100 * (together / alone - 1), predicted)


def _depth_of_long(device: PublishedDevice, limit_s: float) -> int:
    """Return the queue depth for texts of ``LONG_TEXT`` tokens."""
    each = device.line.seconds(1, LONG_TEXT) - device.beta
    return math.floor((limit_s - device.beta) / each)


def _lockstep_seconds(device: PublishedDevice, concurrency: int) -> float:
    return lockstep_seconds([SimulatedDevice(device.name, device.line.new_load, concurrency)], concurrency)
