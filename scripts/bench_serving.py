"""Serves a load of requests on the embedded model, summarizes it, and compares the tokens with those of solo runs."""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, cast

import numpy as np

from staticllm import StaticLLMPipeline, demo_model_path
from staticllm.pipelines.diagnostics.costs import wait_for_costs
from staticllm.pipelines.profiling.stats import percentile
from staticllm.pipelines.scheduling.planner import make_policy

WARM_UP = 24


@dataclass(frozen=True)
class Served:
    """A load: random prompts of one length, and answers of one length."""

    num_prompt: int
    num_new: int
    count: int
    num_seqs: int
    properties: dict[str, Any]
    prompts: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.num_prompt, self.num_new])
        self.prompts.extend(rng.integers(8, 1000, self.num_prompt) for _ in range(self.count))

    def pipeline(self, scheduler: str) -> StaticLLMPipeline:
        """Return a pipeline for this load. Random prompts share no prefix, so prefix caching is off."""
        length = self.num_prompt + self.num_new
        return StaticLLMPipeline(
            demo_model_path(), "CPU", scheduler=make_policy(scheduler), MAX_NUM_SEQS=self.num_seqs, MAX_WAITING=self.count,
            MAX_PROMPT_LEN=self.num_prompt, MIN_RESPONSE_LEN=self.num_new, KV_SLOTS=(self.num_seqs + 2) * length,
            HOST_KV_SLOTS=self.count * length, PREFIX_CACHING=False, **self.properties,
        )  # fmt: skip


@dataclass(frozen=True)
class Run:
    """One request: moments of ``time.perf_counter``, and its tokens."""

    arrival: float
    times: list[float]
    tokens: list[int]


def serve(
    pipe: StaticLLMPipeline, prompts: list[np.ndarray], num_new: int, rate: float | None = None, seed: int = 7
) -> list[Run]:
    """Submit the prompts, all at once or in a Poisson process of ``rate`` requests per second, and wait for the answers."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, len(prompts)) if rate else np.zeros(len(prompts))
    handles, arrivals, start = [], [], time.perf_counter()
    for prompt, due in zip(prompts, np.cumsum(gaps), strict=True):
        time.sleep(max(0.0, start + due - time.perf_counter()))
        arrivals.append(time.perf_counter())
        handles.append(pipe.submit(prompt, max_new_tokens=num_new, ignore_eos=True))
    answers = [handle.output() for handle in handles]
    return [Run(arrival, answer.token_times, answer.tokens) for arrival, answer in zip(arrivals, answers, strict=True)]


def rest(pipe: StaticLLMPipeline, seconds: float = 60.0) -> None:
    """Wait until the engine has measured its costs, for at most ``seconds``."""
    if not wait_for_costs(pipe.engine, seconds):
        print(f"costs are not measured after {seconds} s: that disturbs what others do now", file=sys.stderr)


def decode_call_ms(pipe: StaticLLMPipeline) -> float:
    """Return the median time of calls in which the maximum number of requests decodes and no prompt runs.

    Its change between two runs of one row is the change of the machine's speed.
    """
    trace = cast(list[Any], pipe.engine.core.profiler.trace or [])  # run() has put a list there
    steps = [record for record in trace if hasattr(record, "variant")]
    num_seqs = max((len(step.decode) for step in steps), default=0)
    return 1e3 * statistics.median(s.seconds for s in steps if len(s.decode) == num_seqs and not s.prefill)


def saturated_rate(pipe: StaticLLMPipeline, load: Served) -> float:
    """Return the requests per second that a saturated pipeline serves; the median of three runs."""
    rates = []
    for _ in range(3):
        runs = serve(pipe, load.prompts[:WARM_UP], load.num_new)
        rates.append(len(runs) / (max(run.times[-1] for run in runs) - min(run.arrival for run in runs)))
    return statistics.median(rates)


def summary(runs: list[Run]) -> dict[str, float]:
    """Return figures over the requests, in ms. TPOT is taken from the second token on, without waits to be swapped in."""
    start, end = min(run.arrival for run in runs), max(run.times[-1] for run in runs)
    mean = statistics.fmean
    return {
        "tokens_per_second": sum(len(run.times) for run in runs) / (end - start),
        "ttft_ms": 1e3 * mean(run.times[0] - run.arrival for run in runs),
        "ttft_p95_ms": 1e3 * percentile([run.times[0] - run.arrival for run in runs], 0.95),
        "tpot_ms": 1e3 * mean((run.times[-1] - run.times[1]) / (len(run.times) - 2) for run in runs),
        "first_to_second_ms": 1e3 * mean(run.times[1] - run.times[0] for run in runs),
        "longest_gap_ms": 1e3 * max(after - before for run in runs for before, after in pairwise(run.times)),
        "gap_p95_ms": 1e3
        * percentile([max(after - before for before, after in pairwise(run.times)) for run in runs], 0.95),
        "longest_later_gap_ms": 1e3 * max(after - before for run in runs for before, after in pairwise(run.times[1:])),
        "end_to_end_ms": 1e3 * mean(run.times[-1] - run.arrival for run in runs),
    }


def check_solo(load: Served, runs: dict[str, list[Run]]) -> dict[str, list[dict[str, float]]]:
    """Return where the tokens of each run differ from those of solo runs, with the margin between the two best logits there."""
    forks: dict[str, list[dict[str, float]]] = {name: [] for name in runs}
    with load.pipeline("fcfs") as pipe:
        for index, prompt in enumerate(load.prompts):
            alone = pipe.generate(prompt, max_new_tokens=load.num_new, ignore_eos=True).tokens[0]
            for name, served in runs.items():
                pairs = enumerate(zip(alone, served[index].tokens, strict=True))
                place = next((i for i, (mine, other) in pairs if mine != other), None)
                if place is not None:
                    margin = _margin(pipe, prompt, alone[:place])
                    forks[name].append({"request": index, "token": place, "margin": margin})
    return forks


def _margin(pipe: StaticLLMPipeline, prompt: np.ndarray, answer: list[int]) -> float:
    runner = pipe.engine.runner

    def top_two() -> float:
        sequence = runner.cache.open()
        logits = np.sort(runner.prefill(sequence, [*prompt.tolist(), *answer]))
        runner.cache.close(sequence)
        return float(logits[-1] - logits[-2])

    return pipe.engine.run_between_steps(top_two)
