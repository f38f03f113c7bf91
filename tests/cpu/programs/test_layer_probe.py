"""Tests the probe that times the first layers of a model in two programs."""

from __future__ import annotations

import numpy as np
import pytest

from staticllm.config import StaticLLMConfig
from staticllm.devices import get_core
from staticllm.pipelines.programs import autotune
from staticllm.pipelines.programs.autotune import ProbedProgram, ProbeMemory, first_layers, layers_speedup
from staticllm.pipelines.programs.compile_plan import prepare
from staticllm.pipelines.programs.dry_run import random_feeds, run_apart

CONFIG = StaticLLMConfig(
    max_prompt_len=64, min_response_len=64, max_num_seqs=2, device_properties={"INFERENCE_PRECISION_HINT": "f32"}
)
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}


@pytest.fixture
def plan_of(model_path):
    return lambda name: prepare(model_path(name), "CPU", CONFIG)


def step_of(plan):
    return min(variant for variant in plan.variants if variant.rows == 1 and variant.kv_len)


@pytest.mark.parametrize("name", ["demo", "qwen2", "gemma3_text", "qwen2_moe", "lfm2"])
def test_the_first_layers_compute_what_the_whole_model_does(name, plan_of):
    plan = plan_of(name)
    step, whole = step_of(plan), plan.lowered.share(plan.variants)
    part = first_layers(whole, 0.7)
    assert 0 < len(part.get_results()) < len(whole.get_results())
    assert len(part.get_parameters()) < len(whole.get_parameters())
    compiled, of_whole = (get_core().compile_model(model, "CPU", EXACT) for model in (part, whole))
    expected = run_apart(of_whole, random_feeds(of_whole, step))
    feeds = {**random_feeds(compiled, step), **random_feeds(of_whole, step)}
    for port, values in run_apart(compiled, feeds).items():
        np.testing.assert_allclose(values, expected[port], rtol=1e-4, atol=1e-5)


def test_both_programs_are_timed_and_the_times_are_kept(plan_of, monkeypatch):
    plan, kept, timed = plan_of("demo"), ProbeMemory(), []
    monkeypatch.setattr(autotune, "LAYERS_SHARE", 0.7)
    monkeypatch.setattr(autotune, "_seconds_in_turns", lambda requests: timed.append(len(requests)) or [3.0, 2.0])
    few = tuple(variant for variant in plan.variants if variant.rows == 1)
    programs = ProbedProgram(plan.variants, EXACT), ProbedProgram(few, EXACT)
    arguments = get_core(), "CPU", plan.lowered, step_of(plan)
    assert [layers_speedup(*arguments, programs, kept) for _ in range(2)] == [1.5, 1.5]
    assert timed == [2]
    layers_speedup(*arguments, (programs[0], ProbedProgram(few, {**EXACT, "NUM_STREAMS": 1})), kept)
    layers_speedup(*arguments[:3], max(few), programs, kept)
    assert timed == [2, 2, 2], "other programs and other calls are timed"


def test_a_program_is_as_fast_as_itself(plan_of, monkeypatch):
    plan = plan_of("demo")
    monkeypatch.setattr(autotune, "LAYERS_SHARE", 0.7)
    program = ProbedProgram(plan.variants, EXACT)
    assert 0.5 < layers_speedup(get_core(), "CPU", plan.lowered, step_of(plan), (program, program)) < 2


def test_a_model_without_layers_is_not_timed(plan_of, monkeypatch):
    plan = plan_of("demo")
    monkeypatch.setattr(autotune, "LAYERS_SHARE", 1e-3)
    monkeypatch.setattr(autotune, "_seconds_in_turns", lambda requests: pytest.fail("timed"))
    program = ProbedProgram(plan.variants, EXACT)
    assert layers_speedup(get_core(), "CPU", plan.lowered, step_of(plan), (program, program)) == 1.0
