"""Simulates FlexNPU's Tables 2 and 3: 384 cards, static disaggregation (6P2D) against 3 co-located instances of 128 cards.

Each instance is one simulated device. The costs of a request come from the static rows of Table 3: 96 cards prefill 489.84
requests per second, so one request takes 96 / 489.84 card-seconds, and likewise for decode. With co-location every call costs
``interference`` times as much. That factor is fitted on 1K-1K, and 1K-4K is predicted with it.

A real instance decodes thousands of sequences at a time. The simulated one decodes four, in proportionally shorter steps, and
one token stands for 128. This does not change the throughput, the only figure in the tables, because the cost of a step with
thousands of sequences is proportional to their number.

For decode at 1K-4K Table 2 gives 53 requests per second, Table 3 gives 146.63. The published improvement of 5.15 % refers to
the latter.

The co-located instances run our policy ``dynamic``. The paper's own is on a page that our copy does not have.
"""

from __future__ import annotations

from dataclasses import dataclass

from staticllm.core import Variant
from staticllm.pipelines.programs.variant_index import VariantIndex
from staticllm.pipelines.scheduling.policies.dynamic import Dynamic
from staticllm.pipelines.scheduling.policies.fcfs import Fcfs
from staticllm.pipelines.scheduling.request_table import Limits
from staticllm.pipelines.simulator.cluster import Cluster, Pool
from staticllm.pipelines.simulator.simulated_device import DeviceModel
from staticllm.pipelines.simulator.summary import Run, steady_rate
from staticllm.pipelines.simulator.workload import Arrival, Lengths, burst

PREFILL_INSTANCES, PREFILL_CARDS = 6, 16
DECODE_INSTANCES, DECODE_CARDS = 2, 144
SHARED_INSTANCES, SHARED_CARDS = 3, 128
TOKENS_PER_TOKEN = 128
"""The number of real tokens per simulated token."""
MAX_SEQS = 4
NUM_REQUESTS = 360
CONCURRENCY = 16
"""The number of admitted requests per instance, enough that no instance idles for lack of requests."""


@dataclass(frozen=True)
class Published:
    """A workload of Table 3: lengths in tokens, and requests per second of both sides of the static split and of co-location."""

    name: str
    prompt: int
    output: int
    prefill: float
    decode: float
    colocated: float

    @property
    def static(self) -> float:
        """The requests per second of the static split, which are those of its slower side."""
        return min(self.prefill, self.decode)

    @property
    def prefill_card_seconds(self) -> float:
        """The card-seconds of one request's prefill."""
        return PREFILL_INSTANCES * PREFILL_CARDS / self.prefill

    @property
    def decode_card_seconds(self) -> float:
        """The card-seconds of one request's decode."""
        return DECODE_INSTANCES * DECODE_CARDS / self.decode


TABLE_3 = (
    Published("1K-1K", 1024, 1024, 489.84, 811.52, 618.18),
    Published("1K-4K", 1024, 4096, 489.84, 146.63, 154.18),
)


@dataclass(frozen=True)
class Comparison:
    """One simulated workload: requests per second, and the idle shares of both sides of the saturated static split."""

    published: Published
    static: float
    colocated: float
    prefill_idle: float
    decode_idle: float
    is_fitted: bool

    @property
    def improvement(self) -> float:
        """The simulated improvement of co-location over the static split, in percent."""
        return (self.colocated / self.static - 1) * 100

    @property
    def published_improvement(self) -> float:
        """The published improvement of co-location over the static split, in percent."""
        return (self.published.colocated / self.published.static - 1) * 100


def tables_2_and_3() -> tuple[float, list[Comparison]]:
    """Return the interference factor, and the comparison of each workload simulated with it."""
    fitted = TABLE_3[0]
    interference = steady_rate(_colocated(fitted, 1.0).requests) / fitted.colocated
    return interference, [_compare(row, interference, row is fitted) for row in TABLE_3]


def _compare(row: Published, interference: float, is_fitted: bool) -> Comparison:
    static = _disaggregated(row)
    rate = steady_rate(static.requests)
    busy = [sum(step.seconds for step in steps) / len(static.requests) for steps in static.steps]
    prefill, decode = sum(busy[:PREFILL_INSTANCES]), sum(busy[PREFILL_INSTANCES:])  # instance-seconds per request
    return Comparison(
        row, rate, steady_rate(_colocated(row, interference).requests),
        1 - rate * prefill / PREFILL_INSTANCES, 1 - rate * decode / DECODE_INSTANCES, is_fitted,
    )  # fmt: skip


def _disaggregated(row: Published) -> Run:
    prefill = Pool(_instance(row, PREFILL_CARDS, 1.0), Fcfs, PREFILL_INSTANCES)
    decode = Pool(_instance(row, DECODE_CARDS, 1.0), Fcfs, DECODE_INSTANCES)
    concurrency = CONCURRENCY * (PREFILL_INSTANCES + DECODE_INSTANCES)
    return Cluster(prefill, decode, concurrency=concurrency).run(_saturating(row))


def _colocated(row: Published, interference: float) -> Run:
    pool = Pool(_instance(row, SHARED_CARDS, interference), Dynamic, SHARED_INSTANCES)
    return Cluster(pool, concurrency=CONCURRENCY * SHARED_INSTANCES).run(_saturating(row))


def _saturating(row: Published) -> list[Arrival]:
    return burst(NUM_REQUESTS, Lengths.fixed(row.prompt // TOKENS_PER_TOKEN, row.output // TOKENS_PER_TOKEN))


def _instance(row: Published, cards: int, interference: float) -> DeviceModel:
    """Return one device for an instance of ``cards`` cards; it runs one prompt or one decode step at a time."""
    prompt, output = row.prompt // TOKENS_PER_TOKEN, row.output // TOKENS_PER_TOKEN
    longest = prompt + output
    kv_slots = CONCURRENCY * longest
    prefill = row.prefill_card_seconds / cards * interference
    token = row.decode_card_seconds / cards * interference / (output - 1)  # prefill generates the first
    costs = {
        Variant(prompt, 0): prefill,
        Variant(prompt, kv_slots): prefill,
        **{Variant(seqs, kv_slots, seqs): token * seqs for seqs in range(1, MAX_SEQS + 1)},
    }
    return DeviceModel(
        VariantIndex(costs),
        costs.__getitem__,
        Limits(MAX_SEQS),
        kv_slots,
        host_kv_slots=10 * CONCURRENCY * longest,
        max_seq_len=longest,
    )
