"""Measures prompt lookup and draft models: tokens per second with drafts against without, in one run, in turns.

python scripts/bench_drafts.py                       # the embedded model
python scripts/bench_drafts.py --model MODEL --genai # another one, and GenAI's prompt lookup beside it
python scripts/bench_drafts.py --model MODEL --draft SMALL

The repeating prompt is one part, six times; the random prompt has no n-gram twice. Every answer ignores the end of sequence, so
that all have --tokens tokens. A ratio is the median over --rounds of the ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

import staticllm
from staticllm import StaticLLMPipeline, demo_model_path

LOOKUP = {"max_ngram_size": 3, "num_assistant_tokens": 5}
CHOSEN = {"max_ngram_size": 3}
Run = Callable[[np.ndarray], int]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=demo_model_path())
    parser.add_argument("--draft", type=Path, help="a draft model")
    parser.add_argument("--genai", action="store_true", help="also measure GenAI's prompt lookup")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--part", type=int, default=40, help="tokens of the part that the repeating prompt repeats")
    options = parser.parse_args()
    prompts = prompts_of(options.part, vocab_of(options.model))
    runs = runs_of(options)
    for kind, prompt in prompts.items():
        print(json.dumps({"prompt": kind, **measured(runs, prompt, options.rounds)}), flush=True)


def vocab_of(model: Path) -> int:
    config = (
        json.loads((model / "config.json").read_text(encoding="utf-8")) if (model / "config.json").is_file() else {}
    )
    return int(config.get("vocab_size", 512))


def prompts_of(part: int, vocab_size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    unit, others = rng.integers(8, vocab_size, part), rng.permutation(np.arange(8, vocab_size))[: 6 * part]
    return {"repeating": np.array([np.tile(unit, 6)]), "random": np.array([others])}


def runs_of(options: argparse.Namespace) -> dict[str, Run]:
    """Return functions that generate and return the number of accepted drafted tokens, by name."""
    common: dict[str, Any] = {"max_new_tokens": options.tokens, "ignore_eos": True}
    sizes = {"MAX_PROMPT_LEN": 512, "MIN_RESPONSE_LEN": max(128, options.tokens)}
    ours = StaticLLMPipeline(options.model, "CPU", **sizes)

    def run_ours(pipe: StaticLLMPipeline, **more: Any) -> Run:
        return lambda prompt: pipe.generate(prompt, **common, **more).perf_metrics.get_num_accepted_tokens()

    sampled = {"do_sample": True, "rng_seed": 7, "temperature": 1.0}
    runs = {
        "plain": run_ours(ours),
        "lookup": run_ours(ours, **CHOSEN),
        "lookup of 5": run_ours(ours, **LOOKUP),
        "sampled plain": run_ours(ours, **sampled),
        "sampled lookup": run_ours(ours, **sampled, **CHOSEN),
    }
    if options.draft is not None:
        drafted = StaticLLMPipeline(options.model, "CPU", draft_model=staticllm.draft_model(options.draft), **sizes)
        runs["draft model"] = run_ours(drafted)
    if options.genai:
        theirs = genai.LLMPipeline(options.model, "CPU", prompt_lookup=True)
        runs["genai lookup"] = lambda prompt: bool(theirs.generate(ov.Tensor(prompt), **common, **LOOKUP)) and 0
        plain = genai.LLMPipeline(options.model, "CPU")
        runs["genai plain"] = lambda prompt: bool(plain.generate(ov.Tensor(prompt), **common)) and 0
    return runs


def measured(runs: dict[str, Run], prompt: np.ndarray, rounds: int) -> dict[str, Any]:
    """Return seconds and ratios: each round runs all in turns, the first round warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    accepted: dict[str, int] = {}
    for index in range(rounds + 1):
        for name, run in runs.items():
            start = time.perf_counter()
            accepted[name] = run(prompt)
            if index:
                seconds[name].append(time.perf_counter() - start)

    def ratio(one: str, other: str) -> float:
        return round(statistics.median(a / b for a, b in zip(seconds[one], seconds[other], strict=True)), 3)

    found: dict[str, Any] = {"seconds": {name: round(statistics.median(values), 3) for name, values in seconds.items()}}
    found["accepted"] = {name: count for name, count in accepted.items() if count}
    found["speed-up"] = {
        name: ratio("plain", name) for name in runs if name not in ("plain", "sampled plain", "sampled lookup")
    }
    found["speed-up"]["sampled lookup"] = ratio("sampled plain", "sampled lookup")
    if "genai lookup" in runs:
        found["against genai lookup"] = {name: ratio("genai lookup", name) for name in ("lookup", "lookup of 5")}
    return found


if __name__ == "__main__":
    main()
