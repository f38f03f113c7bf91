"""Programs for NPUs hold in f16: masks, norms and logits, with massive activations too. A CPU without f16 emulates it."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops
from support.command_line import in_here
from support.models.lora_files import linear_layers

from staticllm.compiler_passes.compiling.dry_run import random_feeds
from staticllm.config import StaticLLMConfig
from staticllm.core import Variant
from staticllm.devices import check_known, get_core
from staticllm.errors import ConfigError, UnsupportedModelError
from staticllm.pipelines.diagnostics import divergence, half_divergence
from staticllm.pipelines.diagnostics.half_divergence import has_f16, measure_f16
from staticllm.pipelines.diagnostics.half_precision import Extremes, RoundedModel, RoundToF16, round_to_f16
from staticllm.pipelines.diagnostics.reference import EXACT, exact_for
from staticllm.pipelines.loading.decoder_kind import job_of

FOLDER = Path(os.environ.get("STATICLLM_ZOO", Path(__file__).resolve().parents[4] / "shared" / "zoo"))
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/openvino_model.xml")) or ["none"]
MOST = 1e-6
"""Largest mean divergence of the tiny models, in nats per token; f16 has 11 bits, bf16 gives 1e-4."""
SMALL = StaticLLMConfig(max_prompt_len=64, min_response_len=64, max_num_seqs=1)
HIDDEN = -65504.0


@pytest.fixture(autouse=True)
def _short_texts(monkeypatch):
    monkeypatch.setattr(divergence, "TEXTS", 2)
    monkeypatch.setattr(divergence, "TEXT_LEN", 20)


def npu_job(path):
    try:
        job = job_of(path, "NPU", SMALL, check=check_known)
        job.kind.plan(job)
    except UnsupportedModelError:
        pytest.skip("a pass refuses this model")
    return job


def test_a_number_is_rounded_as_f16_is():
    numbers = np.concatenate([np.random.default_rng(0).standard_normal(500) * 10.0**k for k in range(-8, 6)])
    numbers = np.concatenate([numbers, [0.0, 65504, 65519, 65520, 6e-8, 2.9e-8, -7e4]]).astype(np.float32)
    x = ops.parameter([len(numbers)], ov.Type.f32)
    program = get_core().compile_model(
        ov.Model([ops.result(RoundToF16([x.output(0)]).output(0))], [x]).clone(), "CPU", EXACT
    )
    with np.errstate(over="ignore"):
        expected = numbers.astype(np.float16).astype(np.float32)
    assert np.array_equal(program(numbers)[0], expected)


def squares_of(values, has_whole_norms, square=lambda x: ops.power(x, ops.constant(np.float32(2)))):
    """Return what RMSNorm makes of the rows of an embedding, in f16."""
    ids = ops.parameter([1, len(values)], ov.Type.i64)
    ids.output(0).set_names({"input_ids"})
    x = ops.gather(ops.constant(values), ids, ops.constant(0))
    mean = ops.reduce_mean(square(x), np.array([-1]), True)
    scale = ops.divide(ops.constant(np.float32(1)), ops.sqrt(ops.add(mean, ops.constant(np.float32(1e-6)))))
    result = ops.result(ops.multiply(x, scale))
    model = ov.Model([result], [ids])
    extremes = Extremes()
    assert round_to_f16(model, extremes, has_whole_norms) >= 2
    program = get_core().compile_model(model, "CPU", EXACT)
    return np.array(program(np.arange(len(values))[None])[0][0]), extremes


def test_squares_overflow_unless_a_norm_is_one_operation():
    values = np.array([[1, 2, 3, 4], [1, 300, -2, 5000], [0, 0, 0, 0]], np.float32)
    expected = values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-6)
    whole, seen = squares_of(values, True)
    assert np.abs(whole - expected).max() <= 1e-3
    assert (seen.largest, seen.overflows) == (5000, 0)
    by_product, seen = squares_of(values, True, lambda x: ops.multiply(x, x))
    assert np.array_equal(by_product, whole)
    assert seen.overflows == 0
    steps, seen = squares_of(values, False)
    assert np.abs(steps[0] - expected[0]).max() <= 2e-3
    assert not np.abs(steps[1]).any(), "the mean of its squares is infinite"
    assert seen.overflows >= 2, "two squares"


@pytest.mark.parametrize("name", NAMES)
def test_f16_is_close_to_the_original_in_f32(name, zoo):
    whole, in_steps = measure_f16(npu_job(zoo / name))
    for found in (whole, in_steps):
        assert found.not_finite == 0
        assert found.extremes.overflows == 0, found.extremes
        assert 0 < found.divergence.mean <= MOST, "it is not f32"
    assert whole.is_ok
    assert whole.decides
    assert not in_steps.decides


@pytest.mark.parametrize("name", NAMES)
def test_no_row_that_sees_nothing_is_no_number(name, zoo):
    """An idle row, all of whose cells are hidden, is finite; so are the rows beside it."""
    job = npu_job(zoo / name)
    lowered = RoundedModel.of(job.kind.plan(job).lowered)
    variant = Variant(16, 64)
    program = get_core().compile_model(lowered.specialise(variant), "CPU", {**exact_for("CPU")})
    feeds = random_feeds(program, variant)
    for port, value in feeds.items():
        if port.startswith("mask."):
            value[:, :, 8:] = HIDDEN
    results = program({port: feeds[min(port.get_names() & feeds.keys())] for port in program.inputs})
    assert all(np.isfinite(np.asarray(value, np.float32)).all() for value in results.values())


def massive(path, folder, factor):
    """Copy a model, and let the second layer add numbers of several thousand to the hidden state."""
    shutil.copytree(path, folder)
    model = ov.Core().read_model(path / "openvino_model.xml")
    (node,) = [each for name, each in linear_layers(model).items() if name.endswith("layers.1.mlp.down_proj")]
    scaled = ops.multiply(node.input_value(1), ops.constant(np.float32(factor)))
    node.input(1).replace_source_output(scaled.output(0))
    ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    return folder


def test_massive_activations_survive(zoo, tmp_path):
    whole, in_steps = measure_f16(npu_job(massive(zoo / "llama", tmp_path / "massive", 8e3)))
    assert 2000 <= whole.extremes.largest <= 65504
    assert whole.extremes.overflows == 0
    assert whole.divergence.mean <= MOST
    assert in_steps.extremes.overflows > 0
    assert in_steps.divergence.mean > 100 * whole.divergence.mean, "what a norm in steps loses"
    assert not in_steps.is_good
    assert in_steps.is_ok, "NPUs compute norms whole"


def test_a_model_that_f16_cannot_hold_is_told(zoo, tmp_path):
    whole, _ = measure_f16(npu_job(massive(zoo / "llama", tmp_path / "massive", 1e6)))
    assert whole.extremes.overflows > 0
    assert whole.extremes.largest > 65504
    assert "layers.1" in whole.extremes.first
    assert not whole.is_ok
    assert "FAIL f16" in whole.line()
    assert "beyond f16" in whole.line()


def test_a_device_with_f16_is_not_emulated(zoo, monkeypatch):
    asked = []
    monkeypatch.setattr(half_divergence, "has_f16", lambda device: True)
    original = half_divergence._compiled

    def compiled(plan, device, properties):
        asked.append((device, dict(properties)))
        return original(plan, device, properties)

    monkeypatch.setattr(half_divergence, "_compiled", compiled)
    (found,) = measure_f16(job_of(zoo / "llama", "CPU", SMALL))
    assert asked == [("CPU", {"INFERENCE_PRECISION_HINT": "f16"})]
    assert found.how == "on CPU"
    assert found.extremes is None


def test_the_processor_is_asked_whether_it_has_f16():
    has_it = "FP16" in get_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    assert has_f16("CPU") == has_it
    assert not has_f16("NPU.7")


def test_an_encoder_is_refused():
    job = job_of(FOLDER / "llama", "NPU", SMALL, check=check_known)
    other = replace(job, kind=type("Encoder", (), {"name": "encoder"})())
    with pytest.raises(ConfigError, match="--precision f16 compares the next tokens of a decoder"):
        next(measure_f16(other))


def test_the_command_prints_the_divergence(zoo):
    found = in_here("verify", zoo / "llama", "--precision", "f16", "--device", "NPU", "--json")
    answer = json.loads(found.stdout)
    assert answer["ok"] is True
    first, second = answer["checks"]
    assert (first["check"], second["check"]) == ("f16", "f16, norms in steps")
    assert 0 < first["mean"] <= MOST
    assert first["tokens"] == divergence.TEXTS * divergence.TEXT_LEN
