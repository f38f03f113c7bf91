"""Converts a GGUF file into a model directory, with the reader that OpenVINO brings."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import openvino as ov

from staticllm.errors import ModelError, last_line, quoted, shown
from staticllm.model_files.gguf_architectures import (
    EXPORT,
    attention_scale,
    check_architecture,
    context_length,
    window_of,
)
from staticllm.model_files.gguf_header import GGUFHeader, kinds_of, read_gguf_header
from staticllm.model_paths.path_kind import MODEL_XML, TOKENIZER_XML

from ..gguf import make_stateful
from ..rewrites.join_halves import join_halves
from ..rewrites.rotate_halves import rotate_halves
from .gguf_layers import mend_layers
from .gguf_modules import name_modules
from .gguf_rotation import restore_angles
from .gguf_tokenizer import assumed, build_tokenizer, special_tokens, tool_templates
from .gguf_weights import restore_scales

CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG = "config.json", "generation_config.json", "tokenizer_config.json"
_SIZES = {
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count", "num_attention_heads": "attention.head_count",
}  # fmt: skip
"""Keys of ``config.json``, and those of a file's metadata behind the architecture's name."""


def convert(path: Path, target: Path) -> list[str]:
    """Write the model, its tokenizer and its configuration into a folder. Return what was assumed, each in a line.

    Raises:
        ModelError: the file cannot be read, or its architecture, types of weights or vocabulary are not known.
    """
    header = read_gguf_header(path)
    check_architecture(header)
    tokenizers = build_tokenizer(header)
    model = _read(header)
    for name, each in zip((MODEL_XML, *TOKENIZER_XML), (model, *tokenizers), strict=True):
        _save(each, target / name)
    _write(target / CONFIG, _config(header))
    _write(target / GENERATION_CONFIG, _generation_config(header))
    if templates := tool_templates(header):
        _write(target / TOKENIZER_CONFIG, {"chat_template": templates})
    return assumed(header)


def _save(model: ov.Model, path: Path) -> None:
    """Write a model.

    Raises:
        ModelError: there is no room for it, or it may not be written.
    """
    try:
        ov.save_model(model, path, compress_to_fp16=False)
    except RuntimeError as error:
        free = shutil.disk_usage(path.parent).free
        raise ModelError(
            f"the model cannot be written to {quoted(path.parent.parent)}, which has {free / 1e9:.1f} GB ({last_line(error)}): "
            "free space there, or set XDG_CACHE_HOME to a folder of a larger disk"
        ) from None


def _read(header: GGUFHeader) -> ov.Model:
    from openvino.frontend import FrontEndManager

    what = f"{quoted(header.path)} (architecture {shown(header.architecture)}, {', '.join(kinds_of(header))})"
    os.environ["OV_GGUF_Q4_K_ZP_F16"] = "1"  # or it makes whole numbers of zero points, which cannot be restored
    frontend = FrontEndManager().load_by_framework("gguf")
    if frontend is None:
        raise ModelError(f"the installed OpenVINO {ov.get_version()} has no reader for GGUF: install openvino 2026.4")
    try:
        model = frontend.convert(frontend.load(str(header.path)))
    except RuntimeError as error:
        raise ModelError(f"{what} cannot be read by OpenVINO ({last_line(error)}): {EXPORT}") from None
    restore_scales(model, header)
    restore_angles(model, header)
    mend_layers(model, header)
    make_stateful(model, window_of(header), attention_scale(header))
    join_halves(model)
    rotate_halves(model)
    name_modules(model, header)
    return model


def _config(header: GGUFHeader) -> dict[str, Any]:
    found = {name: header.whole(key) for name, key in _SIZES.items()}
    found["max_position_embeddings"] = context_length(header)
    return {"model_type": header.architecture, **{name: value for name, value in found.items() if value is not None}}


def _generation_config(header: GGUFHeader) -> dict[str, Any]:
    special = special_tokens(header)
    values = {"bos_token_id": special.bos, "eos_token_id": list(special.ends), "pad_token_id": special.pad}
    return {name: value for name, value in values.items() if value not in (None, [])}


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", "utf-8")
