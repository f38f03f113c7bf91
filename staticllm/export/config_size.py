"""Compares the sizes in a ``config.json`` with the weights beside it, so that no export computes what no file can hold."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

from staticllm.errors import ModelError, quoted, shown
from staticllm.system.files import read_regular

CONFIG = "config.json"
MAX_BYTES = 1 << 20
MOST_PER_BYTE = 16
"""The most parameters for a byte of the weights' files: packed 4-bit weights have 2, ternary ones 5, layers may share theirs."""
MOST_LAYERS = 1024
_HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
_POSITIONS = "max_position_embeddings"
MOST_POSITIONS = 1 << 27


def check_config_size(folder: Path, num_bytes: int) -> None:
    """Check that a model can be as large as its ``config.json`` says, if its weights' files have ``num_bytes``.

    What is missing or no number is left to those that read it.

    Raises:
        ModelError: a value, and what it would take.
    """
    config: Any = None
    with suppress(OSError, ValueError, RecursionError):
        config = json.loads(read_regular(folder / CONFIG, MAX_BYTES))
    if not isinstance(config, dict):
        return
    part = config.get("text_config")
    for each in (config, part) if isinstance(part, dict) else (config,):
        _check(each, folder, num_bytes)


def _check(config: dict[str, Any], folder: Path, num_bytes: int) -> None:
    hidden_name, hidden = _first(config, _HIDDEN)
    layers_name, layers = _first(config, _LAYERS)
    vocabulary = _number(config, "vocab_size")
    for name, value, most in (
        (layers_name, layers, MOST_LAYERS),
        (_POSITIONS, _number(config, _POSITIONS), MOST_POSITIONS),
    ):
        if value > most:
            raise _refusal(folder, f"has {name}={shown(value)}, at most {most} are exported")
    least = hidden * max(vocabulary, layers * hidden, layers * _number(config, "intermediate_size"))
    if least > MOST_PER_BYTE * max(num_bytes, 1 << 20):
        raise _refusal(
            folder,
            f"has {hidden_name}={shown(hidden)}, {layers_name}={shown(layers)} and vocab_size={shown(vocabulary)}, a model of "
            f"more than {least / 1e9:.2g} billion parameters, and its weights have {num_bytes / 1e6:.1f} MB",
        )


def _refusal(folder: Path, what: str) -> ModelError:
    return ModelError(f"{quoted(folder / CONFIG)} {what}: download the model again")


def _first(config: dict[str, Any], names: tuple[str, ...]) -> tuple[str, int]:
    """Return the first of these numbers that a config has, with its name; 0 without one."""
    return next(((name, found) for name in names if (found := _number(config, name))), (names[0], 0))


def _number(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0
