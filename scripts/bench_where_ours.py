"""The calls of a pipeline of ours: in requests, alone, and in programs with counters."""

from __future__ import annotations

import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import openvino as ov
from bench_where_nodes import (
    CountedRuns,
    NodeTime,
    counted_program,
    counting,
    kinds_in,
    num_running,
    shares_of,
)
from bench_where_parts import (
    CountedCall,
    Phase,
    Prompt,
    Reader,
    TokenRun,
    between,
    greedy,
    wait_until,
)
from numpy.typing import NDArray

from staticllm.compiler_passes.compiling.chain import device_models
from staticllm.compiler_passes.compiling.dry_run import bound_request, random_feeds
from staticllm.core import Variant
from staticllm.model_files.model_at import check_model_dir
from staticllm.pipelines.costs.probe import timed_run
from staticllm.pipelines.diagnostics.costs import wait_for_costs
from staticllm.pipelines.diagnostics.settings import settings_in
from staticllm.pipelines.llm_pipeline import StaticLLMPipeline
from staticllm.pipelines.loading.decoder_kind import prepare
from staticllm.pipelines.programs.bind import BoundPrograms


class StaticCalls:
    """A pipeline of ours whose time is divided. It first rests until its costs are measured; then it measures no more.

    Raises:
        ConfigError: the device has no counters; and what ``prepare`` raises.
    """

    name = "staticllm"

    def __init__(
        self,
        pipe: StaticLLMPipeline,
        models_path: str | os.PathLike[str],
        rest_seconds: float,
        on_progress: Callable[[int, int], None] = lambda *_: None,
    ) -> None:
        self._pipe = pipe
        self._engine = pipe.engine
        self._plan = counting(prepare(check_model_dir(models_path, False), pipe.device, pipe.config))
        self._programs = cast("BoundPrograms", self._engine.runner.programs)
        self._counted: dict[Variant, CountedRuns] = {}
        self._compiled: dict[Variant, ov.CompiledModel] = {}
        self._feeds: dict[Variant, Mapping[str, NDArray[Any]]] = {}  # what the requests read
        wait_for_costs(self._engine, rest_seconds, on_progress)
        self._engine.run_between_steps(self._engine.runner.probe.pause)

    def run(self, prompt: Prompt, num_new: int, past_len: int) -> TokenRun:
        """Run a request; its calls and tokens are those that the engine records."""
        before: tuple[Variant, ...] = ()
        if past_len:
            with self._pipe.record() as trace:
                answer = self._pipe.generate(prompt[:past_len], **greedy(1)).tokens[0]
                self._engine.run_between_steps(lambda: None)
            before = (trace.steps[-1].variant,)
            prompt = np.concatenate([prompt[:past_len], answer, prompt[past_len:]])
        reader = Reader()
        with self._pipe.record() as trace:
            start = time.perf_counter()
            self._pipe.generate(prompt, streamer=reader, **greedy(num_new))
            self._engine.run_between_steps(lambda: None)  # the last call is recorded after its token
        (request,) = trace.requests
        steps = [[step for step in trace.steps if step.prefill], *([step] for step in trace.steps if not step.prefill)]
        return TokenRun(
            between(start, reader.times),
            between(request.arrival, request.token_times),
            [sum(step.seconds for step in each) for each in steps],
            [tuple(step.variant for step in each) for each in steps],
            before,
        )

    def repeat(self, run: TokenRun) -> Sequence[float]:
        """Run the same variants on the engine's thread, with what their buffers hold."""
        return self._engine.run_between_steps(
            partial(_at_pace, run, lambda variant: timed_run(self._programs[variant]), run.before)
        )

    def count(self, run: TokenRun) -> Sequence[float]:
        """Run the same variants on random tokens and KV slots."""
        for variant in {variant for each in run.programs for variant in each} - set(self._counted):
            self._compile(variant).run()  # the very first run does not count
        return _at_pace(run, lambda variant: self._counted[variant].run())

    def _compile(self, variant: Variant) -> CountedRuns:
        """Compile the program of a variant once more, with the settings that it has in the pipeline, and with counters."""
        settings = settings_in(device_models(self._programs.compiled(variant))[0])
        options = self._plan.options
        parts = {part: {**each, **settings} for part, each in options.properties.items()}
        plan = replace(self._plan, options=replace(options, properties=parts))
        self._compiled[variant] = counted_program(plan, variant)
        self._feeds[variant] = random_feeds(self._compiled[variant], variant)
        self._counted[variant] = CountedRuns(bound_request(self._compiled[variant], self._feeds[variant]))
        return self._counted[variant]

    def counted(self, run: TokenRun, phase: Phase) -> CountedCall:
        """Return what was counted, over all calls of the prompt, or as the mean of the calls of the other tokens."""
        tokens = run.programs[1:] if phase == "decode" else run.programs[:1]
        shares = {
            variant: count / len(tokens) for variant, count in Counter(v for each in tokens for v in each).items()
        }
        times = list[NodeTime]()
        kinds: dict[str, str] = {}
        num_nodes = 0.0
        for variant, share in shares.items():
            found = self._counted[variant].times()
            own = kinds_in(self._compiled[variant], self._plan.lowered.graph.model, found)
            num_nodes += num_running(found) * share
            times += [NodeTime(f"{variant} {node.name}", node.type, node.ms * share) for node in found]
            kinds |= {f"{variant} {name}": kind for name, kind in own.items()}
        mean_ms = 1e3 * sum(
            statistics.fmean(self._counted[variant].seconds) * share for variant, share in shares.items()
        )
        return CountedCall(shares_of(times, kinds), num_nodes, mean_ms)

    def forget(self) -> None:
        self._counted.clear()
        self._compiled.clear()
        self._feeds.clear()


def _at_pace(run: TokenRun, call: Callable[[Variant], float], before: Sequence[Variant] = ()) -> list[float]:
    """Return the seconds of the calls for each token of a request after others, with its pauses between them."""
    for variant in before:
        call(variant)
    found = list[float]()
    for variants, pause in zip(run.programs, run.pauses, strict=True):
        wait_until(time.perf_counter() + pause)
        found.append(sum(map(call, variants)))
    return found
