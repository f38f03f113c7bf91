"""Makes tiny encoders with random weights, exported as users export them, one .zip each, for the tests of encoders.

    pip install ".[train]"
    python scripts/make_encoder_zoo.py tests/_encoders
    python scripts/make_encoder_zoo.py tests/_encoders bert modernbert

Weights are multiples of 1/16 from a seed, so that the archives are small. An exported model gives the same bytes again; in a
converted one, the numbers in the names of nodes depend on what the process converted before. optimum-intel exports what it
knows; OpenVINO converts the others from torch.
"""

from __future__ import annotations

import argparse
import tempfile
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SEED, GRID = 0, 16
STAMP = (2026, 1, 1, 0, 0, 0)
"""The date of every file in an archive, which would differ otherwise."""
SIZES: dict[str, Any] = {
    "vocab_size": 100, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 140, "pad_token_id": 1, "bos_token_id": 2,
    "eos_token_id": 3,
}  # fmt: skip


SCORES = "AutoModelForSequenceClassification"
TASKS = {
    "AutoModel": "feature-extraction",
    "AutoModelForCausalLM": "text-generation-with-past",
    SCORES: "text-classification",
}


@dataclass(frozen=True)
class Recipe:
    """How one model is made. ``head``: the class of transformers. ``is_exported``: by optimum-intel, else by OpenVINO."""

    model_type: str
    changes: dict[str, Any] = field(default_factory=dict)
    head: str = "AutoModel"
    is_exported: bool = True


MODERN = {"local_attention": 16, "global_attn_every_n_layers": 2, "cls_token_id": 2, "sep_token_id": 3}
RECIPES = {
    "bert": Recipe("bert"),
    "roberta": Recipe("roberta"),
    "xlm_roberta": Recipe("xlm-roberta"),
    "mpnet": Recipe("mpnet"),
    "distilbert": Recipe("distilbert", {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}),
    "electra": Recipe("electra", {"embedding_size": 16}),
    "albert": Recipe("albert", {"embedding_size": 16}),
    "deberta": Recipe(
        "deberta-v2", {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
    ),
    "modernbert": Recipe("modernbert", MODERN, is_exported=False),
    "nomic_bert": Recipe("nomic_bert", is_exported=False),
    "eurobert": Recipe("eurobert", is_exported=False),
    "jina_v3": Recipe("jina_embeddings_v3", is_exported=False),
    "t5": Recipe(
        "t5",
        {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4},
        "T5EncoderModel",
        is_exported=False,
    ),
    "roformer": Recipe("roformer"),
    "convbert": Recipe("convbert", {"embedding_size": 32}),
    "qwen3": Recipe("qwen3"),
    "qwen3_with_past": Recipe("qwen3", head="AutoModelForCausalLM"),
    "qwen3_scores": Recipe("qwen3", {"num_labels": 1, "pad_token_id": 0}, SCORES),
    "bert_scores": Recipe("bert", {"num_labels": 1}, SCORES),
    "xlm_roberta_scores": Recipe("xlm-roberta", {"num_labels": 2}, SCORES),
    "modernbert_scores": Recipe(
        "modernbert", {**MODERN, "num_labels": 1, "classifier_pooling": "mean"}, SCORES, is_exported=False
    ),
}


def make(name: str, target: Path) -> int:
    """Make one archive, and return its size in bytes."""
    recipe = RECIPES[name]
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        model = random_model(recipe)
        (export if recipe.is_exported else convert)(model, recipe, scratch)
        pack(scratch, target / f"{name}.zip")
    return (target / f"{name}.zip").stat().st_size


def random_model(recipe: Recipe) -> Any:
    import torch
    import transformers
    from transformers import AutoConfig

    known = AutoConfig.for_model(recipe.model_type)
    sizes = {key: value for key, value in SIZES.items() if can_be_set(known, key)}
    config = AutoConfig.for_model(recipe.model_type, **{**sizes, **recipe.changes})
    kind = getattr(transformers, recipe.head)
    torch.manual_seed(SEED)
    model = (kind.from_config(config) if recipe.head in TASKS else kind(config)).eval()
    random = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.3 if parameter.dim() > 1 else 0.2
            noise = torch.randn(parameter.shape, generator=random) * spread
            values = noise if parameter.dim() > 1 else parameter + noise
            parameter.copy_((values * GRID).round() / GRID)
    return model


def can_be_set(config: Any, key: str) -> bool:
    """Return whether an architecture has this size and does not derive it from others."""
    return hasattr(config, key) and not isinstance(getattr(type(config), key, None), property)


def export(model: Any, recipe: Recipe, target: Path) -> None:
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    model.save_pretrained(target / "torch")
    main_export(
        str(target / "torch"),
        str(target),
        task=TASKS[recipe.head],
        ov_config=OVConfig(dtype="fp16"),
        convert_tokenizer=False,
    )


def convert(model: Any, recipe: Recipe, target: Path) -> None:
    import openvino as ov
    import torch

    names = ("input_ids", "attention_mask")
    example = {"input_ids": torch.full((2, 9), 5), "attention_mask": torch.ones((2, 9), dtype=torch.int64)}
    axes = {0: torch.export.Dim("batch", min=1, max=64), 1: torch.export.Dim("rows", min=2, max=128)}
    program = torch.export.export(model, (), example, dynamic_shapes=dict.fromkeys(names, axes), strict=False)
    converted = ov.convert_model(program)
    converted.outputs[0].set_names({"logits" if recipe.head == SCORES else "last_hidden_state"})
    ov.save_model(converted, target / "openvino_model.xml")


def pack(folder: Path, target: Path) -> None:
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for suffix in (".xml", ".bin"):
            info = zipfile.ZipInfo(f"openvino_model{suffix}", STAMP)
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, (folder / f"openvino_model{suffix}").read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the archives go")
    parser.add_argument("names", nargs="*", default=list(RECIPES), metavar="name", help="which models; default: all")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    for name in options.names:
        try:
            print(f"{name}: {make(name, options.folder)} bytes", flush=True)
        except Exception as error:
            print(f"{name}: {type(error).__name__}: {str(error)[:600]}", flush=True)


if __name__ == "__main__":
    main()
