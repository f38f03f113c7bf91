"""Tests probes: settings change only if measured to be faster, never against the user's; layers are timed in two programs."""

from __future__ import annotations

import os

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from staticllm import demo_model_path
from staticllm.compiler_passes.artifacts.measurements import probes_in
from staticllm.compiler_passes.compiling import autotune
from staticllm.compiler_passes.compiling.autotune import (
    GROUP_SIZE,
    LARGE_GROUP,
    PRECISION,
    ProbedProgram,
    calibrated,
    first_layers,
    layers_speedup,
)
from staticllm.compiler_passes.compiling.compile import CompileOptions
from staticllm.compiler_passes.compiling.dry_run import random_feeds, run_apart
from staticllm.config import StaticLLMConfig
from staticllm.core import Variant
from staticllm.devices import get_core
from staticllm.pipelines.loading import decoder_kind
from staticllm.pipelines.loading.decoder_kind import prepare

QUANTIZED = "f32 with quantized activations"
PHASES = {"prefill": {"PERFORMANCE_HINT": "LATENCY"}, "generate": {"PERFORMANCE_HINT": "LATENCY"}}


def stack(size=1024, count=2, head=64, compressed=True):
    """Return a model of ``count`` square matrices in 8 bits, and another one as its head."""
    value = ops.parameter([1, -1, size], np.float32)
    result = value
    for rows in (*[size] * count, head):
        weights = np.ones((rows, size), np.uint8 if compressed else np.float32)
        constant = ops.constant(weights)
        if compressed:
            constant = ops.multiply(ops.convert(constant, np.float32), np.full((rows, 1), 0.01, np.float32))
        result = ops.matmul(result, constant, False, True)
    return ov.Model([ops.result(result)], [value])


@pytest.fixture(autouse=True)
def not_in_pages(monkeypatch):
    """What these tests choose among is for models whose slots cannot lie in pages."""
    monkeypatch.setattr(decoder_kind, "may_be_paged", lambda job: False)


@pytest.fixture
def timed(monkeypatch):
    """Set the seconds of each kind of candidate, and record how many rows and matrices were timed."""
    seconds, probes = {"own": 2.0, LARGE_GROUP: 1.0, 0: 1.0, "f32": 1.0, QUANTIZED: 9.0}, []

    def measured(self, num_rows, candidates, is_cold=False):
        probes.append((num_rows, self._sizes))
        assert is_cold == (num_rows < autotune.MANY_ROWS), "few rows read their weights from memory"
        kinds = ["f32" if PRECISION in c and not c[GROUP_SIZE] else c.get(GROUP_SIZE, "own") for c in candidates]
        kinds = [
            QUANTIZED if PRECISION in c and c[GROUP_SIZE] else kind for c, kind in zip(candidates, kinds, strict=True)
        ]
        return [seconds.get((num_rows, kind), seconds[kind]) for kind in kinds]

    monkeypatch.setattr(autotune.Probe, "seconds", measured)
    return seconds, probes


def calibrate(model, layout="shared", device="CPU", **generate):
    phases = {**PHASES, "generate": {**PHASES["generate"], **generate}}
    return calibrated(get_core(), device, model, phases, layout).properties


def test_the_faster_group_is_taken_for_both_phases_which_still_share_a_program(timed):
    found = calibrate(stack())
    assert found == {phase: {"PERFORMANCE_HINT": "LATENCY", GROUP_SIZE: LARGE_GROUP} for phase in PHASES}
    assert timed[1] == [(autotune.MANY_ROWS, [1024])], "one matrix of each shape, no head"
    assert GROUP_SIZE not in PHASES["prefill"]


def test_a_small_gain_changes_nothing(timed):
    timed[0]["own"] = 1.05
    assert calibrate(stack()) == PHASES


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (stack(), {"device": "NPU"}),
        (stack(), {GROUP_SIZE: 0}),  # set by the user, or by f32
        (stack(size=1000), {}),  # not divisible by the group size
        (stack(compressed=False), {}),
    ],
)  # fmt: skip
def test_nothing_is_timed_without_candidates(model, options, timed):
    expected = {**PHASES, "generate": {**PHASES["generate"], **{k: v for k, v in options.items() if k != "device"}}}
    assert calibrate(model, **options) == expected
    assert not timed[1]


def test_small_models_do_not_quantize_activations(timed, monkeypatch):
    """It gains nothing there, and their tokens are nearer to those of the model in f32."""
    monkeypatch.setattr(autotune.Probe, "can_run", lambda self, properties: True)
    assert calibrate(stack(size=256)) == {phase: {**properties, GROUP_SIZE: 0} for phase, properties in PHASES.items()}
    assert calibrate(stack(size=256), **{GROUP_SIZE: 64})["generate"][GROUP_SIZE] == 64, "the user's own"
    assert calibrate(stack(size=256), device="NPU") == PHASES
    assert not timed[1]


@pytest.mark.parametrize(("precision", "runs", "size"), [("bf16", True, 0), ("bf16", False, None), ("f16", True, None)])
def test_small_models_stay_quantized_where_the_processor_cannot_run_them_otherwise(monkeypatch, precision, runs, size):
    monkeypatch.setattr(autotune.Probe, "can_run", lambda self, properties: runs)
    found = calibrated(
        get_core(), "CPU", stack(size=256), {p: {PRECISION: precision} for p in PHASES}, "shared"
    ).properties
    assert found["prefill"].get(GROUP_SIZE) == found["generate"].get(GROUP_SIZE) == size


IS_F32 = get_core().get_property("CPU", PRECISION).get_type_name() == "f32"


@pytest.mark.parametrize("layout", ["few_rows", "separate"])
def test_single_rows_are_not_quantized_unless_that_is_clearly_slower(layout, timed):
    plain = {"PERFORMANCE_HINT": "LATENCY", GROUP_SIZE: 0}
    found = calibrate(stack(), layout)
    assert found["few_rows"] == plain
    assert found["generate"][GROUP_SIZE] == LARGE_GROUP
    assert [rows for rows, _ in timed[1]] == [autotune.MANY_ROWS, 1, *([] if IS_F32 else [autotune.PACKED_ROWS])]
    timed[0][0] = 1.04
    assert calibrate(stack(), layout)["few_rows"] == plain, "within what a probe varies by"
    timed[0].update({0: 1.1, "f32": 0.99})
    assert calibrate(stack(), layout)["few_rows"] == plain, "f32 must be clearly faster"
    timed[0].update({0: 1.3, "f32": 1.3})
    assert calibrate(stack(), layout)["few_rows"] == found["generate"], "as weights in 4 bits are"
    if not IS_F32:
        timed[0].update({0: 1.3, "f32": 0.9})
        assert calibrate(stack(), layout)["few_rows"] == {**plain, PRECISION: "f32"}
        assert PRECISION not in calibrate(stack(), layout)["generate"]


def test_the_users_decoding_properties_apply_to_single_rows(timed):
    timed[0].update({0: 1.3, "f32": 0.5})
    asked = {GROUP_SIZE: 64}
    assert calibrate(stack(), "few_rows", **asked)["few_rows"] == {**PHASES["generate"], **asked}
    timed[0][0] = 1.0
    asked = {PRECISION: "bf16"}
    assert calibrate(stack(), "few_rows", **asked)["few_rows"] == {**PHASES["generate"], **asked, GROUP_SIZE: 0}
    assert "few_rows" not in calibrate(stack(), "shared")


WITH_AMX = {  # ms of calls of the 0.5B model on a processor with AMX; of 32 rows it is a guess
    (1, 0): 24.4, (1, LARGE_GROUP): 26.8, (1, "f32"): 21.3, (1, QUANTIZED): 20.4,
    (8, LARGE_GROUP): 57.6, (8, QUANTIZED): 35.1, (32, LARGE_GROUP): 52.0, (32, QUANTIZED): 50.0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "few_rows"),
    [
        ({}, 32),
        ({(32, QUANTIZED): 60.0}, 16),
        ({(8, QUANTIZED): 55.0}, 1),  # no clear gain for packed steps
        ({(1, QUANTIZED): 23.0}, 1),  # single rows would be slower
    ],
)
def test_calls_of_few_rows_run_in_f32_with_quantized_activations_where_that_is_faster(
    changes, few_rows, timed, monkeypatch
):
    monkeypatch.setattr(autotune.Probe, "is_f32", False)
    timed[0].update({**WITH_AMX, **changes})
    found = calibrated(get_core(), "CPU", stack(), PHASES, "few_rows")
    usual = {"PERFORMANCE_HINT": "LATENCY", GROUP_SIZE: LARGE_GROUP}
    assert found.few_rows == few_rows
    assert found.properties["prefill"] == usual
    expected = {**usual, PRECISION: "f32"} if few_rows > 1 else {**usual, GROUP_SIZE: 0}
    assert found.properties["few_rows"] == expected
    packed = timed[0][8, LARGE_GROUP] / timed[0][8, QUANTIZED] if few_rows > 1 else 0
    assert found.speedup == pytest.approx(max(26.8 / (timed[0][1, QUANTIZED] if few_rows > 1 else 24.4), packed))
    options = CompileOptions("CPU", "few_rows", "f32", found.properties, found.few_rows)
    apart = {rows for rows in (1, 8, 16, 32, 64) if options.program_group(Variant(rows, 256)).part}
    assert apart == {rows for rows in (1, 8, 16, 32, 64) if rows <= few_rows}


def test_prompts_with_properties_of_their_own_do_not_share_the_program_for_few_rows(timed, monkeypatch):
    monkeypatch.setattr(autotune.Probe, "is_f32", False)
    timed[0].update(WITH_AMX)
    phases = {**PHASES, "prefill": {"PERFORMANCE_HINT": "THROUGHPUT"}}
    assert calibrated(get_core(), "CPU", stack(), phases, "few_rows").few_rows == 1


@pytest.mark.parametrize(
    ("seconds", "layers", "size", "layout"),
    [
        (0.85, 1.0, 494 << 20, "few_rows"),  # saves 15 %, and 570 MB must save 9.5 %
        (0.95, 1.0, 494 << 20, "shared"),
        (0.85, 1.0, 900 << 20, "shared"),  # a copy of 1038 MB must save 17 %
        (0.95, 1.0, 100 << 20, "few_rows"),
        (1.3, 1.0, 1 << 20, "shared"),
        (1.3, 1.12, 494 << 20, "few_rows"),  # the same properties: the plugin prepares fewer nodes for each call
        (1.3, 1.08, 494 << 20, "shared"),
    ],
)
def test_single_rows_have_a_program_only_if_it_pays_for_its_copy(seconds, layers, size, layout, timed, monkeypatch):
    timed[0].update({0: seconds, "f32": 1.3})
    monkeypatch.setattr(decoder_kind, "layers_speedup", lambda *arguments: layers)
    monkeypatch.setattr(decoder_kind, "weights_size", lambda *arguments: size)
    monkeypatch.setattr(autotune, "LEAST_WEIGHTS", 0)
    monkeypatch.setattr(decoder_kind, "program_layout", lambda *arguments: "few_rows")
    model = demo_model_path()
    options = prepare(model, "CPU", StaticLLMConfig()).options
    assert options.layout == layout
    assert (options.program_group(Variant(1, 256)) == options.program_group(Variant(64, 256))) == (layout == "shared")
    asked = prepare(model, "CPU", StaticLLMConfig(programs="few_rows")).options
    assert asked.layout == "few_rows"
    assert "few_rows" in asked.properties


@pytest.mark.parametrize(("seconds", "layers", "is_apart"), [(0.85, 1.0, True), (1.3, 1.12, True), (1.3, 1.01, False)])
def test_single_rows_of_small_models_have_a_third_program_if_it_pays(seconds, layers, is_apart, timed, monkeypatch):
    probed = []

    def speedup(core, device, lowered, alone, programs, *more):
        probed.append({variant.phase for variant in programs[0].variants})
        return layers

    timed[0].update({0: seconds, "f32": 1.3})
    monkeypatch.setattr(decoder_kind, "layers_speedup", speedup)
    monkeypatch.setattr(decoder_kind, "weights_size", lambda *arguments: 100 << 20)
    monkeypatch.setattr(autotune, "LEAST_WEIGHTS", 0)
    options = prepare(demo_model_path(), "CPU", StaticLLMConfig()).options
    assert options.layout == "phases"
    assert (options.program_group(Variant(1, 256)) != options.program_group(Variant(8, 256, 8))) == is_apart
    assert options.program_group(Variant(8, 256, 8)) != options.program_group(Variant(64, 256))
    assert probed in ([], [{"generate"}])
    asked = prepare(demo_model_path(), "CPU", StaticLLMConfig(programs="phases")).options
    assert asked.program_group(Variant(1, 256)) == asked.program_group(Variant(8, 256, 8))


def recorded(many, single, packed, prompt=(1.0, 1.0)):
    """Return ms of probes as ``timed`` has them: of 128 rows, of one, of 8, and of 32 if they were timed."""
    return {
        (128, "own"): many[0], (128, LARGE_GROUP): many[1],
        **{(1, kind): ms for kind, ms in zip((0, LARGE_GROUP, "f32", QUANTIZED), single, strict=True)},
        (8, LARGE_GROUP): packed[0], (8, QUANTIZED): packed[1],
        (32, LARGE_GROUP): prompt[0], (32, QUANTIZED): prompt[1],
    }  # fmt: skip


ON_ZEN_4 = [  # probes of seven loads on an AMD EPYC (AVX-512, VNNI and bf16, no AMX) on 2026-11-28, and what whole calls say
    # Qwen2-0.5B-shaped, 8 bits: steps in a program of their own took 0.95 to 0.98 of those in one program
    (494, recorded((6.649, 5.135), (0.687, 0.744, 0.679, 0.724), (0.776, 0.692)), 1.145, "few_rows", 1),
    (494, recorded((6.697, 5.134), (0.659, 0.682, 0.629, 0.675), (0.892, 0.868)), 1.163, "few_rows", 1),
    (494, recorded((6.882, 5.441), (0.754, 0.780, 0.762, 0.737), (1.059, 0.968)), 1.177, "few_rows", 1),
    (494, recorded((6.197, 4.760), (0.596, 0.618, 0.593, 0.568), (0.660, 0.595)), 1.120, "few_rows", 1),
    (494, recorded((6.806, 5.165), (0.697, 0.708, 0.721, 0.704), (0.844, 0.714), (1.753, 1.789)), 1.0, "few_rows", 32),
    # Llama-1B-shaped, 4 bits
    (730, recorded((23.312, 17.628), (1.953, 1.335, 1.853, 1.263), (1.664, 1.640)), 1.069, "shared", 1),
    (730, recorded((23.517, 17.574), (1.880, 1.207, 1.761, 1.098), (1.610, 1.533)), 1.039, "shared", 1),
]


@pytest.mark.parametrize(("megabytes", "times", "layers", "layout", "few_rows"), ON_ZEN_4)
def test_what_is_chosen_with_times_that_were_measured_without_amx(
    megabytes, times, layers, layout, few_rows, timed, monkeypatch
):
    timed[0].update(times)
    monkeypatch.setattr(autotune.Probe, "is_f32", False)
    monkeypatch.setattr(decoder_kind, "layers_speedup", lambda *arguments: layers)
    monkeypatch.setattr(decoder_kind, "weights_size", lambda *arguments: megabytes << 20)
    monkeypatch.setattr(autotune, "LEAST_WEIGHTS", 0)
    monkeypatch.setattr(decoder_kind, "program_layout", lambda *arguments: "few_rows")
    options = prepare(demo_model_path(), "CPU", StaticLLMConfig()).options
    assert options.layout == layout
    assert options.properties["prefill"][GROUP_SIZE] == options.properties["generate"][GROUP_SIZE] == LARGE_GROUP
    if layout == "few_rows":
        assert options.few_rows == few_rows
        own = {GROUP_SIZE: 0} if few_rows == 1 else {GROUP_SIZE: LARGE_GROUP, PRECISION: "f32"}
        assert own.items() <= options.properties["few_rows"].items()


def test_tiny_models_have_no_third_program():
    options = prepare(demo_model_path(), "CPU", StaticLLMConfig()).options
    assert options.layout == "phases"
    assert "few_rows" not in options.properties


def test_one_program_serves_if_the_layers_cannot_be_timed(timed, monkeypatch):
    def refuse(*arguments):
        raise RuntimeError("the device refused it")

    timed[0].update({0: 1.3, "f32": 1.3})
    monkeypatch.setattr(decoder_kind, "layers_speedup", refuse)
    monkeypatch.setattr(autotune, "LEAST_WEIGHTS", 0)
    monkeypatch.setattr(decoder_kind, "program_layout", lambda *arguments: "few_rows")
    assert prepare(demo_model_path(), "CPU", StaticLLMConfig()).options.layout == "shared"


def test_every_candidate_is_run_and_the_model_stays_as_it_was():
    model = stack()
    before = len(model.get_ordered_ops())
    probe = autotune.Probe(get_core(), "CPU", autotune.repeated_matrices(model))
    for num_rows, is_cold in ((autotune.MANY_ROWS, False), (1, True)):
        times = probe.seconds(num_rows, [{}, {GROUP_SIZE: LARGE_GROUP}], is_cold)
        assert len(times) == 2
        assert all(0 < time < 10 for time in times)
    assert len(probe.requests) == 2
    assert len(model.get_ordered_ops()) == before


class Times:
    """Times of probes that an earlier process measured, and the questions that were asked."""

    def __init__(self, known=None):
        self.known, self.asked = known or {}, []

    def times(self, question, count):
        self.asked.append((question, count))
        return self.known.get(question)

    def add(self, question, seconds):
        self.known[question] = seconds


def test_kept_times_of_probes_choose_what_they_chose_before(monkeypatch):
    runs = []
    monkeypatch.setattr(autotune.Probe, "is_f32", True)
    fast_groups = lambda self, rows, candidates, is_cold: (runs.append(rows), [2.0, 1.0][: len(candidates)])[1]  # noqa: E731
    monkeypatch.setattr(autotune.Probe, "timed", fast_groups)
    kept = Times()
    first = calibrated(get_core(), "CPU", stack(), PHASES, "few_rows", kept)
    assert runs == [autotune.MANY_ROWS, 1]
    assert first.properties["prefill"][GROUP_SIZE] == LARGE_GROUP
    again = calibrated(get_core(), "CPU", stack(), PHASES, "few_rows", Times(kept.known))
    assert again == first
    assert (
        calibrated(get_core(), "CPU", stack(), PHASES, "shared", kept).properties["prefill"]
        == first.properties["prefill"]
    )
    assert runs == [autotune.MANY_ROWS, 1], "nothing was timed again"
    calibrated(get_core(), "CPU", stack(size=2048), PHASES, "shared", kept)
    assert runs == [autotune.MANY_ROWS, 1, autotune.MANY_ROWS], "another model"
    slow = Times({question: [1.0, 1.0] for question in kept.known})
    assert GROUP_SIZE not in calibrated(get_core(), "CPU", stack(), PHASES, "shared", slow).properties["prefill"]


@pytest.mark.skipif("ONEDNN_MAX_CPU_ISA" in os.environ, reason="the plugin has no such products under a limited ISA")
def test_a_model_that_is_calibrated_in_two_parts_is_timed_once(monkeypatch, tmp_path):
    runs = []
    timed = autotune.Probe.timed
    monkeypatch.setattr(autotune.Probe, "timed", lambda self, *args: (runs.append(args[0]), timed(self, *args))[1])
    memory = probes_in(tmp_path, get_core(), "CPU")
    calibrated(get_core(), "CPU", stack(), PHASES, "shared", memory)
    calibrated(get_core(), "CPU", stack(), PHASES, "few_rows", memory)
    assert runs.count(autotune.MANY_ROWS) == 1
    assert 1 in runs


class FakeRequest:
    """Computes one number for each candidate, and counts its runs."""

    def __init__(self, number):
        self.number, self.num_runs = number, 0

    def infer(self, feeds=None):
        self.num_runs += 1
        return {0: np.array([self.number])}


def test_settings_that_compute_the_same_numbers_are_timed_once(monkeypatch):
    """Without instructions for quantized activations, for example, all candidates run the same kernels."""
    probe = autotune.Probe(get_core(), "CPU", autotune.repeated_matrices(stack()))
    requests = {0: FakeRequest(1.0), 1: FakeRequest(2.0), 2: FakeRequest(1.0)}
    monkeypatch.setattr(probe, "request_of", lambda properties: requests[properties["number"]])
    numbers = [{"number": number} for number in requests]
    seconds = probe.seconds(autotune.MANY_ROWS, numbers)
    assert seconds[0] == seconds[2]
    assert requests[0].num_runs > autotune.LEAST_RUNS <= requests[1].num_runs
    assert requests[2].num_runs == 1
    num_runs = requests[0].num_runs
    assert probe.seconds(autotune.MANY_ROWS, [numbers[0], numbers[2]]) == [1.0, 1.0]
    assert requests[0].num_runs == num_runs + 1


SMALL = StaticLLMConfig(
    max_prompt_len=64, min_response_len=64, max_num_seqs=2, device_properties={"INFERENCE_PRECISION_HINT": "f32"}
)
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}


@pytest.fixture
def plan_of(model_path):
    return lambda name: prepare(model_path(name), "CPU", SMALL)


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


def test_both_programs_are_timed_and_the_times_are_kept(plan_of, monkeypatch, tmp_path):
    plan, kept, timed = plan_of("demo"), probes_in(tmp_path, get_core(), "CPU"), []
    monkeypatch.setattr(autotune, "LAYERS_SHARE", 0.7)
    monkeypatch.setattr(autotune, "seconds_in_turns", lambda requests: timed.append(len(requests)) or [3.0, 2.0])
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
    monkeypatch.setattr(autotune, "seconds_in_turns", lambda requests: pytest.fail("timed"))
    program = ProbedProgram(plan.variants, EXACT)
    assert layers_speedup(get_core(), "CPU", plan.lowered, step_of(plan), (program, program)) == 1.0
