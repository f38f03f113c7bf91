"""Compares scheduling with static co-location and with other pipelines: prints tables, and writes JSON and plots.

    pip install ".[plot]"
    python scripts/bench_scheduling.py                       # all parts, about an hour on two cores
    python scripts/bench_scheduling.py table4 --requests 60  # one part, shorter

``table4`` repeats FlexNPU's Table 4 on the embedded model: dynamic against fcfs, at twice the load that fcfs can serve.
``freeze`` measures the longest gap of a chat while a prompt of 1000 tokens arrives. ``throughput`` compares 8 and 16 clients
with openvino_genai's NPU pipeline and its ContinuousBatchingPipeline. The last two run on the Qwen2-0.5B-shaped model that
scripts/make_bench_model.py makes. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from bench_serving import Served, check_solo, decode_call_ms, rest, saturated_rate, serve, summary
from bench_workers import Worker
from make_bench_model import make

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = ((64, 64), (64, 256), (256, 64), (256, 256))
MAX_SEQS = 4
PRECISIONS = {"f32": {"INFERENCE_PRECISION_HINT": "f32"}, "default": {}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[[], "table4", "freeze", "throughput"], metavar="PART")
    parser.add_argument("--requests", type=int, default=200, help="requests of a row of table4")
    parser.add_argument("--precisions", nargs="+", default=list(PRECISIONS), choices=list(PRECISIONS))
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds of the other parts")
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench", help="where JSON and plots go")
    options = parser.parse_args()
    parts = {"table4": table4, "freeze": freeze, "throughput": throughput}
    options.output.mkdir(parents=True, exist_ok=True)
    for name in options.parts or parts:
        result = {"part": name, "date": time.strftime("%Y-%m-%d %H:%M"), **parts[name](options)}
        path = options.output / f"scheduling_{name}.json"
        path.write_text(json.dumps(result, indent=1))
        print(f"wrote {path}\n")
        if name != "throughput":
            plot(name, result, path.with_suffix(".png"))


def table4(options: argparse.Namespace) -> dict[str, object]:
    """Run each row under fcfs and then dynamic, with the same arrivals and prompts, in every precision."""
    rows = []
    for precision in options.precisions:
        for num_prompt, num_new in LENGTHS:
            row = table4_row(precision, num_prompt, num_new, options)
            rows.append(row)
            print_row(row)
    return {"num_seqs": MAX_SEQS, "requests": options.requests, "rows": rows}


def table4_row(precision: str, num_prompt: int, num_new: int, options: argparse.Namespace) -> dict[str, Any]:
    load = Served(num_prompt, num_new, options.requests, MAX_SEQS, PRECISIONS[precision])
    measured: dict[str, list[dict[str, float]]] = {"fcfs": [], "dynamic": []}
    rates, runs = [], {}
    with load.pipeline("fcfs") as fcfs, load.pipeline("dynamic") as dynamic:
        for pipe in (fcfs, dynamic):  # the first use of a size of call takes longer, and costs are measured at rest
            serve(pipe, load.prompts, num_new)
            rest(pipe)
        for _ in range(options.rounds):
            rates.append(2 * saturated_rate(fcfs, load))
            for name, pipe in (("fcfs", fcfs), ("dynamic", dynamic)):
                pipe.engine.core.profiler.trace = []
                runs[name] = serve(pipe, load.prompts, num_new, rates[-1])
                measured[name].append({**summary(runs[name]), "decode_call_ms": decode_call_ms(pipe)})
    median = {
        name: {key: statistics.median(run[key] for run in found) for key in found[0]}
        for name, found in measured.items()
    }
    pairs = list(zip(measured["fcfs"], measured["dynamic"], strict=True))
    return {
        "precision": precision, "num_prompt": num_prompt, "num_new": num_new, "rate": statistics.median(rates),
        "ratio": {key: statistics.median(after[key] / before[key] for before, after in pairs) for key in pairs[0][0]},
        "forks": check_solo(load, runs), **median, "rounds": measured,
    }  # fmt: skip


def print_row(row: dict[str, Any]) -> None:
    forks = {name: len(found) for name, found in row["forks"].items()}
    print(
        f"{row['num_prompt']}/{row['num_new']} {row['precision']}, {row['rate']:.1f} requests/s; forks from solo {forks}"
    )
    print(f"  {'':<24}{'fcfs':>12}{'dynamic':>12}{'ratio':>8}")
    for key, ratio in row["ratio"].items():
        print(f"  {key:<24}{row['fcfs'][key]:>12.2f}{row['dynamic'][key]:>12.2f}{ratio:>8.3f}")
    if row["precision"] == "f32" and any(forks.values()):
        sys.exit("in f32 every request must have the tokens of its solo run")


def freeze(options: argparse.Namespace) -> dict[str, object]:
    """Measure the longest gap of a chat while a prompt of 1000 tokens arrives, as a share of its target."""
    path, rows = str(make("qwen2-0.5b")), []
    with Worker("ours", path) as worker:
        worker.do("answer", length=64, seed=1)
        solo = statistics.median(worker.do("answer", length=64, seed=2 + i)["tpot_ms"] for i in range(3))
    target = 3 * solo
    print(f"solo TPOT {solo:.1f} ms, target {target:.1f}")
    with (
        Worker("ours", path, SCHEDULER="dynamic", TPOT_MS=target) as dynamic,
        Worker("ours", path, SCHEDULER="fcfs") as fcfs,
    ):
        for worker in (dynamic, fcfs):
            worker.do("freeze", seed=0)
        for seed in range(1, options.rounds + 1):
            row = {
                "target_ms": target,
                "dynamic": dynamic.do("freeze", seed=seed),
                "fcfs": fcfs.do("freeze", seed=seed),
            }
            rows.append(row)
            gap, other = row["dynamic"], row["fcfs"]
            print(
                f"longest gap: dynamic {gap['longest_gap_ms']:.1f} ms ({gap['longest_gap_ms'] / target:.2f} of the target), "
                f"fcfs {other['longest_gap_ms']:.1f}; TTFT of the prompt {gap['ttft_ms']:.0f} against {other['ttft_ms']:.0f}"
            )
    return {"solo_tpot_ms": solo, "rounds": rows}


def throughput(options: argparse.Namespace) -> dict[str, object]:
    """Measure the output tokens per second of several clients, all three pipelines in turn; ratios are medians."""
    path, rows = str(make("qwen2-0.5b")), []
    with Worker("ours", path) as ours, Worker("batching", path) as batching, Worker("npuw", path) as npuw:
        peers = {"ours": ours, "batching": batching, "npuw": npuw}
        for count in options.clients:
            for seed in range(options.rounds + 1):
                rates = {
                    name: peer.do("clients", count=count, seed=seed)["tokens_per_second"]
                    for name, peer in peers.items()
                }
                if seed:  # the first round warms up
                    rows.append({"clients": count, **rates})
            mine = [row for row in rows if row["clients"] == count]
            medians = {name: statistics.median(row[name] for row in mine) for name in peers}
            ratios = [statistics.median(row["ours"] / row[peer] for row in mine) for peer in ("batching", "npuw")]
            print(
                f"{count:>2} clients, tokens/s: ours {medians['ours']:.1f}, ContinuousBatchingPipeline "
                f"{medians['batching']:.1f} ({ratios[0]:.2f} x), NPU pipeline {medians['npuw']:.1f} ({ratios[1]:.1f} x)"
            )
    return {"rounds": rows}


def plot(name: str, result: dict[str, object], path: Path) -> None:
    """Draw a picture of one part if matplotlib is installed."""
    try:
        from bench_plots import plot_freeze, plot_table4
    except ImportError:
        print("no plots: pip install matplotlib", file=sys.stderr)
        return
    {"table4": plot_table4, "freeze": plot_freeze}[name](result, path)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
