"""Compares staticllm with openvino_genai: prints tables and ratios, and writes JSON and a plot.

    pip install ".[plot,train]" psutil
    python scripts/bench.py            # about an hour on two cores, 24 GiB
    python scripts/bench.py --quick    # under 3 minutes: fewer peers, lengths and rounds
    python scripts/bench.py --docs     # writes the section of this kind of processor in docs/lab/benchmarks.md as well
    python scripts/bench.py --peers ours "ours shared" genai "genai f32" batching "batching f32"   # the layout with one copy

Each peer is a process of its own. All of them load their models first and then take turns, so that a change of the machine's
speed affects all of them. Figures are medians over the rounds, and ratios are medians of the ratios of each round. A streamer
that receives each token takes the times. Every peer has its defaults, unless its name says otherwise. Ours first rests until it
has measured its costs, and after a job until it has measured those anew that have changed: it would do so while others are timed.
For each row, ``best genai`` is the setting of GenAI on the CPU with the best median among those that ran, and bench_targets.py
has the targets.
scripts/make_bench_model.py makes the model (random weights). It is Qwen2-0.5B-shaped in int8, or with ``--model llama-1b``
Llama-1B-shaped in int4; the targets are those of the first. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shlex
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import bench_peak
import bench_report as report
import numpy as np
from bench_docs import write_docs
from bench_figures import Figures
from bench_grammars import mask_figures
from bench_machine import KINDS, num_cores, this_machine
from bench_targets import SHARED, judge
from bench_workers import Worker
from make_bench_model import SHAPES, make

ROOT = Path(__file__).resolve().parent.parent
LENGTHS, CLIENTS = (16, 128, 512, 1000), (1, 4, 8, 16)
POLICIES = ("dynamic", "fcfs", "prefill_first", "chunked")  # decode_first is for prompts that may wait
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0, "KV_CACHE_PRECISION": "f32"}
TUNED = {"NPUW_LLM_PREFILL_CHUNK_SIZE": 256, "NPUW_LLM_GENERATE_PYRAMID": True, "NPUW_LLM_ENABLE_PREFIX_CACHING": True}
LATER_SECONDS = 0.1  # shorter background work is not reported
T = TypeVar("T")
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
    SHARED: Peer("ours", {"PROGRAMS": "shared"}),
    "ours separate": Peer("ours", {"PROGRAMS": "separate"}),
    "npuw": Peer("npuw"),
    "npuw chunk 128": Peer("npuw", {"NPUW_LLM_PREFILL_CHUNK_SIZE": 128}),
    "npuw tuned": Peer("npuw", TUNED),
    "genai": Peer("genai"),
    "genai f32": Peer("genai", {"INFERENCE_PRECISION_HINT": "f32"}),
    "batching": Peer("batching"),
    "batching f32": Peer("batching", {"INFERENCE_PRECISION_HINT": "f32"}),
}
QUICK = ("ours", "npuw", "genai")
ALONE_ONLY = ("npuw chunk 128", "npuw tuned", "genai", "genai f32")
"""Peers that serve one request after another. With several clients, npuw stands for all of them."""


def main() -> None:
    options = read_options()
    names = options.peers or (QUICK if options.quick else list(PEERS))
    lengths, clients = ((16, 512), (8,)) if options.quick else (() if options.only == "clients" else LENGTHS, CLIENTS)
    make(options.model)
    peers = {name: replace(PEERS[name], model=options.model) for name in names}
    figures, begin = Figures(), time.perf_counter()
    side_by_side(figures, peers, lengths, clients, options.rounds)
    save(figures, options, names, begin)
    if not options.quick and options.only != "clients":
        loading(figures, peers, options.rounds)
        save(figures, options, names, begin)
    if options.only:
        show(figures, options, names, None)
        return
    if not options.quick:
        prefill(figures, options)
    ours_alone(figures, options)
    grammars(figures, options)
    is_same = None if options.quick else same_tokens(options.model)
    result = save(figures, options, names, begin, same_tokens_f32=is_same)
    show(figures, options, names, is_same)
    plot(result, options.output / "bench.png")
    if options.docs:
        print(f"wrote the section {write_docs(result)!r} of docs/lab/benchmarks.md")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="under 3 minutes")
    parser.add_argument(
        "--only", choices=("clients", "peers"), help="the rows of several clients, or all that compare peers"
    )
    parser.add_argument("--rounds", type=int, help="[5; 1 with --quick]")
    parser.add_argument("--model", choices=sorted(SHAPES), default="qwen2-0.5b", help="[qwen2-0.5b]")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), help="[all]")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench", help="where JSON and plot go")
    parser.add_argument(
        "--docs", action="store_true", help="replace this processor's section of docs/lab/benchmarks.md"
    )
    parser.add_argument("--kind", choices=list(KINDS), help="kind of processor  [found by its flags on Linux]")
    options = parser.parse_args()
    options.rounds = options.rounds or (1 if options.quick else 5)
    if options.only and options.docs:
        parser.error("--only has no section in the docs: leave out --docs")
    return options


def show(figures: Figures, options: argparse.Namespace, names: Sequence[str], is_same: bool | None) -> None:
    """Print the report."""
    print()
    for part in (report.text(report.medians(figures, names)), "\n".join(report.alone(figures, names)),
                 report.text(report.ratios(judge(figures, options.model))), report.text(report.prefill(figures))):  # fmt: skip
        if part:
            print(f"{part}\n")
    if is_same is not None:
        print(f"tokens of both sides in f32, without quantized activations: {'the same' if is_same else 'DIFFERENT'}")


def save(
    figures: Figures, options: argparse.Namespace, names: Sequence[str], begin: float, **more: Any
) -> dict[str, Any]:
    """Write the figures so far, because a run is long and a peer may die."""
    seconds = time.perf_counter() - begin
    command = shlex.join(["python", "scripts/bench.py", *sys.argv[1:]])
    result = {"machine": this_machine(options.kind).as_dict(), "command": command, "model": options.model,
              "peers": list(names), "seconds": seconds, "rounds": options.rounds, "figures": figures.values, **more}  # fmt: skip
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
            worker.do("rest")
        for seed in range(rounds + 1):
            print(f"round {seed} of {rounds}", file=sys.stderr)
            found = Figures() if seed == 0 else figures
            for place, length in enumerate(lengths):
                for name, worker in in_turn(workers, seed + place):
                    timed = worker.do("answer", length=length, seed=seed)
                    found.add(f"ttft_{length}", name, timed["ttft_ms"])
                    found.add(f"tpot_{length}", name, timed["tpot_ms"])
            for name, worker in in_turn(workers, seed) if lengths else ():
                found.add("ttft_turn", name, worker.do("turn", seed=seed)["ttft_ms"])
            for place, count in enumerate(clients):
                for name, worker in in_turn(workers, seed + place):
                    if count == 1 or name not in ALONE_ONLY:
                        rate = worker.do("clients", count=count, seed=seed)["tokens_per_second"]
                        found.add(f"clients_{count}", name, rate)
            found.add("read_ms", "ours", 1e3 * read_weights(next(iter(peers.values())).path))


def in_turn(peers: dict[str, T], first: int) -> list[tuple[str, T]]:
    """Return the peers, each time with another one first, because the first one finds the caches filled by others."""
    items = list(peers.items())
    first %= len(items)
    return [*items[first:], *items[:first]]


def read_weights(path: str) -> float:
    """Return the seconds of reading as many bytes as the model's weights, with one thread per core.

    The shortest of 3 runs of two operations, because neither may be limited by anything but memory.
    """

    def once(operation: np.ufunc, element_type: type[np.integer[Any]]) -> float:
        parts = np.array_split(weights(path).view(element_type), num_cores())
        threads = [threading.Thread(target=operation.reduce, args=(part,)) for part in parts]
        begin = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return time.perf_counter() - begin

    ways = ((np.bitwise_or, np.int64), (np.maximum, np.int32))
    return min(once(*way) for _ in range(3) for way in ways)


@cache
def weights(path: str) -> np.ndarray:
    """Return an array with as many bytes as the model's weights."""
    return np.ones((Path(path) / "openvino_model.bin").stat().st_size // 8, np.int64)


def loading(figures: Figures, peers: dict[str, Peer], rounds: int) -> None:
    """Measure load times without a cache and with a filled one, and then separately the peak of private memory.

    A load is also timed with the first token of a first prompt: some peers pack their weights in the first call.
    """
    figures.values.pop("load_s", None)  # the loads before the first round were beside other peers
    with tempfile.TemporaryDirectory() as caches:
        for number in range(rounds):
            for name, peer in in_turn(peers, number):
                cache = {"CACHE_DIR": str(Path(caches) / name.replace(" ", "_"))}
                with ExitStack() as stack:
                    worker = start(name, stack, peer)
                    load = worker.load
                    figures.add("load_s", name, load["seconds"])
                    first = 1e-3 * worker.do("answer", length=16, seed=number)["ttft_ms"]
                    figures.add("start_s", name, load["seconds"] + first)
                    if load["later_seconds"] > LATER_SECONDS:
                        figures.add("later_s", name, load["later_seconds"])
                if number == 0:
                    with ExitStack() as stack:
                        start(name, stack, peer, **cache)
                with ExitStack() as stack:
                    figures.add("load_cached_s", name, start(name, stack, peer, **cache).load["seconds"])
    for number in range(rounds):
        for name, peer in in_turn(peers, number):
            with ExitStack() as stack:
                worker = start(name, stack, peer, is_watched=True)
                worker.do("answer", length=1000, seed=1)
                figures.add("peak_mb", name, worker.do("answer", length=16, seed=1)["peak_mb"])


def prefill(figures: Figures, options: argparse.Namespace) -> None:
    """Measure prefill and the products with the model's matrices alone, in turns."""
    with ExitStack() as stack:
        ours = start("ours, prefill", stack, Peer("ours", model=options.model))
        products = start("products", stack, Peer("products", model=options.model))
        ours.do("rest")
        bench_peak.measure(figures, ours, products, min(3, options.rounds))


def ours_alone(figures: Figures, options: argparse.Namespace) -> None:
    """Measure the host time per token, the cost of a larger KV length, and each policy."""
    with ExitStack() as stack:
        worker = start("ours, demo model", stack, Peer("ours", model="demo"))
        worker.do("rest")
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
        for worker in workers.values():
            worker.do("rest")
        for seed in range(options.rounds):
            for name, worker in workers.items():
                figures.add("tpot_kv_len", name, worker.do("answer", length=128, seed=seed)["tpot_ms"])
    with ExitStack() as stack:
        workers = {name: start(name, stack, Peer("ours", {"SCHEDULER": name}, options.model)) for name in POLICIES}
        for worker in workers.values():
            worker.do("rest")
        for seed in range(3):
            for name, worker in workers.items():
                rate = worker.do("clients", count=8, seed=seed)["tokens_per_second"]
                if seed:
                    figures.add("policy_clients_8", name, rate)


def grammars(figures: Figures, options: argparse.Namespace) -> None:
    """Measure masks of a JSON schema with the model's vocabulary, and their share that the device hides."""
    if importlib.util.find_spec("llguidance") is None:
        print("no figures of grammars: pip install llguidance", file=sys.stderr)
        return
    for name, value in mask_figures(Path(Peer("ours", model=options.model).path), options.rounds).items():
        figures.add(f"grammar_{name}", "ours", value)


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
