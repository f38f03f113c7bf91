"""Tests encoders that pool by themselves: their only output is one vector per text."""

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops
from support.encoders.encoder_models import HEADS, Alone, Packed, TinyEncoder, some_texts, unpack

from staticllm.compiler_passes.lower_encoder import lower_encoder
from staticllm.compiler_passes.pass_pipeline import EncoderOptions
from staticllm.compiler_passes.shapes.add_pooling import Dense
from staticllm.core import EncoderVariant
from staticllm.devices import get_core
from staticllm.errors import UnsupportedModelError
from staticllm.pipelines.diagnostics.reference import EXACT


def mean(hidden, mask):
    shown = ops.broadcast(ops.convert(ops.unsqueeze(mask, ops.constant(-1)), "f32"), ops.shape_of(hidden))
    total = ops.reduce_sum(ops.multiply(hidden, shown), np.array([1]))
    return ops.divide(total, ops.clamp(ops.reduce_sum(shown, np.array([1])), 1e-9, 1e9))


def first(hidden, mask):
    return ops.gather(hidden, ops.constant(np.int64(0)), ops.constant(np.int64(1)))


def largest(hidden, mask):
    return ops.reduce_max(hidden, np.array([1]))


def pooling_model(name, folder, pool):
    """Return an encoder whose only output is the normalised vector of a text, through a Dense layer in the graph."""
    model = get_core().read_model(unpack(name, folder))
    (result,) = model.get_results()
    (mask,) = [port.get_node() for port in model.inputs if "attention_mask" in port.get_names()]
    weights = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
    vector = ops.tanh(ops.matmul(pool(result.input_value(0), mask), ops.constant(weights), False, True))
    found = ops.result(ops.normalize_l2(vector, np.array([-1]), 1e-12, "max"))
    found.output(0).set_names({"sentence_embedding"})
    model.remove_result(result)
    model.add_results([found])
    model.validate_nodes_and_infer_types()
    return model


@pytest.mark.parametrize("name", ["bert", "modernbert", "t5"])
@pytest.mark.parametrize(("pool", "kind"), [(mean, "mean"), (first, "first")])
def test_texts_together_have_the_vectors_of_each_alone(tmp_path, name, pool, kind):
    alone = Alone(pooling_model(name, tmp_path, pool))
    dense = (Dense(np.zeros((3, 16), np.float32)),)  # is in the graph already: not applied again
    lowered = lower_encoder(alone.model.clone(), EncoderOptions(max_rows=64, dense=dense))
    assert (lowered.shape.output, lowered.shape.width, lowered.shape.pooling) == ("embeddings", 16, kind)
    assert lowered.shape.is_packable
    variant = EncoderVariant(2, 24, 8)
    texts = some_texts(np.random.default_rng(1), lowered.shape, variant)
    assert len(texts) > 2
    expected = [alone(text.ids, kind) for text in texts]
    assert np.abs(Packed(lowered, variant)(texts, kind) - expected).max() < 2e-6


def test_a_pooling_that_is_no_product_is_refused_in_one_line(tmp_path):
    with pytest.raises(UnsupportedModelError, match="neither the first token, the last, nor the mean") as error:
        lower_encoder(pooling_model("bert", tmp_path, largest))
    assert "\n" not in str(error.value)


def test_a_shared_program_of_one_size_has_no_static_rows_where_they_are_as_many_as_heads():
    lowered = lower_encoder(TinyEncoder().model(), EncoderOptions(max_rows=64))
    variant = EncoderVariant(1, HEADS, 1)
    assert HEADS in lowered.shape.unsafe_rows
    shared = lowered.share((variant,))
    assert all(port.get_partial_shape().is_dynamic for port in shared.inputs)
    assert lowered.share((EncoderVariant(1, HEADS + 1, 1),)).input("input_ids").get_partial_shape().is_static
    ids = np.arange(HEADS)[None] + 5
    feeds = {"input_ids": ids, "mask.full": np.zeros((1, 1, HEADS, HEADS), np.float32)}
    feeds["pool"] = np.full((1, HEADS), 1 / HEADS, np.float32)
    found = get_core().compile_model(shared, "CPU", EXACT)(feeds)[0]
    assert np.abs(found[0] - Alone(TinyEncoder().model())(ids[0], "mean")).max() < 1e-6
    assert isinstance(shared, ov.Model)


@pytest.mark.parametrize("padding", [0, 1, 7])
def test_a_graph_that_looks_for_its_last_token_by_the_padding_id_pools_the_last(tmp_path, padding):
    model = get_core().read_model(unpack("qwen3_scores", tmp_path))
    (search,) = [node for node in model.get_ops() if node.get_type_name() == "NotEqual"]
    search.input(1).replace_source_output(ops.constant(np.full((1, 1), padding, np.int64)).output(0))
    alone = Alone(model)
    lowered = lower_encoder(model.clone(), EncoderOptions(max_rows=64))
    assert (lowered.shape.output, lowered.shape.width, lowered.shape.pooling) == ("scores", 1, "last")
    assert lowered.shape.is_packable
    variant = EncoderVariant(2, 24, 8)
    texts = [t for t in some_texts(np.random.default_rng(1), lowered.shape, variant) if t.ids[-1] != padding]
    expected = [alone(text.ids, "last") for text in texts]
    assert np.abs(Packed(lowered, variant)(texts, "last") - expected).max() < 2e-6
