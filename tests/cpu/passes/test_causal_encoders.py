"""Tests causal language models as encoders: embedders and rerankers that were exported with past key values or logits."""

from __future__ import annotations

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops
from openvino.op.util import Variable, VariableInfo
from support.encoders.encoder_models import Alone, Packed, Placed, unit, unpack

from staticllm.compiler_passes.graph.step_graph import named_result, upstream
from staticllm.compiler_passes.lower_encoder import lower_encoder
from staticllm.compiler_passes.pass_pipeline import EncoderOptions
from staticllm.compiler_passes.shapes.select_logits import find_head
from staticllm.core import EncoderMask, EncoderVariant
from staticllm.devices import get_core
from staticllm.errors import UnsupportedModelError
from staticllm.pipelines.diagnostics.reference import EXACT
from staticllm.pipelines.embedding.encoder_runner import EncoderRunner
from staticllm.pipelines.embedding.packing.tokenized_text import TokenizedText

LENGTHS = (9, 5, 1, 8)
CAUSAL = EncoderMask(None, 0)
NO, YES = 7, 9


def read(name, folder):
    return get_core().read_model(unpack(name, folder / name))


def texts():
    rng, start = np.random.default_rng(3), 0
    for length in LENGTHS:
        yield Placed(rng.integers(5, 99, length), 0, start, np.zeros(length, np.int64))
        start += length


def test_an_embedder_with_past_is_packed_like_the_same_one_without(tmp_path):
    lowered = lower_encoder(read("qwen3_with_past", tmp_path))
    assert (lowered.shape.output, lowered.shape.masks, lowered.shape.is_packable) == ("embeddings", (CAUSAL,), True)
    alone = Alone(read("qwen3", tmp_path))
    placed = list(texts())
    vectors = Packed(lowered, EncoderVariant(1, 24, 4))(placed, "last")
    for text, vector in zip(placed, vectors, strict=True):
        assert np.abs(vector - alone(text.ids, "last")).max() <= 1e-6


@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_an_embedder_with_past_has_the_vectors_of_the_stateful_original(tmp_path, chunk):
    model = read("qwen3_with_past", tmp_path)
    (result,) = model.get_results()
    model.add_results([named_result("states", find_head(result).input_value(0))])
    original = get_core().compile_model(model, "CPU", EXACT)
    assert model.get_variables(), "it has states"
    lowered = lower_encoder(read("qwen3_with_past", tmp_path))
    placed = list(texts())
    vectors = Packed(lowered, EncoderVariant(1, 24, 4))(placed, "last")
    for text, vector in zip(placed, vectors, strict=True):
        assert np.abs(vector - unit(last_state(original, text.ids, chunk or len(text.ids)))).max() <= 1e-6


def test_texts_that_begin_alike_share_rows_and_have_the_vectors_of_the_original(tmp_path):
    """A stem, texts that leave it at different tokens, one that ends with it, and one that comes twice."""
    lowered = lower_encoder(read("qwen3_with_past", tmp_path))
    alone = Alone(read("qwen3", tmp_path))
    variant, rng = EncoderVariant(1, 64, 8), np.random.default_rng(8)
    program = get_core().compile_model(lowered.specialise(variant), "CPU", EXACT)
    stem = rng.integers(5, 99, 20)
    sizes = ((20, 9), (20, 3), (14, 6), (9, 11), (20, 0))
    ids = [np.concatenate((stem[:kept], rng.integers(5, 99, more))) for kept, more in sizes]
    texts = [TokenizedText(each) for each in (*ids, ids[0])]
    assert sum(map(len, texts)) > 2 * variant.rows - 10, "they fit only because rows are shared"
    texts.sort(key=lambda text: tuple(text.ids))
    for pooling in ("last", "mean"):
        vectors = EncoderRunner(lowered.shape, {variant: program}, pooling).run(variant, [texts])
        for text, vector in zip(texts, vectors, strict=True):
            assert np.abs(vector - alone(text.ids, pooling)).max() <= 1e-6


def test_a_bias_by_the_distance_of_rows_forbids_shared_beginnings(tmp_path):
    """Texts can be packed then, because the distances within a text are right, but not those to rows of another text."""
    lowered = lower_encoder(read("qwen3", tmp_path))
    assert lowered.shape.shares_prefixes
    model = read("qwen3", tmp_path)
    for node in model.get_ordered_ops():
        if node.get_type_name() == "ScaledDotProductAttention":
            write_out(node)
    biased = lower_encoder(model)
    assert (biased.shape.is_packable, biased.shape.shares_prefixes) == (True, False)
    assert any("not shared" in note for report in biased.reports for note in report.notes)


def test_factors_that_depend_on_the_length_keep_texts_whole_and_apart(tmp_path):
    """As in LongRoPE: a text of more than 20 tokens has other rotary factors, also for its first tokens."""
    model = with_factors_by_length(read("qwen3_with_past", tmp_path), 20)
    lowered = lower_encoder(model.clone())
    assert (lowered.shape.is_packable, lowered.shape.past) == (False, ())
    assert any("one value of the positions" in note for report in lowered.reports for note in report.notes)
    (result,) = model.get_results()
    model.add_results([named_result("states", find_head(result).input_value(0))])
    original, rng = get_core().compile_model(model, "CPU", EXACT), np.random.default_rng(4)
    for length in (8, 20, 21, 24):
        ids = rng.integers(5, 99, length)
        (vector,) = Packed(lowered, EncoderVariant(1, length, 1))(
            [Placed(ids, 0, 0, np.zeros(length, np.int64))], "last"
        )
        assert np.abs(vector - unit(last_state(original, ids, length))).max() <= 1e-6
    plain = lower_encoder(read("qwen3_with_past", tmp_path))
    assert plain.shape.is_packable and plain.shape.past


def with_factors_by_length(model, limit):
    """Let the rotary frequencies depend on the largest position."""
    (rotary,) = [node for node in model.get_ordered_ops() if node.get_type_name() == "MatMul" and is_rotary(node)]
    place = next(index for index in (0, 1) if not depends_on_inputs(rotary.input_value(index).get_node()))
    positions = rotary.input_value(1 - place)
    largest = ops.reduce_max(positions, ops.constant(np.array([0, 1, 2])), False)
    factor = ops.select(ops.greater_equal(largest, ops.constant(np.float32(limit))), np.float32(0.25), np.float32(1.0))
    scaled = ops.multiply(rotary.input_value(place), factor)
    rotary.input(place).replace_source_output(scaled.output(0))
    model.validate_nodes_and_infer_types()
    return model


def is_rotary(node):
    return any("rotary" in each.get_friendly_name() for each in (node, node.input_value(0).get_node())) and (
        depends_on_inputs(node.input_value(0).get_node()) != depends_on_inputs(node.input_value(1).get_node())
    )


def depends_on_inputs(node):
    kinds = {each.get_type_name() for each in upstream([node]) if each.get_type_name() == "Parameter"}
    return bool(kinds)


def write_out(attention):
    """Replace a fused attention by its products, and add -0.1 times the distance of query and key to its scores."""
    query, key, value, mask = (attention.input_value(index) for index in range(4))
    scale = ops.constant(np.float32(query.get_partial_shape()[3].get_length() ** -0.5))
    rows = ops.gather(ops.shape_of(query), ops.constant(2), ops.constant(0))
    places = ops.convert(ops.range(ops.constant(0), rows, ops.constant(1), "i64"), "f32")
    distance = ops.subtract(ops.unsqueeze(places, ops.constant(0)), ops.unsqueeze(places, ops.constant(1)))
    bias = ops.multiply(ops.abs(distance), ops.constant(np.float32(-0.1)))
    scores = ops.add(ops.add(ops.multiply(ops.matmul(query, key, False, True), scale), mask), bias)
    result = ops.matmul(ops.softmax(scores, -1), value, False, False)
    for port in attention.output(0).get_target_inputs():
        port.replace_source_output(result.output(0))


def last_state(program, ids, chunk):
    """Return the hidden state of the last of ``ids``, which the stateful original reads in chunks with the past in its states."""
    request = program.create_infer_request()
    for start in range(0, len(ids), chunk):
        part = ids[start : start + chunk]
        feeds = {
            "input_ids": part[None],
            "attention_mask": np.ones((1, start + len(part)), np.int64),
            "position_ids": np.arange(start, start + len(part))[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        request.infer({name: feeds[name] for port in program.inputs for name in port.get_names()})
    return np.array(request.get_tensor("states").data[0, -1])


@pytest.mark.parametrize("tokens", [(NO, YES), (YES,), (4, 5, 6)])
def test_a_reranker_gives_the_logits_of_its_tokens(tokens, tmp_path):
    options = EncoderOptions(score_tokens=tokens, is_normalised=False)
    lowered = lower_encoder(read("qwen3_with_past", tmp_path), options)
    assert lowered.shape.width == len(tokens)
    placed = list(texts())
    scores = Packed(lowered, EncoderVariant(1, 24, 4))(placed, "last")
    original = get_core().compile_model(read("qwen3_with_past", tmp_path), "CPU", EXACT)
    for text, found in zip(placed, scores, strict=True):
        assert found == pytest.approx(logits_of(original, text.ids)[list(tokens)], abs=5e-6)


def logits_of(program, ids):
    """Return the logits of the stateful original after the last of ``ids``."""
    request, count = program.create_infer_request(), len(ids)
    feeds = {
        "input_ids": ids[None],
        "attention_mask": np.ones((1, count), np.int64),
        "position_ids": np.arange(count)[None],
        "beam_idx": np.zeros(1, np.int32),
    }
    request.infer({name: feeds[name] for port in program.inputs for name in port.get_names()})
    return request.get_tensor("logits").data[0, -1]


def test_logits_without_a_head_are_refused(tmp_path):
    model = read("qwen3_with_past", tmp_path)
    (result,) = model.get_results()
    result.input(0).replace_source_output(ops.softmax(result.input_value(0), -1).output(0))
    with pytest.raises(UnsupportedModelError, match=r"select_output: 'logits' has the shape .* export the model"):
        lower_encoder(model)


def test_a_head_with_a_bias_cannot_compute_a_part(tmp_path):
    model = read("qwen3_with_past", tmp_path)
    (result,) = model.get_results()
    vocabulary = result.get_output_partial_shape(0)[2].get_length()
    bias = ops.constant(np.arange(vocabulary, dtype=np.float32)[None, None])
    result.input(0).replace_source_output(ops.add(result.input_value(0), bias).output(0))
    with pytest.raises(UnsupportedModelError, match="has a bias or a scale per token"):
        lower_encoder(model, EncoderOptions(score_tokens=(NO, YES)))


def test_a_state_without_an_initial_value_is_refused():
    tokens = ops.parameter(ov.PartialShape([-1, -1]), np.int64, name="input_ids")
    tokens.output(0).set_names({"input_ids"})
    info = VariableInfo()
    info.data_shape, info.data_type, info.variable_id = ov.PartialShape([1]), ov.Type.i64, "kept"
    variable = Variable(info)
    kept = ops.read_value(variable)
    states = ops.unsqueeze(ops.convert(ops.add(tokens, kept), "f32"), np.int64(2))
    result = ops.result(states)
    result.output(0).set_names({"last_hidden_state"})
    model = ov.Model([result], [ops.assign(kept, variable)], [tokens], "kept")
    with pytest.raises(UnsupportedModelError, match="drop_past: state 'kept' has no initial value"):
        lower_encoder(model)
