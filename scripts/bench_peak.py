"""Measures what the machine's matrix units give for the products of a model, and which share of a prefill they take.

    python scripts/bench_peak.py                   # products, prefill, and where the rest of a prefill goes
    python scripts/bench_peak.py --model llama-1b

``bench_products.py`` says what the products are. Prefill and products take turns.
"""

from __future__ import annotations

import argparse
from typing import Any

import bench_report as report
from bench_figures import Figures
from bench_products import TYPES
from bench_workers import Worker
from make_bench_model import SHAPES, make

SIZES = (16, 32, 64, 128, 256, 512, 1000)


def measure(figures: Figures, ours: Any, products: Any, rounds: int, sizes: tuple[int, ...] = SIZES) -> None:
    """Add ``prefill_ROWS`` for each size: the TTFT of ``ours``, and the products in each element type. Both are workers."""
    for seed in range(rounds + 1):
        for size in sizes:
            ttft = ours.do("answer", length=size, seed=seed, count=2)["ttft_ms"]
            found = products.do("products", rows=size)
            if seed:
                figures.add(f"prefill_{size}", "ours", ttft)
                for name, ms in found.items():
                    figures.add(f"prefill_{size}", name, ms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(SHAPES), default="qwen2-0.5b", help="[qwen2-0.5b]")
    parser.add_argument("--rounds", type=int, default=3, help="[3]")
    options = parser.parse_args()
    path, figures = str(make(options.model)), Figures()
    with Worker("ours", path) as ours, Worker("products", path) as products:
        ours.do("rest")
        measure(figures, ours, products, options.rounds)
        flops = products.do("work")["flops"]
    print(report.text(report.prefill(figures)))
    print("\nGFLOP/s of the products")
    for name in (each.name for each in TYPES):
        rates = [
            (size, figures.median(f"prefill_{size}", name)) for size in SIZES if figures.of(f"prefill_{size}", name)
        ]
        if rates:
            print(f"{name:<14}" + "  ".join(f"{size}: {size * flops / ms / 1e6:.0f}" for size, ms in rates if ms))


if __name__ == "__main__":
    main()
