"""A model that the daemon serves, and how it is served when the daemon has gone."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..wire.forks import renew_in_children
from ..wire.messages import Kind, Message
from ..wire.properties import decode_value
from .answers import DaemonGoneError, UnavailableError, checked
from .client import Client
from .local_request import LocalRequest
from .model_source import ModelSource
from .remote_request import RemoteRequest

log = logging.getLogger("staticllm.attach")
_said: set[str] = set()


def say_once(reason: str) -> None:
    """Warn on stderr, or wherever the program sends its log, that something runs natively; each reason once."""
    if reason not in _said:
        _said.add(reason)
        log.warning("staticllm attach: %s", reason)


class FarModel:
    """A compiled model of the daemon. Any thread may call the methods.

    Args:
        client: The program's connection.
        source: The model's files, device and properties.
        input_names: The names of each input.
        compile_native: Compiles the model in the program; called only if the daemon cannot serve any more.
    """

    def __init__(
        self,
        client: Client,
        source: ModelSource,
        input_names: Sequence[frozenset[str]],
        compile_native: Callable[[], Any],
    ) -> None:
        self.input_names = input_names
        self._client, self._source, self._compile_native = client, source, compile_native
        self.renew()
        renew_in_children(self)
        self._native: Any = None
        self._handle = self._epoch = 0
        self.mode = "plain"
        self._hold()

    def renew(self) -> None:
        """Make the lock, for a new model or in a forked child."""
        self._lock = threading.Lock()

    @property
    def is_stateful(self) -> bool:
        """Whether calls depend on earlier ones."""
        return self.mode != "plain"

    def open_remote(self) -> RemoteRequest:
        """Return a new infer request of the daemon, which is started again if it has ended.

        Raises:
            UnavailableError: there is no daemon, or it refuses.
            DaemonGoneError: it has ended meanwhile.
        """
        with self._lock:
            if self._client.connect() != self._epoch:
                self._hold()
            handle, epoch = self._handle, self._epoch
        channel, found = self._client.open_channel()
        if found != epoch:
            channel.close()
            raise DaemonGoneError("the daemon has been started again")
        return RemoteRequest(channel, handle, epoch)

    def open_local(self, reason: str) -> LocalRequest:
        """Return an infer request that runs natively in the program.

        Raises:
            UnavailableError: the program must not run natively.
        """
        if self._client.settings.mode == "require":
            raise UnavailableError(f"{reason} (STATICLLM_ATTACH=require)")
        say_once(f"{reason}: the model {self._source.name} goes on natively in this program")
        return LocalRequest(self.native().create_infer_request())

    def native(self) -> Any:
        """Return the model compiled in the program."""
        with self._lock:
            if self._native is None:
                self._native = self._compile_native()
            return self._native

    def has_died(self, epoch: int) -> None:
        """Count the end of the daemon of an epoch, which a request has seen.

        Raises:
            UnavailableError: it is the second within a minute.
        """
        self._client.has_died(epoch)

    def get_property(self, name: str) -> Any:
        """Return a property of the compiled model.

        Raises:
            RuntimeError: there is none of this name.
        """
        if self._native is None:
            for _ in range(2):
                with contextlib.suppress(DaemonGoneError, UnavailableError):
                    return decode_value(self._ask(Kind.GET_PROPERTY, {"name": name}).body.get("value"))
        return self.native().get_property(name)

    def set_property(self, values: dict[str, Any]) -> None:
        """Set properties.

        Raises:
            RuntimeError: the model is shared, or the device does not allow it.
        """
        if self._native is None:
            with contextlib.suppress(DaemonGoneError, UnavailableError):
                self._ask(Kind.SET_PROPERTY, {"values": {name: str(value) for name, value in values.items()}})
                return
        self.native().set_property(values)

    def close(self) -> None:
        """Give the model back."""
        if self._epoch:
            self._client.release(self._handle, self._epoch)
            self._epoch = 0
        self._source.close()

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
        answer, epoch = self._client.compile(Message(Kind.MODEL, body=self._source.describe()))
        self._handle, self._epoch = int(answer.body["model"]), epoch
        self.mode = str(answer.body.get("mode", "plain"))
