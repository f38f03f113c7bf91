"""Prints the report of ``bench.py``: a table of medians, and ratios with their targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

NAMES = {
    "ttft": "TTFT after {} tokens, ms", "tpot": "TPOT after {} tokens, ms", "clients": "{} clients, tokens/s",
    "ttft_turn": "TTFT of the second turn, ms", "load_s": "load, s", "load_cached_s": "load, with a filled cache, s",
    "later_s": "in the background after loading, s",
    "peak_mb": "peak of private memory, MB", "host_ms": "host time per token, demo model, ms",
    "read_ms": "reading the weights once, ms", "tpot_kv_len": "TPOT, 128 tokens of prompt, ms",
    "policy_clients_8": "8 clients, tokens/s",
}  # fmt: skip


class Measured(Protocol):
    """The figures of a run."""

    values: Any

    def median(self, measure: str, peer: str) -> float | None: ...
    def ratio(self, measure: str, peer: str, other: str) -> float | None: ...


@dataclass(frozen=True)
class Target:
    """A target: ``measure`` of ours as a share of a peer's is at most ``limit``, or at least ``limit`` for throughput."""

    measure: str
    peer: str
    limit: float


TARGETS = (
    *(Target(f"ttft_{length}", "npuw", limit) for length, limit in ((16, 0.07), (128, 0.18), (512, 0.62), (1000, 1.0))),
    Target("ttft_turn", "npuw", 0.10),
    Target("tpot_128", "npuw", 0.42),
    Target("tpot_1000", "npuw", 0.48),
    Target("load_s", "npuw", 0.5),
    Target("peak_mb", "npuw", 0.7),
    Target("tpot_128", "genai", 0.80),
    Target("tpot_128", "genai f32", 1.10),
    Target("ttft_16", "genai", 0.90),
    Target("ttft_512", "genai", 1.15),
    Target("clients_8", "npuw", 9.0),
    Target("clients_8", "batching", 1.1),
    Target("clients_16", "batching", 1.0),
)


def print_report(figures: Measured, names: list[str], same_tokens: bool | None) -> list[dict[str, Any]]:
    """Print the report, and return the ratios with their limits."""
    columns = [name for name in names if any(name in found for found in figures.values.values())]
    print(f"\n{'medians':<34}" + "".join(f"{name:>15}" for name in columns))
    for measure, found in figures.values.items():
        if len(found) > 1 and set(found) <= set(columns):
            row = [figures.median(measure, name) for name in columns]
            print(
                f"{_name(measure):<34}"
                + "".join(f"{'-' if value is None else format(value, '.5g'):>15}" for value in row)
            )
    print()
    for measure, found in figures.values.items():
        if len(found) == 1 or not set(found) <= set(columns):
            print(f"{_name(measure)}: " + ", ".join(f"{name} {figures.median(measure, name):.4g}" for name in found))
    print(f"\n{'ours as a share of':<50}{'ratio':>8}{'target':>10}")
    judged = [*(_judge(figures, target) for target in TARGETS), *_ours(figures)]
    for line in judged:
        if line["ratio"] is not None:
            sign, verdict = (">=", "<=")[not line["is_least"]], "" if line["is_met"] else "   missed"
            print(f"{line['what']:<50}{line['ratio']:>8.3f}{sign:>5}{line['limit']:>5.2f}{verdict}")
    if same_tokens is not None:
        print(
            f"tokens of both sides in f32, without quantized activations: {'the same' if same_tokens else 'DIFFERENT'}"
        )
    return judged


def _judge(figures: Measured, target: Target) -> dict[str, Any]:
    is_least = target.measure.startswith("clients")
    ratio = figures.ratio(target.measure, "ours", target.peer)
    is_met = ratio is not None and (ratio >= target.limit if is_least else ratio <= target.limit)
    what = f"{target.peer}: {_name(target.measure)}"
    return {"what": what, "ratio": ratio, "limit": target.limit, "is_least": is_least, "is_met": is_met}


def _ours(figures: Measured) -> list[dict[str, Any]]:
    """Return ratios of our own figures, and the host time, which is not a ratio."""
    tpot, read = figures.median("tpot_128", "ours"), figures.median("read_ms", "ours")
    small, large = (figures.median("tpot_kv_len", f"kv_len {size}") for size in (512, 4096))
    found = [
        ("TPOT after 128 tokens / reading the weights once", tpot and read and tpot / read, 1.5),
        ("TPOT at KV length 4096 / at 512", small and large and large / small, 1.3),
        ("host time per token on the demo model, ms", figures.median("host_ms", "ours"), 0.25),
    ]
    return [
        {"what": what, "ratio": ratio, "limit": limit, "is_least": False, "is_met": bool(ratio and ratio <= limit)}
        for what, ratio, limit in found
    ]


def _name(measure: str) -> str:
    if measure in NAMES:
        return NAMES[measure]
    stem, _, size = measure.rpartition("_")
    return NAMES[stem].format(size)
