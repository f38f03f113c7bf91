"""Compares vectors with sentence-transformers on tiny random models, with prompts, lower case and truncation of their files.

It needs the environment of ``scripts/test_attached.py``.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

from staticllm import StaticEmbeddingPipeline

torch = pytest.importorskip("torch", reason="python scripts/test_attached.py")
transformers = pytest.importorskip("transformers", reason="python scripts/test_attached.py")
sentences = pytest.importorskip("sentence_transformers", reason="python scripts/test_attached.py")
modules_of = pytest.importorskip("sentence_transformers.models", reason="python scripts/test_attached.py")
pytest.importorskip("optimum.intel", reason="python scripts/test_attached.py")

WORDS = [
    "the",
    "a",
    "fox",
    "asks",
    "what",
    "device",
    "is",
    "and",
    "why",
    "it",
    "only",
    "runs",
    "graphs",
    "of",
    "query",
    "passage",
    "find",
    "text",
    ":",
    ".",
    ",",
    "?",
    "x",
]
SPECIAL = ["[CLS]", "[PAD]", "[SEP]", "[UNK]", "[MASK]"]
TEXTS = ["a", "what is a device?", "the fox asks why it only runs graphs, " * 6, "The FOX runs.", "what, is: a text?"]
SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "pad_token_id": 1,
}
ARCHITECTURES = {
    "Bert": SMALL, "Roberta": SMALL, "XLMRoberta": SMALL, "MPNet": SMALL, "Electra": {**SMALL, "embedding_size": 16},
    "Albert": {**SMALL, "embedding_size": 16}, "Camembert": SMALL,
    "RoFormer": {**SMALL, "embedding_size": 32},
    "DistilBert": {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 48, "pad_token_id": 1},
}  # fmt: skip
"""Nine architectures by the names of transformers, which are only used to make models."""
PROMPTS = {"query": "query: ", "passage": "passage: ", "document": "", "find": "find X: "}
MODES = ["mean", "cls", "lasttoken", "weightedmean", "mean_sqrt_len_tokens"]


def make_tokenizer():
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    vocabulary = {word: index for index, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 0))
    names = dict(zip(("cls_token", "pad_token", "sep_token", "unk_token", "mask_token"), SPECIAL, strict=True))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)


def write(path, content):
    path.write_text(json.dumps(content), encoding="utf-8")


def make_model(folder, name, mode, is_lower_cased):
    """Save a random model for sentence-transformers, and its OpenVINO export with the same files."""
    import openvino as ov
    from openvino_tokenizers import convert_tokenizer
    from optimum.intel import OVModelForFeatureExtraction

    torch.manual_seed(len(name))
    hf, exported, tokenizer = folder / "hf", folder / "ov", make_tokenizer()
    config = getattr(transformers, f"{name}Config")(
        vocab_size=len(SPECIAL) + len(WORDS), max_position_embeddings=80, **ARCHITECTURES[name]
    )
    getattr(transformers, f"{name}Model")(config).eval().save_pretrained(hf)
    tokenizer.save_pretrained(hf)
    write(hf / "sentence_bert_config.json", {"max_seq_length": 24, "do_lower_case": is_lower_cased})
    transformer = modules_of.Transformer(
        str(hf), max_seq_length=24, **({"do_lower_case": True} if is_lower_cased else {})
    )
    modules = [transformer, modules_of.Pooling(32, pooling_mode=mode), modules_of.Normalize()]
    model = sentences.SentenceTransformer(modules=modules, device="cpu", prompts=PROMPTS, default_prompt_name="find")
    OVModelForFeatureExtraction.from_pretrained(hf, export=True, compile=False).save_pretrained(exported)
    for kind, program in zip(
        ("tokenizer", "detokenizer"), convert_tokenizer(tokenizer, with_detokenizer=True), strict=True
    ):
        ov.save_model(program, exported / f"openvino_{kind}.xml")
    model.save(str(folder / "saved"))
    for file in ("modules.json", "config_sentence_transformers.json", "1_Pooling/config.json"):
        (exported / file).parent.mkdir(exist_ok=True)
        (exported / file).write_bytes((folder / "saved" / file).read_bytes())
    write(exported / "sentence_bert_config.json", {"max_seq_length": 24, "do_lower_case": is_lower_cased})
    return model, exported


@pytest.mark.parametrize("number", range(len(ARCHITECTURES)))
def test_vectors_are_those_of_sentence_transformers(tmp_path, number):
    name = list(ARCHITECTURES)[number]
    model, exported = make_model(tmp_path, name, MODES[number % len(MODES)], is_lower_cased=number % 2 == 0)
    with StaticEmbeddingPipeline(exported, "CPU", INFERENCE_PRECISION_HINT="f32") as pipe:
        for found, expected in (
            (pipe.encode(TEXTS), model.encode(TEXTS)),
            (pipe.encode(TEXTS, prompt=""), model.encode(TEXTS, prompt="")),
            (pipe.encode(TEXTS, prompt=pipe.prompts["query"]), model.encode_query(TEXTS)),
            (pipe.embed_documents(TEXTS, as_array=True), model.encode(TEXTS, prompt_name="passage")),
            (pipe.encode(TEXTS, dimensions=8), model.encode(TEXTS, truncate_dim=8, normalize_embeddings=True)),
        ):
            np.testing.assert_allclose(found, expected, atol=2e-6, rtol=0)
    assert np.abs(model.encode(TEXTS) - model.encode(TEXTS, prompt="")).max() > 1e-3, "the default prompt counts"
