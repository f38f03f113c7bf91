"""Measures the time from a start to the first token, with and without a blob set, and compares it with openvino_genai.

    python scripts/make_bench_model.py
    python scripts/bench_start.py                # the embedded model and the 0.5B-shaped one
    python scripts/bench_start.py --rounds 5 --models demo -o start.json

Each start is a process of its own. The clock runs from the constructor to the first token of a prompt of 16 tokens. Ours and
the peers take turns, each round begins with another one, and figures are medians. A ``cold`` start finds nothing on disk, and
may write a cache. A ``warm`` start follows a start that filled the cache. The peers are openvino-genai's ``NPU`` pipeline
(NPUW) on the CPU, and its CPU pipeline, both with ``CACHE_DIR``.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from make_bench_model import cache_dir

DEMO = Path(__file__).resolve().parent.parent / "staticllm" / "demo_model"
MODELS = {"demo": DEMO, "qwen2-0.5b": cache_dir() / "qwen2-0.5b", "llama-1b": cache_dir() / "llama-1b"}
LIMIT_SECONDS = 300

WORKER = """
import json, sys, time
import numpy as np
kind, model, cache = sys.argv[1:]
begin = time.perf_counter()
prompt = np.arange(20, 36, dtype=np.int64)[None]
if kind == "ours":
    from staticllm import StaticLLMPipeline
    imported = time.perf_counter()
    pipe = StaticLLMPipeline(model, "CPU", **({"CACHE_DIR": cache} if cache else {}))
    loaded = time.perf_counter()
    pipe.generate(prompt, max_new_tokens=1, ignore_eos=True)
else:
    import openvino as ov
    import openvino_genai as genai
    imported = time.perf_counter()
    options = {"NPUW_DEVICES": "CPU", "NPUW_ONLINE_PIPELINE": "NONE"} if kind == "npuw" else {}
    options |= {"CACHE_DIR": cache} if cache else {}
    pipe = genai.LLMPipeline(model, "NPU" if kind == "npuw" else "CPU", **options)
    loaded = time.perf_counter()
    inputs = genai.TokenizedInputs(ov.Tensor(prompt), ov.Tensor(np.ones_like(prompt)))
    pipe.generate(inputs, max_new_tokens=1, ignore_eos=True)
end = time.perf_counter()
print(json.dumps({"import": imported - begin, "load": loaded - imported, "first": end - imported}))
sys.stdout.flush()
import os
os._exit(0)  # what it takes to leave is not measured
"""


@dataclass(frozen=True)
class Start:
    """A way to start. ``cache`` is None for no cache, else whether it is filled before."""

    name: str
    kind: str
    has_cache: bool
    is_warm: bool


STARTS = (
    Start("ours, cold", "ours", has_cache=False, is_warm=False),
    Start("ours, cold, writes a cache", "ours", has_cache=True, is_warm=False),
    Start("ours, warm", "ours", has_cache=True, is_warm=True),
    Start("npuw, cold", "npuw", has_cache=False, is_warm=False),
    Start("npuw, cold, writes a cache", "npuw", has_cache=True, is_warm=False),
    Start("npuw, warm", "npuw", has_cache=True, is_warm=True),
    Start("genai CPU, cold", "genai", has_cache=False, is_warm=False),
    Start("genai CPU, warm", "genai", has_cache=True, is_warm=True),
)
RATIOS = (
    ("ours, cold", "npuw, cold"),
    ("ours, cold, writes a cache", "npuw, cold, writes a cache"),
    ("ours, warm", "npuw, warm"),
    ("ours, warm", "ours, cold"),
    ("ours, cold", "genai CPU, cold"),
    ("ours, warm", "genai CPU, warm"),
)


def measure(model: Path, rounds: int, say: Callable[[str], None]) -> dict[str, list[dict[str, float]]]:
    """Measure the seconds of every start, ``rounds`` times."""
    found: dict[str, list[dict[str, float]]] = {start.name: [] for start in STARTS}
    with tempfile.TemporaryDirectory(prefix="staticllm-start-") as folder:
        warm = {start.kind: Path(folder) / f"warm-{start.kind}" for start in STARTS}
        for kind, kept in warm.items():
            run(kind, model, kept)
        for round_ in range(rounds):
            shift = round_ * 3 % len(STARTS)
            for start in (*STARTS[shift:], *STARTS[:shift]):
                cache = warm[start.kind] if start.is_warm else Path(folder) / "cold" if start.has_cache else None
                found[start.name].append(run(start.kind, model, cache))
                shutil.rmtree(Path(folder) / "cold", ignore_errors=True)
                say(f"  {start.name:<28} {found[start.name][-1]['first']:6.2f} s")
    return found


def run(kind: str, model: Path, cache: Path | None) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-c", WORKER, kind, str(model), str(cache or "")],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_SECONDS,
    )
    if done.returncode:
        sys.exit(f"{kind} failed on {model}: {done.stderr[-1000:]}")
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def report(found: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Return the medians, and the medians of the ratios of each round."""
    first = {name: [start["first"] for start in starts] for name, starts in found.items()}
    ratios = {
        f"{ours} / {theirs}": statistics.median(a / b for a, b in zip(first[ours], first[theirs], strict=True))
        for ours, theirs in RATIOS
    }
    return {"first_token_s": {name: statistics.median(values) for name, values in first.items()}, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=["demo", "qwen2-0.5b"])
    parser.add_argument("-o", "--output", type=Path, help="write all that was measured as JSON")
    options = parser.parse_args()
    results = {}
    for name in options.models:
        if not (MODELS[name] / "openvino_model.xml").is_file():
            sys.exit(f"{name} is not there: python scripts/make_bench_model.py {name}")
        print(name, flush=True)
        found = measure(MODELS[name], options.rounds, lambda text: print(text, flush=True))
        results[name] = {**report(found), "starts": found, "how": [asdict(start) for start in STARTS]}
        if options.output:
            options.output.write_text(json.dumps(results, indent=1), encoding="utf-8")
    for name, result in results.items():
        print(f"\n{name}: seconds from the constructor to the first token, medians of {options.rounds}")
        for start, seconds in result["first_token_s"].items():
            print(f"  {start:<28} {seconds:6.2f}")
        for ratio, value in result["ratios"].items():
            print(f"  {ratio:<58} {value:5.2f}")


if __name__ == "__main__":
    main()
