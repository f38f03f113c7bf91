"""Turns a cross-encoder's logits into scores, with the activation from its files or from the user."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from staticllm.errors import ModelError

from .encoder_files import TRUSTED, read_json

Activation = Literal["sigmoid", "identity", "softmax"]
"""What makes a score of a logit: ``softmax`` takes all labels of a text together."""
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
MAX_CONFIG = 1 << 22


def chosen_activation(given: Activation | None, directory: Path, num_labels: int) -> Activation:
    """Return the activation that the user gave, else that of the model's files, else sigmoid, or softmax of several labels.

    ``Identity`` of several labels in the files is what sentence-transformers writes for every such model, so that it stands for
    no choice: the logit of one label alone says nothing.

    Raises:
        ModelError: the files name an activation that is not supported.
    """
    if given is not None:
        return given
    named = _named_activation(directory)
    if num_labels == 1:
        return named or "sigmoid"
    return "softmax" if named in (None, "identity") else named


def activated(logits: NDArray[np.float32], activation: Activation) -> NDArray[np.float32]:
    """Return the scores of ``logits [n, labels]``, computed in f64."""
    values = logits.astype(np.float64)
    if activation == "identity":
        return logits
    if activation == "sigmoid":
        small = np.exp(-np.abs(values))
        return np.asarray(np.where(values < 0, small, 1) / (1 + small), np.float32)
    weights = np.exp(values - values.max(axis=1, keepdims=True, initial=-np.inf))
    return np.asarray(weights / weights.sum(axis=1, keepdims=True), np.float32)


def _named_activation(directory: Path) -> Activation | None:
    """Return what the files say to sentence-transformers' CrossEncoder, first its own file; None if they say nothing."""
    path = directory / "config_sentence_transformers.json"
    named = read_json(path, dict, MAX_CONFIG).get("activation_fn")
    if not isinstance(named, str):
        path = directory / "config.json"
        config = read_json(path, dict, MAX_CONFIG)
        own = config.get("sentence_transformers")
        named = own.get("activation_fn") if isinstance(own, dict) else None
        named = config.get("sbert_ce_default_activation_function") if named is None else named
    if not isinstance(named, str) or not named.startswith(TRUSTED):
        return None
    name = named.rsplit(".", 1)[-1].lower()
    if name in ACTIVATIONS:
        return name
    raise ModelError(
        f"{path}: the activation {named!r} is not supported: give activation= with one of {', '.join(ACTIVATIONS)}"
    )
