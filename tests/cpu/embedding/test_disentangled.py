"""An encoder with DeBERTa's first attention, whose table of places grows with the text, gives the vectors of the original."""

import json

import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest
from support.encoders.disentangled import Disentangled
from support.encoders.encoder_directories import TEXTS, add_tokenizer
from support.encoders.encoder_models import Alone

from staticllm import StaticEmbeddingPipeline, demo_model_path


@pytest.mark.parametrize("programs", ["shared", "separate"])
def test_vectors_are_those_of_the_original(tmp_path, programs):
    tokenizer = genai.Tokenizer(demo_model_path())
    encoder = Disentangled(True, vocabulary=max(tokenizer.get_vocab().values()) + 1)
    add_tokenizer(tmp_path)
    ov.save_model(encoder.model(), tmp_path / "openvino_model.xml", compress_to_fp16=False)
    (tmp_path / "1_Pooling").mkdir()
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 64}))
    alone = Alone(encoder.model())
    with StaticEmbeddingPipeline(tmp_path, "CPU", PROGRAMS=programs, INFERENCE_PRECISION_HINT="f32") as pipe:
        found = pipe.encode(TEXTS)
        ids = [text.ids for text in pipe._tokenizer.encode(TEXTS)]
    expected = np.array([alone(each, "mean") for each in ids])
    assert np.abs(found - expected).max() < 5e-6
