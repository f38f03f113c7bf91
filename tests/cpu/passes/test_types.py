"""Tests types of weights and KV slots: compressed weights equal the compressed original, and small slots stay close."""

import shutil

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from staticllm import StaticLLMPipeline
from staticllm.pipelines.diagnostics.decoder_diagnosis import DecoderDiagnosis
from tests.support.inside import launched_of

pytestmark = pytest.mark.usefixtures("shared_programs")

DISTANCE = {"f32": 1e-5, "f16": 1e-3, "bf16": 1e-2, "u8": 2e-2}
"""The largest difference, as a share of the range of the logits, over 96 given tokens."""
PROMPTS = ("Tell me a story about a fox", "What is an NPU?", "Count from 3 to 8")


def compress(model, bits):
    """Compress the weights as nncf does: in 8 bits with a zero point per output, or in 4 bits with one per group of 16."""
    changed = 0
    for node in model.get_ordered_ops():
        weights = node.input_value(1) if node.get_type_name() == "MatMul" else None
        source = weights.get_node() if weights is not None else None
        if source is None or source.get_type_name() != "Convert":
            continue
        constant = source.input_value(0).get_node()
        if constant.get_type_name() != "Constant" or constant.data.ndim != 2:
            continue
        node.input(1).replace_source_output(decompressed(constant.data.astype(np.float32), bits).output(0))
        changed += 1
    return changed


def decompressed(values, bits):
    shape = values.shape
    if bits == 4:
        values = values.reshape(shape[0], -1, 16)
    low, high = values.min(-1, keepdims=True), values.max(-1, keepdims=True)
    scale = np.maximum((high - low) / (2**bits - 1), 1e-6).astype(np.float16)
    zero = np.clip(np.rint(-low / scale), 0, 2**bits - 1)
    codes = np.clip(np.rint(values / scale) + zero, 0, 2**bits - 1).astype(np.uint8)
    kind = ov.Type.u8 if bits == 8 else ov.Type.u4
    parts = [ops.convert(packed(array.astype(np.uint8), kind), "f16") for array in (codes, zero)]
    restored = ops.multiply(ops.subtract(*parts), ops.constant(scale))
    if bits == 4:
        restored = ops.reshape(restored, np.array(shape), special_zero=False)
    return ops.convert(restored, "f32")


def packed(array, kind):
    if kind == ov.Type.u8:
        return ops.constant(array)
    flat = array.ravel()
    flat = np.append(flat, np.zeros(flat.size % 2, np.uint8))
    tensor = ov.Tensor(kind, ov.Shape(array.shape))  # not made from an array, which it would not keep alive
    tensor.data.reshape(-1)[:] = flat[0::2] | (flat[1::2] << 4)
    return ops.constant(tensor)


SLOW = pytest.mark.slow


@pytest.mark.parametrize("bits", [8, pytest.param(4, marks=SLOW)])
@pytest.mark.parametrize("name", ["llama", *(pytest.param(name, marks=SLOW) for name in ("gpt2", "lfm2"))])
def test_compressed_weights_compute_what_the_compressed_original_computes(name, bits, zoo, tmp_path, in_full):
    model = ov.Core().read_model(zoo / name / "openvino_model.xml")
    assert compress(model, bits) > 4
    ov.save_model(model, tmp_path / "openvino_model.xml", compress_to_fp16=False)
    shutil.copy(zoo / name / "config.json", tmp_path)
    modes = ("separate", "shared") if in_full and name == "llama" else ("shared",) if bits == 8 else ("separate",)
    diagnosis = DecoderDiagnosis(chunks=(16,))
    verdicts = list(diagnosis.verdicts(diagnosis.job(tmp_path, "CPU", {}), modes))
    num_checks = 4 if name == "lfm2" else 6  # recurrent states: no drafts, and no second sequence
    assert len(verdicts) == num_checks * len(modes), verdicts
    assert all(verdict.is_ok for verdict in verdicts), verdicts


@pytest.mark.parametrize("mode", ["shared", pytest.param("separate", marks=SLOW)])
@pytest.mark.parametrize("kv_type", [*(pytest.param(name, marks=SLOW) for name in ("f32", "f16")), "bf16", "u8"])
def test_slots_of_every_type_stay_close_and_keep_the_tokens(kv_type, mode, model_path, original):
    path = model_path("demo")
    text = np.random.default_rng(3).integers(8, 1000, 96).tolist()
    reference = original(path)
    expected = reference.logits(text)
    with StaticLLMPipeline(
        path, PROGRAMS=mode, INFERENCE_PRECISION_HINT="f32", KV_CACHE_PRECISION=kv_type, MAX_PROMPT_LEN=128
    ) as pipe:
        runner = pipe.engine.runner
        sequence = runner.cache.open()
        found = [runner.prefill(sequence, text[:32]).copy()] + [runner.decode(sequence, t).copy() for t in text[32:]]
        assert np.isfinite(found).all()
        assert np.abs(np.stack(found) - expected[31:]).max() <= DISTANCE[kv_type] * np.ptp(expected)
        runner.cache.close(sequence)
        tokenizer = pipe.get_tokenizer()
        for prompt in PROMPTS:
            ids = tokenizer.encode(prompt).input_ids.data[0].tolist()
            result = pipe.generate(np.array([ids]), max_new_tokens=32, ignore_eos=True)
            assert list(result.tokens[0]) == reference.greedy(ids, 32)


def test_u8_slots_take_a_quarter_of_the_memory(model_path):
    properties = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "u8", "MAX_PROMPT_LEN": 128}
    with StaticLLMPipeline(model_path("demo"), PROGRAMS="shared", **properties) as pipe:
        shape, arena = launched_of(pipe).loaded.programs.shape, pipe.engine.runner.cache.arena
        heads, head_dim = shape.kv_states[0].heads, shape.kv_states[0].head_dim
        num_states = sum(not state.is_scale for state in shape.kv_states)
        assert arena.num_bytes == num_states * heads * (head_dim + 2 * 4) * arena.num_slots
