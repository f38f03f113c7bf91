"""Compares the weights of poolings with sentence-transformers' Pooling module (``pip install sentence-transformers``)."""

from __future__ import annotations

import json

import numpy as np
import pytest

from staticllm.pipelines.embedding.encoder_files import POOLINGS, read_encoder_files
from staticllm.pipelines.embedding.packing.encoder_buffers import pooling_weights

torch = pytest.importorskip("torch", reason="pip install sentence-transformers")
models = pytest.importorskip("sentence_transformers.models", reason="pip install sentence-transformers")
MODES = ["cls", "mean", "lasttoken", "mean_sqrt_len_tokens", "weightedmean"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("length", "num_prompt"), [(1, 0), (7, 0), (7, 3), (7, 6)])
def test_a_product_with_the_weights_is_the_module(mode, length, num_prompt):
    states = np.random.default_rng(length).normal(size=(length, 5)).astype(np.float32)
    pooling = models.Pooling(5, pooling_mode=mode, include_prompt=False)
    features = {
        "token_embeddings": torch.tensor(states[None]),
        "attention_mask": torch.ones((1, length), dtype=torch.int64),
        "prompt_length": num_prompt,
    }
    expected = pooling(features)["sentence_embedding"][0].numpy()
    np.testing.assert_allclose(pooling_weights(POOLINGS[mode], length, num_prompt) @ states, expected, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_a_file_of_the_module_is_read(tmp_path, mode):
    pooling = models.Pooling(5, pooling_mode=mode, include_prompt=False)
    (tmp_path / "1_Pooling").mkdir()
    pooling.save(str(tmp_path / "1_Pooling"))
    assert json.loads((tmp_path / "1_Pooling" / "config.json").read_text())["pooling_mode"] == mode
    found = read_encoder_files(tmp_path)
    assert (found.pooling, found.is_prompt_pooled) == (POOLINGS[mode], False)
