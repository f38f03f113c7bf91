"""Compares the simulator with the engine on this machine, and with the tables of FlexNPU's paper, for ``staticllm simulate``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from staticllm.cli.progress import Progress, progress

if TYPE_CHECKING:
    from staticllm.pipelines.simulator.papers.flexnpu_cluster import Comparison
    from staticllm.pipelines.simulator.papers.flexnpu_single import Cell
    from staticllm.pipelines.simulator.simulated_device import DeviceModel
    from staticllm.pipelines.simulator.summary import Summary
    from staticllm.pipelines.simulator.validate import Check

NUM_CELLS = 8
"""The number of cells of table 4, for the progress bar."""
CHECK_HEADER = (
    f"{'policy':<14}{'lengths':>9}{'rate':>8}  {'tokens/s':>24}  {'TTFT ms':>24}  {'TPOT ms':>24}\n"
    f"{'costs':<31}" + f"  {'simulated measured':>24}" * 3
)


def compare_with_engine(options: dict[str, Any]) -> None:
    """Print the deviations of the simulator from the engine (``--validate``), and write the costs for ``--save-costs``.

    Raises:
        StaticLLMError: the model cannot be loaded or run.
        ConfigError: the costs cannot be written.
    """
    from staticllm.pipelines.simulator.cost_model import write_costs
    from staticllm.pipelines.simulator.validate import WORKLOADS, validate

    checks: list[Check] = []
    model: DeviceModel | None = None
    if not options["as_json"]:
        click.echo(CHECK_HEADER)
    total = len(options["policies"]) * len(WORKLOADS)
    with progress("loading the model, and measuring its costs") as shown:
        arguments = (options[name] for name in ("model", "device", "policies", "requests", "rate", "seed"))
        for check, calibrated in validate(*arguments):
            checks.append(check)
            model = calibrated
            if not options["as_json"]:
                shown.write(_check_lines(check))
            shown.show("serving workloads", len(checks), total)
    if options["save_costs"] and model is not None:
        write_costs(options["save_costs"], model.index.variants, model.cost)
    if options["as_json"]:
        click.echo(json.dumps([{**asdict(check), "deviations": check.deviations} for check in checks], indent=2))


def _check_lines(check: Check) -> str:
    """Return two lines: simulated with the costs measured before the run, then with those of the run itself."""
    head = f"{check.policy:<14}{f'{check.prompt}/{check.output}':>9}{check.rate:>8.2f}"
    before = f"{head}{_check_cells(check.predicted, check.measured)}"
    return f"{before}\n{'  of the run itself':<31}{_check_cells(check.replayed, check.measured)}"


def _check_cells(simulated: Summary, measured: Summary) -> str:
    from staticllm.pipelines.simulator.validate import deviations

    return "".join(
        f"  {getattr(simulated, name):>8.1f} {getattr(measured, name):>8.1f} {deviation:>+5.1f}%"
        for name, deviation in deviations(simulated, measured).items()
    )


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
