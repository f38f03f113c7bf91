"""Peers and ours, each with its model in a process of its own that waits for jobs, so that short runs can be interleaved.

Run by the benchmark scripts. A job is a line of JSON on standard input, its result a line on standard output.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from itertools import pairwise
from types import TracebackType
from typing import Any

import numpy as np

NUM_PROMPT, NUM_NEW, NPUW_REQUESTS = 64, 64, 2
NPUW = {"NPUW_DEVICES": "CPU", "NPUW_ONLINE_PIPELINE": "NONE"}  # the real NPUW, on the CPU


class Worker:
    """A process that has loaded one pipeline. ``do`` runs one job in it."""

    def __init__(self, kind: str, path: str, **properties: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps({"kind": kind, "path": path, "properties": properties})],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.load = self._answer()

    def do(self, job: str, **options: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps({"job": job, **options}), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit("a benchmark worker has died: its message is above")
        return json.loads(line)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


def prompts_of(count: int, seed: int, length: int = NUM_PROMPT) -> list[np.ndarray]:
    """Random tokens; another seed shares no prefix."""
    rng = np.random.default_rng([seed, length])
    return [rng.integers(8, 1000, length) for _ in range(count)]


class Ours:
    """StaticLLMPipeline."""

    def __init__(self, path: str, properties: dict[str, Any]) -> None:
        from staticllm import StaticLLMPipeline

        self._pipe = StaticLLMPipeline(path, "CPU", **properties)

    def clients(self, count: int, seed: int) -> dict[str, Any]:
        start = time.perf_counter()
        handles = [self._pipe.submit(p, max_new_tokens=NUM_NEW, ignore_eos=True) for p in prompts_of(count, seed)]
        num_tokens = sum(len(handle.outcome().answer.tokens) for handle in handles)
        return {"tokens_per_second": num_tokens / (time.perf_counter() - start)}

    def solo(self, seed: int) -> dict[str, Any]:
        (prompt,) = prompts_of(1, seed)
        metrics = self._pipe.generate(prompt, max_new_tokens=NUM_NEW, ignore_eos=True).perf_metrics
        return {"tpot_ms": metrics.get_tpot().mean, "ttft_ms": metrics.get_ttft().mean}

    def freeze(self, seed: int) -> dict[str, Any]:
        """A chat, and a prompt of 1000 tokens that arrives after its tenth token."""
        chat = self._pipe.submit(prompts_of(1, seed)[0], max_new_tokens=200, ignore_eos=True)
        tokens = chat.tokens()
        for _ in range(10):
            next(tokens)
        arrival = time.perf_counter()
        late = self._pipe.submit(prompts_of(1, seed, 1000)[0], max_new_tokens=2, ignore_eos=True)
        times, first = chat.outcome().answer.token_times, late.outcome().answer.token_times[0]
        gaps = [1e3 * (after - before) for before, after in pairwise(times)]
        return {"longest_gap_ms": max(gaps), "ttft_ms": 1e3 * (first - arrival), "gaps_ms": gaps}


class Batching:
    """openvino_genai's ContinuousBatchingPipeline on the CPU, with its defaults."""

    def __init__(self, path: str, properties: dict[str, Any]) -> None:
        import openvino_genai as genai

        self._pipe = genai.ContinuousBatchingPipeline(path, genai.SchedulerConfig(), "CPU", **properties)
        self._config = genai.GenerationConfig(max_new_tokens=NUM_NEW, ignore_eos=True)

    def clients(self, count: int, seed: int) -> dict[str, Any]:
        import openvino as ov

        start = time.perf_counter()
        prompts = [ov.Tensor(prompt[None]) for prompt in prompts_of(count, seed)]
        results = self._pipe.generate(prompts, [self._config] * count)
        num_tokens = sum(len(result.m_generation_ids[0]) for result in results)
        return {"tokens_per_second": num_tokens / (time.perf_counter() - start)}


class Npuw:
    """openvino_genai's NPU pipeline: one request after the other, so that a few tell the rate of any number."""

    def __init__(self, path: str, properties: dict[str, Any]) -> None:
        import openvino_genai as genai

        self._pipe = genai.LLMPipeline(path, "NPU", **NPUW, **properties)

    def clients(self, count: int, seed: int) -> dict[str, Any]:
        import openvino as ov

        start, num_tokens = time.perf_counter(), 0
        for prompt in prompts_of(min(count, NPUW_REQUESTS), seed):
            result = self._pipe.generate(ov.Tensor(prompt[None]), max_new_tokens=NUM_NEW, ignore_eos=True)
            num_tokens += len(result.tokens[0])
        return {"tokens_per_second": num_tokens / (time.perf_counter() - start)}


def main() -> None:
    what = json.loads(sys.argv[1])
    start = time.perf_counter()
    peer = {"ours": Ours, "batching": Batching, "npuw": Npuw}[what["kind"]](what["path"], what["properties"])
    print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(getattr(peer, job.pop("job"))(**job)), flush=True)


if __name__ == "__main__":
    main()
