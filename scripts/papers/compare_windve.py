"""Prints WINDVE's published figures beside ours, the paper's errors, and the loads that it leaves out.

python scripts/papers/compare_windve.py --seed 0
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable

import windve_tables as paper
from windve_loads import LoadRow, load_table
from windve_tables import GainRow

HEADER = (
    f"{'':<16}{'':<16}{'main device alone':^32}  {'with the CPU':^32}\n"
    f"{'arrivals':<16}{'policy':<16}" + f"  {'in time/s':>9}{'late':>7}{'busy':>7}{'worst':>9}" * 2
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of arrivals and lengths")
    show(load_table(seed=parser.parse_args().seed))


def show(loads: Iterable[LoadRow]) -> None:
    print("\n".join(published_lines()))
    last = ""
    for row in loads:
        title = f"\n{row.main} + {row.helping}, limit {row.limit_s:g} s, {row.rate:.1f} queries/s arrive"
        if title != last:
            print(f"{title}\n{HEADER}")
        print(_load_line(row), flush=True)
        last = title


def published_lines() -> list[str]:
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


if __name__ == "__main__":
    main()
