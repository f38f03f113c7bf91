"""Runs a request on the original stateful model, from where our engine left off, in calls that take turns with the engine's.

A guard checks each call before the device runs it: with wrong sizes or beams it would read foreign memory.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.daemon.sharing.device_scheduler import ClientId, DeviceRequest, DeviceScheduler, EngineId
from staticllm.devices import get_core
from staticllm.errors import ClosedError, PromptError
from staticllm.pipelines.costs.model import CallCosts
from staticllm.pipelines.engine.client_sequences.state import Wanted
from staticllm.ports import ATTENTION_MASK, BEAM_IDX, INPUT_IDS, LOGITS, POSITION_IDS

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
        """Check the inputs of the next call.

        Raises:
            PromptError: a shape or a ``beam_idx`` does not fit the states.
        """
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

        Raises:
            PromptError: its type or shape is not that of the state.
            IndexError: there is no such state.
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

        Raises:
            PromptError: the type or shape is not that of the state.
            IndexError: there is no such state.
        """
        target = self._request.query_state()[index].state.data
        if (values.dtype, values.shape) != (target.dtype, target.shape):
            raise PromptError(
                f"state {index} is written as {values.dtype} {list(values.shape)}: it is {target.dtype} {list(target.shape)}"
            )
        target[...] = values

    def count(self, inputs: Mapping[str, Array]) -> None:
        ids = inputs.get(INPUT_IDS)
        if ids is None or self.num_columns is None:
            self.forget()
            return
        self.batch = ids.shape[0]
        self.num_columns = self.num_columns + ids.shape[1]

    def reset(self) -> None:
        self.num_columns = 0
        self.batch = None

    def forget(self) -> None:
        """Note that the states were changed, or that a call has failed: their sizes are looked up before the next call."""
        self.num_columns = None
        self.batch = None

    def _look(self) -> None:
        """Find the sizes of the states.

        Raises:
            PromptError: their sizes differ.
        """
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


REPLAY_COLUMNS = 128
"""The most columns of a device call: others get the device between two calls."""


@dataclass
class RowLog:
    """One row of a request's batch: all ids that it was given since the last reset, and the mask of each."""

    ids: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)

    def copy(self) -> RowLog:
        return RowLog(list(self.ids), list(self.mask))


class OriginalModel:
    """The original model, compiled on the thread of the first request that needs it. Any thread may call; they take turns.

    Args:
        model: The graph as it was read; its weights must stay.
        device: The name that the client gave.
        properties: OpenVINO's properties of the compilation.
        scheduler: That of the device.
        compiling: Held while the model is compiled.
        engine: Pays for requests of no client; its number is the model's.
        num_bytes: The bytes of the weights that each call reads.
    """

    def __init__(
        self,
        model: ov.Model,
        device: str,
        properties: Mapping[str, Any],
        *,
        scheduler: DeviceScheduler,
        compiling: threading.Lock,
        engine: EngineId,
        num_bytes: int,
    ) -> None:
        self.scheduler = scheduler
        self.engine = engine
        self.num_bytes = num_bytes
        self.costs = CallCosts()
        self._model: ov.Model | None = model
        self._device = device
        self._properties = dict(properties)
        self._compiling = compiling
        self._compiled: ov.CompiledModel | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    def open(self) -> ov.InferRequest:
        """Return a new infer request of the compiled model.

        Raises:
            RuntimeError: it cannot be compiled.
            ClosedError: the model is closed.
        """
        with self._lock:
            compiled = self._compiled
            model = self._model
            if compiled is None and model is not None and not self._is_closed:
                with self._compiling:
                    compiled = get_core().compile_model(model, self._device, self._properties)
                self._compiled = compiled
        if self._is_closed or compiled is None:
            self._compiled = None
            raise ClosedError("the model is closed: load it again")
        return compiled.create_infer_request()

    def close(self) -> None:
        """Release the model. Does not wait for a compilation in progress, which ends with a ``ClosedError``."""
        self._is_closed = True
        self._compiled = None
        self._model = None


@dataclass
class Caller:
    """The client that pays for the calls of a replay (None: the engine), its priority now, and whether it has gone."""

    client: ClientId | None = None
    priority: int = 0
    is_cancelled: bool = False

    def check(self) -> None:
        """Check that the next call may begin.

        Raises:
            ClosedError: the request was cancelled.
        """
        if self.is_cancelled:
            raise ClosedError("the request was cancelled")


class Replay:
    """A request on the original model. One thread at a time may call.

    Every device call takes a turn of its own. Prompts run in pieces of ``REPLAY_COLUMNS`` where that changes only rounding.
    ``device_seconds`` counts what the calls took on the device.
    """

    def __init__(self, original: OriginalModel, caller: Caller) -> None:
        self._original = original
        self._caller = caller
        self._request = original.open()
        self._names = {name for port in self._request.model_inputs for name in port.get_names()}
        self._vocab_size = _vocab_size(self._request)
        self._guard = StateGuard(self._request)
        self.device_seconds = 0.0

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
            self.infer({**feeds, POSITION_IDS: positions[:, start:end]}, "last")
            start = end

    def infer(self, inputs: Mapping[str, Array], wanted: Wanted = "all") -> Array:
        """Run a call as the original model does, and return its logits ``[B, S, V]``, or ``[B, 1, V]`` if the last are wanted.

        Raises:
            PromptError: the inputs do not fit the states.
            RuntimeError: OpenVINO refused the inputs.
            ClosedError: the request was cancelled; the states may be those of a part of the call.
        """
        known = {name: np.array(array) for name, array in inputs.items() if name in self._names}
        self._guard.check(known)
        parts: list[Array] = []
        try:
            for piece in self._pieces(known):
                logits = self._run(piece)
                parts = [*parts, logits] if wanted == "all" else [logits[:, -1:]]
                self._guard.count(piece)
        except BaseException:
            self._guard.forget()
            raise
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def reset(self) -> None:
        self._request.reset_state()
        self._guard.reset()

    def states(self) -> list[Any]:
        return list(self._request.query_state())

    def set_state(self, index: int, values: Array) -> None:
        self._guard.check_state(index, values)
        self._guard.forget()
        self._request.query_state()[index].state = ov.Tensor(np.array(values))

    def write_state(self, index: int, values: Array) -> None:
        self._guard.write_state(index, values)

    def reset_state(self, index: int) -> None:
        self._guard.forget()
        self._request.query_state()[index].reset()

    def _run(self, feeds: Mapping[str, Array]) -> Array:
        """Make one device call, and return a copy of its logits."""
        original = self._original
        caller = self._caller
        caller.check()
        shapes = tuple(array.shape for array in feeds.values())
        rows = int(np.prod(feeds[INPUT_IDS].shape)) if INPUT_IDS in feeds else 0
        phase = "prefill" if rows > len(feeds.get(BEAM_IDX, ())) else "decode"
        use = DeviceRequest(
            caller.client or original.engine, original.costs.expected(shapes), caller.priority, original.engine.model,
            phase=phase, rows=rows, num_bytes=original.num_bytes,
        )  # fmt: skip
        with original.scheduler.use(use):
            caller.check()
            start = time.perf_counter()
            self._request.infer(dict(feeds))
            seconds = time.perf_counter() - start
        original.costs.add(shapes, seconds)
        self.device_seconds += seconds
        logits: Array = self._request.get_tensor(LOGITS).data.copy()
        return logits

    def _pieces(self, inputs: dict[str, Array]) -> Iterator[dict[str, Array]]:
        """Yield a call in pieces that give the same logits and states, up to rounding; the call itself where none do."""
        if not self._can_be_cut(inputs):
            yield inputs
            return
        ids = inputs[INPUT_IDS]
        mask = inputs[ATTENTION_MASK]
        positions = inputs.get(POSITION_IDS)
        num_past = self._guard.num_columns or 0
        for start in range(0, ids.shape[1], REPLAY_COLUMNS):
            end = min(start + REPLAY_COLUMNS, ids.shape[1])
            piece = {**inputs, INPUT_IDS: ids[:, start:end], ATTENTION_MASK: mask[:, : num_past + end]}
            if positions is not None:
                piece[POSITION_IDS] = positions[..., start:end]
            if start and BEAM_IDX in inputs:
                piece[BEAM_IDX] = np.arange(ids.shape[0], dtype=inputs[BEAM_IDX].dtype)
            yield piece

    def _can_be_cut(self, inputs: Mapping[str, Array]) -> bool:
        """Whether all new tokens are shown, and the shapes are those of tokens after the ones in the states.

        The keys of hidden tokens depend on the columns of their call, and a call that is refused must change no state.
        """
        ids = inputs.get(INPUT_IDS)
        mask = inputs.get(ATTENTION_MASK)
        num_past = self._guard.num_columns
        if ids is None or mask is None or num_past is None or ids.ndim != 2 or ids.shape[1] <= REPLAY_COLUMNS:
            return False
        positions = inputs.get(POSITION_IDS)
        beams = inputs.get(BEAM_IDX)
        count = ids.shape[1]
        return (
            mask.shape == (ids.shape[0], num_past + count)
            and bool((mask[:, num_past:] == 1).all())
            and (positions is None or (positions.ndim >= 2 and positions.shape[-2:] == ids.shape))
            and (beams is None or beams.shape == (ids.shape[0],))
            and bool(((ids >= 0) & (ids < self._vocab_size)).all())
        )


def positions_of(mask: Array) -> Array:
    """Return the positions ``[B, T]`` of the tokens that ``mask [B, T]`` shows, as transformers computes them."""
    positions: Array = np.cumsum(mask, axis=1, dtype=np.int64) - 1
    positions[mask == 0] = 1
    return positions


def _vocab_size(request: ov.InferRequest) -> int:
    """Return the number of words in the logits; 0 if the graph does not say."""
    shapes = [port.get_partial_shape() for port in request.model_outputs if LOGITS in port.get_names()]
    last = shapes[0][-1] if shapes and shapes[0].rank.is_static else None
    return int(last.get_length()) if last is not None and last.is_static else 0
