"""Simulates FlexNPU's Figures 5 and 6 and the redundancy of its Table 2: one side of the static split gets a share of its time.

Figure 5 (1K-1K) gives the decode instances a share of their time slices while prefill keeps all of its own; Figure 6 (1K-4K) does
it the other way round. Slices that are not given stay idle, so a share s makes every call of that side 1 / s times as long.

The paper's figures are pictures whose numbers our copy does not have. What can be compared is what its text says of them. Known
are the peak rates of Table 3, the limit of 50 ms on TPOT, and that decode matches prefill with 25 % of its slices. Two things
are assumed:

- A decode step of n sequences costs ``STEP_FLOOR`` of the limit, whatever n is, and the rest in proportion to n. At its peak
  rate a decode instance runs as many sequences as the limit allows. With a share s it may run fewer, because steps become longer.
- Above ``saturation()`` more time slices make decode no faster, as Figure 2 says of AI cores. The value is computed from the
  25 %.

One simulated sequence stands for some hundred real ones (``FULL_BATCH`` for a full decode instance), and one token for 128. This
leaves rates and the proportions of KV slots as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from flexnpu_cluster import (
    DECODE_CARDS,
    DECODE_INSTANCES,
    PREFILL_CARDS,
    PREFILL_INSTANCES,
    SHARED_CARDS,
    SHARED_INSTANCES,
    TABLE_3,
    TOKENS_PER_TOKEN,
    Published,
)

from staticllm.core import Variant
from staticllm.pipelines.programs.variant_index import VariantIndex
from staticllm.pipelines.scheduling.policies.fcfs import Fcfs
from staticllm.pipelines.scheduling.policies.ratio import Ratio
from staticllm.pipelines.scheduling.request_table import Limits
from staticllm.pipelines.simulator.cluster import Cluster, Pool
from staticllm.pipelines.simulator.simulated_device import DeviceModel
from staticllm.pipelines.simulator.summary import mean_slots, steady_rate
from staticllm.pipelines.simulator.workload import Arrival, Lengths, burst

BALANCED, DECODE_HEAVY = TABLE_3
TPOT_S = 0.050
FULL_BATCH = 24
STEP_FLOOR = 0.2
MATCHING_SHARE = 0.25
"""The share of decode's time slices with which it matches prefill at 1K-1K, by section 4.3 and Table 2 (75 % redundancy)."""
DECODE_SHARES = (0.10, 0.15, 0.20, 0.25, 0.30, 0.36, 0.60)
PREFILL_SHARES = (0.10, 0.20, 0.30, 0.40, 0.60, 0.80)
COLOCATED_SHARES = (0.15, 0.25, 0.35, 0.45, 0.55)
NUM_REQUESTS = 360


@dataclass(frozen=True)
class Point:
    """One point of a figure: requests per second, and the mean KV of both sides in millions of real tokens."""

    share: float
    rate: float
    prefill_kv: float
    decode_kv: float


@dataclass(frozen=True)
class Redundancy:
    """A row of Table 2: the share of the time of the side that is no bottleneck which it does not need, in percent.

    ``linear`` assumes that a share of the time gives the same share of the rate, and ``from_table_2`` that with Table 2's rates.
    """

    name: str
    side: str
    published: float
    linear: float
    from_table_2: float


def figure_5(shares: Iterable[float] = DECODE_SHARES) -> list[Point]:
    """Simulate 1K-1K with these shares of decode's time slices."""
    return [_split(BALANCED, share, 1.0, decode_speed(share)) for share in shares]


def figure_6(shares: Iterable[float] = PREFILL_SHARES) -> list[Point]:
    """Simulate 1K-4K with these shares of prefill's time slices."""
    return [_split(DECODE_HEAVY, share, share, 1.0) for share in shares]


def colocated(row: Published, shares: Iterable[float] = COLOCATED_SHARES) -> list[Point]:
    """Simulate 3 co-located instances under the policy ``ratio`` with these shares for prefill, without interference."""
    return [_colocated(row, share) for share in shares]


def table_2() -> list[Redundancy]:
    """Return the column of time slice redundancy."""
    return [
        Redundancy("1K/1K", "decode", 75, _unused(489.84, 811.52), _unused(490, 812)),
        Redundancy("1K/4K", "prefill", 40, _unused(146.63, 489.84), _unused(53, 490)),
    ]


def saturation() -> float:
    """Return the share of decode's time slices from which on more of them make it no faster."""
    return MATCHING_SHARE / (STEP_FLOOR + (1 - STEP_FLOOR) * BALANCED.prefill / BALANCED.decode)


def decode_speed(share: float) -> float:
    """Return how fast decode steps are with this share of the time slices; 1 is as fast as with all."""
    return min(1.0, share / saturation())


def decode_tokens(row: Published, rate: float) -> float:
    """Return the millions of tokens in the KV of decoding requests by Little's law, at ``TPOT_S`` per token."""
    return rate * row.output * TPOT_S * (row.prompt + row.output / 2) / 1e6


def _unused(needed: float, peak: float) -> float:
    return 100 * (1 - needed / peak)


def _split(row: Published, share: float, prefill_speed: float, speed: float) -> Point:
    """Return a point of the static split, with calls that are as fast as given on either side."""
    group = _group(row, DECODE_CARDS)
    num_seqs = max(1, int(FULL_BATCH * (speed - STEP_FLOOR) / (1 - STEP_FLOOR) + 1e-9))
    prefill = Pool(_prefilling(row, group / prefill_speed), Fcfs, PREFILL_INSTANCES)
    decode = Pool(_decoding(row, num_seqs, speed), Fcfs, DECODE_INSTANCES)
    concurrency = 3 * DECODE_INSTANCES * FULL_BATCH
    run = Cluster(prefill, decode, concurrency=concurrency).run(_saturating(row))
    kv = [mean_slots(steps) * group * TOKENS_PER_TOKEN / 1e6 for steps in run.steps]
    return Point(share, steady_rate(run.requests) * group, sum(kv[:PREFILL_INSTANCES]), sum(kv[PREFILL_INSTANCES:]))


def _colocated(row: Published, share: float) -> Point:
    group = _group(row, SHARED_CARDS)
    costs = {**_decode_costs(row, FULL_BATCH, 1.0), **_prompt_costs(row, SHARED_CARDS, group)}
    pool = Pool(_model(row, FULL_BATCH, costs), partial(Ratio, share), SHARED_INSTANCES)
    run = Cluster(pool, concurrency=2 * FULL_BATCH * SHARED_INSTANCES).run(_saturating(row))
    kv = sum(mean_slots(steps) for steps in run.steps) * group * TOKENS_PER_TOKEN / 1e6
    return Point(share, steady_rate(run.requests) * group, 0.0, kv)


def _group(row: Published, cards: int) -> float:
    """Return the number of real sequences per simulated one, if an instance of ``cards`` cards has ``FULL_BATCH`` of these."""
    rate = cards / row.decode_card_seconds
    return rate * row.output * TPOT_S / FULL_BATCH


def _prefilling(row: Published, group: float) -> DeviceModel:
    costs = _prompt_costs(row, PREFILL_CARDS, group)
    single = Variant(
        1, _kv_slots(row), 1
    )  # every device needs one; as dear as a prompt, so that no prompt runs in single rows
    return _model(row, 1, {**costs, single: max(costs.values())})


def _decoding(row: Published, num_seqs: int, speed: float) -> DeviceModel:
    return _model(row, num_seqs, {**_decode_costs(row, num_seqs, speed), **_prompt_costs(row, DECODE_CARDS, 1.0)})


def _decode_costs(row: Published, num_seqs: int, speed: float) -> dict[Variant, float]:
    """Return the seconds of steps of 1 to ``num_seqs`` sequences; all of an answer takes ``TPOT_S`` per token in a full batch."""
    step = row.output * TPOT_S / (row.output // TOKENS_PER_TOKEN - 1) / speed  # prefill generates the first token
    kv_slots = _kv_slots(row)
    return {
        Variant(n, kv_slots, n): step * (STEP_FLOOR + (1 - STEP_FLOOR) * n / FULL_BATCH) for n in range(1, num_seqs + 1)
    }


def _prompt_costs(row: Published, cards: int, group: float) -> dict[Variant, float]:
    rows = row.prompt // TOKENS_PER_TOKEN
    seconds = row.prefill_card_seconds / cards * group
    return {Variant(rows, 0): seconds, Variant(rows, _kv_slots(row)): seconds}


def _model(row: Published, num_seqs: int, costs: dict[Variant, float]) -> DeviceModel:
    longest = (row.prompt + row.output) // TOKENS_PER_TOKEN
    return DeviceModel(
        VariantIndex(costs), costs.__getitem__, Limits(num_seqs), _kv_slots(row),
        host_kv_slots=NUM_REQUESTS * longest, max_seq_len=longest,
    )  # fmt: skip


def _kv_slots(row: Published) -> int:
    return 2 * FULL_BATCH * (row.prompt + row.output) // TOKENS_PER_TOKEN


def _saturating(row: Published) -> list[Arrival]:
    return burst(NUM_REQUESTS, Lengths.fixed(row.prompt // TOKENS_PER_TOKEN, row.output // TOKENS_PER_TOKEN))
