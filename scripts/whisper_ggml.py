"""Writes a Whisper model of transformers in whisper.cpp's format (ggml, weights in f16), for `bench_speech.py`.

    python scripts/whisper_ggml.py ORIGINAL TARGET     # a folder with config.json, weights and tokenizer.json → one file

Layout, as whisper.cpp's `models/convert-h5-to-ggml.py` writes it: the magic number, eleven sizes, the mel filters, the bytes of
the tokens without special ones, and the tensors with the names of openai-whisper, whose sizes are in reverse order.
"""

from __future__ import annotations

import argparse
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

MAGIC = 0x67676D6C
F32, F16 = 0, 1
NAMES = {
    "self_attn.k_proj": "attn.key", "self_attn.q_proj": "attn.query", "self_attn.v_proj": "attn.value",
    "self_attn.out_proj": "attn.out", "self_attn_layer_norm": "attn_ln", "encoder_attn.k_proj": "cross_attn.key",
    "encoder_attn.q_proj": "cross_attn.query", "encoder_attn.v_proj": "cross_attn.value",
    "encoder_attn.out_proj": "cross_attn.out", "encoder_attn_layer_norm": "cross_attn_ln", "fc1": "mlp.0", "fc2": "mlp.2",
    "final_layer_norm": "mlp_ln", "embed_positions.weight": "positional_embedding",
    "embed_tokens.weight": "token_embedding.weight",
}  # fmt: skip
"""Parts of names in transformers, and in openai-whisper."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("original", type=Path)
    parser.add_argument("target", type=Path)
    options = parser.parse_args()
    try:
        write(options.original, options.target)
    except ImportError as error:
        sys.exit(f"{error.name} is missing: use an environment with torch and transformers")


def write(original: Path, target: Path) -> None:
    """Write the model of a folder to a file, which is made as a whole or not at all."""
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration, WhisperTokenizerFast

    model = WhisperForConditionalGeneration.from_pretrained(original)
    filters = np.asarray(WhisperFeatureExtractor.from_pretrained(original).mel_filters, np.float32).T
    scratch = target.with_suffix(".part")
    with scratch.open("wb") as file:
        _write_numbers(file, MAGIC, *_sizes(model.config), F16, *filters.shape)
        filters.tofile(file)
        tokens = list(_token_bytes(WhisperTokenizerFast.from_pretrained(original)))
        _write_numbers(file, len(tokens))
        for token in tokens:
            _write_numbers(file, len(token))
            file.write(token)
        for name, value in model.state_dict().items():
            if name != "proj_out.weight":  # that of the embedding
                _write_tensor(file, _name_of(name), value.numpy())
    scratch.replace(target)


def _sizes(config: Any) -> tuple[int, ...]:
    return (
        config.vocab_size, config.max_source_positions, config.d_model, config.encoder_attention_heads,
        config.encoder_layers, config.max_target_positions, config.d_model, config.decoder_attention_heads,
        config.decoder_layers, config.num_mel_bins,
    )  # fmt: skip


def _write_numbers(file: BinaryIO, *numbers: int) -> None:
    file.write(struct.pack(f"<{len(numbers)}i", *numbers))


def _token_bytes(tokenizer: Any) -> Iterator[bytes]:
    """Yield the bytes of the tokens, up to the first special one, in the order of their ids."""
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    added = set(tokenizer.get_added_vocab())
    letters = _byte_letters()
    for token, _ in vocab:
        if token in added:
            return
        yield bytes(letters[letter] for letter in token)


def _byte_letters() -> dict[str, int]:
    """Return which byte each letter of a byte-level token stands for, as in GPT-2: printable ones stand for themselves."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}


def _name_of(name: str) -> str:
    parts = name.removeprefix("model.").replace(".layers.", ".blocks.")
    if parts.endswith((".layer_norm.weight", ".layer_norm.bias")):
        return parts.replace("layer_norm", "ln_post" if parts.startswith("encoder") else "ln")
    for theirs, ours in NAMES.items():
        if f".{theirs}." in f"{parts}.":
            return f"{parts}.".replace(f".{theirs}.", f".{ours}.").removesuffix(".")
    return parts


def _write_tensor(file: BinaryIO, name: str, value: NDArray[Any]) -> None:
    if name in ("encoder.conv1.bias", "encoder.conv2.bias"):
        value = value[:, None]
    is_f32 = value.ndim < 2 or value.shape[1] == 1 or name.endswith("positional_embedding")
    encoded = name.encode()
    _write_numbers(file, value.ndim, len(encoded), F32 if is_f32 else F16, *reversed(value.shape))
    file.write(encoded)
    np.ascontiguousarray(value, np.float32 if is_f32 else np.float16).tofile(file)


if __name__ == "__main__":
    main()
