"""Makes the tables and the page's section of ``bench_embedding.py``."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import bench_report as report
import numpy as np
from bench_figures import Figure, Figures
from bench_machine import KINDS, Machine

WRONG = 0.99
"""The least cosine to the reference of an engine that answers correctly."""
GENAI_TARGETS = {1: 2.3, 4: 2.2, 16: 3.5, 64: 5.0, 256: 5.5}
"""How many times GenAI's texts/s ours should have, by clients. They were set for processors with AMX in bf16."""
OTHERS_TARGET = 1.5
CHAT_TARGETS = {
    "ttft_ms": ("TTFT of a chat, together / alone", 1.3),
    "texts": ("texts/s beside a chat, together / alone", 0.7),
}


def cosine(vectors: Any, reference: Any) -> float:
    """Return the least cosine of the vectors ``[n, width]`` of the same texts; -1 if a vector is not finite."""
    mine, other = np.asarray(vectors, float), np.asarray(reference, float)
    if mine.shape != other.shape or not np.isfinite(mine).all():
        return -1.0
    norms = np.linalg.norm(mine, axis=1) * np.linalg.norm(other, axis=1)
    return float(((mine * other).sum(1) / np.maximum(norms, 1e-12)).min())


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, int(np.ceil(share * len(ordered))) - 1)]


def throughput(
    figures: Figures, names: Sequence[str], clients: Sequence[int], cosines: Mapping[str, float]
) -> report.Table:
    """Return texts/s with p50 and p99 in ms of every engine, by clients, with the engine's least cosine."""
    table = [["texts/s (p50 / p99 ms)", *map(str, clients), "memory, MB", "min cosine"]]
    for name in names:
        cells = []
        for count in clients:
            rate = figures.median(f"clients_{count}", name)
            ms = figures.of(f"ms_{count}", name)
            has = rate is not None and ms
            cells.append(f"{rate:.1f} ({percentile(ms, 0.5):.0f} / {percentile(ms, 0.99):.0f})" if has else "")
        mb, close = figures.median("mb", name), cosines.get(name)
        wrong = "" if close is None else f"{close:.6f}" + (" **wrong**" if close < WRONG else "")
        table.append([name, *cells, "" if mb is None else f"{mb:.0f}", wrong])
    return table


def ratios(figures: Figures, names: Sequence[str], clients: Sequence[int], mine: str = "ours") -> report.Table:
    """Return the median of each round's ratio of texts/s of ours to every other engine, by clients."""
    table = [[f"{mine} as a multiple of", *map(str, clients)]]
    for name in names:
        if name != mine:
            found = [figures.ratio(Figure(f"clients_{n}", mine), Figure(f"clients_{n}", name)) for n in clients]
            table.append([name, *("" if each is None else f"{each:.2f}" for each in found)])
    return table


def targets(figures: Figures, names: Sequence[str], clients: Sequence[int]) -> report.Table:
    """Return the targets that this run can judge: the ratio, the limit, and whether it is missed."""
    table = [["share", "ratio", "target", ""]]
    others = [name for name in names if not name.startswith("ours")]
    for count in clients:
        measure = f"clients_{count}"
        ratio = figures.ratio(Figure(measure, "ours"), Figure(measure, "genai"))
        table += _judged(f"genai: {count} clients, texts/s", ratio, GENAI_TARGETS.get(count))
        rates = {name: rate for name in others if (rate := figures.median(measure, name)) is not None}
        if rates:
            best = max(rates, key=rates.__getitem__)
            ratio = figures.ratio(Figure(measure, "ours"), Figure(measure, best))
            table += _judged(f"best other ({best}): {count} clients, texts/s", ratio, OTHERS_TARGET)
    for measure, (title, limit) in CHAT_TARGETS.items():
        shared = [kind for kind in figures.values.get(f"{measure}_alone", {}) if kind.startswith("chat shared")]
        for kind in shared:
            ratio = figures.ratio(Figure(f"{measure}_both", kind), Figure(f"{measure}_alone", kind))
            table += _judged(title + kind.removeprefix("chat shared"), ratio, limit, is_least=measure == "texts")
    return table


def _judged(title: str, ratio: float | None, limit: float | None, is_least: bool = True) -> report.Table:
    """Return the row of a target; none if it was not measured."""
    if ratio is None or limit is None:
        return []
    is_met = ratio >= limit if is_least else ratio <= limit
    bound = f"at {'least' if is_least else 'most'} {limit:.2f}"
    return [[title, f"{ratio:.2f}", bound, "" if is_met else "**missed**"]]


def alone(figures: Figures, names: Sequence[str]) -> list[str]:
    """Return a line on fill, host share and products for each of ours that has them."""
    lines = []
    for name in names:
        fill, host = figures.median("fill", name), figures.median("host", name)
        gflops, peak = figures.median("gflops", name), figures.median("peak", name)
        if fill is not None and host is not None:
            lines.append(f"{name}, all texts in one call: fill {fill:.1%}, host {host:.1%} of the time")
        if gflops and peak:
            lines.append(
                f"{name}, call of the most rows of 128: {gflops:.0f} GFLOP/s, {gflops / peak:.0%} of {peak:.0f}"
            )
    return lines


def chat(figures: Figures) -> report.Table:
    """Return the table of chats beside documents; ratios are medians of the ratios of each round."""
    names = {"gap_ms": "longest gap, ms", "ttft_ms": "TTFT, ms", "texts": "texts/s"}
    table = [["", "engine", "alone", "together", "together / alone"]]
    for measure, title in names.items():
        for kind in figures.values.get(f"{measure}_alone", {}):
            before, after = figures.median(f"{measure}_alone", kind), figures.median(f"{measure}_both", kind)
            ratio = figures.ratio(Figure(f"{measure}_both", kind), Figure(f"{measure}_alone", kind))
            if before is not None and after is not None and ratio is not None:
                table.append([title, kind.removeprefix("chat "), f"{before:.1f}", f"{after:.1f}", f"{ratio:.2f}"])
    return table


def section(result: Mapping[str, Any]) -> str:
    """Return the section of a result in Markdown."""
    machine, figures = Machine(**result["machine"]), Figures(result["figures"])
    names, clients = result["engines"], result["clients"]
    parts = [
        f"## {KINDS[machine.kind]}: embeddings, {result['model']}",
        f"`{result['command']}`, rounds: {result['rounds']}. {machine.line} Columns are clients.",
        report.markdown(throughput(figures, names, clients, result["cosines"])),
        report.markdown(ratios(figures, names, clients)),
        "\n".join(f"- {line}" for line in [*alone(figures, names), *result["left_out"]]),
        report.markdown(chat(figures)),
        report.markdown(targets(figures, names, clients)),
    ]
    return "\n\n".join(part for part in parts if part)


def plot(result: Mapping[str, Any], path: Any) -> None:
    """Draw texts/s of every engine over the number of clients."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 4.6), layout="constrained")
    for name in result["engines"]:
        points = [(n, result["figures"].get(f"clients_{n}", {}).get(name)) for n in result["clients"]]
        known = [(n, statistics.median(values)) for n, values in points if values]
        if known:
            axis.plot(*zip(*known, strict=True), marker="o", label=name, linewidth=2.4 if name == "ours" else 1.2)
    axis.set_xscale("log", base=2)
    axis.set_xticks(result["clients"], [str(n) for n in result["clients"]])
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.grid(visible=True, which="both", alpha=0.25)
    axis.set_xlabel("clients")
    axis.set_ylabel("texts/s")
    axis.legend(fontsize=8)
    axis.set_title(f"{result['model']}, medians of {result['rounds']} rounds, {result['machine']['kind']}")
    figure.savefig(path, dpi=110)
    plt.close(figure)
