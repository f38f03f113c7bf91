"""Runs of a program for their duration only, and how they are given up."""

from __future__ import annotations

import time

import numpy as np
import pytest

from staticllm import StaticLLMPipeline, demo_model_path
from staticllm.pipelines.engine import engine as engine_module

LENGTHS = {"MAX_PROMPT_LEN": 512, "MIN_RESPONSE_LEN": 64}
PROMPT = np.arange(5, 105)[None]


@pytest.fixture
def pipe(monkeypatch):
    monkeypatch.setattr(engine_module, "IDLE_SECONDS", 3600.0)
    with StaticLLMPipeline(demo_model_path(), "CPU", **LENGTHS) as pipe:
        yield pipe


def test_a_cancelled_run_changes_no_answer_and_leaves_the_program_usable(pipe):
    expected = pipe.generate(PROMPT, max_new_tokens=8, ignore_eos=True).tokens
    programs = pipe.engine.runner.programs
    largest = max(variant for variant in programs if variant.sequences == 1 and not variant.kv_len)
    asked = []

    def from_the_second_time():
        asked.append(True)
        return len(asked) > 1

    assert pipe.engine.run_between_steps(lambda: programs[largest].time_unless(from_the_second_time)) is None
    assert pipe.engine.run_between_steps(lambda: programs[largest].time_unless(lambda: True)) is None
    assert pipe.engine.run_between_steps(lambda: programs[largest].time_unless(lambda: False)) > 0
    assert pipe.generate(PROMPT, max_new_tokens=8, ignore_eos=True).tokens == expected


def test_a_plugin_that_cannot_cancel_finishes_the_run(pipe, monkeypatch):
    program = pipe.engine.run_between_steps(lambda: max(pipe.engine.runner.programs.items())[1])
    request = program._request

    class WithoutCancel:
        def __getattr__(self, name):
            return getattr(request, name)

        def cancel(self):
            raise RuntimeError("not implemented")

    monkeypatch.setattr(program, "_request", WithoutCancel())
    asked = iter([False, *[True] * 10_000])
    assert pipe.engine.run_between_steps(lambda: program.time_unless(lambda: next(asked))) is None
    assert pipe.engine.run_between_steps(lambda: program.time_unless(lambda: False)) > 0


@pytest.mark.parametrize("measure_costs", [True, False])
def test_costs_are_measured_only_if_asked(measure_costs, monkeypatch):
    monkeypatch.setattr(engine_module, "IDLE_SECONDS", 0.01)
    with StaticLLMPipeline(demo_model_path(), "CPU", MEASURE_COSTS=measure_costs, **LENGTHS) as pipe:
        pipe.generate(PROMPT, max_new_tokens=2)
        num_left = pipe.engine.runner.probe.num_left
        until = time.monotonic() + (10 if measure_costs else 0.5)
        while pipe.engine.runner.probe.num_left == num_left and time.monotonic() < until:
            time.sleep(0.02)
        assert (pipe.engine.runner.probe.num_left < num_left) == measure_costs
