"""Makes the tables of ``bench.py``: medians with the best setting of GenAI, ratios with their targets, matrix products."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence

from bench_figures import BEST, Figures
from bench_targets import Judged

NAMES = {
    "ttft": "TTFT after {} tokens, ms", "tpot": "TPOT after {} tokens, ms", "clients": "{} clients, tokens/s",
    "ttft_turn": "TTFT of the second turn, ms", "load_s": "load, s", "load_cached_s": "load, with a filled cache, s",
    "start_s": "load and first token, s", "later_s": "then in the background, s", "peak_mb": "peak of private memory, MB",
    "host_ms": "host time per token, demo model, ms", "read_ms": "reading the weights once, ms",
    "tpot_kv_len": "TPOT after 128 tokens, ms", "policy_clients_8": "8 clients, tokens/s",
    "grammar_num_tokens": "JSON schema, tokens of the vocabulary",
    "grammar_first_mask_ms": "JSON schema, until its first mask, ms",
    "grammar_mask_us": "JSON schema, each further mask, us",
    "grammar_hidden": "JSON schema, share of its masks' time that passes while the device runs",
}  # fmt: skip
PREFILL = "prefill_"
Table = list[list[str]]
"""Rows of cells; the first row is the header."""


def medians(figures: Figures, names: Sequence[str]) -> Table:
    """Return a row for each measure of the peers, with the better median of GenAI's settings and its name in the last column."""
    columns = [name for name in names if any(name in found for found in figures.values.values())]
    with_best = any(figures.best(measure) for measure in figures.values)
    table = [["", *columns, *([BEST] if with_best else [])]]
    for measure, found in figures.values.items():
        if not _is_compared(measure, found, columns):
            continue
        cells = [_number(figures.median(measure, name)) for name in columns]
        best = figures.best(measure)
        named = [f"{_number(figures.median(measure, best))} ({best})" if best else ""] if with_best else []
        table.append([name_of(measure), *cells, *named])
    return table


def alone(figures: Figures, names: Sequence[str]) -> list[str]:
    """Return a line for each measure of ours alone."""
    lines = []
    for measure, found in figures.values.items():
        if not measure.startswith(PREFILL) and not _is_compared(measure, found, names):
            medians_of = ", ".join(f"{name} {_number(figures.median(measure, name))}" for name in found)
            lines.append(f"{name_of(measure)}: {medians_of}")
    return lines


def ratios(judged: Iterable[Judged]) -> Table:
    """Return a row for each target that was measured."""
    table = [["share", "ratio", "target", ""]]
    for each in judged:
        limit = f"{'at least' if each.is_least else 'at most'} {each.target.limit:.2f}"
        assert each.ratio is not None
        table.append([_what(each), f"{each.ratio:.2f}", limit, "" if each.is_met else "**missed**"])
    return table


def prefill(figures: Figures) -> Table:
    """Return a row for each number of tokens: the TTFT, and what the products alone take in each element type, as a share of it.

    The rows without a TTFT have the products only.
    """
    sizes = sorted({int(m.removeprefix(PREFILL)) for m in figures.values if m.startswith(PREFILL)})
    types = [name for name in figures.values.get(f"{PREFILL}{sizes[0]}", {}) if name != "ours"] if sizes else []
    header = ["tokens", "prefill, ms", *(f"products in {name}, ms" for name in types), "products, share of prefill"]
    table = [header]
    for size in sizes:
        measure = f"{PREFILL}{size}"
        best, ours = figures.best(measure, types), figures.median(measure, "ours")
        share = f"{figures.median(measure, best) / ours:.2f} ({best})" if ours and best else ""  # type: ignore[operator]
        times = [_number(figures.median(measure, name)) for name in types]
        table.append([str(size), _number(ours), *times, share])
    return table if sizes else []


def text(table: Table) -> str:
    """Return a table in columns for a terminal."""
    if len(table) < 2:
        return ""
    widths = [max(len(_plain(row[place])) for row in table) for place in range(len(table[0]))]
    return "\n".join(
        "  ".join(
            _plain(cell).ljust(width) if not place else _plain(cell).rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    )


def markdown(table: Table) -> str:
    """Return a table in Markdown."""
    if len(table) < 2:
        return ""
    lines = ["| " + " | ".join(row) + " |" for row in table]
    return re.sub(r"  +\|", " |", "\n".join([lines[0], "|" + "---|" * len(table[0]), *lines[1:]]))


def name_of(measure: str) -> str:
    """Return what a measure is, with its unit."""
    if measure in NAMES:
        return NAMES[measure]
    stem, _, size = measure.rpartition("_")
    return NAMES[stem].format(size)


def _is_compared(measure: str, found: Collection[str], names: Collection[str]) -> bool:
    """Return whether a measure has figures of several peers, or of the only one."""
    return not measure.startswith(PREFILL) and set(found) <= set(names) and len(found) >= min(2, len(names))


def _what(judged: Judged) -> str:
    mine, other = judged.target.mine, judged.target.other
    if other is None:
        return name_of(mine.measure)
    if other.measure != mine.measure:
        return f"{name_of(mine.measure)} / {name_of(other.measure)}"
    mine_name = "" if mine.peer == "ours" else f"{mine.peer} / "
    best = f" ({judged.best})" if judged.best else ""
    return f"{mine_name}{other.peer}{best}: {name_of(mine.measure)}"


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def _plain(cell: str) -> str:
    return cell.replace("**", "")
