"""Compares the simulator with the tables of FlexNPU's paper, for ``staticllm simulate --flexnpu``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from staticllm.cli.progress import Progress, progress

if TYPE_CHECKING:
    from staticllm.pipelines.simulator.papers.flexnpu_cluster import Comparison
    from staticllm.pipelines.simulator.papers.flexnpu_single import Cell

NUM_CELLS = 8
"""The number of cells of table 4, for the progress bar."""


def compare_with_tables(as_json: bool) -> None:
    """Print simulated and published figures side by side (``--flexnpu``)."""
    from staticllm.pipelines.simulator.papers.flexnpu_cluster import tables_2_and_3
    from staticllm.pipelines.simulator.papers.flexnpu_single import PREFILL_SHARE, table_4

    with progress("simulating tables 2 and 3"):
        interference, comparisons = tables_2_and_3()
    if as_json:
        with progress("simulating table 4") as shown:
            cells = [{**asdict(cell), "deviations": cell.deviations} for cell in _counted(table_4(), shown)]
        rows = [{**asdict(row), "improvement": row.improvement} for row in comparisons]
        report = {
            "interference": interference,
            "tables_2_and_3": rows,
            "prefill_share": PREFILL_SHARE,
            "table_4": cells,
        }
        click.echo(json.dumps(report, indent=2))
        return
    click.echo(f"Tables 2 and 3, requests/s, published in brackets; interference {interference:.3f}, fitted on 1K-1K")
    click.echo(f"{'lengths':<10}{'static':>18}{'co-located':>18}{'improvement':>18}  idle P, D")
    for row in comparisons:
        click.echo(_comparison_line(row))
    click.echo(
        f"\nTable 4, published in brackets; share of prefill {PREFILL_SHARE:.2f}, fitted on the TTFT of dynamic 1024/256"
    )
    click.echo(f"{'column':<10}{'lengths':<10}{'tokens/s':>26}{'TTFT ms':>32}{'TPOT ms':>26}")
    with progress("simulating table 4") as shown:
        for cell in _counted(table_4(), shown):
            shown.write(_cell_line(cell))


def _counted(cells: Iterator[Cell], shown: Progress) -> Iterator[Cell]:
    """Yield the cells, and show the progress."""
    for number, cell in enumerate(cells, 1):
        yield cell
        shown.show("simulating table 4", number, NUM_CELLS)


def _comparison_line(row: Comparison) -> str:
    p = row.published
    return (
        f"{p.name:<10}{_pair(row.static, p.static)}{_pair(row.colocated, p.colocated)}"
        f"{_pair(row.improvement, row.published_improvement)}  {max(0, row.prefill_idle):.0%}, {max(0, row.decode_idle):.0%}"
    )


def _cell_line(cell: Cell) -> str:
    p, (throughput, ttft, tpot) = cell.published, cell.deviations
    return (
        f"{'dynamic' if cell.is_dynamic else 'static':<10}{p.name:<10}"
        f"{_pair(cell.throughput, p.throughput)}{throughput:>+7.1f}%{_pair(cell.ttft_ms, p.ttft_ms, 24)}{ttft:>+7.1f}%"
        f"{_pair(cell.tpot_ms, p.tpot_ms)}{tpot:>+7.1f}%"
    )


def _pair(simulated: float, published: float, width: int = 18) -> str:
    return f"{simulated:.2f} ({published:.2f})".rjust(width)
