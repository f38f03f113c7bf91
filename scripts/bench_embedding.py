"""Compares StaticEmbeddingPipeline with other engines on real texts: prints tables, and writes JSON and a picture.

    pip install ".[embed-test,plot,train]" fastembed onnx onnxruntime onnxscript psutil
    python scripts/bench_embedding.py             # all engines, 1 to 256 clients, 5 rounds
    python scripts/bench_embedding.py --quick     # fewer engines, clients and rounds
    python scripts/bench_embedding.py --docs      # writes the section of this kind of processor in docs/lab/benchmarks.md as well

Each engine is a process of its own, and engines take turns. Clients send one text each, all at once; the next texts are sent
after all answers. Figures are medians over the rounds, ratios are medians of the ratios of each round. Before that, the vectors
of every engine are compared with those of sentence-transformers in f32. Engines whose packages are missing are left out.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import bench_docs
import bench_embedding_report as report
import bench_report
from bench_embedding_workers import Worker, is_installed
from bench_figures import Figures
from bench_machine import KINDS, num_cores, this_machine
from make_bench_encoder import MODELS, make_encoder

ROOT = Path(__file__).resolve().parent.parent
CLIENTS = {1: 24, 4: 10, 16: 5, 64: 2, 256: 1}
"""The numbers of clients, and the batches that each round has."""
F32 = {"INFERENCE_PRECISION_HINT": "f32"}
CELL_SECONDS, MOST_SECONDS = 4.0, 12.0
"""The seconds that batches of one engine and number of clients should take per round; more than the second are not measured."""
BULK, REFERENCE = {"minilm": 512, "bge-large": 32}, "st torch"
CHATS = ("chat shared", "chat separate")
LARGER = Path.home() / ".cache" / "staticllm" / "bench" / "qwen2-0.5b"
"""Chats with this model of ``make_bench_model.py`` are measured, too, if it is there."""


@dataclass(frozen=True)
class Engine:
    """A kind of ``bench_embedding_workers``, its properties, and the packages that it needs."""

    kind: str
    properties: dict[str, Any] = field(default_factory=dict)
    packages: tuple[str, ...] = ()


TORCH = ("sentence-transformers", "torch")
ENGINES = {
    "ours": Engine("ours"),
    "ours f32": Engine("ours", F32),
    "ours list": Engine("ours list"),
    "genai": Engine("genai"),
    "genai f32": Engine("genai", F32),
    "genai sorted": Engine("genai", {"sorted": True}),
    "st torch": Engine("st", {"backend": "torch"}, TORCH),
    "st openvino": Engine("st", {"backend": "openvino"}, (*TORCH, "optimum-intel")),
    "fastembed": Engine("fastembed", {}, ("fastembed", "onnxruntime")),
    "openvino sorted": Engine("raw", {}, ("tokenizers",)),
}
QUICK = ("ours", "genai", "genai sorted", "st torch", "openvino sorted")


def main() -> None:
    options = read_options()
    path = str(make_encoder(options.model))
    names, left_out = available(options.engines or (QUICK if options.quick else list(ENGINES)), path)
    for line in left_out:
        print(line)
    figures, cosines, batches = Figures(), dict[str, float](), dict[tuple[str, int], int]()
    with ExitStack() as stack:
        workers = {name: start(name, stack, path, options.threads) for name in names}
        compare(workers, cosines)
        for number in range(options.rounds + 1):  # the first one is a warm-up
            print(f"round {number} of {options.rounds}", file=sys.stderr)
            if number == 0:
                batches, too_slow = warm_up(workers, options)
                left_out += too_slow
            else:
                measure(workers, figures, options, number, batches)
        for name, worker in workers.items():
            figures.add("mb", name, worker.do("memory")["mb"])
    result = save(figures, cosines, names, left_out, options)
    if not options.no_chat:
        beside_chat(figures, path, options)
        result = save(figures, cosines, names, left_out, options)
    show(result)
    draw(result, options.output / "bench_embedding.png")
    if options.docs:
        write_docs(result)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer engines, clients and rounds")
    parser.add_argument("--rounds", type=int, help="[5; 2 with --quick]")
    parser.add_argument("--model", choices=MODELS, default="minilm", help="[minilm]")
    parser.add_argument("--clients", nargs="+", type=int, choices=list(CLIENTS), help="[all; 1 16 64 with --quick]")
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), help="[all]")
    parser.add_argument("--threads", type=int, default=num_cores(), help="of every engine  [the cores]")
    parser.add_argument("--no-chat", action="store_true", help="skip the chat beside documents")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "bench", help="where JSON and picture go")
    parser.add_argument(
        "--docs", action="store_true", help="replace this processor's section of docs/lab/benchmarks.md"
    )
    parser.add_argument("--kind", choices=list(KINDS), help="kind of processor  [found by its flags on Linux]")
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 5)
    options.clients = options.clients or ([1, 16, 64] if options.quick else list(CLIENTS))
    return options


def available(names: Sequence[str], path: str) -> tuple[list[str], list[str]]:
    """Return the engines that can run, and a line for each that cannot."""
    found, lines = [], []
    for name in names:
        missing = [package for package in ENGINES[name].packages if not is_installed(package)]
        if missing:
            lines.append(f"{name} is left out: {', '.join(missing)} not installed")
        elif ENGINES[name].kind == "fastembed" and not (Path(path) / "onnx").is_dir():
            lines.append(f"{name} is left out: this model has no ONNX file")
        else:
            found.append(name)
    return found, lines


def start(name: str, stack: ExitStack, path: str, threads: int) -> Worker:
    print(f"loading {name} …", file=sys.stderr)
    engine = ENGINES.get(name, Engine(name))
    return stack.enter_context(Worker(engine.kind, path, threads=threads, **engine.properties))


def compare(workers: dict[str, Worker], cosines: dict[str, float]) -> None:
    """Add the least cosine of every engine to sentence-transformers; nothing if that did not run."""
    if REFERENCE not in workers:
        print(f"{REFERENCE} does not run: vectors are not compared")
        return
    reference = workers[REFERENCE].do("vectors")["vectors"]
    for name, worker in workers.items():
        cosines[name] = report.cosine(worker.do("vectors")["vectors"], reference)
        wrong = "  WRONG" if cosines[name] < report.WRONG else ""
        print(f"{name}: least cosine to {REFERENCE} {cosines[name]:.6f}{wrong}")


def warm_up(workers: dict[str, Worker], options: argparse.Namespace) -> tuple[dict[tuple[str, int], int], list[str]]:
    """Return the batches per round of each engine and number of clients, and a line for each pair that takes too long.

    Every pair runs one batch, unless the rate at fewer clients says that it takes more than ``MOST_SECONDS``.
    """
    batches, lines = dict[tuple[str, int], int](), list[str]()
    for name, worker in workers.items():
        rate = float("inf")
        for count in sorted(options.clients):
            if count / rate <= MOST_SECONDS:
                rate = worker.do("clients", count=count, batches=1, seed=0)["texts_per_second"]
            if count / rate > MOST_SECONDS:
                lines.append(f"{name} with {count} clients is left out: one batch takes over {MOST_SECONDS:.0f} s")
                continue
            most = max(1, CLIENTS[count] // (2 if options.quick else 1))
            batches[name, count] = min(most, max(1, int(CELL_SECONDS * rate / count)))
    for line in lines:
        print(line)
    return batches, lines


def measure(
    workers: dict[str, Worker],
    figures: Figures,
    options: argparse.Namespace,
    number: int,
    batches: dict[tuple[str, int], int],
) -> None:
    """Run one round. Each time, another engine is the first."""
    for place, count in enumerate(options.clients):
        for name, worker in in_turn(workers, number + place):
            if (name, count) not in batches:
                continue
            found = worker.do("clients", count=count, batches=batches[name, count], seed=number)
            figures.add(f"clients_{count}", name, found["texts_per_second"])
            for ms in found["ms"]:
                figures.add(f"ms_{count}", name, ms)
    for name, worker in workers.items():
        if ENGINES[name].kind == "ours":
            for job in (worker.do("bulk", count=BULK[options.model], seed=number), worker.do("peak")):
                for measure_name in ("fill", "host", "gflops", "peak"):
                    if measure_name in job:
                        figures.add(measure_name, name, job[measure_name])


def in_turn(workers: dict[str, Worker], first: int) -> list[tuple[str, Worker]]:
    items = list(workers.items())
    first %= len(items)
    return [*items[first:], *items[:first]]


def beside_chat(figures: Figures, path: str, options: argparse.Namespace) -> None:
    """Measure chats and documents alone and together, on one engine and on two pipelines, in turns."""
    with ExitStack() as stack:
        workers = {name: start(name, stack, path, options.threads) for name in CHATS}
        for name in CHATS if LARGER.is_dir() else ():
            chat = Worker(name, path, threads=options.threads, chat=str(LARGER))
            workers[f"{name}, {LARGER.name}"] = stack.enter_context(chat)
        for number in range(options.rounds + 1):
            for name, worker in in_turn(workers, number):
                stream, bulk = worker.do("stream", seed=number), worker.do("bulk", seed=number)
                both = worker.do("both", seed=number + 1000)
                if number:
                    for kind, found in (("alone", {**stream, **bulk}), ("both", both)):
                        figures.add(f"gap_ms_{kind}", name, found["gap_ms"])
                        figures.add(f"ttft_ms_{kind}", name, found["ttft_ms"])
                        figures.add(f"texts_{kind}", name, found["texts_per_second"])


def save(
    figures: Figures, cosines: dict[str, float], names: list[str], left_out: list[str], options: argparse.Namespace
) -> dict[str, Any]:
    command = shlex.join(["python", "scripts/bench_embedding.py", *sys.argv[1:]])
    result = {"machine": this_machine(options.kind).as_dict(), "command": command, "model": options.model,
              "engines": names, "clients": options.clients, "rounds": options.rounds, "cosines": cosines,
              "left_out": left_out, "figures": figures.values}  # fmt: skip
    options.output.mkdir(parents=True, exist_ok=True)
    path = options.output / "bench_embedding.json"
    path.write_text(json.dumps(result, indent=1))
    print(f"wrote {path}")
    return result


def show(result: dict[str, Any]) -> None:
    figures, names, clients = Figures(result["figures"]), result["engines"], result["clients"]
    for part in (bench_report.text(report.throughput(figures, names, clients, result["cosines"])),
                 bench_report.text(report.ratios(figures, names, clients)),
                 "\n".join(report.alone(figures, names)), bench_report.text(report.chat(figures))):  # fmt: skip
        if part:
            print(f"\n{part}")


def draw(result: dict[str, Any], path: Path) -> None:
    try:
        report.plot(result, path)
        print(f"wrote {path}")
    except ImportError:
        print("no picture: pip install matplotlib", file=sys.stderr)


def write_docs(result: dict[str, Any], page: Path = bench_docs.PAGE) -> None:
    key = f"{result['machine']['kind']} embeddings {result['model']}"
    text = bench_docs.replaced(page.read_text(encoding="utf-8"), key, report.section(result))
    page.write_text(text, encoding="utf-8", newline="\n")
    print(f"wrote the section {key!r} of docs/lab/benchmarks.md")


if __name__ == "__main__":
    main()
