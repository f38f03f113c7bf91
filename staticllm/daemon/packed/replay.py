"""Runs a request on the original stateful model, from where our engine left off."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.compiler_passes.graph.exported_inputs import ATTENTION_MASK, BEAM_IDX
from staticllm.ports import INPUT_IDS, LOGITS, POSITION_IDS

Array = NDArray[Any]
REPLAY_COLUMNS = 512
"""The most columns of a call that repeats earlier ones."""


@dataclass
class RowLog:
    """One row of a request's batch: all ids that it was given since the last reset, and the mask of each."""

    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)

    def copy(self) -> RowLog:
        """Return a copy that can go on by itself."""
        return RowLog(list(self.ids), list(self.mask))


class OriginalModel:
    """The original model, compiled when the first request needs it. Any thread may call; calls take turns."""

    def __init__(self, model: ov.Model, core: ov.Core, device: str, properties: Mapping[str, Any]) -> None:
        self._model, self._core, self._device, self._properties = model, core, device, dict(properties)
        self._compiled: ov.CompiledModel | None = None
        self._lock = threading.Lock()

    def open(self) -> ov.InferRequest:
        """Return a new infer request of the compiled model.

        Raises:
            RuntimeError: the device refuses the model.
        """
        with self._lock:
            if self._compiled is None:
                self._compiled = self._core.compile_model(self._model, self._device, self._properties)
            return self._compiled.create_infer_request()

    def close(self) -> None:
        """Release the compiled model."""
        with self._lock:
            self._compiled = None


class Replay:
    """A request on the original model. One thread at a time may call."""

    def __init__(self, original: OriginalModel) -> None:
        self._request = original.open()
        self._names = {name for port in self._request.model_inputs for name in port.get_names()}

    def repeat(self, logs: Sequence[RowLog], apart: Mapping[int, int]) -> None:
        """Give the states what they would be after the calls in ``logs``: one row of the batch for each of them.

        Calls are joined where that changes nothing. ``apart`` has the others, with hidden tokens, whose keys depend on the
        columns of their call: the first column of each, and the one after its last.
        """
        num_columns = len(logs[0].ids) if logs else 0
        if not num_columns:
            return
        ids = np.array([log.ids for log in logs], np.int64)
        mask = np.array([log.mask for log in logs], np.int64)
        positions = positions_of(mask)
        start = 0
        while start < num_columns:
            next_apart = min((first for first in apart if first > start), default=num_columns)
            end = apart.get(start, min(start + REPLAY_COLUMNS, next_apart))
            beams = np.arange(len(logs), dtype=np.int32)
            feeds: dict[str, Array] = {INPUT_IDS: ids[:, start:end], ATTENTION_MASK: mask[:, :end], BEAM_IDX: beams}
            self.infer({**feeds, POSITION_IDS: positions[:, start:end]})
            start = end

    def infer(self, inputs: Mapping[str, Array]) -> Array:
        """Run a call as the original model does, and return its logits ``[B, S, V]``.

        Raises:
            RuntimeError: OpenVINO refused the inputs.
        """
        known = {name: np.array(array) for name, array in inputs.items() if name in self._names}
        self._request.infer(known)
        logits: Array = self._request.get_tensor(LOGITS).data.copy()
        return logits

    def reset_state(self) -> None:
        """Set all states back."""
        self._request.reset_state()

    @property
    def states(self) -> list[Any]:
        """The states of the original model."""
        return list(self._request.query_state())


def positions_of(mask: Array) -> Array:
    """Return the positions ``[B, T]`` of the tokens that ``mask [B, T]`` shows, as transformers computes them."""
    positions: Array = np.cumsum(mask, axis=1, dtype=np.int64) - 1
    positions[mask == 0] = 1
    return positions
