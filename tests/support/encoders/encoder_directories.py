"""Model directories of tiny encoders, with the tokenizer of the demo model, for tests of pipelines and commands."""

import json
import shutil
import zipfile

import openvino as ov
import openvino_genai as genai
from support.encoders.encoder_models import ARCHIVES, TinyEncoder, by_distance, symmetric_alibi, unpack

from staticllm import demo_model_path
from staticllm.pipelines.embedding import encoder_kind

TEXTS = ["a", "What is an NPU?", "Tell me a story about a fox. " * 6, "the", "Ein Satz mit Umlauten: äöü."]


def a_directory(folder):
    """Make the directory of a text embedding model with mean pooling, for texts of up to 128 tokens."""
    add_tokenizer(folder)
    vocabulary = genai.Tokenizer(demo_model_path()).get_vocab()
    model = TinyEncoder(by_distance(symmetric_alibi), vocabulary=max(vocabulary.values()) + 1).model()
    ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 128}))
    return folder


def scores_directory(folder, name="bert_scores"):
    """Make the directory of a tiny cross-encoder; its tokens are not those of the tokenizer."""
    folder.mkdir(exist_ok=True)
    unpack(name, folder)
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 64}))
    return folder


def a_scorer(folder):
    """Make the directory of a cross-encoder with its own tokenizer."""
    scores_directory(folder)
    with zipfile.ZipFile(ARCHIVES / "bert_tokenizer.zip") as archive:
        archive.extractall(folder)
    return folder


def add_tokenizer(folder):
    for name in ("openvino_tokenizer", "openvino_detokenizer"):
        for suffix in ("xml", "bin"):
            shutil.copy(demo_model_path() / f"{name}.{suffix}", folder)


def no_compilation(monkeypatch):
    def refuse(*arguments):
        raise AssertionError("compiled, although there is a set")

    monkeypatch.setattr(encoder_kind.EncoderKind, "plan", refuse)
