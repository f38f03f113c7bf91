"""One client of the daemon: its objects, by handles that are valid only for this client, and its usage."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

from staticllm.daemon.bodies import Claim
from staticllm.daemon.limits import DaemonLimits
from staticllm.daemon.models.language_model import LanguageModel
from staticllm.daemon.models.plain import PlainModel
from staticllm.daemon.models.speech_service import SpeechService
from staticllm.daemon.models.table import ModelTable, SharedModel, WantedModel
from staticllm.daemon.packed.model import PackedModel
from staticllm.daemon.sharing.device_scheduler import ClientId
from staticllm.daemon.sharing.devices import Devices
from staticllm.errors import BusyError, ConfigError

_numbers = count(1)


@dataclass(frozen=True)
class HeldModel:
    """A model that a client holds: its key in the table of models, and the model."""

    key: tuple[object, ...]
    model: SharedModel


class Session:
    """A client: a program with one or more connections. Any of their threads may call the methods."""

    def __init__(
        self,
        pid: int,
        program: str,
        priority: int,
        table: ModelTable,
        devices: Devices,
        limits: DaemonLimits,
        *,
        watches: bool = False,
    ) -> None:
        """``watches``: it only asks for statistics, and is no program that uses a device."""
        self.client = ClientId(next(_numbers))
        self.token = secrets.token_hex(16)
        self.pid = pid
        self.program = program
        self.priority = priority
        self.watches = watches
        self.usage = devices.open(self.client, f"{program} {pid}")
        self._started = time.monotonic()
        self._table = table
        self._devices = devices
        self._limits = limits
        self._models: dict[int, HeldModel] = {}
        self._num_compiling = 0  # they count as models
        self._claiming: dict[int, LanguageModel] = {}  # those with claims of this client, by handle
        self._handles = count(1)
        self._num_requests = 0
        self._num_cross_windows: dict[int, int] = {}  # by the model's number
        self._block_bytes = 0
        self._lock = threading.Lock()
        self._is_closed = False
        self._followers: dict[object, Callable[[int], None]] = {}  # by the object that they belong to

    def hold(self, origin: WantedModel) -> tuple[int, SharedModel]:
        """Compile a model, or share one that is compiled, and return its handle and the model.

        Raises:
            BusyError: the client has as many models as it may, or has gone.
        """
        with self._lock:
            num_models = len(self._models) + self._num_compiling
            if num_models >= self._limits.models:
                raise BusyError(f"this program has {num_models} models, the limit is {self._limits.models}: drop one")
            self._num_compiling += 1
        try:
            key, model = self._table.acquire(origin)
        except BaseException:
            with self._lock:
                self._num_compiling -= 1
            raise
        with self._lock:
            self._num_compiling -= 1
            if not self._is_closed:
                handle = next(self._handles)
                self._models[handle] = HeldModel(key, model)
                return handle, model
        self._table.release(key)
        raise BusyError("the program has gone while its model was compiled")

    def model(self, handle: int) -> SharedModel:
        """Return one of the client's models.

        Raises:
            ConfigError: it has none with this handle.
        """
        with self._lock:
            held = self._models.get(handle)
        if held is None:
            raise ConfigError(f"this program has no model {handle}")
        return held.model

    def infer_model(self, handle: int) -> PlainModel | PackedModel:
        """Return a model that has infer requests.

        Raises:
            ConfigError: it is another one.
        """
        model = self.model(handle)
        if not isinstance(model, (PlainModel, PackedModel)):
            raise ConfigError(f"model {handle} has no infer requests: it was loaded as a language model")
        return model

    def language_model(self, handle: int) -> LanguageModel:
        """Return a language model with an engine.

        Raises:
            ConfigError: it is another one.
        """
        model = self.model(handle)
        if not isinstance(model, LanguageModel):
            raise ConfigError(f"model {handle} takes no requests: it was not loaded as a language model")
        return model

    def speech_model(self, handle: int) -> SpeechService:
        """Return a speech model.

        Raises:
            ConfigError: it is another one.
        """
        model = self.model(handle)
        if not isinstance(model, SpeechService):
            raise ConfigError(f"model {handle} is not a speech model")
        return model

    def claim(self, handle: int, asked: Claim) -> None:
        """Keep a conversation of a session longer than others while the client holds the model.

        Raises:
            ConfigError: the handle is of no language model.
        """
        model = self.language_model(handle)
        with self._lock:
            if handle in self._models:
                self._claiming[handle] = model
                model.claim(self.token, asked)

    def set_priority(self, priority: int) -> None:
        """Change the priority of the client's calls, including calls that wait or run in an engine.

        A step that an engine waits for keeps a higher priority until it has run, because the priority may come from another
        client.
        """
        self.priority = priority
        with self._lock:
            followers = tuple(self._followers.values())
        for follow in followers:
            follow(priority)
        self._devices.set_priority(self.client, priority)  # calls that began meanwhile have it

    def follow(self, key: object, on_priority: Callable[[int], None] | None) -> None:
        """Call ``on_priority`` whenever the priority changes; None ends that. ``key`` names the follower."""
        with self._lock:
            self._followers.pop(key, None)
            if on_priority is not None:
                self._followers[key] = on_priority

    def release(self, handle: int) -> None:
        """Release a model; an unknown handle is ignored."""
        with self._lock:
            held = self._models.pop(handle, None)
            claiming = self._claiming.pop(handle, None)
            if claiming is not None and claiming not in self._claiming.values():
                claiming.drop_claims(self.token)
        if held is not None:
            self._table.release(held.key)

    def count_request(self, change: int) -> None:
        """Count an infer request that is opened (1) or closed (-1).

        Raises:
            BusyError: the client has too many.
        """
        with self._lock:
            if self._num_requests + change > self._limits.requests:
                raise BusyError(
                    f"this program has {self._num_requests} infer requests, the limit is {self._limits.requests}: drop some"
                )
            self._num_requests += change

    def count_window(self, model: int, change: int, limit: int) -> None:
        """Count a window of a model that is added (1) or removed (-1).

        Raises:
            BusyError: the client has too many.
        """
        with self._lock:
            count = self._num_cross_windows.get(model, 0)
            if count + change > limit:
                raise BusyError(f"this program has {count} windows of the model, the limit is {limit}: release one")
            self._num_cross_windows[model] = count + change

    def count_block(self, change: int) -> None:
        """Count the bytes of shared memory that are added or, if negative, freed.

        Raises:
            BusyError: the client would have too many.
        """
        with self._lock:
            if self._block_bytes + change > self._limits.block_bytes:
                raise BusyError(
                    f"this program needs {(self._block_bytes + change) >> 20} MiB of shared memory for tensors, the limit is "
                    f"{self._limits.block_bytes >> 20} MiB: use smaller tensors or fewer requests"
                )
            self._block_bytes += change

    def close(self) -> None:
        """Release everything. A second call does nothing."""
        with self._lock:
            self._is_closed = True
            held = list(self._models.values())
            self._models.clear()
            for model in self._claiming.values():
                model.drop_claims(self.token)
            self._claiming.clear()
        for each in held:
            self._table.release(each.key)
        self._devices.forget(self.client)

    def describe(self) -> dict[str, object]:
        """Return the client's figures for ``staticllm daemon top``, as JSON types."""
        with self._lock:
            models = [held.model.id for held in self._models.values()]
        since = time.time() - (time.monotonic() - self._started)  # the clock may have been set meanwhile
        return {
            "pid": self.pid, "program": self.program, "priority": self.priority, "since": since, "models": models,
            "requests": self._num_requests, "block_bytes": self._block_bytes, **self.usage.to_dict(),
        }  # fmt: skip
