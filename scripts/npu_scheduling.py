"""Simulates policies at the costs of an NPU, with calls in one piece and with decode steps between their blocks.

    python scripts/npu_scheduling.py beside          # a prompt of 1000 tokens beside two chats: seconds
    python scripts/npu_scheduling.py table4          # the rows of FlexNPU's Table 4: a minute
    python scripts/npu_scheduling.py sizes           # prompts in few sizes of programs, compared with many

The costs are those that the NPU compiler's schedule predicts for a Qwen2-0.5B shape (``pipelines/simulator/npu_costs.py``), with
0.5 ms of host time per call and 20 us per block; no NPU has run this. docs/lab/scheduling.md shows the tables.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import pairwise

from staticllm.compiler_passes.compiling.variants import choose_variants
from staticllm.config import StaticLLMConfig
from staticllm.core import Variant
from staticllm.pipelines.programs.variant_index import VariantIndex, plan_chunks
from staticllm.pipelines.scheduling.policies import policy_names
from staticllm.pipelines.simulator.cluster import Scenario, max_rate, npu_model
from staticllm.pipelines.simulator.cost_model import Blocks, Cost, HostCost
from staticllm.pipelines.simulator.npu_costs import NPU_COSTS
from staticllm.pipelines.simulator.simulated_device import DeviceModel
from staticllm.pipelines.simulator.summary import RunSummary, summarize_run
from staticllm.pipelines.simulator.workload import Arrival, Lengths, poisson

HOST = HostCost(0.5e-3)
LENGTHS = ((64, 64), (64, 256), (256, 64), (256, 256), (1000, 100))
TARGETS = (None, 70.0, 50.0, 40.0)
NUM_CHATS, LATE = 2, Arrival(9, 1.0, 1000, 8)
NUM_PHASES = 4
"""Moments within a decode step at which the prompt arrives."""
POLICIES = sorted(policy_names())
MANY_ROWS = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
PROMPTS = range(20, 1025, 37)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["beside", "table4", "sizes"])
    parser.add_argument("--costs", choices=sorted(NPU_COSTS), default="npu-4000")
    parser.add_argument("--requests", type=int, default=60, help="requests of a row of table4")
    options = parser.parse_args()
    parts: dict[str, Callable[[str], Iterator[str]]] = {
        "beside": beside,
        "sizes": sizes,
        "table4": partial(table4, num_requests=options.requests),
    }
    for line in parts[options.part](options.costs):
        print(line, flush=True)


def models(costs: str, tpot_ms: float | None = None) -> list[DeviceModel]:
    """Return the device with calls in one piece, and that with calls in blocks; both have the same programs and costs."""
    model = npu_model(StaticLLMConfig(tpot_ms=tpot_ms), NPU_COSTS[costs], HOST)
    return [replace(model, blocks=Blocks()), model]


def beside(costs: str) -> Iterator[str]:
    """Yield the lines of a table: the longest gap of two chats beside a prompt of 1000 tokens, and its mean TTFT."""
    cost = NPU_COSTS[costs]
    step = cost(Variant(16, 1152, 16)) + HOST.step
    alone = Scenario(models(costs)[0], (LATE,)).run("fcfs").requests[0].ttft
    assert alone is not None
    yield f"Decode step of two chats: {step * 1e3:.1f} ms. First token of the prompt alone: {alone * 1e3:.0f} ms."
    yield ""
    yield "| policy | `TPOT_MS` | in one piece: longest gap, steps | TTFT / alone | in blocks: longest gap | TTFT / alone |"
    yield "|---|---|---|---|---|---|"
    for tpot_ms in TARGETS:
        for policy in POLICIES if tpot_ms is None else ("dynamic", "fcfs"):
            cells = []
            for model in models(costs, tpot_ms):
                moments = [LATE.time + phase * step / NUM_PHASES for phase in range(NUM_PHASES)]
                found = [_beside(model, policy, replace(LATE, time=moment)) for moment in moments]
                gap = max(gap for gap, _ in found)
                ttft = sum(ttft for _, ttft in found) / NUM_PHASES
                cells.append(f"{gap / step:.1f} | {ttft / alone:.2f}")
            yield f"| `{policy}` | {'-' if tpot_ms is None else f'{tpot_ms:.0f}'} | {' | '.join(cells)} |"


def _beside(model: DeviceModel, policy: str, late: Arrival) -> tuple[float, float]:
    """Return the longest time between two tokens of a chat until a prompt has its first token, and the prompt's TTFT, s."""
    chats = tuple(Arrival(index, 0.3 * index, 64, 120) for index in range(NUM_CHATS))
    found = {record.id: record for record in Scenario(model, (*chats, late)).run(policy).requests}
    gaps = [
        after - before
        for index in range(NUM_CHATS)
        for before, after in pairwise(found[index].token_times)
        if late.time <= after and before <= found[late.id].token_times[0]
    ]
    ttft = found[late.id].ttft
    assert ttft is not None
    return max(gaps), ttft


def sizes(costs: str) -> Iterator[str]:
    """Yield the lines of a table: how much longer prompts of 20 to 1024 tokens take than in programs of 108 sizes."""
    cost = NPU_COSTS[costs]
    kv_lens = (0, *range(128, 1153, 128))
    many = VariantIndex(Variant(rows, kv_len) for rows in MANY_ROWS for kv_len in kv_lens)
    config = StaticLLMConfig()
    yield "| programs | sizes | mean | worst |"
    yield "|---|---|---|---|"
    for name in ("blocks", "separate"):
        variants = choose_variants(config, "separate", None, name)
        ratios = [_seconds(VariantIndex(variants), cost, count) / _seconds(many, cost, count) for count in PROMPTS]
        yield f"| `{name}` | {len(variants)} | {sum(ratios) / len(ratios):.2f} | {max(ratios):.2f} |"


def _seconds(index: VariantIndex, cost: Cost, num_tokens: int) -> float:
    """Return the seconds of the cheapest calls of a new prompt in an empty arena."""
    return sum(cost(variant) for variant, _ in plan_chunks(index, cost, num_tokens, 0, is_fresh=True))


def table4(costs: str, num_requests: int) -> Iterator[str]:
    """Yield the lines of a table: each row of Table 4, and one with long prompts, at twice the load that ``fcfs`` can serve."""
    yield "| prompt / answer | policy | TTFT, s | longest gap, p95, ms | tokens/s | in blocks: TTFT, s | longest gap | tokens/s |"
    yield "|---|---|---|---|---|---|---|---|"
    whole, divided = models(costs)
    for num_prompt, num_new in LENGTHS:
        lengths = Lengths((num_prompt, num_prompt), (num_new, num_new))
        rate = 2 * max_rate(Scenario(whole, tuple(poisson(1.0, num_requests, lengths))))
        arrivals = tuple(poisson(rate, num_requests, lengths))
        for policy in POLICIES:
            runs = [summarize_run(Scenario(model, arrivals).run(policy)) for model in (whole, divided)]
            yield f"| {num_prompt} / {num_new} | `{policy}` | {' | '.join(map(_cells, runs))} |"


def _cells(found: RunSummary) -> str:
    return f"{found.ttft_ms / 1e3:.2f} | {found.gap_p95_ms:.0f} | {found.tokens_per_second:.0f}"


if __name__ == "__main__":
    main()
