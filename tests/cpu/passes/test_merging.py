"""Tests that merged projections compute what they computed separately, and that others are not merged."""

from __future__ import annotations

import math

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from staticllm import demo_model_path
from staticllm.compiler_passes import decoder
from staticllm.compiler_passes.graph.step_graph import StepGraph
from staticllm.compiler_passes.rewrites import merge_projections as merging
from staticllm.compiler_passes.rewrites.merge_projections import merge_projections
from staticllm.config import StaticLLMConfig
from staticllm.devices import get_core
from staticllm.pipelines.diagnostics.reference import EXACT
from staticllm.pipelines.loading.decoder_kind import prepare

pytestmark = pytest.mark.usefixtures("shared_programs")

SIZE, ROWS = 64, 3
KINDS = {"u8": ov.Type.u8, "i8": ov.Type.i8, "u4": ov.Type.u4, "i4": ov.Type.i4}


def integers(rng, kind, *shape):
    count = math.prod(shape) * KINDS[kind].bitwidth // 8
    data = rng.integers(0, 256, count).astype(np.uint8)
    if kind.endswith("4"):
        tensor = ov.Tensor(KINDS[kind], ov.Shape(shape))  # not made from an array, which it would not keep alive
        tensor.data.reshape(-1).view(np.uint8)[:] = data
        return ops.constant(tensor)
    return ops.constant(data.reshape(shape) if kind == "u8" else data.view(np.int8).reshape(shape))


def matrix(rng, rows, kind="u8", zero=None, scale="f16"):
    """Return weights ``[rows, SIZE]`` as nncf stores them: in 8 bits with a scale per row, or in 4 bits in groups of 16."""
    shape, scales = ((rows, SIZE), (rows, 1)) if kind.endswith("8") else ((rows, 4, 16), (rows, 4, 1))
    value = ops.convert(integers(rng, kind, *shape), scale)
    if kind.startswith("u"):
        value = ops.subtract(value, ops.convert(integers(rng, kind, *scales) if zero is None else zero, scale))
    value = ops.multiply(value, ops.convert(ops.constant(rng.random(scales).astype(np.float16) / 64), scale))
    return ops.reshape(value, np.array([rows, SIZE]), special_zero=False) if len(shape) == 3 else value


def layer(matrices, biases=(), transposed=True):
    """Return a model with one input and an output per matrix, with a bias if one is given."""
    value = ops.parameter([1, -1, SIZE], np.float32)
    results = []
    for index, weights in enumerate(matrices):
        is_f32 = weights.get_output_element_type(0) == ov.Type.f32
        product = ops.matmul(value, weights if is_f32 else ops.convert(weights, "f32"), False, transposed)
        if index < len(biases) and biases[index] is not None:
            bias = biases[index] if isinstance(biases[index], ov.Node) else ops.constant(biases[index])
            product = ops.add(product, bias)
        results.append(ops.result(product))
    return ov.Model(results, [value])


def answers(model):
    feed = np.random.default_rng(1).standard_normal((1, ROWS, SIZE)).astype(np.float32)
    return [np.array(value) for value in get_core().compile_model(model, "CPU", EXACT)([feed]).values()]


def count(model, kind="MatMul"):
    return sum(node.get_type_name() == kind for node in model.get_ordered_ops())


def merge(model):
    """Merge the projections of a model, and return its outputs before and after."""
    before = answers(model)
    merge_projections(graph := StepGraph(model))
    after = answers(model)
    for own, other in zip(before, after, strict=True):
        np.testing.assert_allclose(other, own, rtol=0, atol=1e-5 * np.ptp(own))
    assert len(graph.notes["merge_projections"]) == 1
    return graph.notes["merge_projections"][0]


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_of_every_type_are_merged(kind):
    rng = np.random.default_rng(0)
    model = layer([matrix(rng, rows, kind) for rows in (96, 32, 32)])
    assert merge(model) == "3 of 3 compressed matrices became 1"
    assert count(model) == 1
    assert count(model, "VariadicSplit") == 1


def test_biases_are_merged_if_all_matrices_have_one():
    rng = np.random.default_rng(0)
    bias = [rng.standard_normal(shape).astype(np.float32) for shape in ((1, 1, 96), (32,), (1, 32))]
    model = layer([matrix(rng, rows) for rows in (96, 32, 32)], [bias[0], bias[1], bias[1]])
    merge(model)
    assert count(model) == 1, "the matrices are merged whatever their biases are"
    assert count(model, "Add") == 3, "biases of different shapes are not merged"
    model = layer([matrix(rng, rows) for rows in (96, 32, 32)], [bias[0], *[bias[1].reshape(1, 1, 32)] * 2])
    merge(model)
    assert count(model) == 1
    assert count(model, "Add") == 1
    lifted = [ops.reshape(ops.constant(array.ravel()), np.array([1, 1, -1]), special_zero=False) for array in bias]
    model = layer([matrix(rng, rows) for rows in (96, 32, 32)], lifted)
    merge(model)
    assert count(model) == 1
    assert count(model, "Add") == 1
    model = layer([matrix(rng, rows) for rows in (96, 32, 32)], [bias[0], None, None])
    merge(model)
    assert count(model) == 1, "the matrices are merged if only one has a bias"
    assert count(model, "Add") == 1, "the bias of one matrix is kept"


def test_projections_with_different_zero_points_are_not_merged():
    rng = np.random.default_rng(0)
    seven, eight = (ops.constant(np.array([[value]], np.uint8)) for value in (7, 8))
    assert count_after([matrix(rng, 32, zero=seven), matrix(rng, 48, zero=seven)]) == 1
    assert count_after([matrix(rng, 32, zero=seven), matrix(rng, 48, zero=eight)]) == 2
    assert count_after([matrix(rng, 32, zero=seven), matrix(rng, 48)]) == 2


def count_after(matrices, **options):
    model = layer(matrices, **options)
    merge(model)
    return count(model)


def test_different_projections_are_not_merged(monkeypatch):
    rng = np.random.default_rng(0)
    assert count_after([matrix(rng, 32), matrix(rng, 32, "i8")]) == 2
    assert count_after([matrix(rng, 32), matrix(rng, 32, scale="f32")]) == 2
    assert count_after([matrix(rng, SIZE), matrix(rng, SIZE)], transposed=False) == 2
    plain = [ops.constant(rng.random((32, SIZE)).astype(np.float32)) for _ in range(2)]
    assert count_after(plain) == 2, "weights that are not compressed"
    monkeypatch.setattr(merging, "SMALL_BYTES", 32 * SIZE - 1)
    assert count_after([matrix(rng, 32), matrix(rng, 32)]) == 2, "too large to be worth a copy"
    monkeypatch.setattr(merging, "SMALL_BYTES", 32 * SIZE)
    assert count_after([matrix(rng, 32), matrix(rng, 32)]) == 1


def test_a_product_with_two_consumers_keeps_both():
    rng = np.random.default_rng(0)
    value = ops.parameter([1, -1, SIZE], np.float32)
    first, second = (ops.matmul(value, ops.convert(matrix(rng, 32), "f32"), False, True) for _ in range(2))
    both = ops.add(first, second)  # no bias
    model = ov.Model([ops.result(both), ops.result(ops.relu(first))], [value])
    merge(model)
    assert count(model) == 1
    assert count(model, "Add") == 1


def test_small_projections_of_the_embedded_model_are_merged(monkeypatch):
    def note_of():
        plan = prepare(demo_model_path(), "CPU", StaticLLMConfig(programs="shared"))
        notes = [report.notes for report in plan.lowered.reports if report.name == "merge_projections"]
        return notes[0][0] if notes else ""

    note = note_of()
    merged, _, after = (int(word) for word in note.split() if word.isdigit())
    assert 0 < after < merged
    monkeypatch.setattr(decoder, "merges_projections", lambda device: False)
    assert note_of() == ""
