"""Makes a small encoder with a tokenizer, so that texts become vectors."""

from __future__ import annotations

import json
import shutil

import openvino as ov
import openvino_genai as genai
from encoder_models import TinyEncoder, by_distance, symmetric_alibi

from staticllm import demo_model_path


def make_text_encoder(folder):
    """Write an encoder with the demo model's tokenizer, and pooling and prompts in the files of sentence-transformers."""
    for name in ("openvino_tokenizer", "openvino_detokenizer"):
        for suffix in ("xml", "bin"):
            shutil.copy(demo_model_path() / f"{name}.{suffix}", folder)
    vocabulary = genai.Tokenizer(demo_model_path()).get_vocab()
    model = TinyEncoder(by_distance(symmetric_alibi), vocabulary=max(vocabulary.values()) + 1).model()
    ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    (folder / "1_Pooling").mkdir()
    write(folder / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False})
    write(folder / "config_sentence_transformers.json", {"prompts": {"query": "query: ", "document": ""}})
    write(folder / "sentence_bert_config.json", {"max_seq_length": 128})
    return folder


def write(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")
