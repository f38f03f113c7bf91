"""An infer request wherever it can run: in the daemon, in the next daemon after a crash, or natively in the program.

The states of a new place are computed again from the calls since the last reset.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..wire.tensors import Array
from .answers import DaemonGoneError, RefusedError, UnavailableError
from .call_log import CallLog, StateChange
from .far_model import FarModel
from .local_request import LocalRequest
from .remote_request import Finished, RemoteRequest

Place = RemoteRequest | LocalRequest
Result = TypeVar("Result")
MAX_TRIES = 4


class GivenState(NamedTuple):
    """The array of a state that the program has got, and its bytes when the state had the same."""

    values: Array
    before: bytes


def _write(index: int, values: Array, place: Place) -> None:
    place.write_state(index, values)


class FarRequest:
    """An infer request outside of the ghost. One thread at a time may call the methods.

    After Ctrl-C in ``finish``, ``finish`` runs the call again, and ``start`` counts it as done, as natively, where Ctrl-C does
    not end a call.
    """

    def __init__(self, model: FarModel) -> None:
        self._model = model
        self._log = CallLog(model.input_names) if model.is_stateful else None
        self._place: Place | None = None
        self._pending: dict[int, Array] | None = None
        self._local_reason = ""
        self._given: dict[int, GivenState] = {}
        self._at_place(lambda place: None)  # a program that has too many requests is told now

    @property
    def model(self) -> FarModel:
        """The model that the request runs."""
        return self._model

    def start(self, inputs: dict[int, Array]) -> None:
        """Start a call; the arrays must not change before ``finish``.

        Raises:
            RuntimeError: neither the daemon nor the program can run it.
        """
        if self._pending is not None:  # interrupted by Ctrl-C
            self._commit()
            self._close_place()
        self._send_writes()
        self._given.clear()
        if self._log is not None:
            inputs = {index: np.array(array) for index, array in inputs.items()}
        self._at_place(lambda place: place.start(inputs))
        self._pending = inputs

    def poll(self, seconds: float | None) -> bool:
        """Wait at most ``seconds`` for the end of the call; return whether ``finish`` would not wait."""
        return self._pending is None or self._at_place(lambda place: place.poll(seconds))

    def finish(self) -> Finished:
        """Wait for the result of the call that was started.

        Raises:
            RuntimeError: neither the daemon nor the program can run it.
            Exception: the one that the call raised.
        """
        try:
            result = self._at_place(lambda place: place.finish())
        except Exception:
            self._pending = None
            raise
        self._commit()
        return result

    def forget_call(self) -> None:
        """Forget the call that runs, without waiting."""
        self._pending = None

    def reset(self) -> None:
        """Set all states back."""
        if self._pending is not None:
            self._commit()
            self._close_place()
        self._given.clear()
        if self._log is not None:
            self._log.clear()
            if self._place is not None:
                self._at_place(lambda place: place.reset())

    def state_names(self) -> list[str]:
        """Return the names of the states."""
        return self._at_place(lambda place: place.state_names())

    def get_state(self, index: int) -> Array:
        """Return a state. Until the next call, the state gets what the program writes into the array, as natively."""
        self._send_writes()
        values = self._at_place(lambda place: place.get_state(index))
        self._given[index] = GivenState(values, values.tobytes())
        return values

    def set_state(self, index: int, values: Array) -> None:
        """Set a state."""
        self._send_writes()
        self._given.pop(index, None)
        self._at_place(lambda place: place.set_state(index, values))
        self._note_state(StateChange(index, np.array(values)))

    def reset_state(self, index: int) -> None:
        """Set one state back."""
        self._send_writes()
        self._given.pop(index, None)
        self._at_place(lambda place: place.reset_state(index))
        self._note_state(StateChange(index, None))

    def profile(self) -> list[dict[str, Any]]:
        """Return the times of the nodes in the last call."""
        return self._at_place(lambda place: place.profile())

    def close(self) -> None:
        """End the request."""
        self._close_place()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be ending
            self._close_place()

    def _send_writes(self) -> None:
        """Write into the states what the program has written into their arrays."""
        for index, (values, before) in self._given.items():
            if (now := values.tobytes()) != before:
                written = np.array(values)
                self._given[index] = GivenState(values, now)
                self._at_place(partial(_write, index, written))
                self._note_state(StateChange(index, written, is_in_place=True))

    def _note_state(self, change: StateChange) -> None:
        if self._log is not None:
            self._log.add_state(change)

    def _at_place(self, step: Callable[[Place], Result]) -> Result:
        """Run a step where the request is; if the daemon ends meanwhile, run it in another place."""
        for _ in range(MAX_TRIES):
            try:
                place = self._ready_place()
                return step(place)
            except DaemonGoneError as error:
                self._leave(error)
            except UnavailableError as error:
                self._close_place()
                if self._local_reason:
                    raise
                self._local_reason = str(error)
        raise RuntimeError(
            "the daemon ended again and again during a call: staticllm daemon status, or STATICLLM_ATTACH=off"
        )

    def _ready_place(self) -> Place:
        """Return the place of the request, with the states of its log, and with the call running that was started."""
        place = self._place
        if place is None or place.is_closed:
            place = self._open()
            if self._log is not None:
                self._log.repeat(place)
            self._place = place
        if self._pending is not None and not place.is_running:
            place.start(self._pending)
        return place

    def _open(self) -> Place:
        if self._local_reason:
            return self._model.open_local(self._local_reason)
        try:
            return self._model.open_remote()
        except RefusedError as error:
            self._local_reason = str(error)
            return self._model.open_local(self._local_reason)

    def _leave(self, error: DaemonGoneError) -> None:
        place = self._place
        self._close_place()
        try:
            if isinstance(place, RemoteRequest):
                self._model.has_died(place.epoch)
        except UnavailableError as reason:
            self._local_reason = f"{reason} ({error})"

    def _commit(self) -> None:
        if self._log is not None and self._pending is not None:
            self._log.add(self._pending)
        self._pending = None

    def _close_place(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            place.close()
