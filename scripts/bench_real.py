"""Measures time to first token and time per token of a GGUF file beside openvino_genai and llama.cpp, in turns in one run.

    python scripts/bench_real.py                              # SmolLM2-135M-Instruct, 5 rounds
    python scripts/bench_real.py gemma3 --rounds 7 --prompt 512
    python scripts/bench_real.py path/to/model.gguf --peers ours genai

All read the same file and get the same token ids, greedily. openvino_genai's reader rounds the zero points of types such as Q4_1,
which is faster and another model; "genai on our conversion" has the numbers of the file, as ours. TTFT is the time of a call for
one token after a prompt that was not seen before; TPOT is the rest of a call for more tokens, per token. In each round all take
turns, and each round begins with another one; figures are medians, and ratios medians of the ratios of each round. Before that
the engine is left alone until its programs are complete and its costs are known. llama.cpp runs if llama-cpp-py-sync is installed
(PyPI has wheels for CPUs); llama-cpp-python has source only. The exactness of other readers is measured by
scripts/verified_models.py --readers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from bench_figures import Figure, Figures
from bench_machine import num_cores, this_machine
from numpy.typing import NDArray
from real_models import MODELS, fetch

from staticllm import StaticLLMPipeline
from staticllm.model_files.converted import converted

Generate = Callable[[NDArray[np.int64], int], object]
"""Runs a prompt and generates a number of tokens."""
IDLE_SECONDS = 30.0
TTFT, TPOT = "TTFT, ms", "TPOT, ms"
F32 = {"INFERENCE_PRECISION_HINT": "f32"}
LLAMA_PACKAGE = "llama-cpp-py-sync"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2", help="a name of real_models.py, or a file  [smollm2]")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt  [256]")
    parser.add_argument("--new", type=int, default=65, help="tokens that are generated  [65]")
    parser.add_argument("--idle", type=float, default=IDLE_SECONDS, help="seconds before timing  [30]")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    options = parser.parse_args()
    path = fetch(options.model) if options.model in MODELS else Path(options.model)
    found = {name: PEERS[name](path, options) for name in options.peers}
    peers = {name: generate for name, generate in found.items() if generate is not None}
    time.sleep(options.idle)
    figures = Figures()
    for number in range(options.rounds + 1):
        names = list(peers)
        for name in [*names[number % len(names) :], *names[: number % len(names)]]:
            ttft, tpot = timed(peers[name], options, number)
            if number:  # the first round warms up
                figures.add(TTFT, name, ttft)
                figures.add(TPOT, name, tpot)
    report(figures, list(peers), path, options)


def timed(generate: Generate, options: argparse.Namespace, seed: int) -> tuple[float, float]:
    """Return the ms to the first token, and the ms per further token."""
    first, more = prompt_of(options.prompt, 2 * seed), prompt_of(options.prompt, 2 * seed + 1)
    begin = time.perf_counter()
    generate(first, 1)
    middle = time.perf_counter()
    generate(more, options.new)
    end = time.perf_counter()
    ttft = 1e3 * (middle - begin)
    return ttft, (1e3 * (end - middle) - ttft) / (options.new - 1)


def prompt_of(length: int, seed: int) -> NDArray[np.int64]:
    """Return token ids ``[length]`` of ordinary tokens, other ones for each seed."""
    return np.random.default_rng(seed).integers(1000, 20_000, length)


def ours(path: Path, options: argparse.Namespace, **properties: Any) -> Generate:
    sizes = {"MAX_PROMPT_LEN": options.prompt, "MIN_RESPONSE_LEN": options.new}
    pipe = StaticLLMPipeline(path, "CPU", **sizes, **properties)
    pipe.wait_until_complete()
    return lambda ids, count: pipe.generate(ids[None], max_new_tokens=count, ignore_eos=True, do_sample=False)


def openvino_genai(path: Path, options: argparse.Namespace, **properties: Any) -> Generate:
    pipe = genai.LLMPipeline(str(path), "CPU", **properties)

    def generate(ids: NDArray[np.int64], count: int) -> object:
        inputs = genai.TokenizedInputs(ov.Tensor(ids[None]), ov.Tensor(np.ones((1, len(ids)), np.int64)))
        return pipe.generate(inputs, max_new_tokens=count, ignore_eos=True, do_sample=False)

    return generate


def llama_cpp(path: Path, options: argparse.Namespace) -> Generate | None:
    """Return llama.cpp's generation through its low-level calls, because its high-level ones take texts; None without it."""
    try:
        from llama_cpp_py_sync import Llama

        model = Llama(str(path), n_ctx=options.prompt + options.new + 8, n_batch=options.prompt, n_threads=num_cores())
    except (ImportError, RuntimeError) as error:  # its wheel of 2026-10 needs glibc 2.38
        print(f"llama.cpp is left out: pip install {LLAMA_PACKAGE} ({error})")
        return None
    calls = model._lib
    model._sampler = calls.llama_sampler_chain_init(calls.llama_sampler_chain_default_params())
    calls.llama_sampler_chain_add(model._sampler, calls.llama_sampler_init_greedy())

    def generate(ids: NDArray[np.int64], count: int) -> object:
        model._clear_context_state()
        place = model._eval_tokens(ids.tolist(), 0)
        tokens = [model._sample_token()]
        while len(tokens) < count:
            place = model._eval_tokens(tokens[-1:], place)
            tokens.append(model._sample_token())
        return tokens

    return generate


def report(figures: Figures, peers: list[str], path: Path, options: argparse.Namespace) -> None:
    print(f"{path.name}, prompts of {options.prompt} tokens, {options.rounds} rounds; {this_machine().line}")
    with suppress(PackageNotFoundError):
        print(f"{LLAMA_PACKAGE} {version(LLAMA_PACKAGE)}")
    print(f"load of the machine after the run: {os.getloadavg()[0]:.1f}")
    print("\n| | TTFT, ms | TPOT, ms | ours / it, TTFT | ours / it, TPOT |\n|---|---|---|---|---|")
    for name in peers:
        medians = [f"{statistics.median(figures.of(measure, name)):.2f}" for measure in (TTFT, TPOT)]
        mine = "ours f32" if name.endswith("f32") else "ours"
        ratios = [figures.ratio(Figure(measure, mine), Figure(measure, name)) for measure in (TTFT, TPOT)]
        shown = ["" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
        print("| " + " | ".join([name, *medians, *shown]) + " |")


PEERS: dict[str, Callable[[Path, argparse.Namespace], Generate | None]] = {
    "ours": ours,
    "genai": openvino_genai,
    "genai on our conversion": lambda path, options: openvino_genai(converted(path), options, ATTENTION_BACKEND="SDPA"),
    "ours f32": lambda path, options: ours(path, options, **F32),
    "genai f32": lambda path, options: openvino_genai(path, options, **F32),
    "llama.cpp": llama_cpp,
}

if __name__ == "__main__":
    main()
