"""Compares the simulator with the tables of WINDVE's paper, for ``staticllm simulate --windve``."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from staticllm.cli.progress import progress

if TYPE_CHECKING:
    from staticllm.pipelines.simulator.papers.windve_loads import LoadRow
    from staticllm.pipelines.simulator.papers.windve_tables import GainRow

HEADER = (
    f"{'':<16}{'':<16}{'main device alone':^32}  {'with the CPU':^32}\n"
    f"{'arrivals':<16}{'policy':<16}" + f"  {'in time/s':>9}{'late':>7}{'busy':>7}{'worst':>9}" * 2
)


def compare_with_windve(seed: int, as_json: bool) -> None:
    """Print ours beside the published figures, the paper's errors, and the loads that it leaves out (``--windve``)."""
    from staticllm.pipelines.simulator.papers import windve_tables as paper
    from staticllm.pipelines.simulator.papers.windve_loads import NUM_ROWS, load_table

    if as_json:
        with progress("simulating loads"):
            loads = [asdict(row) for row in load_table(seed=seed)]
        tables = {
            "table_3": [asdict(row) for row in paper.table_3()],
            "tables_1_and_2": [asdict(row) for row in paper.tables_1_and_2()],
            "savings": [asdict(row) for row in paper.savings()],
            "long_texts": [asdict(row) for row in paper.long_texts()],
            "errors": paper.ERRORS,
        }
        click.echo(json.dumps({**tables, "loads": loads}, indent=2))
        return
    click.echo("\n".join(_published_lines()))
    with progress("simulating loads") as shown:
        last = ""
        for number, row in enumerate(load_table(seed=seed), 1):
            title = f"\n{row.main} + {row.helping}, limit {row.limit_s:g} s, {row.rate:.1f} queries/s arrive"
            shown.write("\n".join([*([title, HEADER] if title != last else []), _load_line(row)]))
            last = title
            shown.show("simulating loads", number, NUM_ROWS)


def _published_lines() -> list[str]:
    from staticllm.pipelines.simulator.papers import windve_tables as paper

    lines = ["Table III, queue depths, published in brackets; alpha from Figure 4's beta and these regression depths"]
    lines.append(
        f"{'limit':<7}{'device':<10}{'regression':>14}{'stress test':>14}  fine-tuned, and its seconds on the line"
    )
    for row in paper.table_3():
        stress = f"{row.stress} ({row.published_stress})"
        lines.append(
            f"{f'{row.limit_s:g} s':<7}{row.device:<10}{f'{row.regression} ({row.published_regression})':>14}{stress:>14}"
            f"  ({row.published_tuned}) {row.seconds_at_tuned:.2f} s"
        )
    lines.append(
        "\nTables I (bge) and II (jina), queries at once, from the published fine-tuned depths; gains in percent"
    )
    lines.append(
        f"{'model':<7}{'limit':<7}{'devices':<18}{'alone':>7}{'together':>10}{'gain':>8}{'published':>11}  from regression"
    )
    lines += [_gain_line(row) for row in paper.tables_1_and_2()]
    lines.append("\nSavings in percent, published for a peak and for an average deployment")
    lines += [
        f"{row.model:<7}{row.saving:>6.1f}  ({row.published_peak:.1f}, {row.published_average:.1f})"
        for row in paper.savings()
    ]
    lines.append(
        f"\nFigure 5, texts of {paper.LONG_TEXT} tokens, exponent {paper.LENGTH_EXPONENT}: V100, and what the Xeon adds"
    )
    lines += [f"{f'{row.limit_s:g} s':<7}{row.main:>3} + {row.helping}  ({row.claim})" for row in paper.long_texts()]
    lines += ["Figure 6 is not reproduced.", "\nErrors and gaps of the paper"]
    return [*lines, *(f"- {error}" for error in paper.ERRORS), "\nLoads that the paper leaves out"]


def _gain_line(row: GainRow) -> str:
    p = row.published
    predicted = "" if row.predicted is None else f"{row.predicted:>15.1f}"
    return (
        f"{p.model:<7}{f'{p.limit_s:g} s':<7}{f'{p.main} + {p.helping}':<18}{row.alone:>7}{row.together:>10}{row.gain:>8.1f}"
        f"{f'({p.gain})':>11}{predicted}"
    )


def _load_line(row: LoadRow) -> str:
    cells = (
        f"  {run.in_time_rate:>9.1f}{run.late:>7.0%}{run.busy:>7.0%}{f'{run.worst_s:.2f} s':>9}"
        for run in (row.alone, row.together)
    )
    return f"{row.arrivals:<16}{row.policy:<16}{''.join(cells)}"
