"""The devices of the daemon: one set of turns per device, and what each client used of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import openvino as ov

from staticllm.daemon.sharing.device_turns import Ask, ClientId, DeviceTurns, Share
from staticllm.daemon.sharing.timeline import Timeline

VIRTUAL_DEVICES = ("AUTO", "HETERO", "MULTI", "BATCH")
"""Devices of OpenVINO that stand for others, and that cannot export what they compile."""


@dataclass
class Usage:
    """What a client used since it came. ``track`` names its track in recordings.

    Attributes:
        calls: Calls of models, and tokens of requests.
        device_seconds: Device time; of calls that it shared, the part of its rows.
        queued_seconds: Time that its calls, and its requests before their first device call, waited.
        tensor_bytes: Bytes of the outputs that were sent to it.
        read_bytes: What the device read for it: weights, keys and values; of shared calls its part.
        by_model, by_phase: The device seconds by the model's number, and by phase: ``prefill``, ``decode``, ``call``.
        rows_by_phase: The rows of device calls by phase.
    """

    track: str
    calls: int = 0
    device_seconds: float = 0.0
    queued_seconds: float = 0.0
    tensor_bytes: int = 0
    read_bytes: int = 0
    by_model: dict[int, float] = field(default_factory=dict)
    by_phase: dict[str, float] = field(default_factory=dict)
    rows_by_phase: dict[str, int] = field(default_factory=dict)

    def add_share(self, model: int, share: Share) -> None:
        """Count what the client had of a use of a device."""
        self.device_seconds += share.seconds
        self.read_bytes += share.num_bytes
        self.by_model[model] = self.by_model.get(model, 0.0) + share.seconds
        self.by_phase[share.phase] = self.by_phase.get(share.phase, 0.0) + share.seconds
        self.rows_by_phase[share.phase] = self.rows_by_phase.get(share.phase, 0) + share.rows

    def add_calls(self, count: int, queued_seconds: float, tensor_bytes: int) -> None:
        """Count calls that have ended, or tokens that were sent."""
        self.calls += count
        self.queued_seconds += queued_seconds
        self.tensor_bytes += tensor_bytes

    def to_dict(self) -> dict[str, object]:
        """Return the usage as JSON types."""
        return {
            "calls": self.calls, "device_seconds": self.device_seconds, "queued_seconds": self.queued_seconds,
            "tensor_bytes": self.tensor_bytes, "read_bytes": self.read_bytes,
            "by_model": {str(key): value for key, value in tuple(self.by_model.items())},
            "by_phase": dict(tuple(self.by_phase.items())), "rows_by_phase": dict(tuple(self.rows_by_phase.items())),
        }  # fmt: skip


class Devices:
    """The devices that the daemon uses, by the names that clients give: ``NPU``, ``GPU.1``. Any thread may call the methods.

    ``compiling`` is held while a model is compiled: two compilers at once crash some devices.
    """

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.compiling = threading.Lock()
        self._turns: dict[str, DeviceTurns] = {}
        self._usages: dict[ClientId, Usage] = {}
        self._lock = threading.Lock()

    def turns(self, device: str) -> DeviceTurns:
        """Return the turns of a device."""
        with self._lock:
            found = self._turns.get(device)
            if found is None:
                found = self._turns[device] = DeviceTurns(on_use=self._record)
            return found

    def open(self, owner: ClientId, track: str) -> Usage:
        """Return the usage of a new client, which grows from now on until ``forget``."""
        with self._lock:
            usage = self._usages[owner] = Usage(track)
        return usage

    def forget(self, owner: ClientId) -> None:
        """Forget a client that has gone."""
        with self._lock:
            self._usages.pop(owner, None)
        for each in self._all_turns():
            each.forget(owner)

    def hurry(self, owner: ClientId, priority: int) -> None:
        """Give the calls of a client that wait for a device a higher priority."""
        for each in self._all_turns():
            each.hurry(owner, priority, ())

    def _all_turns(self) -> tuple[DeviceTurns, ...]:
        with self._lock:
            return tuple(self._turns.values())

    def _record(self, ask: Ask, seconds: float, shares: Sequence[Share]) -> None:
        """Count a use of a device for its clients, and record it."""
        if isinstance(ask.owner, ClientId):
            shares = (Share(ask.owner, ask.phase, seconds, ask.rows, ask.num_bytes),)
        with self._lock:
            used = [
                (usage, share)
                for share in shares
                if share.owner is not None and (usage := self._usages.get(share.owner)) is not None
            ]
            for usage, share in used:
                usage.add_share(ask.model, share)
        if self.timeline.is_recording:
            self._draw(ask, seconds, used)

    def _draw(self, ask: Ask, seconds: float, used: Sequence[tuple[Usage, Share]]) -> None:
        """Record a use of a device that ends now on the tracks of the clients that had it."""
        start = time.perf_counter() - seconds
        waited = max(0.0, start - ask.arrival)
        if ask.owner.is_engine:
            self.timeline.add(f"engine of model {ask.model}", "step", start, seconds, waited)
        for usage, share in used:
            more = {"rows": share.rows, "device_ms": share.seconds * 1e3, "read_MB": share.num_bytes / 1e6}
            name = f"{share.phase} of model {ask.model}"
            self.timeline.add(usage.track, name, start, seconds, 0.0 if ask.owner.is_engine else waited, more)


def is_virtual(device: str) -> bool:
    """Return whether a device stands for others, such as ``AUTO:NPU,CPU``."""
    return device.split(":", maxsplit=1)[0].upper() in VIRTUAL_DEVICES


def real_device(compiled: ov.CompiledModel, asked: str) -> str:
    """Return the device behind ``AUTO`` and the like, so that all its users take turns on it; other devices as ``asked``."""
    if not is_virtual(asked):
        return asked
    try:
        first = next(iter(compiled.get_property("EXECUTION_DEVICES")), asked)
    except RuntimeError:
        return asked
    return str(first).strip("()")
