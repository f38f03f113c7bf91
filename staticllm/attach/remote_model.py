"""A model that the daemon serves, and its infer requests, wherever they run when the daemon has gone.

The states of a new place are computed again from the calls since the last reset.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np

from ..wire.channel import renew_in_children
from ..wire.messages import Kind, Message, decode_value
from ..wire.tensors import Array
from .call_log import CallLog, StateChange
from .client import Client, DaemonGoneError, RefusedError, UnavailableError, checked
from .infer_requests import CallOutputs, DaemonRequest, NativeRequest, Place
from .model_origin import NativeOrigin

Result = TypeVar("Result")
MAX_TRIES = 4
log = logging.getLogger("staticllm.attach")
_said: set[str] = set()


def say_once(reason: str) -> None:
    """Warn on stderr, or wherever the program sends its log, that something runs natively; each reason once."""
    if reason not in _said:
        _said.add(reason)
        log.warning("staticllm attach: %s", reason)


class RemoteModel:
    """A compiled model of the daemon. Any thread may call the methods.

    Args:
        client: The program's connection.
        origin: The model's files, device and properties.
        input_names: The names of each input.
        compile_native: Compiles the model in the program; called only if the daemon cannot serve any more.
    """

    def __init__(
        self,
        client: Client,
        origin: NativeOrigin,
        input_names: Sequence[frozenset[str]],
        compile_native: Callable[[], Any],
    ) -> None:
        self.input_names = input_names
        self._client = client
        self._origin = origin
        self._compile_native = compile_native
        self.renew()
        renew_in_children(self)
        self._native: Any = None
        self._handle = 0
        self._epoch = 0
        self.mode = "plain"
        self._hold()

    def renew(self) -> None:
        """Make the lock, for a new model or in a forked child."""
        self._lock = threading.Lock()

    @property
    def is_stateful(self) -> bool:
        """Whether calls depend on earlier ones."""
        return self.mode != "plain"

    def open_in_daemon(self) -> DaemonRequest:
        """Return a new infer request of the daemon, which is started again if it has ended.

        Raises:
            UnavailableError: there is no daemon, or it refuses.
            DaemonGoneError: it has ended meanwhile.
        """
        with self._lock:
            if self._client.connect() != self._epoch:
                self._hold()
            handle = self._handle
            epoch = self._epoch
        channel, found = self._client.open_channel()
        if found != epoch:
            channel.close()
            raise DaemonGoneError("the daemon has been started again")
        return DaemonRequest(channel, handle, epoch)

    def open_native(self, reason: str) -> NativeRequest:
        """Return an infer request that runs natively in the program.

        Raises:
            UnavailableError: the daemon is required.
        """
        if self._client.settings.mode == "require":
            raise UnavailableError(f"{reason} (STATICLLM_ATTACH=require)")
        say_once(f"{reason}: the model {self._origin.name} goes on natively in this program")
        return NativeRequest(self.native().create_infer_request())

    def native(self) -> Any:
        """Return the model compiled in the program."""
        with self._lock:
            if self._native is None:
                self._native = self._compile_native()
            return self._native

    def has_died(self, epoch: int) -> None:
        """Count the end of the daemon of an epoch.

        Raises:
            UnavailableError: it is the second within a minute.
        """
        self._client.has_died(epoch)

    def get_property(self, name: str) -> Any:
        if self._native is None:
            for _ in range(2):
                with contextlib.suppress(DaemonGoneError, UnavailableError):
                    return decode_value(self._ask(Kind.GET_PROPERTY, {"name": name}).body.get("value"))
        return self.native().get_property(name)

    def set_property(self, values: dict[str, Any]) -> None:
        if self._native is None:
            with contextlib.suppress(DaemonGoneError, UnavailableError):
                self._ask(Kind.SET_PROPERTY, {"values": {name: str(value) for name, value in values.items()}})
                return
        self.native().set_property(values)

    def close(self) -> None:
        if self._epoch:
            self._client.release(self._handle, self._epoch)
            self._epoch = 0
        self._origin.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be ending
            self.close()

    def _ask(self, kind: Kind, body: dict[str, Any]) -> Message:
        with self._lock:
            if self._client.connect() != self._epoch:
                self._hold()
            handle = self._handle
        return checked(self._client.call(Message(kind, handle, body=body)))

    def _hold(self) -> None:
        answer, epoch = self._client.compile(Message(Kind.MODEL, body=self._origin.describe()))
        self._handle = int(answer.body["model"])
        self._epoch = epoch
        self.mode = str(answer.body.get("mode", "plain"))


class GivenState(NamedTuple):
    """The array of a state that the program has got, and its bytes when the state had the same."""

    values: Array
    before: bytes


def _write(index: int, values: Array, place: Place) -> None:
    place.write_state(index, values)


class MovableRequest:
    """An infer request outside of the placeholder. One thread at a time may call the methods.

    After Ctrl-C in ``finish``, ``finish`` runs the call again, and ``start`` counts it as done, as natively, where Ctrl-C does
    not end a call.
    """

    def __init__(self, model: RemoteModel) -> None:
        self._model = model
        self._log = CallLog(model.input_names) if model.is_stateful else None
        self._place: Place | None = None
        self._pending: dict[int, Array] | None = None
        self._native_reason = ""
        self._given: dict[int, GivenState] = {}
        self._at_place(lambda place: None)  # a program that has too many requests is told now

    @property
    def model(self) -> RemoteModel:
        return self._model

    def start(self, inputs: dict[int, Array]) -> None:
        """Start a call; the arrays must not change before ``finish``.

        Raises:
            RuntimeError: the call cannot be started.
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

    def finish(self) -> CallOutputs:
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
        if self._pending is not None:
            self._commit()
            self._close_place()
        self._given.clear()
        if self._log is not None:
            self._log.clear()
            if self._place is not None:
                self._at_place(lambda place: place.reset())

    def state_names(self) -> list[str]:
        return self._at_place(lambda place: place.state_names())

    def get_state(self, index: int) -> Array:
        """Return a state. Until the next call, the state gets what the program writes into the array, as natively."""
        self._send_writes()
        values = self._at_place(lambda place: place.get_state(index))
        self._given[index] = GivenState(values, values.tobytes())
        return values

    def set_state(self, index: int, values: Array) -> None:
        self._send_writes()
        self._given.pop(index, None)
        self._at_place(lambda place: place.set_state(index, values))
        self._note_state(StateChange(index, np.array(values)))

    def reset_state(self, index: int) -> None:
        self._send_writes()
        self._given.pop(index, None)
        self._at_place(lambda place: place.reset_state(index))
        self._note_state(StateChange(index, None))

    def profile(self) -> list[dict[str, Any]]:
        return self._at_place(lambda place: place.profile())

    def close(self) -> None:
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
                if self._native_reason:
                    raise
                self._native_reason = str(error)
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
        if self._native_reason:
            return self._model.open_native(self._native_reason)
        try:
            return self._model.open_in_daemon()
        except RefusedError as error:
            self._native_reason = str(error)
            return self._model.open_native(self._native_reason)

    def _leave(self, error: DaemonGoneError) -> None:
        place = self._place
        self._close_place()
        try:
            if place is not None:
                self._model.has_died(place.epoch)
        except UnavailableError as reason:
            self._native_reason = f"{reason} ({error})"

    def _commit(self) -> None:
        if self._log is not None and self._pending is not None:
            self._log.add(self._pending)
        self._pending = None

    def _close_place(self) -> None:
        place = self._place
        self._place = None
        if place is not None:
            place.close()
