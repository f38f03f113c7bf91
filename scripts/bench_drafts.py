"""Measures prompt lookup and draft models: tokens per second with drafts against without, in one run, in turns.

python scripts/bench_drafts.py                       # the embedded model
python scripts/bench_drafts.py --model MODEL --genai # another one, and GenAI's prompt lookup of 5, 10 and 15 tokens beside it
python scripts/bench_drafts.py --model MODEL --draft SMALL

The repeating prompt is one part again and again; the random prompt has no token twice. Answers are greedy, or sampled at a high
temperature, where drafts are hopeless. Every answer ignores the end of sequence, so that all have --tokens tokens. A speed-up
is the median over --rounds of the ratios within a round, by the clock and by the processor time of all threads, which other
programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

import staticllm
from staticllm import StaticLLMPipeline, demo_model_path

SAMPLED = {"do_sample": True, "rng_seed": 7, "temperature": 2.0}
LOOKUPS: dict[str, dict[str, Any]] = {
    "lookup": {"max_ngram_size": 3},
    "lookup of 5": {"max_ngram_size": 3, "num_assistant_tokens": 5},
}
GENAI_LOOKUPS = {
    f"genai lookup of {count}": {"max_ngram_size": 3, "num_assistant_tokens": count} for count in (5, 10, 15)
}


@dataclass(frozen=True)
class Timing:
    """Seconds of one answer by the clock and of all processors, and the number of accepted drafted tokens."""

    wall: float
    processor: float
    num_accepted: int


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=demo_model_path())
    parser.add_argument("--draft", type=Path, help="a draft model")
    parser.add_argument("--genai", action="store_true", help="also measure GenAI with and without prompt lookup")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", type=int, default=10, help="tokens of the part that the repeating prompt repeats")
    options = parser.parse_args()
    runs = runs_of(options)
    for kind, prompt in prompts_of(options.part, vocab_of(options.model)).items():
        chosen = {name: run for name, run in runs.items() if name.startswith("sampled") == (kind == "hopeless")}
        print(json.dumps({"prompt": kind, **measured(chosen, prompt, options.rounds)}), flush=True)


def vocab_of(model: Path) -> int:
    path = model / "config.json"
    return int(json.loads(path.read_text(encoding="utf-8")).get("vocab_size", 512)) if path.is_file() else 512


def prompts_of(part: int, vocab_size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    unit, others = rng.integers(8, vocab_size, part), rng.permutation(np.arange(8, vocab_size))[:240]
    return {
        "repeating": np.array([np.resize(unit, 240)]),
        "random": np.array([others]),
        "hopeless": np.array([others]),
    }


def runs_of(options: argparse.Namespace) -> dict[str, Callable[[np.ndarray], int]]:
    """Return functions that generate an answer and return the number of accepted drafted tokens, by name."""
    common: dict[str, Any] = {"max_new_tokens": options.tokens, "ignore_eos": True}
    sizes = {"MAX_PROMPT_LEN": 512, "MIN_RESPONSE_LEN": max(128, options.tokens)}
    ours = StaticLLMPipeline(options.model, "CPU", **sizes)
    ours.wait_until_complete()

    def of(pipe: StaticLLMPipeline, **more: Any) -> Callable[[np.ndarray], int]:
        return lambda prompt: pipe.generate(prompt, **common, **more).perf_metrics.get_num_accepted_tokens()

    def of_genai(pipe: genai.LLMPipeline, **more: Any) -> Callable[[np.ndarray], int]:
        return lambda prompt: 0 * len(pipe.generate(ov.Tensor(prompt), **common, **more).tokens)

    runs = {"plain": of(ours), "sampled plain": of(ours, **SAMPLED)}
    runs |= {name: of(ours, **lookup) for name, lookup in LOOKUPS.items()}
    runs |= {f"sampled {name}": of(ours, **lookup, **SAMPLED) for name, lookup in LOOKUPS.items()}
    if options.draft is not None:
        drafted = StaticLLMPipeline(options.model, "CPU", draft_model=staticllm.draft_model(options.draft), **sizes)
        runs |= {"draft model": of(drafted), "sampled draft model": of(drafted, **SAMPLED)}
    if options.genai:
        looking_up = genai.LLMPipeline(options.model, "CPU", prompt_lookup=True)
        runs |= {name: of_genai(looking_up, **lookup) for name, lookup in GENAI_LOOKUPS.items()}
        runs["genai plain"] = of_genai(genai.LLMPipeline(options.model, "CPU"))
    return runs


def measured(runs: dict[str, Callable[[np.ndarray], int]], prompt: np.ndarray, rounds: int) -> dict[str, Any]:
    """Return seconds and speed-ups: each round runs all in turns, the first of which change; the first round warms up."""
    timings: dict[str, list[Timing]] = {name: [] for name in runs}
    for index in range(rounds + 1):
        names = list(runs)
        for name in names[index % len(names) :] + names[: index % len(names)]:
            timing = timed(runs[name], prompt)
            if index:
                timings[name].append(timing)
            else:
                time.sleep(1.0)  # the engine rests, and measures costs

    def ratios(base: str, field: str) -> dict[str, float]:
        values = {name: [getattr(timing, field) for timing in found] for name, found in timings.items()}
        return {
            name: round(statistics.median(a / b for a, b in zip(values[base], found, strict=True)), 3)
            for name, found in values.items()
            if name != base
        }

    base = "plain" if "plain" in runs else "sampled plain"
    found: dict[str, Any] = {
        "seconds": {name: round(statistics.median(t.wall for t in each), 3) for name, each in timings.items()},
        "accepted": {name: each[-1].num_accepted for name, each in timings.items() if each[-1].num_accepted},
        "speed-up": ratios(base, "wall"),
        "speed-up by processor time": ratios(base, "processor"),
    }
    for peer in GENAI_LOOKUPS.keys() & runs.keys():
        found[f"against {peer}"] = {name: ratios(peer, "wall")[name] for name in LOOKUPS}
    return found


def timed(run: Callable[[np.ndarray], int], prompt: np.ndarray) -> Timing:
    start, processor = time.perf_counter(), time.process_time()
    accepted = run(prompt)
    return Timing(time.perf_counter() - start, time.process_time() - processor, accepted)


if __name__ == "__main__":
    main()
