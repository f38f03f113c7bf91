"""Tests decoders whose head is cut: their programs return the hidden states that the same model returns as an embedder."""

from __future__ import annotations

import numpy as np
import pytest
from support.encoders.encoder_models import HIDDEN, Alone, unit, unpack

from staticllm.compiler_passes.decoder import DECODER_EMBEDDER
from staticllm.compiler_passes.inputs.classify_mask import visible_cells
from staticllm.compiler_passes.lower import lower
from staticllm.compiler_passes.pass_pipeline import LoweringOptions
from staticllm.core import Variant
from staticllm.devices import get_core
from staticllm.errors import UnsupportedModelError
from staticllm.pipelines.diagnostics.reference import EXACT

CHUNK = 6


def read(name, tmp_path):
    return get_core().read_model(unpack(name, tmp_path / name))


def lowered(tmp_path, **options):
    return lower(read("qwen3_with_past", tmp_path), LoweringOptions(64, **options), DECODER_EMBEDDER)


def run_in_chunks(model, ids):
    """Return the embedding after the last of ``ids``, whose tokens run in chunks of ``CHUNK`` over the slots before them."""
    past = {
        state.past_name: np.zeros((1, state.heads, 0, state.head_dim), np.float32) for state in model.shape.kv_states
    }
    embedding = None
    for start in range(0, len(ids), CHUNK):
        chunk = ids[start : start + CHUNK]
        program = get_core().compile_model(model.specialise(Variant(len(chunk), start)), "CPU", EXACT)
        mask = np.where(visible_cells(start, len(chunk), None), 0, HIDDEN).astype(np.float32)
        feeds = {
            "input_ids": chunk[None],
            "position_ids": np.arange(start, start + len(chunk))[None],
            "mask.causal": mask[None, None],
            "logit_rows": np.array([len(chunk) - 1]),
            **(past if start else {}),
        }
        values = {port.get_any_name(): value for port, value in program(feeds).to_dict().items()}
        for state in model.shape.kv_states:
            past[state.past_name] = np.concatenate([past[state.past_name], values[state.present_name]], axis=2)
        embedding = values["embeddings"]
    assert embedding.shape == (1, 1, model.shape.vocab_size)
    return embedding[0, 0]


@pytest.mark.parametrize("length", [1, 6, 16])
def test_a_decoder_without_its_head_returns_the_embedding_of_the_last_token(length, tmp_path):
    alone = Alone(read("qwen3", tmp_path))
    ids = np.random.default_rng(length).integers(5, 99, length)
    embedding = run_in_chunks(lowered(tmp_path), ids)
    assert np.abs(embedding - alone(ids, "last")).max() <= 1e-6


def test_embeddings_keep_their_length_if_that_is_asked_for(tmp_path):
    ids = np.arange(5, 11)
    plain = run_in_chunks(lowered(tmp_path, is_normalised=False), ids)
    assert np.linalg.norm(plain) > 1.5
    assert np.abs(unit(plain) - run_in_chunks(lowered(tmp_path), ids)).max() <= 1e-6


def test_a_model_without_a_head_is_refused(tmp_path):
    model = read("qwen3_with_past", tmp_path)
    (port,) = (port for port in model.outputs if "logits" in port.get_names())
    port.get_tensor().set_names({"states"})
    with pytest.raises(UnsupportedModelError, match="cut_head: the model has no output 'logits'"):
        lower(model, LoweringOptions(64), DECODER_EMBEDDER)
