"""Static programs in parts compute what they compute as a whole, and layers that repeat are one part."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openvino import opset13 as ops

from staticllm.compiler_passes.blocks.chain_model import OfRows, OfWeights, OfWireRows
from staticllm.compiler_passes.blocks.dataflow import fold_shapes
from staticllm.compiler_passes.blocks.drop_idle import drop_idle
from staticllm.compiler_passes.blocks.split import Splitter, group_segments
from staticllm.compiler_passes.compiling.chain import CompiledChain
from staticllm.compiler_passes.compiling.chain_compiler import ChainCompiler, UncompiledChain, compile_model
from staticllm.compiler_passes.compiling.dry_run import random_feeds, run_apart
from staticllm.config import StaticLLMConfig
from staticllm.core import Variant
from staticllm.errors import DeviceError, UnsupportedModelError
from staticllm.pipelines.loading.decoder_kind import prepare

EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
FOLDER = Path(os.environ.get("STATICLLM_ZOO", Path(__file__).resolve().parents[4] / "shared" / "zoo"))
NAMES = sorted(path.parent.name for path in FOLDER.glob("*/openvino_model.xml")) or ["none"]
VARIANTS = (Variant(1, 128), Variant(16, 128, 4), Variant(64, 0), Variant(8, 128, 8))
OF_EVERY_SIZE = ("bloom", "gemma2", "llama", "qwen2_moe")
"""A table of distances, windows, none of these, experts. The other models run in two sizes each, in turns."""
TOLERANCE = 3e-6
"""Of a value's range: parts and wholes may sum in another order, and keys and values are f32 here."""


def uncompiled(lowered, variant):
    return UncompiledChain(lambda: lowered.specialise(variant), variant.rows, "CPU", EXACT, str(variant))


def plan_of(path):
    config = StaticLLMConfig(
        max_prompt_len=64,
        min_response_len=64,
        programs="shared",
        kv_cache_precision="f32",
        device_properties=EXACT,
    )
    return prepare(path, "CPU", config)


@pytest.fixture(scope="module")
def lowered(zoo):
    """A function from a name to the lowered model, made once."""
    known = {}

    def of(name):
        if name not in known:
            try:
                known[name] = plan_of(zoo / name).lowered
            except UnsupportedModelError:
                pytest.skip("a pass refuses this model")
        return known[name]

    return of


def sizes_of(name, shape):
    if shape.needs_real_rows:
        return (Variant(1, 128), Variant(16, 128), Variant(64, 0))
    return VARIANTS if name in OF_EVERY_SIZE else VARIANTS[NAMES.index(name) % 2 :: 2]


@pytest.mark.parametrize("name", NAMES)
def test_a_chain_computes_what_the_whole_program_computes(name, lowered):
    found, chains = lowered(name), ChainCompiler()
    for variant in sizes_of(name, found.shape):
        whole = compile_model(ov.Core(), found.specialise(variant), "CPU", EXACT, "it")
        feeds = random_feeds(whole, variant)
        chain = chains.compile(uncompiled(found, variant))
        assert {port.name for port in chain.inputs} == feeds.keys()
        expected, computed = run_apart(whole, feeds), run_apart(chain, feeds)
        assert expected.keys() == computed.keys()
        for port, value in expected.items():
            assert np.abs(value - computed[port]).max() <= TOLERANCE * max(np.ptp(value), 1), (variant, port)


@pytest.mark.parametrize("name", NAMES)
def test_all_layers_of_a_kind_are_one_part(name, lowered):
    """Every layer is in a part that repeats, except those of a kind of which there is one."""
    found = lowered(name)
    chain = Splitter().split(found.specialise(Variant(1, 128)))
    assert chain.parts[0].place == "host"
    assert [call.part for call in chain.calls].count(0) == 1
    counts = [[call.part for call in chain.calls].count(part) for part in range(len(chain.parts))]
    states = {port.name for port in chain.outputs} - {"logits"}
    written = [
        target.name
        for call in chain.calls
        if counts[call.part] > 1
        for target in call.outputs
        if hasattr(target, "name")
    ]
    assert sorted(states) == sorted(written), "the states of all layers are written by parts that repeat"
    assert sum(count > 1 for count in counts) == 1


def test_parts_do_not_hold_the_weights(zoo):
    chain = Splitter().split(plan_of(zoo / "llama").lowered.specialise(Variant(16, 128)))
    for part in chain.parts:
        constants = [node for node in part.model.get_ops() if node.get_type_name() == "Constant"]
        assert sum(node.get_byte_size() for node in constants) < 1 << 14, part.name


def test_equal_parts_of_two_programs_are_compiled_once(zoo):
    lowered, made = plan_of(zoo / "llama").lowered, []

    def compile_part(part, device, properties, what):
        made.append(part.name)
        return compile_model(ov.Core(), part.model, device, properties, what)

    chains = ChainCompiler(compile_part)
    first = chains.compile(uncompiled(lowered, Variant(1, 128)))
    again = chains.compile(uncompiled(lowered, Variant(1, 64)))
    prompt = chains.compile(uncompiled(lowered, Variant(64, 0)))
    assert made == ["host", "block1", "part2", *(["host", "block1"] * 2)], (
        "one head serves one row of logits of any call"
    )
    assert first.parts[2] is prompt.parts[2]
    assert first.parts[2] is again.parts[2]
    assert chains.bank.num_bytes < 1.02 * sum(entry.data.nbytes for entry in chains.bank.entries)
    assert chains.bank is first.bank
    sizes = {(entry.data.ctypes.data, entry.shape) for entry in first.bank.entries}
    assert len(sizes) == len(first.bank.entries), "each constant is in the bank once"


@pytest.mark.parametrize("num_parallel", [1, 2])
def test_a_part_that_was_refused_is_compiled_again(num_parallel):
    """Neither a refusal nor the cancelling of the parts behind it is remembered."""
    model, refusals = layered((0.5, 0.5)), [True]

    def compile_part(part, device, properties, what):
        if part.place == "device" and refusals and refusals.pop():
            raise DeviceError(f"{device} refused {part.name}")
        return compile_model(ov.Core(), part.model, device, properties, what)

    chains = ChainCompiler(compile_part, num_parallel)
    uncompiled = UncompiledChain(model.clone, 1, "CPU", EXACT, "it")
    with pytest.raises(DeviceError, match="refused block1"):
        chains.compile(uncompiled)
    ids = np.array([[3, 1, 4, 49]])
    whole = compile_model(ov.Core(), model, "CPU", EXACT, "it")
    np.testing.assert_allclose(
        run(chains.compile(uncompiled), ids), run_apart(whole, {"input_ids": ids})["logits"], atol=1e-5
    )


def test_rows_of_tables_are_picked_by_the_host(zoo):
    chain = Splitter().split(plan_of(zoo / "llama").lowered.specialise(Variant(16, 128)))
    rows = [read for read in chain.calls[0].inputs if isinstance(read, OfRows)]
    assert [read.port for read in rows] == ["input_ids"]
    assert not any(isinstance(read, OfWeights) for read in chain.calls[0].inputs)
    (host, *_) = chain.parts
    assert "Gather" not in {node.get_type_name() for node in host.model.get_ops()}


def test_a_head_behind_a_reshape_to_the_same_shape_serves_calls_of_all_sizes(zoo):
    lowered, splitter = plan_of(zoo / "gpt2").lowered, Splitter()
    chains = [splitter.split(lowered.specialise(variant)) for variant in (Variant(1, 128), Variant(64, 0))]
    assert [[part.name for part in chain.parts] for chain in chains] == [["host", "block1", "part2"]] * 2
    assert chains[0].parts[2].key == chains[1].parts[2].key


def stateful_layers(orders):
    """Return a model with a layer per order of the numbers of its two states, a product and a sum, and the numbers' values."""
    ids = ops.parameter([1, 4], ov.Type.i64, name="input_ids")
    ids.output(0).set_names({"input_ids"})
    rng = np.random.default_rng(0)
    hidden = ops.gather(ops.constant(rng.standard_normal((50, 8)).astype(np.float32)), ids, ops.constant(0))
    parameters, results = [ids], []
    for layer, order in enumerate(orders):
        states = [ops.parameter([1, 4, 8], ov.Type.f32) for _ in order]
        inner = ops.matmul(hidden, ops.constant(rng.standard_normal((8, 8)).astype(np.float32)), False, False)
        written = [ops.multiply(ops.tanh(inner), states[0]), ops.add(ops.tanh(inner), states[1])]
        for number, state, value in zip(order, states, written, strict=True):
            state.output(0).set_names({f"state.{2 * layer + number}"})
            results.append(ops.result(value))
            results[-1].output(0).set_names({f"state.{2 * layer + number}.next"})
        parameters += states
        hidden = ops.add(hidden, ops.add(*written))
    results.append(ops.result(ops.multiply(hidden, ops.constant(np.float32(2)))))
    results[-1].output(0).set_names({"logits"})
    return ov.Model(results, parameters)


def test_layers_whose_states_are_numbered_in_other_orders_are_one_part():
    orders, rng = ((0, 1), (1, 0), (0, 1), (1, 0)), np.random.default_rng(1)
    model, whole = (stateful_layers(orders) for _ in range(2))
    chain = ChainCompiler().compile(UncompiledChain(lambda: model, 1, "CPU", EXACT, "it"))
    assert [call.part for call in chain.plan.calls].count(1) == len(orders)
    feeds = {f"state.{number}": rng.standard_normal((1, 4, 8)).astype(np.float32) for number in range(2 * len(orders))}
    feeds["input_ids"] = np.array([[3, 1, 4, 49]])
    expected = run_apart(compile_model(ov.Core(), whole, "CPU", EXACT, "it"), feeds)
    computed = run_apart(chain, feeds)
    assert expected.keys() == computed.keys()
    for port, value in expected.items():
        np.testing.assert_allclose(computed[port], value, atol=1e-5, err_msg=port)


def sized_model():
    """Return a model with operations that do something only at other sizes, and with some that look like them."""
    values = ops.parameter([1, 3, 2], ov.Type.f32, name="values")
    empty = ops.slice(values, [3], [9], [1], [1])
    same = ops.reshape(ops.slice(values, [0], [9], [1], [1]), [1, -1, 2], special_zero=False)
    joined = ops.concat([empty, ops.broadcast(same, [1, 3, 2]), empty], 1)
    twice = ops.concat([joined, empty, values], 1)
    filled = ops.pad(empty, [0, 1, 0], [0, 2, 0], "constant", ops.constant(np.float32(7)))
    turned = ops.slice(values, [-1], [-9], [-1], [1])
    padded = ops.pad(values, [0, 1, 0], [0, 0, 0], "constant", ops.constant(np.float32(5)))
    return ov.Model([ops.result(each) for each in (joined, twice, filled, turned, padded)], [values])


def test_weights_whose_shape_is_computed_stay_compressed():
    """Exporters reshape weights in groups to sizes that they read off the value with which these are multiplied."""
    value = ops.parameter([1, 4, 256], ov.Type.f32)
    weights = ops.constant(np.arange(256 * 256, dtype=np.uint8).reshape(256, 8, 32))
    scaled = ops.multiply(ops.convert(weights, "f32"), ops.constant(np.full((256, 8, 1), 0.5, np.float32)))
    columns = ops.gather(ops.shape_of(value), ops.constant([2]), ops.constant(0))
    shape = ops.concat([ops.constant(np.array([256])), columns], 0)
    model = ov.Model([ops.matmul(value, ops.reshape(scaled, shape, False), False, True)], [value], "groups")
    fold_shapes(model)
    assert "ShapeOf" not in {node.get_type_name() for node in model.get_ops()}
    types = {
        node.get_element_type().get_type_name() for node in model.get_ops() if node.get_output_size() and is_large(node)
    }
    assert types == {"u8"}


def is_large(node):
    return node.get_type_name() == "Constant" and node.get_byte_size() > 1 << 14


def test_what_computes_nothing_at_these_sizes_is_dropped():
    model, values = sized_model(), np.arange(6, dtype=np.float32).reshape(1, 3, 2)
    drop_idle(model)
    kinds = sorted(node.get_type_name() for node in model.get_ordered_ops() if not node.get_type_name().startswith("C"))
    assert not any(0 in output.get_shape() for node in model.get_ordered_ops() for output in node.outputs())
    assert kinds == ["Broadcast", "Pad", "Parameter", *["Result"] * 5, "Slice"], "a Concat starts with C"
    expected, computed = (
        ov.Core().compile_model(each, "CPU", EXACT)([values]).to_tuple() for each in (sized_model(), model)
    )
    for mine, other in zip(computed, expected, strict=True):
        np.testing.assert_array_equal(mine, other)


@pytest.mark.parametrize("kind", [ov.Type.bf16, ov.Type.f16, ov.Type.f32, ov.Type.f64])
def test_a_number_of_any_type_keeps_its_value(kind):
    values = ops.parameter([2], ov.Type.f32)
    product = ops.multiply(values, ops.convert(ops.constant(np.array([-0.75], np.float32), kind), "f32"))
    model = ov.Model([ops.result(product)], [values])
    drop_idle(model)
    (found,) = ov.Core().compile_model(model, "CPU", EXACT)([np.array([1, 8], np.float32)]).to_tuple()
    np.testing.assert_array_equal(found, [-0.75, -6])


def layered(values):
    """Return a model with a layer per value, which adds tanh(x * w) * value; ``value`` is a small constant of its own."""
    ids = ops.parameter([1, 4], ov.Type.i64, name="input_ids")
    ids.output(0).set_names({"input_ids"})
    rng = np.random.default_rng(0)
    hidden = ops.gather(ops.constant(rng.standard_normal((50, 8)).astype(np.float32)), ids, ops.constant(0))
    for value in values:
        weights = ops.constant(rng.standard_normal((8, 80)).astype(np.float32))
        back = ops.constant(rng.standard_normal((80, 8)).astype(np.float32))
        inner = ops.tanh(ops.matmul(hidden, weights, False, False))
        number = ops.constant(value if isinstance(value, np.floating) else np.float32(value))
        factor = number if number.get_element_type() == ov.Type.f32 else ops.convert(number, "f32")
        scaled = ops.multiply(ops.matmul(inner, back, False, False), factor)
        hidden = ops.add(hidden, scaled)
    result = ops.result(ops.multiply(hidden, ops.constant(np.float32(2))))
    result.output(0).set_names({"logits"})
    return ov.Model([result], [ids])


def run(chain: CompiledChain, ids):
    return run_apart(chain, {"input_ids": ids})["logits"]


def test_layers_whose_numbers_have_other_types_are_one_part():
    """An export stores a number in f16 only where little of it is lost."""
    values = (np.float16(0.25), np.float32(0.3), np.float16(0.5), np.float32(0.7))
    models = [layered(values) for _ in range(2)]
    whole = compile_model(ov.Core(), models[0], "CPU", EXACT, "it")
    chain = ChainCompiler().compile(UncompiledChain(lambda: models[1], 1, "CPU", EXACT, "it"))
    assert [call.part for call in chain.plan.calls].count(1) == len(values)
    ids = np.array([[3, 1, 4, 49]])
    expected = run_apart(whole, {"input_ids": ids})["logits"]
    np.testing.assert_allclose(run(chain, ids), expected, rtol=0, atol=TOLERANCE * np.ptp(expected))


@pytest.mark.parametrize(("values", "num_inputs"), [((0.5, 0.5, 0.5), 3), ((0.5, 0.25, 0.125), 4)])
def test_a_small_constant_is_an_input_only_if_layers_differ_in_it(values, num_inputs):
    model, ids = layered(values), np.array([[3, 1, 4, 49]])
    whole = compile_model(ov.Core(), layered(values), "CPU", EXACT, "it")
    chain = ChainCompiler().compile(UncompiledChain(lambda: model, 1, "CPU", EXACT, "it"))
    repeated = [call for call in chain.plan.calls if call.part == 1]
    assert len(repeated) == 3
    assert {len(call.inputs) for call in repeated} == {num_inputs}
    np.testing.assert_allclose(run(chain, ids), run_apart(whole, {"input_ids": ids})["logits"], atol=1e-5)


def test_layers_of_other_values_inside_are_other_parts():
    """Axes are no inputs: a layer that sums along another axis is another kind of layer."""
    ids = ops.parameter([1, 8], ov.Type.i64, name="input_ids")
    ids.output(0).set_names({"input_ids"})
    table = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)
    hidden = ops.gather(ops.constant(table), ids, ops.constant(0))
    for axis in (1, 2, 1, 2, 1):
        weights = ops.constant(np.random.default_rng(axis).standard_normal((8, 8 * axis)).astype(np.float32))
        grown = ops.matmul(hidden, weights, False, False)
        summed = ops.reduce_sum(grown, np.array([axis]), True)
        hidden = ops.add(hidden, ops.reduce_mean(summed, np.array([1, 2]), True))
    result = ops.result(hidden)
    result.output(0).set_names({"logits"})
    model = ov.Model([result], [ids])
    whole = compile_model(ov.Core(), model.clone(), "CPU", EXACT, "it")
    chain = ChainCompiler().compile(UncompiledChain(lambda: model, 1, "CPU", EXACT, "it"))
    tokens = np.arange(8)[None]
    np.testing.assert_allclose(run(chain, tokens), run_apart(whole, {"input_ids": tokens})["logits"], rtol=1e-5)
    assert sorted(call.part for call in chain.plan.calls)[0] == 0
    assert len(chain.parts) >= 3


def with_table(table_of, count, is_scaled=True):
    """Return a model of two layers for ``count`` tokens, which are looked up in what ``table_of`` makes of numbers ``[8, 8]``."""
    ids = ops.parameter([1, count], ov.Type.i64, name="input_ids")
    ids.output(0).set_names({"input_ids"})
    rng = np.random.default_rng(0)
    hidden = ops.gather(table_of(rng.standard_normal((8, 8)).astype(np.float32)), ids, ops.constant(0))
    for _ in range(2):
        weights = ops.constant(rng.standard_normal((8, 8)).astype(np.float32))
        hidden = ops.add(hidden, ops.tanh(ops.matmul(hidden, weights, False, False)))
    result = ops.result(ops.multiply(hidden, ops.constant(np.float32(2))) if is_scaled else hidden)
    result.output(0).set_names({"logits"})
    return ov.Model([result], [ids])


def check_chain(model, ids):
    """Compare the chain of a model with the whole model, and return the chain."""
    whole = compile_model(ov.Core(), model.clone(), "CPU", EXACT, "it")
    chain = ChainCompiler().compile(UncompiledChain(lambda: model, 1, "CPU", EXACT, "it"))
    np.testing.assert_allclose(run(chain, ids), run_apart(whole, {"input_ids": ids})["logits"], rtol=1e-5, atol=1e-5)
    return chain


@pytest.mark.parametrize(
    "table_of",
    [
        lambda table: ops.add(ops.constant(table), ops.constant(table[0])),
        lambda table: ops.multiply(ops.constant(table), ops.constant(table[:, :1].copy())),
        lambda table: ops.reshape(ops.constant(table.reshape(-1)), np.array([8, 8]), False),
    ],
    ids=["a number per column", "a number per row", "flat"],
)
@pytest.mark.parametrize("count", [4, 8])
def test_only_the_axis_of_rows_is_picked(table_of, count):
    """A bias per column has as many numbers as a square table has rows, and a flat table has no rows."""
    check_chain(with_table(table_of, count), np.array([[7, 0, 3, 3, 1, 2, 6, 5][:count]]))


def test_a_model_that_ends_with_its_last_layer_has_no_empty_part():
    chain = check_chain(with_table(ops.constant, 8, is_scaled=False), np.arange(8)[None])
    assert [call.part for call in chain.plan.calls] == [0, 1, 1]


def test_parts_whose_constants_differ_in_other_places_are_others():
    """In each model, layers differ in one of two small constants, and the other one, which stays inside, has the same value."""

    def layers(first, second):
        ids = ops.parameter([1, 4], ov.Type.i64, name="input_ids")
        ids.output(0).set_names({"input_ids"})
        rng = np.random.default_rng(0)
        hidden = ops.gather(ops.constant(rng.standard_normal((50, 8)).astype(np.float32)), ids, ops.constant(0))
        weights = ops.constant(rng.standard_normal((8, 80)).astype(np.float32))
        back = ops.constant(rng.standard_normal((80, 8)).astype(np.float32))
        for own, other in zip(first, second, strict=True):
            inner = ops.power(ops.matmul(hidden, weights, False, False), ops.constant(np.float32(own)))
            hidden = ops.add(
                hidden, ops.multiply(ops.matmul(inner, back, False, False), ops.constant(np.float32(other)))
            )
        result = ops.result(ops.tanh(hidden))
        result.output(0).set_names({"logits"})
        return ov.Model([result], [ids])

    splitter = Splitter()
    (first,) = [part for part in splitter.split(layers((2, 2), (2, 3))).parts if part.name == "block1"]
    (second,) = [part for part in splitter.split(layers((2, 3), (2, 2))).parts if part.name == "block1"]
    assert first.key[0] == second.key[0], "they compute the same from what enters them"
    assert first.key != second.key


def test_layers_whose_nodes_have_other_attributes_are_other_parts():
    model = with_table(ops.constant, 8, is_scaled=False)
    hidden = model.get_results()[0].input_value(0)
    for axis in (1, 2, 1):
        hidden = ops.add(hidden, ops.softmax(hidden, axis))
    result = ops.result(hidden)
    result.output(0).set_names({"logits"})
    chain = check_chain(ov.Model([result], model.get_parameters()), np.array([[7, 0, 3, 3, 1, 2, 6, 5]]))
    (_, _, _, first, second, third) = [call.part for call in chain.plan.calls]
    assert first == third != second


def with_pick(end, axis=1):
    """Return a model of two layers, then what ``end`` makes of their values ``[1, 8, 8]``, picked rows, and a head."""
    model = with_table(ops.constant, 8, is_scaled=False)
    rows = ops.parameter([2], ov.Type.i64, name="logit_rows")
    rows.output(0).set_names({"logit_rows"})
    hidden = model.get_results()[0].input_value(0)
    picked = ops.gather(end(hidden), rows, ops.constant(axis))
    weights = ops.constant(np.random.default_rng(5).standard_normal((8, 24)).astype(np.float32))
    head = ops.reshape(picked, np.array([1, 2, 8]), False) if axis == 1 else ops.transpose(picked, np.array([0, 2, 1]))
    result = ops.result(ops.matmul(head, weights, False, False))
    result.output(0).set_names({"logits"})
    return ov.Model([result], [*model.get_parameters(), rows])


COLUMNS = np.linspace(1, 2, 8).astype(np.float32)
ENDS = {
    "norm": (lambda x: ops.divide(x, ops.sqrt(ops.reduce_mean(ops.multiply(x, x), np.array([-1]), True))), True),
    "scale per column": (lambda x: ops.multiply(x, ops.constant(COLUMNS[None, None])), True),
    "scale per row": (lambda x: ops.multiply(x, ops.constant(COLUMNS[None, :, None].copy())), False),
    "mean of rows": (lambda x: ops.subtract(x, ops.reduce_mean(x, np.array([1]), True)), False),
    "softmax over rows": (lambda x: ops.softmax(x, 1), False),
}


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("axis", [1, 2])
def test_rows_are_picked_before_what_treats_each_row_alike(name, axis):
    end, is_row_wise = ENDS[name]
    model = with_pick(end, axis)
    whole = compile_model(ov.Core(), model.clone(), "CPU", EXACT, "it")
    feeds = {"input_ids": np.array([[7, 0, 3, 3, 1, 2, 6, 5]]), "logit_rows": np.array([6, 1])}
    chain = ChainCompiler().compile(UncompiledChain(lambda: model, 1, "CPU", EXACT, "it"))
    np.testing.assert_allclose(
        run_apart(chain, feeds)["logits"], run_apart(whole, feeds)["logits"], rtol=1e-4, atol=1e-5
    )
    (picks,) = [call for call in chain.plan.calls if any(isinstance(each, OfWireRows) for each in call.inputs)] or [
        None
    ]
    assert (picks is not None) == (axis == 1), "only rows are picked by the host"
    layer = chain.plan.calls[1].part
    assert axis == 2 or (chain.plan.calls[-2].part == layer) == is_row_wise, (
        "nothing is between the layers and the pick"
    )


@given(st.lists(st.integers(0, 4), min_size=1, max_size=24))
def test_groups_hold_all_segments_in_their_order(signatures):
    groups = group_segments(signatures)
    assert [signature for group in groups for signature in group] == signatures
    assert len(set(groups)) <= len(set(signatures))


@pytest.mark.parametrize(
    ("signatures", "groups"),
    [
        ([1, 2, 1, 2, 1, 2, 9, 8], ["12", "12", "12", "98"]),
        ([1, 1, 1, 2], ["1", "1", "1", "2"]),
        ([1, 2, 3, 2, 1, 2, 3, 2], ["1232", "1232"]),
        ([7, 1, 5, 1, 2, 1, 2], ["715", "12", "12"]),
        ([1, 2, 3, 1, 2, 4, 1, 2, 3], ["123", "124", "123"]),
        ([1, 9, 2, 9, 3, 9, 4], ["1", "9", "2", "9", "3", "9", "4"]),
        ([1, 2, 3], ["123"]),
    ],
)
def test_segments_are_joined_to_few_different_groups(signatures, groups):
    assert ["".join(map(str, group)) for group in group_segments(signatures)] == groups
