"""Compares the simulator with the tables of FlexNPU's paper; what is published stands in brackets.

python scripts/papers/compare_flexnpu.py
"""

from __future__ import annotations

from flexnpu_cluster import Comparison, tables_2_and_3
from flexnpu_errors import ERRORS
from flexnpu_shares import Point, Redundancy, figure_5, figure_6, table_2
from flexnpu_single import PREFILL_SHARE, Cell, table_4


def main() -> None:
    interference, comparisons = tables_2_and_3()
    print(f"Tables 2 and 3, requests/s, published in brackets; interference {interference:.3f}, fitted on 1K-1K")
    print(f"{'lengths':<10}{'static':>18}{'co-located':>18}{'improvement':>18}  idle P, D")
    for row in comparisons:
        print(comparison_line(row))
    print("\nTable 2, time slices not needed by the side that is no bottleneck; from Table 3's rates, from Table 2's")
    for entry in table_2():
        print(redundancy_line(entry))
    show_figures()
    print(
        f"\nTable 4, published in brackets; share of prefill {PREFILL_SHARE:.2f}, fitted on the TTFT of dynamic 1024/256"
    )
    print(f"{'column':<10}{'lengths':<10}{'tokens/s':>26}{'TTFT ms':>32}{'TPOT ms':>26}{'second token s':>24}")
    for cell in table_4():
        print(cell_line(cell), flush=True)
    show_errors()


def show_figures() -> None:
    """Print the simulated points of Figures 5 and 6."""
    print("\nFigure 5, 1K-1K: share of decode's time slices, requests/s, millions of tokens in decode's KV")
    for point in figure_5():
        print(point_line(point))
    print("\nFigure 6, 1K-4K: share of prefill's time slices, requests/s, millions of tokens in decode's KV")
    for point in figure_6():
        print(point_line(point))


def show_errors() -> None:
    """Print the errors and gaps of the paper."""
    print("\nErrors and gaps of the paper")
    for error in ERRORS:
        print(f"- {error}")


def redundancy_line(row: Redundancy) -> str:
    return f"{row.name:<10}{row.side:<10}{row.linear:.0f}%  {row.from_table_2:.0f}%  ({row.published:.0f}%)"


def point_line(point: Point) -> str:
    return f"{point.share:<10.2f}{point.rate:>10.1f}{point.decode_kv:>10.1f}"


def comparison_line(row: Comparison) -> str:
    p = row.published
    return (
        f"{p.name:<10}{_pair(row.static, p.static)}{_pair(row.colocated, p.colocated)}"
        f"{_pair(row.improvement, row.published_improvement)}  {max(0, row.prefill_idle):.0%}, {max(0, row.decode_idle):.0%}"
    )


def cell_line(cell: Cell) -> str:
    p, (throughput, ttft, tpot) = cell.published, cell.deviations
    return (
        f"{'dynamic' if cell.is_dynamic else 'static':<10}{p.name:<10}"
        f"{_pair(cell.throughput, p.throughput)}{throughput:>+7.1f}%{_pair(cell.ttft_ms, p.ttft_ms, 24)}{ttft:>+7.1f}%"
        f"{_pair(cell.tpot_ms, p.tpot_ms)}{tpot:>+7.1f}%{_pair(cell.second_token_ms / 1e3, p.hidden_seconds, 24)}"
    )


def _pair(simulated: float, published: float, width: int = 18) -> str:
    return f"{simulated:.2f} ({published:.2f})".rjust(width)


if __name__ == "__main__":
    main()
