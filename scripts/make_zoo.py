"""Makes tiny exports of architectures, with random weights from a seed, to see whether staticllm runs them.

    pip install ".[train]"
    python scripts/make_zoo.py zoo mamba mpt qwen3_next
    python scripts/make_zoo.py zoo my_arch --set num_hidden_layers=6 --set layer_types='["conv", "full_attention"]'
    staticllm verify zoo/mamba

A name is a ``model_type`` of transformers. Sizes are small and the same for all; ``--set`` changes one. If an architecture has
another name for a size, set it by that name. The tokenizer is the demo model's. An architecture that transformers or
optimum-intel cannot export is reported and skipped.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

SEED, SPREAD = 0, 4.0
"""The factor on linear layers; with the usual initial weights, a tiny model would repeat one token."""
DEMO_DIR = Path(__file__).resolve().parent.parent / "staticllm" / "demo_model"
SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "sliding_window": 32,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
"""The sizes that nearly every config has, by the names that transformers maps to its own."""


def make(name: str, target: Path, changes: dict[str, Any]) -> None:
    """Make one model directory, completely or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=target.parent, ignore_cleanup_errors=True) as folder:
        scratch = Path(folder)
        save_random(name, scratch / "torch", changes)
        export(scratch / "torch", scratch / "openvino")
        (scratch / "openvino").rename(target)


def save_random(name: str, folder: Path, changes: dict[str, Any]) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(SEED)
    known = AutoConfig.for_model(name)
    sizes = {key: value for key, value in SIZES.items() if can_be_set(known, key)}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **{**sizes, **changes})).eval()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):  # not the parameters of a recurrence
                module.weight.mul_(SPREAD)
    model.save_pretrained(folder)


def can_be_set(config: Any, key: str) -> bool:
    """Return whether an architecture has this size and does not derive it from others."""
    return hasattr(config, key) and not isinstance(getattr(type(config), key, None), property)


def export(source: Path, target: Path, dtype: str = "fp16") -> None:
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    target.mkdir()
    config = OVConfig(dtype=dtype)
    main_export(str(source), str(target), task="text-generation-with-past", ov_config=config, convert_tokenizer=False)
    for stem in ("openvino_tokenizer", "openvino_detokenizer"):
        for suffix in (".xml", ".bin"):
            shutil.copy(DEMO_DIR / f"{stem}{suffix}", target)


def setting(text: str) -> tuple[str, Any]:
    """Parse ``name=value``; the value is read as JSON if it is JSON."""
    name, found, value = text.partition("=")
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: must be NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the model directories go")
    parser.add_argument("names", nargs="+", metavar="name", help="model_type of an architecture")
    parser.add_argument("--set", dest="changes", type=setting, action="append", default=[], metavar="NAME=VALUE")
    options = parser.parse_args()
    failed = 0
    for name in options.names:
        if (options.folder / name).is_dir():
            print(f"{name}: is there")
            continue
        try:
            make(name, options.folder / name, dict(options.changes))
            print(f"{name}: made")
        except ImportError as error:
            sys.exit(f"{error.name} is missing: pip install '.[train]' in the checkout")
        except Exception as error:  # from transformers, torch or optimum; the other architectures are still made
            failed += 1
            print(f"{name}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}", file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
