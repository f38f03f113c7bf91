"""Finds the files of a speech model: an encoder, a decoder that keeps its keys and values, a tokenizer, and what they are for."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from staticllm.config import is_whole
from staticllm.errors import ModelError, quoted, shown
from staticllm.model_dir import check_ir
from staticllm.model_paths.path_kind import TOKENIZER_XML
from staticllm.system.files import read_regular

ENCODER, DECODER, DECODER_WITH_PAST = (
    f"openvino_{name}_model.xml" for name in ("encoder", "decoder", "decoder_with_past")
)
"""The names that optimum gives the IRs of an encoder-decoder model; the third is that of an export without state."""
MAX_CONFIG = 16 << 20
EXPORT = "optimum-cli export openvino --task automatic-speech-recognition-with-past"


@dataclass(frozen=True)
class SpeechFiles:
    """The checked files of a speech model."""

    directory: Path
    decoder: str
    """The IR that decodes; an export without state has another one for the first tokens, which also computes what it sees of a
    window."""
    cross_window_len: int
    """The frames of a window that the decoder sees."""
    max_positions: int
    """The most tokens of a window, those of its prompt among them."""
    file: Path
    """The path of ``generation_config.json``."""


def speech_files(models_path: str | bytes | os.PathLike[str]) -> SpeechFiles:
    """Return the files of a speech model.

    Raises:
        ModelError: the directory is missing, a file is missing or damaged, or ``config.json`` is not that of a model that sees
            the output of an encoder.
    """
    try:
        directory = Path(os.fsdecode(models_path))
    except TypeError:
        raise ModelError(
            f"models_path is a {type(models_path).__name__}: must be the path of a model directory"
        ) from None
    if not directory.is_dir():
        raise ModelError(f"no model directory at {quoted(directory)}: check the path")
    if not (directory / ENCODER).is_file() or not (directory / DECODER).is_file():
        missing = next(name for name in (ENCODER, DECODER) if not (directory / name).is_file())
        raise ModelError(
            f"{quoted(directory)} is no speech model, {missing} is missing: export one with `{EXPORT}`; a model of text is "
            "loaded by StaticLLMPipeline"
        )
    decoder = DECODER_WITH_PAST if (directory / DECODER_WITH_PAST).is_file() else DECODER
    for name in (ENCODER, DECODER, decoder, *TOKENIZER_XML):
        check_ir(directory / name)
    config = _config(directory)
    file = directory / "generation_config.json"
    if not file.is_file():
        raise ModelError(f"{quoted(file)} is missing: export the model again; it has the ids of the special tokens")
    cross_window_len = _length(directory, config, "max_source_positions")
    return SpeechFiles(directory, decoder, cross_window_len, _length(directory, config, "max_target_positions"), file)


def _config(directory: Path) -> dict[str, Any]:
    path = directory / "config.json"
    try:
        config = json.loads(read_regular(path, MAX_CONFIG))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{quoted(path)} cannot be read: {error}; export the model again") from None
    if not isinstance(config, dict):
        raise ModelError(f"{quoted(path)} holds no object: export the model again")
    return config


def _length(directory: Path, config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if not is_whole(value, 1, 1 << 16):
        raise ModelError(
            f"{quoted(directory / 'config.json')}: {name}={shown(value)}: must be a whole number from 1 to 65536"
        )
    return value
