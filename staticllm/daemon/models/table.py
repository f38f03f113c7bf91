"""The models that the daemon has compiled: one copy for all clients with the same files, device and properties."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from staticllm.daemon.limits import DaemonLimits
from staticllm.errors import BusyError
from staticllm.system.heap import return_free_memory

log = logging.getLogger(__name__)


class WantedModel(Protocol):
    """What a client wants compiled: ``ModelOrigin``, ``LanguageOrigin`` or ``SpeechOrigin``."""

    @property
    def xml(self) -> Path: ...

    @property
    def device(self) -> str: ...

    @property
    def num_bytes(self) -> int: ...

    def identity(self) -> tuple[object, ...]:
        """Return a value that is equal for two origins of which one compiled model serves both."""
        ...


class SharedModel(Protocol):
    """A compiled model. ``id`` is its number, ``mode`` is ``plain``, ``stateful``, ``packed`` or ``engine``."""

    id: int
    mode: str
    device: str

    def describe(self) -> dict[str, Any]:
        """Return what a client must know of the model, as JSON types."""
        ...

    def get_property(self, name: str) -> object:
        """Return a property of the compiled model. Raises ``RuntimeError`` for an unknown one."""
        ...

    def close(self) -> None:
        """Release the compiled model; no request of it is left."""
        ...


class ModelSlot:
    """A model in the table, and how many clients hold it."""

    def __init__(self, origin: WantedModel) -> None:
        self.origin = origin
        self.num_bytes = origin.num_bytes
        self.num_users = 0
        self.free_since = time.monotonic()
        self.compiled: Future[SharedModel] = Future()


Compile = Callable[[Any, int], SharedModel]


class ModelTable:
    """Compiles models, one at a time, and keeps each while a client holds it and for some minutes after. Any thread may call."""

    def __init__(self, compile_model: Compile, limits: DaemonLimits, compiling: threading.Lock | None = None) -> None:
        """Take what compiles an origin, and a lock that is held meanwhile: two compilers at once crash some devices."""
        self._compile = compile_model
        self._limits = limits
        self._slots: dict[tuple[object, ...], ModelSlot] = {}
        self._lock = threading.Lock()
        self._compiling = compiling or threading.Lock()
        self._ids = count(1)

    def acquire(self, origin: WantedModel) -> tuple[tuple[object, ...], SharedModel]:
        """Return the key and the compiled model of an origin; it stays until ``release`` is called with the key.

        Raises:
            BusyError: the weights do not fit beside those of the other models.
            Exception: the compilation failed.
        """
        key = origin.identity()
        with self._lock:
            slot = self._slots.get(key)
            is_new = slot is None
            if slot is None:
                self._make_room(origin)
                slot = ModelSlot(origin)
                self._slots[key] = slot
            slot.num_users += 1
        if is_new:
            self._fill(key, slot)
        try:
            return key, slot.compiled.result()
        except BaseException:
            self.release(key)
            raise

    def release(self, key: tuple[object, ...]) -> None:
        """Give a model back that ``acquire`` returned."""
        with self._lock:
            slot = self._slots.get(key)
            if slot is not None:
                slot.num_users -= 1
                slot.free_since = time.monotonic()
                if slot.compiled.done() and slot.compiled.exception() is not None and not slot.num_users:
                    del self._slots[key]  # the next one tries again

    def drop_idle(self, seconds: float) -> None:
        """Drop the models that no client has held for ``seconds``."""
        moment = time.monotonic() - seconds
        with self._lock:
            idle = [key for key, slot in self._slots.items() if not slot.num_users and slot.free_since <= moment]
            slots = [self._slots.pop(key) for key in idle]
        for slot in slots:
            log.info("model %s is dropped: no program holds it", slot.origin.xml)
            try:
                slot.compiled.result().close()
            except Exception:  # the others are released all the same
                log.exception("model %s was not released", slot.origin.xml)
        if slots:
            return_free_memory()

    def served(self) -> list[tuple[ModelSlot, SharedModel]]:
        with self._lock:
            slots = [slot for slot in self._slots.values() if slot.compiled.done() and not slot.compiled.exception()]
        return [(slot, slot.compiled.result()) for slot in slots]

    def close(self) -> None:
        self.drop_idle(0.0)

    def _fill(self, key: tuple[object, ...], slot: ModelSlot) -> None:
        with self._compiling:
            start = time.perf_counter()
            try:
                model = self._compile(slot.origin, next(self._ids))
            except BaseException as error:
                slot.compiled.set_exception(error)
                return
            seconds = time.perf_counter() - start
            log.info("model %s on %s: %s, %.1f s", slot.origin.xml, slot.origin.device, model.mode, seconds)
            slot.compiled.set_result(model)

    def _make_room(self, origin: WantedModel) -> None:
        """Drop idle models, the oldest first, until the weights fit. The caller holds the lock. Raises ``BusyError``."""
        limit = self._limits.model_bytes
        wanted = origin.num_bytes
        idle = [key for key, slot in self._slots.items() if not slot.num_users and slot.compiled.done()]
        idle.sort(key=lambda key: self._slots[key].free_since)
        used = sum(slot.num_bytes for slot in self._slots.values())
        while used + wanted > limit and idle:
            slot = self._slots.pop(idle.pop(0))
            used -= slot.num_bytes
            slot.compiled.result().close()
        if used + wanted > limit:
            raise BusyError(
                f"the model's weights have {wanted >> 20} MiB, other models of the daemon {used >> 20} MiB, its limit is "
                f"{limit >> 20} MiB: end programs that use other models, or run this one natively"
            )
