"""Measures what several answers and beams cost: prints a table of ratios, each of runs in turns.

    python scripts/bench_generation.py                    # about ten minutes on two cores
    python scripts/bench_generation.py --rounds 1 answers beams

``answers`` compares eight answers of one request with eight requests, one after the other. ``beams`` compares a search of
four beams with openvino_genai's in its default and in its f32 setting. bench_drafts.py measures drafts, bench_grammars.py
grammars, and bench_adapters.py adapters. The model is the one of scripts/make_bench_model.py, Qwen2-0.5B-shaped with random
weights; a ratio is the median of the ratios of each round. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from make_bench_model import make

from staticllm import StaticLLMPipeline

F32 = {"INFERENCE_PRECISION_HINT": "f32"}
VOCAB = 100_000
Times = dict[str, list[float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], metavar="PART")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    model = make("qwen2-0.5b")
    print("| ratio | median | rounds | times, s |\n|---|---|---|---|")
    with StaticLLMPipeline(model, "CPU") as pipe:
        pipe.generate(prompt_of(16, 0), max_new_tokens=8, ignore_eos=True)
        time.sleep(30)  # the engine measures its costs while it rests
        for name in options.parts or list(PARTS):
            PARTS[name](pipe, model, options.rounds)


def answers(pipe: StaticLLMPipeline, model: Path, rounds: int) -> None:
    """Time eight answers of one request, and eight requests with the same prompt, with and without cached prefixes."""
    sampled: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "max_new_tokens": 64, "ignore_eos": True}

    def singles(prompts: list[np.ndarray]) -> None:
        for number, prompt in enumerate(prompts):
            pipe.generate(prompt, rng_seed=number + 1, **sampled)

    ways: dict[str, Callable[[int], object]] = {
        "8 answers": lambda seed: pipe.generate(prompt_of(512, seed), num_return_sequences=8, rng_seed=1, **sampled),
        "8 requests": lambda seed: singles([prompt_of(512, 1000 + seed)] * 8),
        "8 requests, no prefix": lambda seed: singles([prompt_of(512, 10_000 + 8 * seed + i) for i in range(8)]),
    }
    times = in_turns(ways, rounds)
    show(times, "8 answers", "8 requests")
    show(times, "8 answers", "8 requests, no prefix")


def beams(pipe: StaticLLMPipeline, model: Path, rounds: int) -> None:
    """Time a search of four beams with ours and with openvino_genai's settings."""
    asked: dict[str, Any] = {"num_beams": 4, "max_new_tokens": 64, "ignore_eos": True}
    peers = {"genai": genai.LLMPipeline(model, "CPU"), "genai f32": genai.LLMPipeline(model, "CPU", **F32)}
    ways: dict[str, Callable[[int], object]] = {"ours": lambda seed: pipe.generate(prompt_of(128, seed), **asked)}

    def theirs(peer: Any, seed: int) -> object:
        return peer.generate(ov.Tensor(prompt_of(128, seed)), **asked)

    ways |= {name: partial(theirs, peer) for name, peer in peers.items()}
    times = in_turns(ways, rounds)
    for name in peers:
        show(times, "ours", name)


def in_turns(ways: dict[str, Callable[[int], object]], rounds: int) -> Times:
    """Run every way once per round, after one round that does not count, and return the seconds of each."""
    times: Times = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, run in ways.items():
            start = time.perf_counter()
            run(100 * number + len(name))
            if number:
                times[name].append(time.perf_counter() - start)
    return times


def show(times: Times, one: str, other: str) -> None:
    """Print the median ratio of two ways."""
    ratios = [a / b for a, b in zip(times[one], times[other], strict=True)]
    shown = " / ".join(f"{statistics.median(times[name]):.2f}" for name in (one, other))
    print(
        f"| {one} / {other} | {statistics.median(ratios):.2f} | {min(ratios):.2f} to {max(ratios):.2f} | {shown} |",
        flush=True,
    )


def prompt_of(length: int, seed: int) -> np.ndarray:
    """Return random token ids ``[1, length]``."""
    return np.random.default_rng(seed).integers(10, VOCAB, (1, length))


PARTS: dict[str, Callable[[StaticLLMPipeline, Path, int], None]] = {"answers": answers, "beams": beams}

if __name__ == "__main__":
    main()
