"""Tests what shows only in long sequences or in short ones, and inputs of other types and sizes than programs have."""

from __future__ import annotations

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops
from openvino.preprocess import PrePostProcessor
from support.encoders.encoder_models import (
    TinyEncoder,
    a_range,
    a_variant,
    by_distance,
    check_equal,
    hidden_where,
    number,
    symmetric_alibi,
    window_before_and_after,
)

from staticllm.compiler_passes.lower_encoder import lower_encoder
from staticllm.compiler_passes.pass_pipeline import EncoderOptions


def in_blocks_of_32(scores, rows):
    block = ops.floor(ops.divide(a_range(rows), number(32)))
    same = ops.equal(ops.unsqueeze(block, ops.constant(0)), ops.unsqueeze(block, ops.constant(1)))
    return ops.add(scores, hidden_where(ops.logical_not(same)))


def window_and_first_token(scores, rows):
    """Tokens see those less than 20 places away, and the first token of the sequence: a global token, or a sink."""
    places = a_range(rows)
    seen = ops.unsqueeze(places, ops.constant(0))
    distance = ops.abs(ops.subtract(seen, ops.unsqueeze(places, ops.constant(1))))
    is_hidden = ops.logical_and(ops.greater(distance, number(20)), ops.not_equal(seen, number(0)))
    return ops.add(scores, hidden_where(is_hidden))


def with_late_places(hidden, rows):
    """Add one from place 16 on, as a temperature of attention that begins late does."""
    late = ops.convert(ops.greater(a_range(rows), number(15)), "f32")
    return ops.add(hidden, ops.unsqueeze(late, ops.constant(np.array([0, 2]))))


def with_token_before(distance):
    """Add the token ``distance`` places before, as a dilated convolution does."""

    def shifted(hidden, rows):
        before = ops.pad(hidden, np.array([0, distance, 0]), np.array([0, 0, 0]), "constant", number(0))
        size = ops.unsqueeze(rows, ops.constant(0))
        return ops.add(hidden, ops.slice(before, np.array([0]), size, np.array([1]), np.array([1])))

    return shifted


@pytest.mark.parametrize(
    "encoder",
    [
        TinyEncoder(in_blocks_of_32),
        TinyEncoder(window_and_first_token),
        TinyEncoder(on_hidden=with_late_places),
        TinyEncoder(on_hidden=with_token_before(25)),
        TinyEncoder(on_hidden=with_token_before(25), form="fused causal"),
        TinyEncoder(on_hidden=with_token_before(200)),
    ],
)
def test_what_differs_only_in_long_sequences_keeps_texts_apart(encoder):
    lowered = lower_encoder(encoder.model())
    assert not lowered.shape.is_packable or lowered.shape.has_positions
    check_equal(encoder, lowered, rows=80)


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize(
    "encoder", [TinyEncoder(window_before_and_after(4, 4)), TinyEncoder(by_distance(symmetric_alibi))]
)
def test_programs_of_few_rows_are_right(encoder, rows):
    lowered = lower_encoder(encoder.model(), EncoderOptions(max_rows=rows))
    check_equal(encoder, lowered, rows=rows)


def test_inputs_of_32_bits_and_of_fixed_sizes_become_those_of_programs():
    encoder = TinyEncoder()
    model = encoder.model()
    steps = PrePostProcessor(model)
    for port in model.inputs:
        steps.input(port.get_any_name()).tensor().set_element_type(ov.Type.i32)
    narrow, fixed = steps.build(), encoder.model()
    fixed.reshape({port: [4, 32] for port in fixed.inputs})
    for given in (narrow, fixed):
        lowered = lower_encoder(given)
        assert lowered.shape.is_packable
        assert lowered.specialise(a_variant()).input("input_ids").get_element_type() == ov.Type.i64
        check_equal(encoder, lowered)
