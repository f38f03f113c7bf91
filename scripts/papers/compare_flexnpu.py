"""Compares the simulator with the tables of FlexNPU's paper; what is published stands in brackets.

python scripts/papers/compare_flexnpu.py
"""

from __future__ import annotations

from flexnpu_cluster import Comparison, tables_2_and_3
from flexnpu_single import PREFILL_SHARE, Cell, table_4


def main() -> None:
    interference, comparisons = tables_2_and_3()
    print(f"Tables 2 and 3, requests/s, published in brackets; interference {interference:.3f}, fitted on 1K-1K")
    print(f"{'lengths':<10}{'static':>18}{'co-located':>18}{'improvement':>18}  idle P, D")
    for row in comparisons:
        print(comparison_line(row))
    print(
        f"\nTable 4, published in brackets; share of prefill {PREFILL_SHARE:.2f}, fitted on the TTFT of dynamic 1024/256"
    )
    print(f"{'column':<10}{'lengths':<10}{'tokens/s':>26}{'TTFT ms':>32}{'TPOT ms':>26}")
    for cell in table_4():
        print(cell_line(cell), flush=True)


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
        f"{_pair(cell.tpot_ms, p.tpot_ms)}{tpot:>+7.1f}%"
    )


def _pair(simulated: float, published: float, width: int = 18) -> str:
    return f"{simulated:.2f} ({published:.2f})".rjust(width)


if __name__ == "__main__":
    main()
