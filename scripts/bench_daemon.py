"""Measures programs that share a device through the daemon against the same programs without it.

    python scripts/bench_daemon.py [--model DIR] [--rounds 5] [--what calls start pair gap memory table1 table4]

``calls``: the time that a plain call takes longer through the daemon. ``pair``: two programs that decode at the same time.
``gap``: one decodes while another one computes prompts of 1000 tokens. ``memory``: what a second program with the same
model adds. ``table1``: FlexNPU's table 1, an optimum-intel program with and without the daemon (needs optimum-intel).
``start``: the start of an interpreter that does not use OpenVINO. ``table4``: rows of FlexNPU's table 4 by processes: four
send requests to one daemon, at twice the load that ``fcfs`` can serve, under ``fcfs`` and ``dynamic``.

Native and shared runs take turns; medians of all rounds are printed. Every program is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench_serving import Run, summary

ROOT = Path(__file__).resolve().parent.parent
WORKER = Path(__file__).with_name("bench_daemon_worker.py")
NUM_TOKENS = 96
LONG_PROMPT = 1000
MAX_SEQS, NUM_CLIENTS, NUM_REQUESTS = 4, 4, 15
"""Of table 4: sequences that decode at the same time, programs, and requests of each."""
ROW_FIGURES = ("tokens_per_second", "ttft_ms", "ttft_p95_ms", "tpot_ms", "gap_p95_ms", "longest_gap_ms")
STARTS = """
import subprocess, sys, time, statistics
times = []
for _ in range(21):
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", "pass"], check=True)
    times.append((time.perf_counter() - start) * 1e3)
print(statistics.median(times))
"""


class Program:
    """A process that runs one worker: it says ``ready``, starts at a given moment, and prints one JSON object at its end."""

    def __init__(self, kind: str, model: str, **options: Any) -> None:
        prefix = options.pop("prefix", [sys.executable])
        text = json.dumps({"kind": kind, "model": model, **options})
        self._process = subprocess.Popen(
            [*prefix, str(WORKER), text],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ.copy(),
        )

    def wait_ready(self) -> None:
        """Wait until it has loaded its model."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == "ready":
                return
        raise RuntimeError(f"a worker ended with exit code {self._process.wait()}")

    def go(self) -> None:
        """Let it begin."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def result(self) -> dict[str, Any]:
        """Return what it measured."""
        out, _ = self._process.communicate()
        found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
        return found


def run(programs: Sequence[Program]) -> list[dict[str, Any]]:
    """Run programs at the same time, from a common start on."""
    for program in programs:
        program.wait_ready()
    for program in programs:
        program.go()
    return [program.result() for program in programs]


def pair(model: str, engine: str) -> dict[str, float]:
    """Return the tokens/s of two programs that decode at the same time."""
    found = run([Program("decode", model, engine=engine, num_tokens=NUM_TOKENS) for _ in range(2)])
    start, end = min(each["start"] for each in found), max(each["end"] for each in found)
    return {"tokens/s": sum(each["tokens"] for each in found) / (end - start)}


def single(model: str, engine: str) -> dict[str, float]:
    """Return the tokens/s of one program."""
    (found,) = run([Program("decode", model, engine=engine, num_tokens=NUM_TOKENS)])
    return {"tokens/s": found["tokens"] / (found["end"] - found["start"]), "TPOT ms": found["tpot_ms"]}


def gap(model: str, engine: str) -> dict[str, float]:
    """Return the longest gap of a program that decodes, while another one computes long prompts."""
    decoder = Program("decode", model, engine=engine, num_tokens=NUM_TOKENS)
    prefiller = Program("prefill", model, engine=engine, prompt_tokens=LONG_PROMPT)
    first, second = run([decoder, prefiller])
    alone = single(model, engine)["TPOT ms"]
    return {
        "longest gap ms": first["gap_ms"],
        "TPOT ms": first["tpot_ms"],
        "TPOT alone ms": alone,
        "gap / TPOT alone": first["gap_ms"] / alone,
        "prompts/s": second["prompts"] / (second["end"] - second["start"]),
    }


def memory(model: str, engine: str) -> dict[str, float]:
    """Return the private memory (MB) of a first and of a second program, with their shares of the daemon."""
    first, second = (Program("memory", model, engine=engine) for _ in range(2))
    before = daemon_bytes()
    first.wait_ready()
    after_first = daemon_bytes()
    second.wait_ready()
    after_second = daemon_bytes()
    first.go()
    second.go()
    one, two = first.result()["private"], second.result()["private"]
    return {
        "first program MB": (one + after_first - before) / 1e6,
        "second program MB": (two + after_second - after_first) / 1e6,
        "of which its own process MB": two / 1e6,
    }


def daemon_bytes() -> int:
    """Return the daemon's private memory in bytes; 0 without one."""
    import psutil

    from staticllm.daemon.process.lifetime import status
    from staticllm.wire.endpoint import runtime_folder

    found = status(runtime_folder())
    return 0 if found is None else psutil.Process(found["pid"]).memory_full_info().uss


def calls(model: str, engine: str) -> dict[str, float]:
    """Return the microseconds of a small call of a plain model."""
    (found,) = run([Program("calls", model, engine=engine)])
    return {"p50 us": found["p50"], "p95 us": found["p95"]}


def table1(model: str, engine: str) -> dict[str, float]:
    """Return the tokens/s of an unmodified optimum-intel program."""
    attach = [sys.executable, "-m", "staticllm", "attach", "--require", "--", sys.executable]
    prefix = attach if engine == "daemon" else [sys.executable]
    (found,) = run([Program("optimum", model, num_tokens=NUM_TOKENS, prefix=prefix)])
    return {"tokens/s": found["tokens"] / (found["end"] - found["start"])}


def start(model: str, engine: str) -> dict[str, float]:
    """Return the milliseconds in which an interpreter starts and ends that does not use OpenVINO."""
    attach = [sys.executable, "-m", "staticllm", "attach", "--auto", "--", sys.executable]
    times = subprocess.run(
        [*(attach if engine == "daemon" else [sys.executable]), "-c", STARTS],
        check=True,
        capture_output=True,
        text=True,
    )
    return {"interpreter ms": float(times.stdout)}


def table4(num_prompt: int, num_new: int) -> Measure:
    """Return the measure of one row of table 4, whose engines are policies."""

    def row(model: str, engine: str) -> dict[str, float]:
        options = {"num_prompt": num_prompt, "num_new": num_new, "num_seqs": MAX_SEQS}
        if (num_prompt, num_new) not in rates:
            saturated = served(model, "fcfs", rate=None, count=8, **options)
            spent = max(times[-1] for _, times in saturated) - min(arrival for arrival, _ in saturated)
            rates[num_prompt, num_new] = 2 * len(saturated) / spent
        rate = rates[num_prompt, num_new]
        runs = served(model, engine, rate=rate / NUM_CLIENTS, count=NUM_REQUESTS, **options)
        found = summary([Run(arrival, times, []) for arrival, times in runs])
        return {name: value for name, value in found.items() if name in ROW_FIGURES}

    rates: dict[tuple[int, int], float] = {}
    return row


def served(model: str, engine: str, **options: Any) -> list[tuple[float, list[float]]]:
    """Return the arrival and the moments of the tokens of each request of ``NUM_CLIENTS`` programs."""
    found = run([Program("serve", model, engine=engine, seed=seed, **options) for seed in range(NUM_CLIENTS)])
    return [(arrival, times) for each in found for arrival, times in each["runs"]]


Measure = Callable[[str, str], dict[str, float]]
MEASURES: dict[str, Measure] = {
    "calls": calls, "start": start, "pair": pair, "gap": gap, "memory": memory, "table1": table1,
    **{f"table4 {p}/{n}": table4(p, n) for p, n in ((64, 64), (64, 256), (256, 64), (256, 256))},
}  # fmt: skip
PARTS = ("calls", "start", "pair", "gap", "memory", "table1", "table4")


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", help="A model directory; the embedded model without one.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--what", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--peer", default="genai", choices=["genai", "ours"], help="The engine of native programs.")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    import staticllm

    model = options.model or str(staticllm.demo_model_path())
    with tempfile.TemporaryDirectory() as folder:
        os.environ["STATICLLM_RUNTIME_DIR"] = folder
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        try:
            for name in MEASURES:
                if name.split()[0] in options.what:
                    measure(name, model, options.peer, options.rounds)
        finally:
            subprocess.run(
                [sys.executable, "-m", "staticllm", "daemon", "stop"], check=False, stdout=subprocess.DEVNULL
            )


def measure(name: str, model: str, peer: str, num_rounds: int) -> None:
    """Measure one thing natively and with the daemon, or under two policies, in turns, and print the medians of both."""
    is_row = name.startswith("table4")
    engines = ("fcfs", "dynamic") if is_row else (peer, "daemon")
    names = engines if is_row or name in ("pair", "gap", "memory") else ("native", "daemon")
    found: dict[str, list[dict[str, float]]] = {engine: [] for engine in engines}
    start = time.monotonic()
    for number in range(num_rounds):
        for engine in engines if number % 2 == 0 else reversed(engines):
            found[engine].append(MEASURES[name](model, engine))
            print(f"{name} round {number + 1} {engine}: {found[engine][-1]}", file=sys.stderr, flush=True)
    first, second = (medians(found[engine]) for engine in engines)
    print(f"\n### {name} ({num_rounds} rounds, {time.monotonic() - start:.0f} s)\n")
    print(f"| | {names[0]} | {names[1]} | {names[1]} / {names[0]} |\n|---|---|---|---|")
    for figure in first:
        each = [after[figure] / before[figure] for before, after in zip(*found.values(), strict=True) if before[figure]]
        ratio = f"{statistics.median(each):.3f} ({min(each):.3f} to {max(each):.3f})" if each else ""
        print(f"| {figure} | {first[figure]:.1f} | {second[figure]:.1f} | {ratio} |")


if __name__ == "__main__":
    main()
