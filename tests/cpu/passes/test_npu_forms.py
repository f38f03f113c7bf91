"""Tests the passes for NPUs one by one: the same values in another form, and what they leave alone."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops
from support.models.compressed_weights import compressed, integers

from staticllm.compiler_passes.decoder import DECODER_NPU
from staticllm.compiler_passes.graph.step_graph import StepGraph
from staticllm.compiler_passes.lower import lower
from staticllm.compiler_passes.pass_pipeline import LoweringOptions
from staticllm.compiler_passes.rewrites.cut_heads import cut_heads
from staticllm.compiler_passes.rewrites.gate_last import gate_last
from staticllm.compiler_passes.rewrites.halve_weights import halve_weights
from staticllm.compiler_passes.rewrites.join_weights import join_weights
from staticllm.compiler_passes.rewrites.lead_groups import lead_groups
from staticllm.compiler_passes.rewrites.merge_grouped import merge_grouped
from staticllm.compiler_passes.rewrites.merge_joined import merge_joined
from staticllm.compiler_passes.rewrites.narrow_scales import narrow_scales
from staticllm.compiler_passes.rewrites.shift_zero_points import shift_zero_points
from staticllm.compiler_passes.rewrites.sign_sine import sign_sine
from staticllm.compiler_passes.rewrites.write_by_select import write_by_select
from staticllm.core import Variant
from staticllm.pipelines.diagnostics.reference import EXACT

SIZE, ROWS = 64, 3
core = ov.Core()


def run(model, seed=1):
    rng = np.random.default_rng(seed)
    feeds = [
        rng.standard_normal(list(port.get_partial_shape().get_max_shape())).astype(np.float32) for port in model.inputs
    ]
    return [np.array(value) for value in core.compile_model(model, "CPU", EXACT)(feeds).values()]


def same(model, before, tolerance=1e-5):
    for own, other in zip(run(model), before, strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=tolerance * max(1.0, np.ptp(other)))


def kinds(model):
    return [node.get_type_name() for node in model.get_ordered_ops()]


def types(model):
    return {
        node.get_element_type().get_type_name()
        for node in model.get_ordered_ops()
        if node.get_type_name() == "Constant"
    }


def projections(matrices, end=lambda products: products):
    """Return a model of products of one input with these weights, and what ``end`` makes of the products."""
    value = ops.parameter([1, ROWS, SIZE], np.float32)
    products = [ops.matmul(value, weights, False, True) for weights in matrices]
    return ov.Model([ops.result(output) for output in end(products)], [value])


def random(rows, size=SIZE, seed=0):
    return np.random.default_rng(seed).standard_normal((rows, size)).astype(np.float32)


@pytest.mark.parametrize("kind,group,size", [
    ("u8", 0, 64), ("u8", 0, 63), ("u8", 0, 6), ("u4", 0, 64), ("u4", 0, 62), ("u4", 16, 64), ("u8", 16, 64), ("i8", 0, 64),
])  # fmt: skip
def test_zero_points_are_shifted_exactly(kind, group, size):
    """Small whole numbers as inputs and scales of powers of two make every sum exact in f32, so the results must be equal."""
    rng = np.random.default_rng(2)
    shape = (24, size // group, group) if group else (24, size)
    bits = int(kind[1])
    lowest = 0 if kind.startswith("u") else -(1 << bits - 1)
    levels = rng.integers(lowest, lowest + (1 << bits), shape)
    zero = rng.integers(lowest, lowest + (1 << bits), (*shape[:-1], 1))
    zero.reshape(-1)[:2] = (lowest, lowest + (1 << bits) - 1)
    scale = (2.0 ** rng.integers(-3, 3, zero.shape)).astype(np.float16)
    weights = ops.multiply(
        ops.subtract(ops.convert(integers(levels, kind), "f16"), ops.convert(integers(zero, kind), "f16")),
        ops.constant(scale),
    )
    weights = ops.reshape(weights, np.array([24, size]), special_zero=False) if group else weights
    value = ops.parameter([1, -1, size], np.float32)
    model = ov.Model([ops.result(ops.matmul(value, ops.convert(weights, "f32"), False, True))], [value])
    shift_zero_points(graph := StepGraph(model))
    assert graph.notes["shift_zero_points"] == ["1 of 1 compressed matrices lost their zero points"]
    assert types(model).isdisjoint({"u8", "u4"})
    x = rng.integers(-3, 4, (1, ROWS, size)).astype(np.float32)
    wanted = x @ ((levels - zero) * scale.astype(np.float64)).reshape(24, size).T
    assert np.array_equal(core.compile_model(model, "CPU", EXACT)([x])[0], wanted)


def blocks(kind, rng, rows=40, group=16):
    """Return weights in groups with any scale and zero point, in f32, as blocks of GGUF files have them, and their numbers."""
    shape = (rows, SIZE // group, group)
    levels = rng.integers(0, 1 << int(kind[1]), shape)
    scale = rng.uniform(0.5, 2, (*shape[:-1], 1)).astype(np.float32)
    zero = rng.uniform(-3, 20, scale.shape).astype(np.float32)
    value = ops.subtract(ops.convert(integers(levels, kind), "f32"), ops.constant(zero))
    numbers = ((levels - zero) * scale).reshape(rows, SIZE)
    return ops.reshape(ops.multiply(value, ops.constant(scale)), np.array([rows, SIZE]), special_zero=False), numbers


@pytest.mark.parametrize("kind", ["u4", "u8"])
def test_fractions_of_groups_are_shifted_and_scales_narrowed(kind):
    weights, numbers = blocks(kind, rng := np.random.default_rng(3))
    model = projections([weights])
    shift_zero_points(graph := StepGraph(model))
    narrow_scales(graph)
    assert graph.notes["shift_zero_points"] == ["1 of 1 compressed matrices lost their zero points"]
    assert graph.notes["narrow_scales"] == ["1 of 1 matrices with scales in f32 have them in f16"]
    assert types(model).isdisjoint({"u4", "u8", "f32"})
    x = rng.standard_normal((1, ROWS, SIZE)).astype(np.float32)
    wanted = x @ numbers.T
    found = core.compile_model(model, "CPU", EXACT)([x])[0]
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2**-10 * (np.abs(x) @ np.abs(numbers).T).max())


def test_fractions_of_weights_that_an_embedding_shares():
    weights, numbers = blocks("u4", np.random.default_rng(3))
    ids = ops.parameter([1, ROWS], np.int64)
    embedding = ops.gather(weights, ids, ops.constant(0))
    model = ov.Model([ops.result(ops.matmul(embedding, weights, False, True)), ops.result(embedding)], [ids])
    shift_zero_points(graph := StepGraph(model))
    assert graph.notes["shift_zero_points"] == ["1 of 1 compressed matrices lost their zero points"]
    logits, vectors = core.compile_model(model, "CPU", EXACT)([np.array([[3, 39, 0]])]).values()
    np.testing.assert_allclose(vectors[0], numbers[[3, 39, 0]], rtol=0, atol=1e-5 * np.abs(numbers).max())
    np.testing.assert_allclose(logits[0], numbers[[3, 39, 0]] @ numbers.T, rtol=0, atol=1e-3 * np.abs(logits).max())


def test_scales_that_f16_cannot_hold_stay():
    scale = ops.constant(np.full((8, 1), 1e5, np.float32))
    model = projections([ops.multiply(ops.convert(ops.constant(np.full((8, SIZE), 3, np.int8)), "f32"), scale)])
    narrow_scales(graph := StepGraph(model))
    assert graph.notes["narrow_scales"] == ["0 of 1 matrices with scales in f32 have them in f16"]


def test_an_odd_row_of_4_bits_and_fractions_are_left_alone():
    half = ops.subtract(
        ops.convert(ops.constant(np.full((8, SIZE), 3, np.uint8)), "f32"), ops.constant(np.float32(1.5))
    )
    model = projections([ops.multiply(half, ops.constant(np.ones((8, 1), np.float32)))])
    before = run(model)
    shift_zero_points(graph := StepGraph(model))
    assert "left alone: its zero points are no integers" in graph.notes["shift_zero_points"][0]
    same(model, before)
    levels = np.random.default_rng(2).integers(0, 16, (8, SIZE - 1))
    odd = ops.subtract(ops.convert(integers(levels, "u4"), "f32"), ops.constant(np.full((8, 1), 5, np.float32)))
    value = ops.parameter([1, ROWS, SIZE - 1], np.float32)
    product = ops.matmul(value, ops.multiply(odd, ops.constant(np.ones((8, 1), np.float32))), False, True)
    model = ov.Model([ops.result(product)], [value])
    before = run(model)
    shift_zero_points(graph := StepGraph(model))
    assert "left alone: a row is no whole number of bytes" in graph.notes["shift_zero_points"][0]
    same(model, before)


def test_weights_that_an_embedding_shares_are_stored_once():
    """A tied head: its weights become signed, and the embedding reads the same constant with other zero points."""
    table = compressed(random(40), "u8")
    ids = ops.parameter([1, ROWS], np.int64)
    embedding = ops.gather(table, ids, ops.constant(0))
    model = ov.Model([ops.result(ops.matmul(embedding, table, False, True)), ops.result(embedding)], [ids])
    feed = [np.array([[3, 39, 0]])]
    before = [np.array(value) for value in core.compile_model(model, "CPU", EXACT)(feed).values()]
    shift_zero_points(StepGraph(model))
    after = [np.array(value) for value in core.compile_model(model, "CPU", EXACT)(feed).values()]
    for own, other in zip(after, before, strict=True):
        np.testing.assert_allclose(own, other, rtol=0, atol=1e-4 * np.ptp(other))
    large = [
        node
        for node in model.get_ordered_ops()
        if node.get_type_name() == "Constant" and node.get_byte_size() >= 40 * SIZE
    ]
    assert len(large) == 1


def test_groups_come_first_and_keep_their_values():
    model = projections([compressed(random(48), "i4", 16)])
    before = run(model)
    lead_groups(graph := StepGraph(model))
    assert graph.notes["lead_groups"] == ["1 of 1 matrices in groups have their groups first"]
    same(model, before)
    shapes = [list(node.get_output_shape(0)) for node in model.get_ordered_ops() if node.get_type_name() == "Constant"]
    assert [4, 48, 16] in shapes


def gated(products):
    gate, up, *others = products
    return [ops.multiply(ops.swish(gate), up), *others]


def test_the_factors_of_one_product_are_not_merged_for_all_programs():
    weights = [compressed(random(48, seed=seed), "i4", 16, seed=seed) for seed in range(2)]
    model = projections(weights, gated)
    merge_grouped(graph := StepGraph(model))
    assert graph.notes["merge_grouped"] == ["0 of 1 groups of projections are one matrix in all programs"]
    model = projections(weights)
    before = run(model)
    merge_grouped(StepGraph(model))
    assert kinds(model).count("MatMul") == 1
    same(model, before)


def test_factors_behind_a_bias_are_not_merged_either():
    def biased(products):
        gate, up = (ops.add(each, ops.constant(random(1, 48)[None])) for each in products)
        return [ops.multiply(ops.swish(gate), up)]

    model = projections([compressed(random(48, seed=seed), "i4", 16, seed=seed) for seed in range(2)], biased)
    merge_grouped(StepGraph(model))
    assert kinds(model).count("MatMul") == 2


def test_groups_that_an_embedding_reads_too_or_with_zero_points_stay_where_they_are():
    """The embedding picks rows, and would need a second copy of them."""
    table = compressed(random(40), "i4", 16)
    ids = ops.parameter([1, ROWS], np.int64)
    shared = ov.Model([ops.result(ops.matmul(ops.gather(table, ids, ops.constant(0)), table, False, True))], [ids])
    for model in (shared, projections([compressed(random(48), "u4", 16)])):
        lead_groups(graph := StepGraph(model))
        assert graph.notes["lead_groups"] == ["0 of 1 matrices in groups have their groups first"]


def test_gates_are_multiplied_last():
    model = projections([ops.constant(random(48, seed=seed)) for seed in range(2)], gated)
    before = run(model)
    gate_last(graph := StepGraph(model))
    assert graph.notes["gate_last"] == ["1 products have their gate last"]
    product = next(node for node in model.get_ordered_ops() if node.get_type_name() == "Multiply")
    assert product.input_value(1).get_node().get_type_name() == "Swish"
    for own, other in zip(run(model), before, strict=True):
        assert np.array_equal(own, other)


@pytest.mark.parametrize(
    "product",
    [
        lambda gate, up: ops.multiply(ops.swish(gate), ops.swish(up)),
        lambda gate, up: ops.multiply(ops.swish(gate), ops.constant(random(1, 48)[None])),
        lambda gate, up: ops.multiply(ops.swish(gate), ops.reduce_max(up, np.array([1]), True)),
        lambda gate, up: ops.multiply(up, ops.swish(gate)),
    ],
    ids=["two activations", "a constant", "another shape", "last already"],
)
def test_other_products_keep_their_order(product):
    weights = [ops.constant(random(48, seed=seed)) for seed in range(2)]
    model = projections(weights, lambda products: [product(*products)])
    gate_last(graph := StepGraph(model))
    assert graph.notes["gate_last"] == ["0 products have their gate last"]


@pytest.mark.parametrize("kind", ["u8", "i8", "i4", "plain"])
def test_joined_projections_are_merged_without_a_copy(kind):
    def weights(seed):
        return (
            ops.constant(random(48, seed=seed))
            if kind == "plain"
            else compressed(random(48, seed=seed), kind, seed=seed)
        )

    model = projections([weights(seed) for seed in range(3)])
    before = run(model)
    join_weights(graph := StepGraph(model))
    assert kinds(model).count("MatMul") == 3
    same(model, before)
    merged = model.clone()
    assert merge_joined(graph, merged) == 1
    assert kinds(merged).count("MatMul") == 1
    same(merged, before)
    starts = {node.data.ctypes.data for node in model.get_ops() if node.get_type_name() == "Constant"}
    large = [node for node in merged.get_ops() if node.get_type_name() == "Constant" and node.get_byte_size() > 256]
    assert large
    assert all(node.data.ctypes.data in starts for node in large)


def test_projections_that_are_not_joined_are_not_merged():
    model = projections([compressed(random(48, seed=seed), "i8", seed=seed) for seed in range(2)])
    assert merge_joined(StepGraph(model), model) == 0
    assert kinds(model).count("MatMul") == 2


def test_a_part_of_joined_projections_is_not_merged():
    """A program may need only two of three projections; the block has the weights of all."""
    model = projections([compressed(random(48, seed=seed), "i8", seed=seed) for seed in range(3)])
    join_weights(graph := StepGraph(model))
    for chosen in (model.get_results()[:2], model.get_results()[1:]):
        two = ov.Model(chosen, model.get_parameters()).clone()
        before = run(two)
        assert merge_joined(graph, two) == 0
        same(two, before)


def rotary(axis=-1, factor=-1):
    """Return ``x * cos + concat(factor * b, a) * sin`` with positions as an input."""
    ids = ops.parameter([1, ROWS], np.int64, name="input_ids")
    ids.output(0).set_names({"input_ids"})
    places = ops.parameter([1, 1, ROWS, 1], np.float32, name="position_ids")
    places.output(0).set_names({"position_ids"})
    x = ops.reshape(ops.gather(ops.constant(random(40)), ids, ops.constant(0)), np.array([1, 1, ROWS, SIZE]), False)
    first, second = ops.split(x, axis, 2).outputs()
    angles = ops.multiply(places, ops.constant(random(1).reshape(1, 1, 1, SIZE)))
    turned = ops.concat([ops.multiply(second, ops.constant(np.float32(factor))), first], axis)
    return ov.Model(
        [ops.result(ops.add(ops.multiply(x, ops.cos(angles)), ops.multiply(turned, ops.sin(angles))))], [ids, places]
    )


def test_signs_move_into_the_sines():
    feeds = [np.array([[1, 5, 39]]), np.array([3.0, 4.0, 70.0], np.float32).reshape(1, 1, ROWS, 1)]
    for factor, found in ((-1, 1), (-2, 0)):
        model = rotary(factor=factor)
        before = core.compile_model(model, "CPU", EXACT)(feeds)[0].copy()
        assert sign_sine(StepGraph(model), model) == found
        assert np.array_equal(core.compile_model(model, "CPU", EXACT)(feeds)[0], before)


def test_signs_stay_where_another_node_reads_the_halves_or_the_factor_is_data():
    feeds = [np.array([[1, 5, 39]]), np.array([3.0, 4.0, 70.0], np.float32).reshape(1, 1, ROWS, 1)]
    for change in ("another reader", "data"):
        model = rotary()
        concat = next(node for node in model.get_ordered_ops() if node.get_type_name() == "Concat")
        (product,) = (target.get_node() for target in concat.output(0).get_target_inputs())
        port = 0 if product.input_value(1).get_node().get_type_name() == "Concat" else 1
        if change == "data":
            product.input(port).replace_source_output(
                ops.tanh(concat.input_value(1).get_node().input_value(0)).output(0)
            )
        else:
            model.add_results([ops.result(ops.multiply(concat, product.input_value(port)))])
            model.add_results([ops.result(concat)])
        before = [np.array(value) for value in core.compile_model(model, "CPU", EXACT)(feeds).values()]
        assert sign_sine(StepGraph(model), model) == 0, change
        after = [np.array(value) for value in core.compile_model(model, "CPU", EXACT)(feeds).values()]
        assert all(map(np.array_equal, after, before))


def test_f32_matrices_and_tables_of_tokens_become_f16_if_it_can_hold_them():
    ids = ops.parameter([1, ROWS], np.int64, name="input_ids")
    ids.output(0).set_names({"input_ids"})
    numbers = [random(40, seed=seed) for seed in range(4)]
    numbers[2][3, 5] = 70000
    numbers[3] = numbers[3][: 8 * ROWS].reshape(8, ROWS, SIZE)
    table, matrix, large, added = (ops.constant(each) for each in numbers)
    for name, node in (("table", table), ("matrix", matrix), ("large", large), ("added", added)):
        node.set_friendly_name(name)
    hidden = ops.gather(table, ids, ops.constant(0))
    results = [
        ops.result(ops.matmul(hidden, matrix, False, True)),
        ops.result(ops.matmul(hidden, large, False, True)),
        ops.result(ops.add(hidden, added)),
    ]
    model = ov.Model(results, [ids])
    halve_weights(graph := StepGraph(model))
    found = {node.get_friendly_name(): node.get_element_type().get_type_name() for node in model.get_ops()}
    assert {name: found[name] for name in ("table", "matrix", "large", "added")} == {
        "table": "f16", "matrix": "f16", "large": "f32", "added": "f32"
    }  # fmt: skip
    assert graph.notes["halve_weights"] == ["2 weights are f16, 1 are too large for it"]
    rows = numbers[0].astype(np.float16).astype(np.float32)[[1, 5, 39]]
    first, second, third = core.compile_model(model, "CPU", EXACT)([np.array([[1, 5, 39]])]).values()
    np.testing.assert_allclose(first[0], rows @ numbers[1].astype(np.float16).astype(np.float32).T, rtol=0, atol=1e-4)
    np.testing.assert_allclose(second[0], rows @ numbers[2].T, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(third, rows + numbers[3], rtol=0, atol=1e-6)


def test_masks_leave_scores_finite_in_f16(zoo):
    """The mask input reaches attention as f16, and the largest negative score does not make the sum infinite."""
    lowered = lower(core.read_model(zoo / "qwen2" / "openvino_model.xml"), LoweringOptions(256), DECODER_NPU)
    model = lowered.specialise(Variant(2, 6))
    mask = next(node for node in model.get_parameters() if "mask.causal" in node.output(0).get_names())
    (raised,) = (target.get_node() for target in mask.output(0).get_target_inputs())
    narrow = next(target.get_node() for target in raised.output(0).get_target_inputs())
    assert narrow.get_element_type() == ov.Type.f16
    part = ov.Model([ops.result(narrow)], [mask])
    hidden = core.compile_model(part, "CPU")([np.full((1, 1, 2, 8), -65504, np.float32)])[0]
    assert np.isfinite(hidden + np.float16(-30000)).all()
    assert (np.exp((hidden + np.float16(30000)).astype(np.float32)) == 0).all()


def test_keys_are_cut_by_heads_only_in_programs_of_several_rows(zoo):
    lowered = lower(core.read_model(zoo / "qwen2" / "openvino_model.xml"), LoweringOptions(256), DECODER_NPU)
    layers, kept = 3, {1: 0, 2: 2}
    for rows, cut in kept.items():
        model = lowered.specialise(Variant(rows, 8))
        splits = [node for node in model.get_ordered_ops() if node.get_type_name() == "Split"]
        assert len(splits) == layers * cut


def second_best(number, num_written=1):
    """Return a model of rows in which a number is written at the best places, and of the best of what is left."""
    rows = ops.parameter([ROWS, SIZE], np.float32)
    best = ops.topk(rows, np.int64(num_written), 1, "max", "value", "i64")
    places = ops.convert(best.output(1), "i32")
    numbers = ops.broadcast(number, np.array([ROWS, num_written]))
    left = ops.scatter_elements_update(rows, places, numbers, np.int64(-1))
    return ov.Model([ops.result(left), ops.result(ops.subtract(ops.reduce_max(left, 1, True), rows))], [rows])


def test_a_number_is_written_at_the_best_place_by_select():
    misread = second_best(ops.convert(ops.constant(np.array(-100, np.float32), ov.Type.bf16), "f32"))
    assert write_by_select(StepGraph(misread), misread) == 0
    model = second_best(ops.constant(np.float32(-100)))
    before = run(model)
    assert write_by_select(StepGraph(model), model) == 1
    assert "ScatterElementsUpdate" not in kinds(model)
    same(model, before, 0)


@pytest.mark.parametrize(
    ("number", "num_written"), [(np.float32(0), 2), (np.arange(ROWS, dtype=np.float32)[:, None], 1)]
)
def test_several_numbers_are_written_as_they_were(number, num_written):
    model = second_best(ops.constant(number), num_written)
    before = run(model)
    assert write_by_select(StepGraph(model), model) == 0
    same(model, before, 0)


def test_queries_whose_shape_a_key_has_are_not_cut():
    """Exporters let the keys of every layer read the shape of the first layer's queries, which must not differ for that."""
    queries, keys = (ops.parameter([1, ROWS, heads, SIZE], np.float32) for heads in (2, 1))
    turned = [ops.transpose(value, np.array([0, 2, 1, 3])) for value in (queries, keys)]
    present = ops.result(ops.broadcast(turned[1], ops.shape_of(turned[0])))
    present.output(0).set_names({"present.0.key"})
    model = ov.Model([present, ops.result(turned[0])], [queries, keys])
    states = [SimpleNamespace(is_scale=False, present_name="present.0.key")]
    before = run(model)
    assert cut_heads(SimpleNamespace(kv_states=states), model) == 0
    same(model, before, 0)
