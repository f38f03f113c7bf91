"""Makes small Hugging Face models with random weights, what transformers computes with them, and optimum's own exports of them.

Runs in the environment for exports, without staticllm: reference_models.py FOLDER. Each model gets a folder ``NAME``, its
reference ``NAME.npz`` and the exports ``NAME-WEIGHTS``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

SIZES = {
    "vocab_size": 300, "hidden_size": 128, "intermediate_size": 320, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 256, "initializer_range": 0.2, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
"""320 is no multiple of 128: the down projection gets groups of 64."""
DECODERS = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {**GROUPED, "tie_word_embeddings": False}),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {**GROUPED, "tie_word_embeddings": True}),
}
TEXT = "A fox sat on the hill."
NUM_NEW = 16
TEMPLATE = "{% for turn in messages %}[{{ turn.role }}]{{ turn.content }}\n{% endfor %}"
INT4 = {"bits": 4, "ratio": 1.0, "group_size_fallback": "adjust"}
COMPRESSED = {
    "int8": {"bits": 8, "sym": True},
    "int8-asymmetric": {"bits": 8, "sym": False},
    "int4": {**INT4, "sym": True, "group_size": 128, "backup_precision": "int8_sym"},
    "int4-channel": {**INT4, "sym": True, "group_size": -1, "backup_precision": "int8_sym"},
    "int4-64-asymmetric": {**INT4, "sym": False, "group_size": 64, "backup_precision": "int8_asym"},
}
OF_TIED_WEIGHTS = ("int8-asymmetric", "int4")
"""The exports of the model whose head is its table of embeddings; of the other one, all are made."""


def tokenizer():
    """Return a tokenizer of single bytes, with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<s>", "</s>", *alphabet]
    core = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.post_processor = processors.ByteLevel(trim_offsets=False)
    found = transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )
    found.chat_template = TEMPLATE
    return found


def make_decoder(name, folder):
    config, kind, sizes = DECODERS[name]
    torch.manual_seed(7)
    model = kind(config(**sizes)).eval()
    words = tokenizer()
    model.save_pretrained(folder / name)
    words.save_pretrained(folder / name)
    ids = words(TEXT, return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(ids).logits[0].numpy()
        tokens = model.generate(ids, max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW, do_sample=False)[0, ids.shape[1] :]
    chat = words.apply_chat_template([{"role": "user", "content": TEXT}], tokenize=False)
    np.savez(folder / f"{name}.npz", ids=ids[0].numpy(), logits=logits, tokens=tokens.numpy(), chat=chat)
    sys.modules["openvino_telemetry"] = None  # it forks and reports
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    for weights in OF_TIED_WEIGHTS if sizes["tie_word_embeddings"] else COMPRESSED:
        compression = COMPRESSED[weights]
        config = OVWeightQuantizationConfig(**compression)
        exported = OVModelForCausalLM.from_pretrained(
            str(folder / name), export=True, compile=False, quantization_config=config
        )
        exported.save_pretrained(folder / f"{name}-{weights}")


def make_encoder(folder):
    """A sentence-transformer: a BERT with mean pooling and normalisation."""
    torch.manual_seed(8)
    config = transformers.BertConfig(**{name: value for name, value in SIZES.items() if "_token_id" not in name})
    model = transformers.BertModel(config).eval()
    words = tokenizer()
    place = folder / "encoder"
    model.save_pretrained(place)
    words.save_pretrained(place)
    modules = ["Transformer", "Pooling", "Normalize"]
    paths = ["", "1_Pooling", "2_Normalize"]
    listed = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for number, (kind, path) in enumerate(zip(modules, paths, strict=True))
    ]
    (place / "modules.json").write_text(json.dumps(listed))
    (place / "config_sentence_transformers.json").write_text(json.dumps({"prompts": {"query": "q: ", "document": ""}}))
    for path in paths[1:]:
        (place / path).mkdir()
    pooling = {"word_embedding_dimension": SIZES["hidden_size"], "pooling_mode_mean_tokens": True}
    (place / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    with torch.no_grad():
        states = model(words(f"q: {TEXT}", return_tensors="pt").input_ids).last_hidden_state[0]
    vector = torch.nn.functional.normalize(states.mean(0), dim=0)
    np.savez(folder / "encoder.npz", query=vector.numpy())


def make_reranker(folder):
    """A BERT with one label, whose sigmoid is the score of a pair."""
    torch.manual_seed(9)
    sizes = {name: value for name, value in SIZES.items() if "_token_id" not in name}
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**sizes, num_labels=1)).eval()
    words = tokenizer()
    words.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    model.save_pretrained(folder / "reranker")
    words.save_pretrained(folder / "reranker")
    pairs = [words("fox", text, return_tensors="pt", return_token_type_ids=True) for text in ("A fox.", "Rain.")]
    with torch.no_grad():
        scores = [torch.sigmoid(model(**pair).logits[0, 0]).item() for pair in pairs]
    np.savez(folder / "reranker.npz", scores=np.array(scores))


if __name__ == "__main__":
    place = Path(sys.argv[1])
    for each in DECODERS:
        make_decoder(each, place)
    make_encoder(place)
    make_reranker(place)
