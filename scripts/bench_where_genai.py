"""The calls of GenAI's pipeline: in requests, by its own record, and alone, in the same model compiled as GenAI compiles it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai
from bench_where_nodes import (
    PERF_COUNT,
    CountedRuns,
    kinds_in,
    num_running,
    run_step,
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
from openvino import opset13 as ops

from staticllm.compiler_passes.shapes.select_logits import find_head
from staticllm.core import Variant
from staticllm.devices import get_core
from staticllm.model_dir import read_model
from staticllm.ports import ATTENTION_MASK, BEAM_IDX, INPUT_IDS, LOGITS, POSITION_IDS

DEVICE = "CPU"


class GenaiCalls:
    """GenAI's stateful pipeline on the CPU, whose time is divided.

    GenAI shows no program. So the calls alone, and those with counters, are those of the same IR, which is compiled with the same
    properties after GenAI's only change to it: the head takes the last token only. Raises ``RuntimeError`` or ``ModelError``
    (GenAI or OpenVINO cannot load the model).
    """

    name = "GenAI"

    def __init__(self, directory: Path, properties: Mapping[str, Any]) -> None:
        self._pipe = genai.LLMPipeline(directory, DEVICE, ATTENTION_BACKEND="SDPA", **properties)
        self._properties = dict(properties)
        self._model = read_model(get_core(), directory)
        take_last_token(self._model)
        self.request = self._compile(self._properties)
        self.counted_runs: dict[Phase, CountedRuns] = {}

    def _compile(self, properties: dict[str, Any]) -> ov.InferRequest:
        return get_core().compile_model(self._model, DEVICE, properties).create_infer_request()

    def run(self, prompt: Prompt, num_new: int, past_len: int) -> TokenRun:
        """Run a request; its calls and tokens are those of ``perf_metrics``. A turn runs the answer's last token too."""
        if not past_len:
            return self._run(prompt, num_new, Variant(len(prompt), 0))
        self._pipe.start_chat()
        try:
            self._pipe.generate(ov.Tensor(prompt[None, :past_len]), **greedy(1))
            run = self._run(prompt[past_len:], num_new, Variant(len(prompt) - past_len + 1, past_len))
            return replace(run, before=(Variant(past_len, 0),))
        finally:
            self._pipe.finish_chat()

    def _run(self, prompt: Prompt, num_new: int, variant: Variant) -> TokenRun:
        """Run a request whose first token the variant computes."""
        reader = Reader()
        start = time.perf_counter()
        result = self._pipe.generate(ov.Tensor(prompt[None]), streamer=reader, **greedy(num_new))
        wall = between(start, reader.times)
        metrics = result.perf_metrics
        times = [1e-3 * ms for ms in metrics.raw_metrics.m_new_token_times]
        own = [1e-3 * metrics.get_ttft().mean, *between(times[0], times[1:])]
        calls = [1e-6 * us for us in metrics.raw_metrics.token_infer_durations]
        length = variant.kv_len + variant.rows
        steps = [(Variant(1, past),) for past in range(length, length + num_new - 1)]
        return TokenRun(wall, own, calls, [(variant,), *steps])

    def repeat(self, run: TokenRun) -> Sequence[float]:
        """Run the same sizes from an empty state on, on the threads on which GenAI runs them."""
        self.request.reset_state()
        for variant in run.before:
            self._timed(variant, 0.0)
        return [self._timed(variant, pause) for (variant,), pause in zip(run.programs, run.pauses, strict=True)]

    def _timed(self, variant: Variant, pause: float) -> float:
        """Return the seconds of a call that begins a pause from now."""
        begin = time.perf_counter() + pause
        _feed(self.request, variant)
        wait_until(begin)
        start = time.perf_counter()
        (run_step if variant.rows == 1 and variant.kv_len else run_prompt)(self.request)
        return time.perf_counter() - start

    def count(self, run: TokenRun) -> Sequence[float]:
        """Run the same sizes in two programs: counters add up over all runs, so the second one only gets the prompt's state."""
        (prompt,), *steps = run.programs
        if run.before:
            self._count_prompt(*run.before)
            return self._count_after("turn", [prompt], run.pauses)
        if "prefill" not in self.counted_runs:
            self._count_prompt(prompt)  # the very first run does not count
        seconds = self._count_prompt(prompt)
        return [seconds, *(self._count_after("decode", [step for (step,) in steps], run.pauses[1:]) if steps else [])]

    def _count_prompt(self, prompt: Variant) -> float:
        counted = self._counting("prefill")
        counted.request.reset_state()
        _feed(counted.request, prompt)
        return counted.run()

    def _count_after(self, phase: Phase, steps: Sequence[Variant], pauses: Sequence[float]) -> list[float]:
        """Run steps after what the counted prompt left; the very first run does not count."""
        if phase not in self.counted_runs:
            self._counting(phase)
            self._count_after(phase, steps[:1], pauses[:1])
        counted = self._counting(phase)
        states = {state.name: state for state in self._counting("prefill").request.query_state()}
        for state in counted.request.query_state():
            state.state = states[state.name].state
        found = list[float]()
        for step, pause in zip(steps, pauses, strict=True):
            begin = time.perf_counter() + pause
            _feed(counted.request, step)
            wait_until(begin)
            found.append(counted.run())
        return found

    def _counting(self, phase: Phase) -> CountedRuns:
        if phase not in self.counted_runs:
            request = self._compile({**self._properties, PERF_COUNT: True})
            self.counted_runs[phase] = CountedRuns(request, run_step if phase == "decode" else run_prompt)
        return self.counted_runs[phase]

    def counted(self, run: TokenRun, phase: Phase) -> CountedCall:
        """Return what was counted, as the mean of all rounds."""
        counted = self.counted_runs[phase]
        times = counted.times()
        kinds = kinds_in(counted.request.get_compiled_model(), self._model, times)
        return CountedCall(shares_of(times, kinds), num_running(times), 1e3 * statistics.fmean(counted.seconds))

    def forget(self) -> None:
        self.counted_runs.clear()


def run_prompt(request: ov.InferRequest) -> None:
    """Run a request as GenAI runs prompts: on the calling thread."""
    request.infer()


def take_last_token(model: ov.Model) -> None:
    """Let the head of a model take the last token only, as GenAI does. A model without a recognised head is left as it is."""
    head = find_head(model.output(LOGITS).get_node())
    if head is not None:
        source = head.input(0)
        source.replace_source_output(ops.slice(source.get_source_output(), [-1], [-2], [-1], [1]).output(0))
        model.validate_nodes_and_infer_types()


def _feed(request: ov.InferRequest, variant: Variant) -> None:
    """Set the inputs for ``rows`` tokens after ``kv_len`` others."""
    rows = variant.rows
    past = variant.kv_len
    feeds = {
        INPUT_IDS: 8 + np.arange(past, past + rows, dtype=np.int64)[None] % 100,
        ATTENTION_MASK: np.ones((1, past + rows), np.int64),
        POSITION_IDS: np.arange(past, past + rows, dtype=np.int64)[None],
        BEAM_IDX: np.zeros(1, np.int32),
    }
    for port in request.get_compiled_model().inputs:
        (name,) = port.get_names() & feeds.keys()
        request.set_tensor(port, ov.Tensor(feeds[name]))
