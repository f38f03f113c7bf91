"""Makes the models for benchmarks, with real shapes and random weights from a seed; nothing is downloaded.

    pip install ".[train]"
    python scripts/make_bench_model.py                 # a Qwen2-0.5B-shaped model, int8
    python scripts/make_bench_model.py llama-1b        # a Llama-1B-shaped model, int4
    python scripts/make_bench_model.py qwen2.5-3b      # a Qwen2.5-3B-shaped model, int4: 20 GB of memory
    python scripts/make_bench_model.py npu-int4-g128   # one of the models of npu_table.py

The script prints the model's directory. A complete model is not made again. Benchmarks pass token ids, so the tokenizer of the
demo model is used for every vocabulary.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SEED = 0
TOKENIZER = ("openvino_tokenizer", "openvino_detokenizer")
DEMO_DIR = Path(__file__).resolve().parent.parent / "staticllm" / "demo_model"


@dataclass(frozen=True)
class Shape:
    """An architecture of ``transformers`` with its config, and how optimum compresses its weights."""

    architecture: str
    compression: dict[str, Any]
    config: dict[str, Any]


QWEN2 = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
FEW_TOKENS = {**QWEN2, "vocab_size": 4096}
"""For predictions: the head of a large vocabulary would hide what the layers take."""
INT4 = {"bits": 4, "ratio": 1.0}
SHAPES = {
    "qwen2-0.5b": Shape("Qwen2", {"bits": 8}, QWEN2),
    "llama-1b": Shape(
        "Llama",
        {"bits": 4, "group_size": 128},
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "vocab_size": 128256,
            "max_position_embeddings": 131072,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2.5-3b": Shape(
        "Qwen2",
        {"bits": 4, "group_size": 128},
        {
            **QWEN2,
            "hidden_size": 2048,
            "intermediate_size": 11008,
            "num_hidden_layers": 36,
            "num_attention_heads": 16,
        },
    ),
}
NPU_SHAPES = {
    "npu-int8": Shape("Qwen2", {"bits": 8}, FEW_TOKENS),
    "npu-int4": Shape("Qwen2", {**INT4, "sym": True, "group_size": -1}, FEW_TOKENS),
    "npu-int4-g128": Shape("Qwen2", {**INT4, "sym": True, "group_size": 128}, FEW_TOKENS),
}
"""The models of `npu_table.py`."""


def cache_dir() -> Path:
    """Return the folder of the models: ``STATICLLM_BENCH_DIR``, or a folder in the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "staticllm" / "bench"
    return Path(os.environ.get("STATICLLM_BENCH_DIR", default))


def make(name: str) -> Path:
    """Return the directory of a model, which is made completely or not at all if it is missing."""
    target = cache_dir() / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=target.parent))
    try:
        export({**SHAPES, **NPU_SHAPES}[name], scratch / "torch", scratch / "openvino")
        (scratch / "openvino").rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def export(shape: Shape, torch_dir: Path, target: Path) -> None:
    """Save random weights with transformers, and export and compress them with optimum-intel, like a user's model."""
    import torch
    import transformers
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    torch.manual_seed(SEED)
    config = getattr(transformers, f"{shape.architecture}Config")(**shape.config)
    model = getattr(transformers, f"{shape.architecture}ForCausalLM")(config).to(torch.float16)
    model.save_pretrained(torch_dir)
    del model
    compression = OVWeightQuantizationConfig(**shape.compression)
    OVModelForCausalLM.from_pretrained(torch_dir, export=True, quantization_config=compression).save_pretrained(target)
    for stem in TOKENIZER:
        for suffix in (".xml", ".bin"):
            shutil.copy(DEMO_DIR / f"{stem}{suffix}", target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", default="qwen2-0.5b", choices=sorted({**SHAPES, **NPU_SHAPES}))
    try:
        print(make(parser.parse_args().name))
    except ImportError as error:
        sys.exit(f"{error.name} is missing: pip install '.[train]' in the checkout")


if __name__ == "__main__":
    main()
