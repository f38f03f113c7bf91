"""Draws pictures of the results of the benchmark scripts."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LIMITS: dict[str, float | None] = {
    "tokens_per_second": 0.99,
    "ttft_ms": 0.08,
    "tpot_ms": 1.03,
    "end_to_end_ms": 1.03,
    "decode_call_ms": None,
}
NAMES = {
    "tokens_per_second": "output tokens/s",
    "ttft_ms": "TTFT",
    "tpot_ms": "TPOT while decoding",
    "end_to_end_ms": "end to end",
    "decode_call_ms": "the same device call\n(not 1: the machine drifted)",
}


def plot_table4(result: dict[str, Any], path: Path) -> None:
    """Draw dynamic as a share of fcfs, for each row and measure; dashed lines are the targets."""
    rows = result["rows"]
    figure, axes = plt.subplots(1, len(LIMITS), figsize=(16, 4.2), layout="constrained")
    labels = [f"{row['num_prompt']}/{row['num_new']}\n{row['precision']}" for row in rows]
    for axis, (key, limit) in zip(axes, LIMITS.items(), strict=True):
        axis.bar(labels, [row["ratio"][key] for row in rows], color="#3b6fb6")
        if limit is not None:
            axis.axhline(limit, color="#c0392b", linestyle="--", label=f"target {limit}")
            axis.legend(fontsize=8)
        axis.set_title(NAMES[key], fontsize=10)
        axis.tick_params(axis="x", labelsize=7)
    axes[0].set_ylabel("dynamic / fcfs")
    figure.suptitle(f"{result['requests']} requests, {result['num_seqs']} sequences, twice the load that fcfs serves")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_freeze(result: dict[str, Any], path: Path) -> None:
    """Draw every gap between two tokens of the chat, in the first measured round."""
    row = result["rounds"][0]
    figure, axis = plt.subplots(figsize=(9, 4), layout="constrained")
    for name, colour in (("fcfs", "#b0b0b0"), ("dynamic", "#3b6fb6")):
        axis.plot(row[name]["gaps_ms"], color=colour, label=name, marker=".", markersize=3, linewidth=1)
    axis.axhline(row["target_ms"], color="#c0392b", linestyle="--", label="target for TPOT")
    axis.set_yscale("log")
    axis.set_xlabel("token of the chat; a prompt of 1000 tokens arrives after the tenth")
    axis.set_ylabel("ms since the previous token")
    axis.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


COLOURS = {
    "ours": "#c0392b", "ours shared": "#7d2418", "ours separate": "#e59a90",
    "npuw": "#1f4e79", "npuw chunk 128": "#5b8fc0", "npuw tuned": "#a9c6e3",
    "genai": "#2e7d4f", "genai f32": "#8fc7a4", "batching": "#b8901f", "batching f32": "#e3c878",
}  # fmt: skip
PANELS = (
    ("time to first token, ms", ("ttft_16", "ttft_128", "ttft_512", "ttft_1000", "ttft_turn")),
    ("time per output token, ms", ("tpot_16", "tpot_128", "tpot_512", "tpot_1000")),
    ("tokens/s, by number of clients", ("clients_1", "clients_4", "clients_8", "clients_16")),
    ("load, s", ("load_s", "load_cached_s")),
    ("peak of private memory, MB", ("peak_mb",)),
)
LABELS = {"ttft_turn": "2nd turn", "load_s": "no cache", "load_cached_s": "cache filled", "peak_mb": ""}


def plot_bench(result: dict[str, Any], path: Path) -> None:
    """Draw the medians of every peer, grouped by measure; times to first token have a logarithmic scale."""
    medians = {
        measure: {name: statistics.median(values) for name, values in found.items()}
        for measure, found in result["figures"].items()
    }
    widths = [max(2, sum(measure in medians for measure in measures)) for _, measures in PANELS]
    figure, axes = plt.subplots(1, len(PANELS), figsize=(19, 4.6), layout="constrained", width_ratios=widths)
    for axis, (title, measures) in zip(axes, PANELS, strict=True):
        _bars(axis, medians, [measure for measure in measures if measure in medians])
        axis.set_title(title, fontsize=10)
    axes[0].set_yscale("log")
    shown = [name for name in COLOURS if any(name in found for found in medians.values())]
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[name]) for name in shown]
    figure.legend(handles, shown, loc="outside lower center", ncols=len(shown), frameon=False, fontsize=9)
    figure.suptitle(f"{result['model']}, random weights, on this CPU; medians of {result['rounds']} rounds")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _bars(axis: Any, medians: dict[str, dict[str, float]], measures: list[str]) -> None:
    for place, measure in enumerate(measures):
        found = {name: medians[measure][name] for name in COLOURS if name in medians[measure]}
        width = 0.86 / max(1, len(found))
        for number, (name, value) in enumerate(found.items()):
            axis.bar(place - 0.43 + (number + 0.5) * width, value, width * 0.92, color=COLOURS[name])
    axis.set_xticks(range(len(measures)), [LABELS.get(m, m.rpartition("_")[2]) for m in measures], fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
