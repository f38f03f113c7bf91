"""Runs the original model as it was exported; every program of ours must agree with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staticllm.compiler_passes.graph.exported_inputs import ATTENTION_MASK, BEAM_IDX, CACHE_POSITION
from staticllm.compiler_passes.model_kind import check_kind
from staticllm.devices import get_core
from staticllm.errors import ModelError, last_line
from staticllm.model_dir import read_model
from staticllm.ports import INPUT_IDS, LOGITS, POSITION_IDS

EXACT: Mapping[str, Any] = MappingProxyType(
    {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
)
"""CPU properties that add no rounding to that of the model itself."""


class StatefulReference:
    """A stateful IR that runs on the CPU, one conversation at a time, in f32 unless ``properties`` differ.

    Raises:
        ModelError: the directory has no causal language model, or the CPU cannot compile it.
    """

    def __init__(self, models_path: str | os.PathLike[str], properties: Mapping[str, Any] = EXACT) -> None:
        model = read_model(get_core(), Path(models_path))
        check_kind(model, Path(models_path), "decoder")
        try:
            compiled = get_core().compile_model(model, "CPU", dict(properties))
        except RuntimeError as error:
            raise ModelError(
                f"the CPU cannot compile the original in {str(models_path)!r}: {last_line(error)}"
            ) from error
        self._names = {name for port in compiled.inputs for name in port.get_names()}
        self._request = compiled.create_infer_request()
        self._length = 0

    def reset(self) -> None:
        """Begin a new conversation."""
        self._request.reset_state()
        self._length = 0

    def logits(self, tokens: list[int]) -> NDArray[np.float32]:
        """Append tokens, and return the logits after each of them, ``[len(tokens), vocab]``."""
        if CACHE_POSITION in self._names and len(tokens) > 1:  # its prefill is not exact: see fix_cache_position
            return np.concatenate([self.logits([token]) for token in tokens])
        past, count = self._length, len(tokens)
        feeds = {
            INPUT_IDS: np.array([tokens], np.int64),
            ATTENTION_MASK: np.ones((1, past + count), np.int64),
            POSITION_IDS: np.arange(past, past + count, dtype=np.int64)[None],
            BEAM_IDX: np.zeros(1, np.int32),
            CACHE_POSITION: np.array([1 << 30]),
        }
        self._request.infer({name: value for name, value in feeds.items() if name in self._names})
        self._length += 0 if CACHE_POSITION in self._names else count
        logits: NDArray[np.float32] = self._request.get_tensor(LOGITS).data[0].copy()
        return logits

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """Return the ``count`` greedy tokens after a prompt; an end-of-sequence token does not stop them."""
        self.reset()
        tokens = [int(self.logits(prompt)[-1].argmax())]
        while len(tokens) < count:
            tokens.append(int(self.logits(tokens[-1:])[-1].argmax()))
        return tokens
