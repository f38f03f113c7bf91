"""Compares staticllm with openvino_genai: prints tables and ratios, and writes JSON and a plot.

    pip install ".[plot,train]" psutil
    python scripts/bench.py            # about 40 minutes on two cores, 24 GiB
    python scripts/bench.py --quick    # under 3 minutes: fewer peers, lengths and rounds

Each peer is a process of its own. All of them load their models first and then take turns, so that a change of the machine's
speed affects all of them. Figures are medians over the rounds, and ratios are medians of the ratios of each round. A streamer
that receives each token takes the times. Every peer has its defaults, unless its name says otherwise.
scripts/make_bench_model.py makes the model (random weights). It is Qwen2-0.5B-shaped in int8, or with ``--model llama-1b``
Llama-1B-shaped in int4; the targets are those of the first. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from bench_report import print_report
from bench_workers import Worker
from make_bench_model import SHAPES, make

ROOT = Path(__file__).resolve().parent.parent
LENGTHS, CLIENTS = (16, 128, 512, 1000), (1, 4, 8, 16)
POLICIES = ("dynamic", "fcfs", "prefill_first", "chunked")  # decode_first is for prompts that may wait
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0, "KV_CACHE_PRECISION": "f32"}
TUNED = {"NPUW_LLM_PREFILL_CHUNK_SIZE": 256, "NPUW_LLM_GENERATE_PYRAMID": True, "NPUW_LLM_ENABLE_PREFIX_CACHING": True}
LATER_SECONDS = 0.1  # shorter background work is not reported
KV_LENS = {"kv_len 512": 512, "kv_len 4096": 4096}


@dataclass(frozen=True)
class Peer:
    """A pipeline to be measured: a kind of ``bench_workers``, and the properties that differ from its defaults."""

    kind: str
    properties: dict[str, Any] = field(default_factory=dict)
    model: str = "qwen2-0.5b"

    @property
    def path(self) -> str:
        return str(ROOT / "staticllm" / "demo_model" if self.model == "demo" else make(self.model))


PEERS = {
    "ours": Peer("ours"),
    "ours separate": Peer("ours", {"PROGRAMS": "separate"}),
    "npuw": Peer("npuw"),
    "npuw chunk 128": Peer("npuw", {"NPUW_LLM_PREFILL_CHUNK_SIZE": 128}),
    "npuw tuned": Peer("npuw", TUNED),
    "genai": Peer("genai"),
    "genai f32": Peer("genai", {"INFERENCE_PRECISION_HINT": "f32"}),
    "batching": Peer("batching"),
}
QUICK = ("ours", "npuw", "genai")
ALONE_ONLY = ("npuw chunk 128", "npuw tuned", "genai", "genai f32")
"""Peers that serve one request after another. With several clients, npuw stands for all of them."""


class Figures:
    """The measurements: ``[measure][peer]`` is a list with one figure per round."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(self, measure: str, peer: str, value: float) -> None:
        self.values[measure][peer].append(value)

    def median(self, measure: str, peer: str) -> float | None:
        found = self.values.get(measure, {}).get(peer)
        return statistics.median(found) if found else None

    def ratio(self, measure: str, peer: str, other: str) -> float | None:
        """Return the median of the ratios of each round."""
        mine, theirs = (self.values.get(measure, {}).get(name, []) for name in (peer, other))
        return statistics.median(a / b for a, b in zip(mine, theirs, strict=False)) if mine and theirs else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under 3 minutes")
    parser.add_argument("--rounds", type=int, help="[5; 1 with --quick]")
    parser.add_argument("--model", choices=sorted(SHAPES), default="qwen2-0.5b", help="[qwen2-0.5b]")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), help="[all]")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench", help="where JSON and plot go")
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 5)
    names = options.peers or (QUICK if options.quick else list(PEERS))
    lengths, clients = ((16, 512), (8,)) if options.quick else (LENGTHS, CLIENTS)
    make(options.model)
    peers = {name: replace(PEERS[name], model=options.model) for name in names}
    figures, begin = Figures(), time.perf_counter()
    side_by_side(figures, peers, lengths, clients, options.rounds)
    save(figures, options, begin)
    if not options.quick:
        loading(figures, peers, min(3, options.rounds))
        save(figures, options, begin)
    ours_alone(figures, options)
    is_same = None if options.quick else same_tokens(options.model)
    targets = print_report(figures, names, is_same)
    result = save(figures, options, begin, same_tokens_f32=is_same, targets=targets)
    plot(result, options.output / "bench.png")


def save(figures: Figures, options: argparse.Namespace, begin: float, **more: Any) -> dict[str, Any]:
    """Write the figures so far, because a run is long and a peer may die."""
    seconds = time.perf_counter() - begin
    result = {"date": time.strftime("%Y-%m-%d %H:%M"), "model": options.model, "seconds": seconds, "rounds": options.rounds,
              "figures": figures.values, **more}  # fmt: skip
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "bench.json"
    path.write_text(json.dumps(result, indent=1))
    print(f"wrote {path}")
    return result


def start(name: str, stack: ExitStack, peer: Peer, **more: Any) -> Worker:
    print(f"loading {name} …", file=sys.stderr)
    return stack.enter_context(Worker(peer.kind, peer.path, **{**peer.properties, **more}))


def side_by_side(
    figures: Figures, peers: dict[str, Peer], lengths: tuple[int, ...], clients: tuple[int, ...], rounds: int
) -> None:
    """Measure latencies and throughput. The first round is a warm-up."""
    with ExitStack() as stack:
        workers = {name: start(name, stack, peer) for name, peer in peers.items()}
        for name, worker in workers.items():
            figures.add("load_s", name, worker.load["seconds"])
        for seed in range(rounds + 1):
            print(f"round {seed} of {rounds}", file=sys.stderr)
            found = Figures() if seed == 0 else figures
            for place, length in enumerate(lengths):
                for name, worker in in_turn(workers, seed + place):
                    timed = worker.do("answer", length=length, seed=seed)
                    found.add(f"ttft_{length}", name, timed["ttft_ms"])
                    found.add(f"tpot_{length}", name, timed["tpot_ms"])
            for name, worker in in_turn(workers, seed):
                found.add("ttft_turn", name, worker.do("turn", seed=seed)["ttft_ms"])
            for place, count in enumerate(clients if seed < 4 else ()):
                for name, worker in in_turn(workers, seed + place):
                    if count == 1 or name not in ALONE_ONLY:
                        rate = worker.do("clients", count=count, seed=seed)["tokens_per_second"]
                        found.add(f"clients_{count}", name, rate)
            found.add("read_ms", "ours", 1e3 * read_weights(next(iter(peers.values())).path))


def in_turn(workers: dict[str, Worker], first: int) -> list[tuple[str, Worker]]:
    """Return the peers, each time with another one first, because the first one finds the caches filled by others."""
    items = list(workers.items())
    first %= len(items)
    return [*items[first:], *items[:first]]


def read_weights(path: str) -> float:
    """Return the seconds of reading as many bytes as the model's weights, with one thread per core; the best of 3."""
    parts = np.array_split(weights(path), os.cpu_count() or 1)

    def once() -> float:
        threads = [threading.Thread(target=np.bitwise_or.reduce, args=(part,)) for part in parts]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - begin

    return min(once() for _ in range(3))


@cache
def weights(path: str) -> np.ndarray:
    """Return an array with as many bytes as the model's weights."""
    return np.ones((Path(path) / "openvino_model.bin").stat().st_size // 8, np.int64)


def loading(figures: Figures, peers: dict[str, Peer], rounds: int) -> None:
    """Measure load times without a cache and with a filled one, and then separately the peak of private memory."""
    with tempfile.TemporaryDirectory() as caches:
        for number in range(rounds):
            for name, peer in peers.items():
                cache = {"CACHE_DIR": str(Path(caches) / name.replace(" ", "_"))}
                with ExitStack() as stack:
                    load = start(name, stack, peer).load
                    figures.add("load_s", name, load["seconds"])
                    if load["later_seconds"] > LATER_SECONDS:
                        figures.add("later_s", name, load["later_seconds"])
                if number == 0:
                    with ExitStack() as stack:
                        start(name, stack, peer, **cache)
                with ExitStack() as stack:
                    figures.add("load_cached_s", name, start(name, stack, peer, **cache).load["seconds"])
    for name, peer in peers.items():
        with ExitStack() as stack:
            worker = start(name, stack, peer, is_watched=True)
            worker.do("answer", length=1000, seed=1)
            figures.add("peak_mb", name, worker.do("answer", length=16, seed=1)["peak_mb"])


def ours_alone(figures: Figures, options: argparse.Namespace) -> None:
    """Measure the host time per token, the cost of a larger KV length, and each policy."""
    with ExitStack() as stack:
        worker = start("ours, demo model", stack, Peer("ours", model="demo"))
        for seed in range(options.rounds + 1):
            figures.add("host_ms", "ours", worker.do("host", seed=seed)["host_ms"])
    if options.quick:
        return
    with ExitStack() as stack:
        workers = {
            name: start(name, stack, Peer("ours", {"MAX_PROMPT_LEN": size // 2, "MIN_RESPONSE_LEN": size // 2,
                                                   "GENERATE_KV_LENS": [size], "MAX_NUM_SEQS": 1}, options.model))
            for name, size in KV_LENS.items()
        }  # fmt: skip
        for seed in range(options.rounds):
            for name, worker in workers.items():
                figures.add("tpot_kv_len", name, worker.do("answer", length=128, seed=seed)["tpot_ms"])
    with ExitStack() as stack:
        workers = {name: start(name, stack, Peer("ours", {"SCHEDULER": name}, options.model)) for name in POLICIES}
        for seed in range(3):
            for name, worker in workers.items():
                rate = worker.do("clients", count=8, seed=seed)["tokens_per_second"]
                if seed:
                    figures.add("policy_clients_8", name, rate)


def same_tokens(model: str) -> bool:
    """Return whether ours and genai give the same tokens in f32 without quantized activations, for one prompt of each length."""
    with ExitStack() as stack:
        ours = start("ours, exact", stack, Peer("ours", EXACT, model))
        genai = start("genai, exact", stack, Peer("genai", EXACT, model))
        return all(ours.do("tokens", length=n, seed=n) == genai.do("tokens", length=n, seed=n) for n in LENGTHS)


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw a picture if matplotlib is installed."""
    try:
        from bench_plots import plot_bench
    except ImportError:
        print("no plot: pip install matplotlib", file=sys.stderr)
        return
    plot_bench(result, path)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
