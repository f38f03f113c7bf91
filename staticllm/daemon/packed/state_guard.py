"""Checks calls of stateful language models before a device runs them: with wrong sizes or beams it would read foreign memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.compiler_passes.graph.exported_inputs import ATTENTION_MASK, BEAM_IDX
from staticllm.errors import PromptError
from staticllm.ports import INPUT_IDS

Array = NDArray[Any]
CONVERTED = tuple(map(np.dtype, ("float16", "int8", "uint8", "int32")))
"""The types that OpenVINO converts to the floats of a state; it refuses larger ones."""


class StateGuard:
    """Follows the sizes of a request's states, and refuses calls that do not fit them. One thread at a time may call.

    Other inputs than ``input_ids``, ``attention_mask`` and ``beam_idx`` are not looked at: the device checks their shapes.
    ``num_columns`` and ``batch`` are those of the states: the first is None if it is unknown, the second also without any.
    """

    def __init__(self, request: ov.InferRequest) -> None:
        self._request = request
        self._empty = [tuple(each.state.shape) for each in request.query_state()]
        self._grows = any(0 in shape[1:] for shape in self._empty)  # a recurrent state does not
        self.num_columns: int | None = 0
        self.batch: int | None = None

    def check(self, inputs: Mapping[str, Array]) -> None:
        """Check the inputs of the next call. Raises ``PromptError``."""
        if self.num_columns is None:
            self._look()
        ids, mask, beams = (inputs.get(name) for name in (INPUT_IDS, ATTENTION_MASK, BEAM_IDX))
        if ids is not None and (ids.ndim != 2 or not ids.size):
            raise PromptError(
                f"input_ids has the shape {list(ids.shape)}: must be [rows, tokens] with at least one token"
            )
        if ids is not None and mask is not None and self._grows:
            columns = (self.num_columns or 0) + ids.shape[1]
            if mask.ndim != 2 or mask.shape[0] != len(ids) or mask.shape[1] < columns:
                raise PromptError(
                    f"attention_mask has the shape {list(mask.shape)}: must be {[len(ids), columns]} here"
                )
        if beams is not None:
            self._check_beams(beams, ids)

    def check_state(self, index: int, values: Array) -> None:
        """Check the value of a state. A state of floats takes smaller types, too: the device converts them.

        Raises ``PromptError`` (its type or shape is not that of the state) and ``IndexError`` (there is no such state).
        """
        state = self._request.query_state()[index].state
        empty = self._empty[index]
        fits = values.ndim == len(empty) and all(
            size in (given, 0) or place == 0
            for place, (size, given) in enumerate(zip(empty, values.shape, strict=True))
        )
        own = np.dtype(state.element_type.to_dtype())
        is_converted = own == np.float32 and values.dtype in CONVERTED
        if not fits or not (values.dtype == own or is_converted):
            sizes = ", ".join("any" if not size or place == 0 else str(size) for place, size in enumerate(empty))
            raise PromptError(f"state {index} gets {values.dtype} {list(values.shape)}: must be {own} [{sizes}]")

    def write_state(self, index: int, values: Array) -> None:
        """Write values into the tensor of a state, as a program does natively. Whether that changes the state is the device's.

        Raises ``PromptError`` (the type or shape is not that of the state) and ``IndexError`` (there is no such state).
        """
        target = self._request.query_state()[index].state.data
        if (values.dtype, values.shape) != (target.dtype, target.shape):
            raise PromptError(
                f"state {index} is written as {values.dtype} {list(values.shape)}: it is {target.dtype} {list(target.shape)}"
            )
        target[...] = values

    def count(self, inputs: Mapping[str, Array]) -> None:
        """Note that a call has run."""
        ids = inputs.get(INPUT_IDS)
        if ids is None or self.num_columns is None:
            self.forget()
            return
        self.batch, self.num_columns = ids.shape[0], self.num_columns + ids.shape[1]

    def reset(self) -> None:
        """Note that all states were set back."""
        self.num_columns = 0
        self.batch = None

    def forget(self) -> None:
        """Note that the states were changed, or that a call has failed: their sizes are looked up before the next call."""
        self.num_columns = None
        self.batch = None

    def _look(self) -> None:
        """Find the sizes of the states. Raises ``PromptError`` (their sizes differ)."""
        shapes = [tuple(each.state.shape) for each in self._request.query_state()]
        grown = [shape for shape in shapes if 0 not in shape]
        rows = {shape[0] for shape in grown if shape}
        columns = {
            shape[place]
            for shape, empty in zip(shapes, self._empty, strict=True)
            for place, size in enumerate(empty)
            if place and not size
        }
        if len(rows) > 1 or len(columns) > 1:
            raise PromptError(f"the states have {sorted(rows)} rows and {sorted(columns)} columns: reset them")
        self.num_columns = max(columns, default=0)
        self.batch = max(rows, default=None)

    def _check_beams(self, beams: Array, ids: Array | None) -> None:
        if beams.ndim != 1 or (ids is not None and len(beams) != len(ids)):
            rows = "" if ids is None else f" of {len(ids)} rows"
            raise PromptError(
                f"beam_idx has the shape {list(beams.shape)}: must be one row of the last batch for each{rows}"
            )
        batch = len(beams) if self.batch is None else self.batch
        bad = beams[(beams < 0) | (beams >= batch)] if np.issubdtype(beams.dtype, np.integer) else beams
        if len(bad):
            raise PromptError(
                f"beam_idx has {bad[0]}, the batch before had {batch} rows: must be from 0 to {batch - 1}"
            )
