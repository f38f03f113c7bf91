"""Runs each pipeline of a benchmark in a process of its own that waits for jobs, so that short runs can be interleaved.

The benchmark scripts run this. A job is a line of JSON on standard input, and its result a line on standard output.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from itertools import pairwise
from types import TracebackType
from typing import Any, Self

import numpy as np

NUM_PROMPT, NUM_NEW, NPUW_REQUESTS = 64, 64, 2
HISTORY, TURN, ANSWER = 900, 30, 16  # tokens of a second turn
NPUW = {"NPUW_DEVICES": "CPU", "NPUW_ONLINE_PIPELINE": "NONE"}  # the real NPUW, on the CPU
SAMPLE_SECONDS, REST_SECONDS = 0.05, 120.0


class Worker:
    """A process that has loaded one pipeline. ``do`` runs one job in it.

    ``load`` has the ``seconds`` of loading and the ``later_seconds`` of loading in the background, which is awaited so that it
    disturbs no measurement. With ``is_watched``, private memory is sampled from before loading, which costs a little speed.
    """

    script = __file__
    """The file that the process runs."""

    def __init__(self, kind: str, path: str, is_watched: bool = False, **properties: Any) -> None:
        what = {"kind": kind, "path": path, "is_watched": is_watched, "properties": properties}
        self._process = subprocess.Popen(
            [sys.executable, self.script, json.dumps(what)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
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

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


def prompts_of(count: int, seed: int, length: int = NUM_PROMPT) -> list[np.ndarray]:
    """Return prompts of random tokens; those of another seed share no prefix."""
    rng = np.random.default_rng([seed, length])
    return [rng.integers(8, 1000, length) for _ in range(count)]


class Peer(ABC):
    """A pipeline and the jobs that all pipelines share, timed from outside by a streamer that receives each token."""

    def complete(self) -> None:  # noqa: B027 - most have nothing to wait for
        """Wait for what is still loaded in the background."""

    def rest(self) -> dict[str, Any]:
        """Wait for what a pipeline does by itself while it has no requests, so that it disturbs no other peer."""
        return {}

    def settle(self) -> None:  # noqa: B027 - most do nothing by themselves
        """Wait for what the calls of a job have made necessary. Does nothing before the first ``rest``."""

    @abstractmethod
    def run(self, prompt: np.ndarray, count: int, streamer: Any = None) -> list[int]:
        """Greedily, exactly ``count`` tokens."""

    @abstractmethod
    def clients(self, count: int, seed: int) -> dict[str, Any]:
        """Run ``count`` requests at once."""

    def answer(self, length: int, seed: int, count: int = NUM_NEW) -> dict[str, Any]:
        """Run one prompt of ``length`` random tokens."""
        (prompt,) = prompts_of(1, seed, length)
        return self._timed(prompt, count)

    def turn(self, seed: int) -> dict[str, Any]:
        """Run the second turn of a conversation, which is passed as a whole, so that a prefix cache can help."""
        history, more = prompts_of(1, seed, HISTORY)[0], prompts_of(1, seed, TURN)[0]
        answer = self.run(history, ANSWER)
        return self._timed(np.concatenate([history, answer, more]), 2)

    def tokens(self, length: int, seed: int, count: int = NUM_NEW) -> dict[str, Any]:
        return {"tokens": self.run(prompts_of(1, seed, length)[0], count)}

    def _timed(self, prompt: np.ndarray, count: int) -> dict[str, Any]:
        streamer = make_clock()
        start = time.perf_counter()
        self.run(prompt, count, streamer)
        first, *_, last = streamer.times
        return {"ttft_ms": 1e3 * (first - start), "tpot_ms": 1e3 * (last - first) / (len(streamer.times) - 1)}


def make_clock() -> Any:
    """Return a streamer of openvino_genai that records the time of each token."""
    import openvino_genai as genai

    class Clock(genai.StreamerBase):
        def __init__(self) -> None:
            super().__init__()
            self.times: list[float] = []

        def write(self, token: int | list[int]) -> Any:
            now = time.perf_counter()
            self.times += [now] * (len(token) if isinstance(token, list) else 1)
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            pass

    return Clock()


class Ours(Peer):
    """StaticLLMPipeline."""

    def __init__(self, path: str, properties: dict[str, Any]) -> None:
        from staticllm import StaticLLMPipeline

        self._pipe = StaticLLMPipeline(path, "CPU", **properties)
        self._has_rested = False

    def complete(self) -> None:
        self._pipe.wait_until_complete()

    def rest(self) -> dict[str, Any]:
        """Wait until the engine has measured its costs."""
        from staticllm.pipelines.diagnostics.costs import wait_for_costs

        start = time.perf_counter()
        is_complete = wait_for_costs(self._pipe.engine, REST_SECONDS)
        if not is_complete:
            print(f"costs are not measured after {REST_SECONDS} s: that disturbs what others do now", file=sys.stderr)
        self._has_rested = True
        return {"seconds": time.perf_counter() - start, "is_complete": is_complete}

    def settle(self) -> None:
        """Calls that took much longer or shorter than measured are a reason to measure all costs again."""
        if self._has_rested:
            self.rest()

    def run(self, prompt: np.ndarray, count: int, streamer: Any = None) -> list[int]:
        return self._pipe.generate(prompt, streamer=streamer, max_new_tokens=count, ignore_eos=True).tokens[0]

    def clients(self, count: int, seed: int) -> dict[str, Any]:
        start = time.perf_counter()
        handles = [self._pipe.submit(p, max_new_tokens=NUM_NEW, ignore_eos=True) for p in prompts_of(count, seed)]
        num_tokens = sum(len(handle.output().tokens) for handle in handles)
        return {"tokens_per_second": num_tokens / (time.perf_counter() - start)}

    def freeze(self, seed: int) -> dict[str, Any]:
        """Run a chat, and submit a prompt of 1000 tokens after its tenth token."""
        chat = self._pipe.submit(prompts_of(1, seed)[0], max_new_tokens=200, ignore_eos=True)
        tokens = chat.tokens()
        for _ in range(10):
            next(tokens)
        arrival = time.perf_counter()
        late = self._pipe.submit(prompts_of(1, seed, 1000)[0], max_new_tokens=2, ignore_eos=True)
        times, first = chat.output().token_times, late.output().token_times[0]
        gaps = [1e3 * (after - before) for before, after in pairwise(times)]
        return {"longest_gap_ms": max(gaps), "ttft_ms": 1e3 * (first - arrival), "gaps_ms": gaps}

    def host(self, seed: int) -> dict[str, Any]:
        """Return the median time between two device calls of a single decoding request."""
        with self._pipe.record() as trace:
            self.run(prompts_of(1, seed)[0], NUM_NEW)
        decode = [step for step in trace.steps if step.decode]
        gaps = [after.start - before.end for before, after in pairwise(decode)]
        return {"host_ms": 1e3 * float(np.median(gaps))}


class Genai(Peer):
    """openvino_genai's LLMPipeline on the CPU, which uses the paged backend."""

    device, extra = "CPU", dict[str, str]()

    def __init__(self, path: str, properties: dict[str, Any]) -> None:
        import openvino_genai as genai

        self._pipe = genai.LLMPipeline(path, self.device, **self.extra, **properties)

    def run(self, prompt: np.ndarray, count: int, streamer: Any = None) -> list[int]:
        import openvino as ov

        extra = {} if streamer is None else {"streamer": streamer}
        result = self._pipe.generate(ov.Tensor(prompt[None]), max_new_tokens=count, ignore_eos=True, **extra)
        return list(result.tokens[0])

    def clients(self, count: int, seed: int) -> dict[str, Any]:
        """Run a few requests: they run one after another, so their rate is that of any number of clients."""
        start, num_tokens = time.perf_counter(), 0
        for prompt in prompts_of(min(count, NPUW_REQUESTS), seed):
            num_tokens += len(self.run(prompt, NUM_NEW))
        return {"tokens_per_second": num_tokens / (time.perf_counter() - start)}


class Npuw(Genai):
    """openvino_genai's LLMPipeline on ``NPU``, through NPUW on the CPU."""

    device, extra = "NPU", NPUW


class Batching(Peer):
    """openvino_genai's ContinuousBatchingPipeline on the CPU, with its default scheduler."""

    def __init__(self, path: str, properties: dict[str, Any]) -> None:
        import openvino_genai as genai

        self._pipe = genai.ContinuousBatchingPipeline(path, genai.SchedulerConfig(), "CPU", properties)

    def run(self, prompt: np.ndarray, count: int, streamer: Any = None) -> list[int]:
        (result,) = self._generate([prompt], count, streamer)
        return list(result.m_generation_ids[0])

    def clients(self, count: int, seed: int) -> dict[str, Any]:
        start = time.perf_counter()
        results = self._generate(prompts_of(count, seed), NUM_NEW)
        num_tokens = sum(len(result.m_generation_ids[0]) for result in results)
        return {"tokens_per_second": num_tokens / (time.perf_counter() - start)}

    def _generate(self, prompts: list[np.ndarray], count: int, streamer: Any = None) -> list[Any]:
        import openvino as ov
        import openvino_genai as genai

        configs = [genai.GenerationConfig(max_new_tokens=count, ignore_eos=True) for _ in prompts]
        extra = () if streamer is None else (streamer,)
        return self._pipe.generate([ov.Tensor(prompt[None]) for prompt in prompts], configs, *extra)


class Watch:
    """The peak of this process's private memory, USS, sampled in a thread."""

    def __init__(self) -> None:
        import psutil

        self._process, self.peak = psutil.Process(), 0
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        while True:
            self.peak = max(self.peak, self._process.memory_full_info().uss)
            time.sleep(SAMPLE_SECONDS)


def main() -> None:
    what = json.loads(sys.argv[1])
    watch = Watch() if what["is_watched"] else None
    start = time.perf_counter()
    if what["kind"] == "products":
        from bench_products import Products

        peer: Any = Products(what["path"], what["properties"])
    else:
        kinds: dict[str, Callable[..., Peer]] = {"ours": Ours, "genai": Genai, "npuw": Npuw, "batching": Batching}
        peer = kinds[what["kind"]](what["path"], what["properties"])
    loaded = time.perf_counter()
    if isinstance(peer, Peer):
        peer.complete()
    print(json.dumps({"seconds": loaded - start, "later_seconds": time.perf_counter() - loaded}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        name = job.pop("job")
        result = getattr(peer, name)(**job)
        if isinstance(peer, Peer) and name != "rest":
            peer.settle()
        if watch is not None:
            result["peak_mb"] = watch.peak / 1e6
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
