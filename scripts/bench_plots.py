"""Pictures of what the benchmark scripts measured."""

from __future__ import annotations

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
    """Dynamic as a share of fcfs, for each row and measure; dashed lines are the targets."""
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
    figure.suptitle(f"{result['requests']} requests, {result['slots']} slots, twice the load that fcfs serves")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def plot_freeze(result: dict[str, Any], path: Path) -> None:
    """Every gap between two tokens of the chat, in the first measured round."""
    row = result["rounds"][0]
    figure, axis = plt.subplots(figsize=(9, 4), layout="constrained")
    for name, colour in (("fcfs", "#b0b0b0"), ("dynamic", "#3b6fb6")):
        axis.plot(row[name]["gaps_ms"], color=colour, label=name, marker=".", markersize=3, linewidth=1)
    axis.axhline(row["target_ms"], color="#c0392b", linestyle="--", label="target for TPOT")
    axis.set_yscale("log")
    axis.set_xlabel("token of the chat; a prompt of 1000 tokens arrives after the tenth")
    axis.set_ylabel("ms since the token before")
    axis.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)
