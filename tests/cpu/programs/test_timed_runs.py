"""Runs of a program for their duration only, between requests."""

from __future__ import annotations

import time

import numpy as np
import pytest

from staticllm import StaticLLMPipeline, demo_model_path
from staticllm.pipelines.costs import probe as cost_probe

LENGTHS = {"MAX_PROMPT_LEN": 512, "MIN_RESPONSE_LEN": 64}
PROMPT = np.arange(5, 105)[None]


@pytest.fixture
def pipe(monkeypatch):
    monkeypatch.setattr(cost_probe, "IDLE_SECONDS", 3600.0)
    with StaticLLMPipeline(demo_model_path(), "CPU", **LENGTHS) as pipe:
        yield pipe


def test_measured_calls_change_no_answer(pipe):
    expected = pipe.generate(PROMPT, max_new_tokens=8, ignore_eos=True).tokens
    runner = pipe.engine.runner
    while not runner.probe.is_done:
        pipe.engine.run_between_steps(lambda: [runner.probe.measure_next(lambda: False) for _ in range(5)])
        assert pipe.generate(PROMPT, max_new_tokens=8, ignore_eos=True).tokens == expected


@pytest.mark.parametrize("measure_costs", [True, False])
def test_costs_are_measured_only_if_asked(measure_costs, monkeypatch):
    monkeypatch.setattr(cost_probe, "IDLE_SECONDS", 0.01)
    with StaticLLMPipeline(demo_model_path(), "CPU", MEASURE_COSTS=measure_costs, **LENGTHS) as pipe:
        pipe.generate(PROMPT, max_new_tokens=2)
        num_left = pipe.engine.runner.probe.num_left
        until = time.monotonic() + (10 if measure_costs else 0.5)
        while pipe.engine.runner.probe.num_left == num_left and time.monotonic() < until:
            time.sleep(0.02)
        assert (pipe.engine.runner.probe.num_left < num_left) == measure_costs
