"""Measures programs that share a device through the daemon against the same programs without it.

    python scripts/bench_daemon.py [--model DIR] [--rounds 5] [--what calls pair gap memory table1]

``calls``: the time that a plain call takes longer through the daemon. ``pair``: two programs that decode at the same time.
``gap``: one decodes while another one computes prompts of 1000 tokens. ``memory``: what a second program with the same
model adds. ``table1``: FlexNPU's table 1, an optimum-intel program with and without the daemon (needs optimum-intel).

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
WORKER = Path(__file__).with_name("bench_daemon_worker.py")
NUM_TOKENS = 96
LONG_PROMPT = 1000


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
    first.go(), second.go()
    one, two = first.result()["private"], second.result()["private"]
    return {
        "first program MB": (one + after_first - before) / 1e6,
        "second program MB": (two + after_second - after_first) / 1e6,
        "of which its own process MB": two / 1e6,
    }


def daemon_bytes() -> int:
    """Return the daemon's private memory in bytes; 0 without one."""
    import psutil

    from staticllm.daemon.lifetime import status
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


MEASURES = {"calls": calls, "pair": pair, "gap": gap, "memory": memory, "table1": table1}


def medians(rounds: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}


def main() -> None:
    """Measure and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", help="A model directory; the embedded model without one.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--what", nargs="+", choices=list(MEASURES), default=list(MEASURES))
    parser.add_argument("--peer", default="genai", choices=["genai", "ours"], help="The engine of native programs.")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    import staticllm

    model = options.model or str(staticllm.demo_model_path())
    with tempfile.TemporaryDirectory() as folder:
        os.environ["STATICLLM_RUNTIME_DIR"] = folder
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        try:
            for name in options.what:
                measure(name, model, options.peer, options.rounds)
        finally:
            subprocess.run(
                [sys.executable, "-m", "staticllm", "daemon", "stop"], check=False, stdout=subprocess.DEVNULL
            )


def measure(name: str, model: str, peer: str, num_rounds: int) -> None:
    """Measure one thing natively and with the daemon, in turns, and print the medians of both."""
    found: dict[str, list[dict[str, float]]] = {peer: [], "daemon": []}
    start = time.monotonic()
    for number in range(num_rounds):
        for engine in (peer, "daemon") if number % 2 == 0 else ("daemon", peer):
            found[engine].append(MEASURES[name](model, engine))
            print(f"{name} round {number + 1} {engine}: {found[engine][-1]}", file=sys.stderr, flush=True)
    native, shared = medians(found[peer]), medians(found["daemon"])
    print(f"\n### {name} ({num_rounds} rounds, {time.monotonic() - start:.0f} s)\n")
    native_name = peer if name in ("pair", "gap", "memory") else "native"
    print(f"| | {native_name} | daemon | daemon / {native_name} |\n|---|---|---|---|")
    for figure in native:
        ratio = shared[figure] / native[figure] if native[figure] else float("nan")
        print(f"| {figure} | {native[figure]:.1f} | {shared[figure]:.1f} | {ratio:.3f} |")


if __name__ == "__main__":
    main()
