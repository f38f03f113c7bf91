"""Tests encoders that cannot be packed as usual: masks and biases that stay in the graph, texts kept apart, and refusals."""

from __future__ import annotations

import re

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops
from support.encoders.disentangled import Disentangled
from support.encoders.encoder_models import (
    VOCABULARY,
    WIDTH,
    Packed,
    TinyEncoder,
    a_range,
    a_text,
    a_variant,
    by_distance,
    check_equal,
    hidden_where,
    number,
    pooled,
    symmetric_alibi,
    unit,
    unpack,
    window_before_and_after,
)

from staticllm.compiler_passes.encoder import ENCODER
from staticllm.compiler_passes.lower_encoder import lower_encoder
from staticllm.compiler_passes.pass_pipeline import EncoderOptions, Pass, PassPipeline
from staticllm.compiler_passes.shapes.add_pooling import Dense
from staticllm.core import EncoderMask
from staticllm.devices import get_core
from staticllm.errors import UnsupportedModelError


def in_blocks(scores, rows):
    """Tokens see those of their own block of eight, counted from the first row: it depends on the places themselves."""
    block = ops.floor(ops.divide(a_range(rows), number(8)))
    same = ops.equal(ops.unsqueeze(block, ops.constant(0)), ops.unsqueeze(block, ops.constant(1)))
    return ops.add(scores, hidden_where(ops.logical_not(same)))


def scaled_by_length(scores, rows):
    return ops.multiply(scores, ops.log(ops.convert(rows, "f32")))


def scaled_if_long(scores, rows):
    """As models do whose attention is sharper in texts longer than those of the training."""
    return ops.multiply(scores, ops.maximum(number(1), ops.divide(ops.convert(rows, "f32"), number(300))))


def with_place_of_long_texts(hidden, rows):
    """Positions that are squeezed if there are many, as in interpolated rotary embeddings."""
    step = ops.minimum(number(1), ops.divide(number(300), ops.convert(rows, "f32")))
    return ops.add(hidden, ops.unsqueeze(ops.sin(ops.multiply(a_range(rows), step)), ops.constant(np.array([0, 2]))))


def with_mean_of_all(hidden, rows):
    return ops.add(hidden, ops.reduce_mean(hidden, ops.constant(np.array([1])), keep_dims=True))


def with_sum_so_far(hidden, rows):
    return ops.add(hidden, ops.multiply(ops.cum_sum(hidden, ops.constant(np.int64(1))), number(0.1)))


def with_place(hidden, rows):
    """Add a wave over the rows, ``[S, 1]``, without an axis for the batch."""
    return ops.add(hidden, ops.unsqueeze(ops.sin(a_range(rows)), ops.constant(1)))


def with_weights_over_rows(hidden, rows):
    """Mix the rows by a matrix of a fixed size, cut to the rows: a token mixer, not attention."""
    random = np.random.default_rng(7).normal(size=(64, 64)).astype(np.float32) * 0.1
    size = ops.concat([ops.unsqueeze(rows, ops.constant(0))] * 2, 0)
    part = ops.slice(ops.constant(random), np.array([0, 0]), size, np.array([1, 1]))
    return ops.add(hidden, ops.matmul(part, hidden, False, False))


@pytest.mark.parametrize(
    ("bounds", "kind", "label"),
    [
        ((5, 0), EncoderMask(5, 0), "window:6"),
        ((4, 4), EncoderMask(4, 4), "local:4"),
        ((5, 2), EncoderMask(), "full + a bias"),
        ((1000, 0), EncoderMask(after=0), "causal"),
        ((1000, 1000), EncoderMask(), "full"),
    ],
)
def test_the_kind_of_a_mask_is_found_by_its_values(bounds, kind, label):
    encoder = TinyEncoder(window_before_and_after(*bounds))
    lowered = lower_encoder(encoder.model())
    assert lowered.shape.masks == (kind,)
    notes = {report.name: report.notes for report in lowered.reports}
    assert f"{label} in 2 of 2 attentions" in notes["expose_encoder_mask"]
    check_equal(encoder, lowered)


@pytest.mark.parametrize(("form", "label"), [("flat", "full"), ("fused", "full"), ("fused causal", "causal")])
def test_other_forms_of_attention_get_a_mask(form, label):
    encoder = TinyEncoder(form=form)
    lowered = lower_encoder(encoder.model())
    assert [kind.label for kind in lowered.shape.masks] == [label]
    assert lowered.shape.is_packable
    check_equal(encoder, lowered)


def test_two_masks_in_one_attention_are_both_kept():
    def both(scores, rows):
        return window_before_and_after(5, 0)(window_before_and_after(3, 3)(scores, rows), rows)

    encoder = TinyEncoder(both)
    check_equal(encoder, lower_encoder(encoder.model()))


def test_positions_without_an_axis_for_the_batch_are_looked_up():
    encoder = TinyEncoder(on_hidden=with_place)
    lowered = lower_encoder(encoder.model())
    assert lowered.shape.has_positions
    assert lowered.shape.is_packable
    check_equal(encoder, lowered)


def test_a_mask_that_depends_on_places_keeps_texts_apart():
    encoder = TinyEncoder(in_blocks)
    lowered = lower_encoder(encoder.model())
    assert not lowered.shape.is_packable
    assert "reads the places of two tokens, not only their distance" in lowered.reasons[0]
    check_equal(encoder, lowered)


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        (TinyEncoder(scaled_by_length), "prove_packing: Multiply '.*' computes with the number of rows"),
        (TinyEncoder(scaled_if_long), "prove_packing: Multiply '.*' computes with the number of rows"),
        (
            TinyEncoder(on_hidden=with_place_of_long_texts),
            "reads other positions in texts of more than 300 tokens: load with max_length of at most 300 ",
        ),
        (Disentangled(True, is_shifted=True), "prove_packing: .* computes with the number of rows"),
        (Disentangled(True, scale=scaled_by_length), "prove_packing: .* computes with the number of rows"),
        (Disentangled(True, scale=scaled_if_long), "prove_packing: .* computes with the number of rows"),
        (TinyEncoder(on_hidden=with_mean_of_all), "prove_packing: .* are mixed with others"),
        (TinyEncoder(on_hidden=with_weights_over_rows), "(check_places|prove_packing): "),
    ],
)
def test_what_is_wrong_even_for_one_text_per_sequence_is_refused(encoder, message):
    with pytest.raises(UnsupportedModelError, match=message) as error:
        lower_encoder(encoder.model())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("encoder", [TinyEncoder(scaled_if_long), TinyEncoder(on_hidden=with_place_of_long_texts)])
def test_what_depends_on_the_length_of_long_texts_only_runs_in_short_programs(encoder):
    lowered = lower_encoder(encoder.model(), EncoderOptions(max_rows=300))
    assert lowered.shape.is_packable
    check_equal(encoder, lowered)


@pytest.mark.parametrize("terms", [("c2p",), ("p2c",), ("c2p", "p2c")])
def test_places_in_a_table_that_grows_with_the_rows_are_right_for_one_text_per_sequence(terms):
    """The first version of DeBERTa counts places from the middle of a table whose part in use has as many rows as the text."""
    encoder = Disentangled(True, terms)
    lowered = lower_encoder(encoder.model())
    assert not lowered.shape.is_packable
    assert any("computes with the number of rows" in reason for reason in lowered.reasons)
    for rows in (3, 8, 15, 16, 17, 24, 100):
        check_equal(encoder, lowered, rows=rows)


def test_places_in_a_table_of_one_size_can_be_packed():
    encoder = Disentangled(False)
    lowered = lower_encoder(encoder.model())
    assert lowered.shape.is_packable
    check_equal(encoder, lowered)


def test_no_program_has_more_rows_than_were_compared():
    lowered = lower_encoder(Disentangled(True).model(), EncoderOptions(max_rows=4096))
    assert lowered.shape.max_rows == 512


def test_texts_that_mix_with_those_before_them_are_kept_apart():
    encoder = TinyEncoder(on_hidden=with_sum_so_far)
    lowered = lower_encoder(encoder.model())
    assert not lowered.shape.is_packable
    assert "together they differ" in lowered.reasons[0]
    check_equal(encoder, lowered)


def test_convolutions_over_tokens_are_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match=r"prove_packing: .* than by attention"):
        lower_encoder(get_core().read_model(unpack("convbert", tmp_path)))


@pytest.mark.parametrize(
    ("name", "missing", "reason"),
    [
        ("bert", ("expose_encoder_positions",), "Add '.*' reads the places of tokens"),
        ("modernbert", ("expose_encoder_positions",), "Multiply '.*' reads the places of tokens"),
        ("bert", ("expose_encoder_positions", "check_places"), "together they differ"),
        ("xlm_roberta", ("expose_encoder_positions", "check_places"), "together they differ"),
    ],
)
def test_positions_that_a_pass_misses_keep_texts_apart(name, missing, reason, tmp_path):
    """A pass that finds nothing must not pass for a model that has nothing to find."""
    lowered = lower_encoder(get_core().read_model(unpack(name, tmp_path)), passes=without(missing))
    assert not lowered.shape.is_packable
    assert re.match(reason, lowered.reasons[0])


def test_masks_that_a_pass_misses_are_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match="prove_packing"):
        lower_encoder(get_core().read_model(unpack("bert", tmp_path)), passes=without(["expose_encoder_mask"]))


def spoil_last_attention(graph, options):
    """Let the last attention read its scores without the mask."""
    softmax = [node for node in graph.model.get_ordered_ops() if node.get_type_name() == "Softmax"][-1]
    softmax.input(0).replace_source_output(softmax.input_value(0).get_node().input_value(0))


def with_pass(before, entry):
    index = [own.name for own in ENCODER.passes].index(before)
    return PassPipeline((*ENCODER.passes[:index], entry, *ENCODER.passes[index:]))


def test_a_layer_that_differs_from_those_before_it_is_part_of_the_proof():
    lowered = lower_encoder(TinyEncoder(layers=6).model())
    (report,) = [each for each in lowered.reports if each.name == "prove_packing"]
    assert "run up to" in report.notes[0]
    with pytest.raises(UnsupportedModelError, match="prove_packing"):
        passes = with_pass("prove_packing", Pass("spoil", spoil_last_attention))
        lower_encoder(TinyEncoder(layers=6).model(), passes=passes)


def test_an_error_of_openvino_names_the_pass_in_one_line():
    def fail(graph, options):
        raise RuntimeError("Exception from src/core/node.cpp:1:\nwhat is wrong")

    with pytest.raises(
        UnsupportedModelError, match=r"^fails: OpenVINO cannot evaluate a part of the graph: what is wrong$"
    ):
        lower_encoder(TinyEncoder().model(), passes=with_pass("check_places", Pass("fails", fail)))


def without(names):
    passes = ENCODER
    for name in names:
        passes = passes.without(name)
    return passes


def test_dense_modules_and_normalisation_follow_the_pooling(tmp_path):
    rng = np.random.default_rng(3)
    dense = (
        Dense(rng.normal(size=(24, WIDTH)).astype(np.float32), rng.normal(size=24).astype(np.float32), "tanh"),
        Dense(rng.normal(size=(16, 24)).astype(np.float32)),
    )
    encoder = TinyEncoder(by_distance(symmetric_alibi))
    program = get_core().compile_model(encoder.model(), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    ids = rng.integers(5, VOCABULARY, 9)
    states = pooled(program([ids[None], np.ones((1, 9), np.int64)])[0][0], "mean")
    expected = dense[1].weight @ np.tanh(dense[0].weight @ states + dense[0].bias)
    text = a_text(rng, 9)
    text.ids[:] = ids
    for is_normalised in (False, True):
        lowered = lower_encoder(encoder.model(), EncoderOptions(dense=dense, is_normalised=is_normalised))
        assert lowered.shape.width == 16
        (vector,) = Packed(lowered, a_variant())([text], "mean")
        assert np.abs(vector - (unit(expected) if is_normalised else expected)).max() <= 1e-5


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (
            Dense(np.ones((4, 5), np.float32)),
            r"Dense module 0 has a weight \(4, 5\) and a bias \(4,\) for vectors of 32",
        ),
        (Dense(np.ones((4, WIDTH), np.float32), np.ones(5, np.float32)), r"a bias \(5,\)"),
        (Dense(np.ones((4, WIDTH), np.float32), activation="mish"), "activation 'mish', not one of identity, tanh"),
    ],
)
def test_a_dense_module_that_does_not_fit_is_refused(layer, message):
    with pytest.raises(UnsupportedModelError, match=message):
        lower_encoder(TinyEncoder().model(), EncoderOptions(dense=(layer,)))


def with_input(model, name, shape):
    parameter = ops.parameter(ov.PartialShape(shape), ov.Type.f32)
    parameter.output(0).set_names({name})
    model.add_parameters([parameter])
    return model


def renamed(model, name):
    model.outputs[0].get_tensor().set_names({name})
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: with_input(TinyEncoder().model(), "pixel_values", [-1, -1]), "the input 'pixel_values' is unknown"),
        (lambda: renamed(TinyEncoder().model(), "logits"), r"'logits' has the shape .*: export the model for feature"),
        (lambda: without_batch(TinyEncoder().model()), "the model has fixed sizes: export it with a dynamic batch"),
    ],
)
def test_a_model_that_is_no_encoder_is_refused(model, message):
    with pytest.raises(UnsupportedModelError, match=message) as error:
        lower_encoder(model())
    assert "\n" not in str(error.value)


def without_batch(model):
    """Fix the sizes inside of the graph, as a trace at one size does."""
    hidden = model.get_results()[0].input_value(0)
    fixed = ops.reshape(hidden, np.array([1, 9, WIDTH]), special_zero=False)
    model.get_results()[0].input(0).replace_source_output(fixed.output(0))
    again = ops.add(fixed, ops.reshape(hidden, np.array([-1, 9, WIDTH]), special_zero=False))
    model.get_results()[0].input(0).replace_source_output(again.output(0))
    model.validate_nodes_and_infer_types()
    return model


def test_a_variant_with_more_rows_than_the_tables_is_refused():
    lowered = lower_encoder(TinyEncoder(on_hidden=with_place).model(), EncoderOptions(max_rows=32))
    with pytest.raises(ValueError, match=r"encode\[1x33,texts=2\] has more rows than the 32"):
        lowered.specialise(a_variant(33, 1, 2))
