"""Tests that a graph that would compute other values is refused, with the pass and the reason."""

import numpy as np
import pytest
from openvino import opset13 as ops

from staticllm.compiler_passes.lower import lower
from staticllm.compiler_passes.pass_pipeline import LoweringOptions
from staticllm.devices import get_core
from staticllm.errors import UnsupportedModelError


def attentions(model):
    return [node for node in model.get_ordered_ops() if node.get_type_name() == "ScaledDotProductAttention"]


def parameter(model, name):
    return next(node for node in model.get_parameters() if name in node.output(0).get_names())


def length_of(output, axis):
    return ops.gather(ops.shape_of(output), np.array(axis), np.array(0))


def counted_to(length):
    return ops.range(np.int64(0), length, np.int64(1), "i64")


def let_a_token_decide_its_mask(model):
    gate = ops.convert(ops.add(ops.mod(parameter(model, "input_ids"), np.int64(5)), np.int64(1)), "f32")
    for node in attentions(model):
        keys = ops.convert(counted_to(length_of(node.input_value(1), 2)), "f32")
        bias = ops.multiply(ops.unsqueeze(gate, np.array([1, 3])), keys)
        node.input(3).replace_source_output(ops.add(node.input_value(3), bias).output(0))


def add_positions_to_all_keys(model):
    table = np.random.default_rng(0).normal(size=(2048, 1)).astype(np.float32)
    for node in attentions(model):
        places = counted_to(length_of(node.input_value(1), 2))
        positions = ops.gather(ops.constant(table), places, np.array(0))
        node.input(1).replace_source_output(ops.add(node.input_value(1), positions).output(0))


def begin_with_rows(model):
    for node in model.get_ordered_ops():
        if node.get_type_name() == "ReadValue":
            _, heads, _, size = node.get_output_partial_shape(0)
            rows = np.ones((1, heads.get_length(), 8, size.get_length()), np.float32)
            node.input(0).replace_source_output(ops.constant(rows).output(0))


def scale_by_the_last_position(model):
    last = ops.gather(parameter(model, "position_ids"), np.array(-1), np.array(1))
    for node in attentions(model):
        factor = ops.add(ops.convert(last, "f32"), np.float32(1))
        node.input(0).replace_source_output(ops.multiply(node.input_value(0), factor).output(0))


def scale_a_state(model):
    (sink, *_) = model.get_sinks()
    sink.input(0).replace_source_output(ops.multiply(sink.input_value(0), np.float32(2)).output(0))


def add_the_number_of_past_rows(model):
    read = next(node for node in model.get_ordered_ops() if node.get_type_name() == "ReadValue")
    result = model.output("logits").get_node()
    rows = ops.convert(length_of(read.output(0), 2), "f32")
    result.input(0).replace_source_output(ops.add(result.input_value(0), rows).output(0))


@pytest.mark.parametrize(
    ("spoil", "stage", "reason"),
    [
        (let_a_token_decide_its_mask, "expose_mask", "depends on the values of tokens or KV slots"),
        (add_positions_to_all_keys, "expose_positions", "number of past KV slots"),
        (begin_with_rows, "keep_new_rows", "it must be empty"),
        (scale_by_the_last_position, "expose_positions", "picks a position of the call"),
        (scale_a_state, "keep_new_rows", "Multiply"),
        (add_the_number_of_past_rows, "expose_positions", "number of past KV slots"),
    ],
)
def test_a_graph_that_would_compute_other_values_is_refused(spoil, stage, reason, zoo):
    model = get_core().read_model(zoo / "llama" / "openvino_model.xml")
    spoil(model)
    model.validate_nodes_and_infer_types()
    with pytest.raises(UnsupportedModelError) as caught:
        lower(model, LoweringOptions(256))
    assert caught.value.stage == stage
    assert reason in caught.value.reason
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("last", "stage", "reason"),
    [
        (41, "expose_mask", "it hides more than the tokens before a first one"),
        (
            300,
            "expose_positions",
            "computes with the number of past KV slots",
        ),  # more than the lengths of the mask probes
    ],
)
def test_a_clamp_beyond_the_first_tokens_is_refused(last, stage, reason, zoo):
    """Positions that stop counting at 41 are not positions, although the first probes cannot tell."""
    model = get_core().read_model(zoo / "lfm2" / "openvino_model.xml")
    places = next(node for node in model.get_ordered_ops() if node.get_type_name() == "Range")
    readers = list(places.output(0).get_target_inputs())
    clamped = ops.minimum(places, ops.constant(np.array(last), places.get_output_element_type(0)))
    for target in readers:
        target.replace_source_output(clamped.output(0))
    with pytest.raises(UnsupportedModelError) as caught:
        lower(model, LoweringOptions(256))
    assert caught.value.stage == stage
    assert reason in caught.value.reason
    assert "\n" not in str(caught.value)


def add_a_table_of_positions(model, count):
    """Add a bias by distance that is read off the end of a table of ``count`` positions, as MPT does."""
    table = np.float32([0.5, 0.25, 0.125, 0.0625]).reshape(1, -1, 1, 1) * np.arange(1 - count, 1, dtype=np.float32)
    for node in model.get_ordered_ops():
        if node.get_type_name() == "ScaledDotProductAttention":
            total = length_of(node.input_value(3), 3)
            begin = ops.reshape(ops.subtract(np.int64(count), ops.convert(total, "i64")), [1], False)
            bias = ops.slice(table, begin, np.array([count]), np.array([1]), np.array([3]))
            node.input(3).replace_source_output(ops.add(node.input_value(3), bias).output(0))


def test_a_model_is_not_evaluated_beyond_its_own_table_of_positions(zoo):
    """The arena has more slots than a conversation has tokens, so its length is no length of a mask."""
    for longest, reason in ((128, ""), (129, "unknown kind"), (300, "of at most 128 (here 300)")):
        model = get_core().read_model(zoo / "llama" / "openvino_model.xml")
        add_a_table_of_positions(model, 128)
        model.validate_nodes_and_infer_types()
        if not reason:
            assert set(lower(model, LoweringOptions(longest)).graph.layer_masks) == {"causal + ALiBi"}
            continue
        with pytest.raises(UnsupportedModelError) as refused:
            lower(model, LoweringOptions(longest))
        assert reason in refused.value.reason
