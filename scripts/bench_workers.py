"""Jobs on one model, each in a process of its own, so that peers share neither memory nor threads.

Run by the benchmark scripts; a job is JSON on the command line, its result JSON on standard output.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from itertools import pairwise
from typing import Any

import numpy as np

NUM_PROMPT, NUM_NEW, NPUW_REQUESTS = 64, 64, 3
NPUW = {"NPUW_DEVICES": "CPU", "NPUW_ONLINE_PIPELINE": "NONE"}  # the real NPUW, on the CPU


def interleaved(jobs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Run jobs one after the other, each in a new process."""
    results = []
    for job in jobs:
        done = subprocess.run(
            [sys.executable, __file__, json.dumps(job)], capture_output=True, text=True, check=False, timeout=1800
        )
        if done.returncode:
            sys.exit(f"{job} failed: {done.stderr.strip().splitlines()[-1]}")
        results.append(json.loads(done.stdout.splitlines()[-1]))
    return results


def prompts_of(count: int, length: int = NUM_PROMPT) -> list[np.ndarray]:
    return [np.random.default_rng(seed).integers(8, 1000, length) for seed in range(count)]


def ours(job: dict[str, Any]) -> dict[str, Any]:
    from staticllm import StaticLLMPipeline

    properties = {name.upper(): job[name] for name in ("scheduler", "tpot_ms") if name in job}
    with StaticLLMPipeline(job["path"], "CPU", **properties) as pipe:
        return {"clients": ours_clients, "solo": ours_solo, "freeze": ours_freeze}[job["job"]](pipe, job)


def ours_clients(pipe: Any, job: dict[str, Any]) -> dict[str, Any]:
    """All clients at once, after as many for the shapes to be known."""
    for prompts in (prompts_of(2 * job["count"])[job["count"] :], prompts_of(job["count"])):
        start = time.perf_counter()
        handles = [pipe.submit(prompt, max_new_tokens=NUM_NEW, ignore_eos=True) for prompt in prompts]
        num_tokens = sum(len(handle.outcome().answer.tokens) for handle in handles)
        seconds = time.perf_counter() - start
    return {"tokens_per_second": num_tokens / seconds}


def ours_solo(pipe: Any, job: dict[str, Any]) -> dict[str, Any]:
    pipe.generate(prompts_of(1)[0], max_new_tokens=8, ignore_eos=True)
    metrics = pipe.generate(prompts_of(2)[1], max_new_tokens=NUM_NEW, ignore_eos=True).perf_metrics
    return {"tpot_ms": metrics.get_tpot().mean, "ttft_ms": metrics.get_ttft().mean}


def ours_freeze(pipe: Any, job: dict[str, Any]) -> dict[str, Any]:
    """A chat, and a long prompt that arrives after its tenth token."""
    pipe.generate(prompts_of(1)[0], max_new_tokens=8, ignore_eos=True)
    chat = pipe.submit(prompts_of(2)[1], max_new_tokens=200, ignore_eos=True)
    tokens = chat.tokens()
    for _ in range(10):
        next(tokens)
    arrival = time.perf_counter()
    long = pipe.submit(prompts_of(1, 1000)[0], max_new_tokens=2, ignore_eos=True)
    times, first = chat.outcome().answer.token_times, long.outcome().answer.token_times[0]
    return {
        "longest_gap_ms": 1e3 * max(after - before for before, after in pairwise(times)),
        "ttft_ms": 1e3 * (first - arrival),
        "gaps_ms": [1e3 * (after - before) for before, after in pairwise(times)],
    }


def batching(job: dict[str, Any]) -> dict[str, Any]:
    """openvino_genai's ContinuousBatchingPipeline on the CPU, its defaults."""
    import openvino as ov
    import openvino_genai as genai

    pipe = genai.ContinuousBatchingPipeline(job["path"], genai.SchedulerConfig(), "CPU")
    config = genai.GenerationConfig(max_new_tokens=NUM_NEW, ignore_eos=True)
    count = job["count"]
    for prompts in (prompts_of(2 * count)[count:], prompts_of(count)):
        start = time.perf_counter()
        results = pipe.generate([ov.Tensor(prompt[None]) for prompt in prompts], [config] * count)
        seconds = time.perf_counter() - start
    num_tokens = sum(len(result.m_generation_ids[0]) for result in results)
    return {"tokens_per_second": num_tokens / seconds}


def npuw(job: dict[str, Any]) -> dict[str, Any]:
    """openvino_genai's NPU pipeline: one request after the other, so that a few tell the rate of any number."""
    import openvino as ov
    import openvino_genai as genai

    pipe = genai.LLMPipeline(job["path"], "NPU", **NPUW)
    for prompts in (prompts_of(1), prompts_of(1 + NPUW_REQUESTS)[1:]):
        start, num_tokens = time.perf_counter(), 0
        for prompt in prompts:
            result = pipe.generate(ov.Tensor(prompt[None]), max_new_tokens=NUM_NEW, ignore_eos=True)
            num_tokens += len(result.tokens[0])
        seconds = time.perf_counter() - start
    return {"tokens_per_second": num_tokens / seconds}


def main() -> None:
    job = json.loads(sys.argv[1])
    timer = threading.Timer(1500, lambda: sys.exit("timed out"))
    timer.daemon = True
    timer.start()
    print(json.dumps({"ours": ours, "batching": batching, "npuw": npuw}[job["kind"]](job)))


if __name__ == "__main__":
    main()
