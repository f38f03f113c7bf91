"""Reads a Whisper model of CTranslate2, and writes it as transformers' `WhisperForConditionalGeneration`.

A ``model.bin`` of version 6 has, in little endian: the version (u32); the name and the revision (u32) of the specification; the
number of variables (u32), and for each its name, rank (u8), sizes (u32 each), element type (u8), number of bytes (u32) and bytes;
at last aliases of variables. A name has its length (u16) before it and a zero at its end. Projections of the same rows are one
layer: queries, keys and values of self-attention, keys and values of cross-attention.
"""

from __future__ import annotations

import json
import re
import struct
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

Weights = dict[str, NDArray[Any]]

VERSION, SPECIFICATION = 6, "WhisperSpec"
TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
NUM_FRAMES = 3000
"""Mel frames of a window of 30 s."""
NAMES = (
    (r"embeddings/weight", ("embed_tokens.weight",)),
    (r"position_encodings/encodings", ("embed_positions.weight",)),
    (r"(conv\d)/(\w+)", (r"\1.\2",)),
    (r"(layer_norm)/(\w+)", (r"\1.\2",)),
    (r"layer_(\d+)/self_attention/linear_0/(\w+)", tuple(rf"layers.\1.self_attn.{kind}_proj.\2" for kind in "qkv")),
    (r"layer_(\d+)/self_attention/linear_1/(\w+)", (r"layers.\1.self_attn.out_proj.\2",)),
    (r"layer_(\d+)/self_attention/layer_norm/(\w+)", (r"layers.\1.self_attn_layer_norm.\2",)),
    (r"layer_(\d+)/attention/linear_0/(\w+)", (r"layers.\1.encoder_attn.q_proj.\2",)),
    (r"layer_(\d+)/attention/linear_1/(\w+)", tuple(rf"layers.\1.encoder_attn.{kind}_proj.\2" for kind in "kv")),
    (r"layer_(\d+)/attention/linear_2/(\w+)", (r"layers.\1.encoder_attn.out_proj.\2",)),
    (r"layer_(\d+)/attention/layer_norm/(\w+)", (r"layers.\1.encoder_attn_layer_norm.\2",)),
    (r"layer_(\d+)/ffn/linear_0/(\w+)", (r"layers.\1.fc1.\2",)),
    (r"layer_(\d+)/ffn/linear_1/(\w+)", (r"layers.\1.fc2.\2",)),
    (r"layer_(\d+)/ffn/layer_norm/(\w+)", (r"layers.\1.final_layer_norm.\2",)),
)
"""Name of CTranslate2 after ``encoder/`` or ``decoder/`` → those of transformers; joined layers lie one after another."""


def write_transformers(source: Path, target: Path) -> None:
    """Write a model directory of transformers, in f32, from a folder with CTranslate2's ``model.bin`` and ``tokenizer.json``.

    Exits with a line if the file is of another version or model.
    """
    with (source / "model.bin").open("rb") as file:
        variables = _variables(file)
    weights = dict(_renamed(variables))
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    tokens = {entry["content"]: entry["id"] for entry in _read(source / "tokenizer.json")["added_tokens"]}
    has = _read(source / "config.json")
    _write(target / "config.json", _config(variables, weights, tokens))
    _write(target / "generation_config.json", _generation_config(has, weights, tokens))
    _write(target / "preprocessor_config.json", _preprocessor_config(weights))
    _write(target / "tokenizer_config.json", _tokenizer_config(tokens))
    (target / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())


def _variables(file: BinaryIO) -> Weights:
    (version,) = _unpacked(file, "I")
    name = _name(file)
    _unpacked(file, "I")
    if (version, name) != (VERSION, SPECIFICATION):
        sys.exit(f"{file.name} is {name} of version {version}, not {SPECIFICATION} of version {VERSION}")
    (count,) = _unpacked(file, "I")
    return dict(_variable(file) for _ in range(count))


def _variable(file: BinaryIO) -> tuple[str, NDArray[Any]]:
    name = _name(file)
    (rank,) = _unpacked(file, "B")
    shape = _unpacked(file, f"{rank}I")
    kind, num_bytes = _unpacked(file, "BI")
    return name, np.frombuffer(file.read(num_bytes), TYPES[kind]).reshape(shape)


def _name(file: BinaryIO) -> str:
    (length,) = _unpacked(file, "H")
    return file.read(length).rstrip(b"\0").decode()


def _unpacked(file: BinaryIO, fields: str) -> tuple[Any, ...]:
    layout = struct.Struct(f"<{fields}")
    return layout.unpack(file.read(layout.size))


def _renamed(variables: Mapping[str, NDArray[Any]]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Yield the name and value of each weight of transformers. Exits with a line if there is one that Whisper lacks."""
    for name, value in variables.items():
        if value.ndim:
            names = _names(name)
            for own, part in zip(names, np.split(value.astype(np.float32), len(names)), strict=True):
                if not own.endswith("k_proj.bias"):
                    yield own, part
                elif part.any():
                    sys.exit(f"{name} has a bias of keys, which Whisper lacks")


def _names(name: str) -> list[str]:
    side, _, rest = name.partition("/")
    for pattern, names in NAMES:
        if found := re.fullmatch(pattern, rest):
            return [f"model.{side}.{_weight_or_bias(found.expand(own))}" for own in names]
    sys.exit(f"{name} is unknown: Whisper has no such weight")


def _weight_or_bias(name: str) -> str:
    return name.replace(".gamma", ".weight").replace(".beta", ".bias")


def _config(variables: Weights, weights: Weights, tokens: Mapping[str, int]) -> dict[str, Any]:
    vocabulary, width = weights["model.decoder.embed_tokens.weight"].shape
    sides = {
        f"{side}_{field}": value
        for side in ("encoder", "decoder")
        for field, value in (
            ("layers", sum(f"model.{side}.layers.{place}.fc1.bias" in weights for place in range(100))),
            ("attention_heads", int(variables[f"{side}/num_heads"])),
            ("ffn_dim", len(weights[f"model.{side}.layers.0.fc1.bias"])),
        )
    }
    end = tokens["<|endoftext|>"]
    return {
        "architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper", "dtype": "float32",
        "is_encoder_decoder": True,
        "vocab_size": vocabulary, "d_model": width, **sides, "num_hidden_layers": sides["encoder_layers"],
        "num_mel_bins": weights["model.encoder.conv1.weight"].shape[1], "activation_function": "gelu", "scale_embedding": False,
        "max_source_positions": len(weights["model.encoder.embed_positions.weight"]),
        "max_target_positions": len(weights["model.decoder.embed_positions.weight"]),
        "decoder_start_token_id": tokens["<|startoftranscript|>"], "bos_token_id": end, "eos_token_id": end, "pad_token_id": end,
        "tie_word_embeddings": True,
    }  # fmt: skip


def _generation_config(has: Mapping[str, Any], weights: Weights, tokens: Mapping[str, int]) -> dict[str, Any]:
    end = tokens["<|endoftext|>"]
    return {
        "decoder_start_token_id": tokens["<|startoftranscript|>"], "bos_token_id": end, "eos_token_id": end, "pad_token_id": end,
        "no_timestamps_token_id": tokens["<|notimestamps|>"], "prev_sot_token_id": tokens["<|startofprev|>"],
        "max_length": len(weights["model.decoder.embed_positions.weight"]), "max_initial_timestamp_index": 50,
        "is_multilingual": False, "return_timestamps": False, "alignment_heads": has["alignment_heads"],
        "suppress_tokens": has["suppress_ids"], "begin_suppress_tokens": has["suppress_ids_begin"],
    }  # fmt: skip


def _preprocessor_config(weights: Weights) -> dict[str, Any]:
    return {
        "feature_extractor_type": "WhisperFeatureExtractor", "processor_class": "WhisperProcessor",
        "feature_size": weights["model.encoder.conv1.weight"].shape[1], "sampling_rate": 16000, "hop_length": 160, "n_fft": 400,
        "chunk_length": 30, "n_samples": 480000, "nb_max_frames": NUM_FRAMES, "padding_side": "right", "padding_value": 0.0,
        "return_attention_mask": False,
    }  # fmt: skip


def _tokenizer_config(tokens: Mapping[str, int]) -> dict[str, Any]:
    end = "<|endoftext|>"
    return {
        "tokenizer_class": "WhisperTokenizer", "processor_class": "WhisperProcessor", "model_max_length": 1024,
        "errors": "replace", "add_prefix_space": False, "bos_token": end, "eos_token": end, "unk_token": end, "pad_token": end,
        "additional_special_tokens": [token for token in tokens if token != end],
    }  # fmt: skip


def _read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def _write(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", "utf-8")
