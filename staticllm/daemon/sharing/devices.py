"""The devices of the daemon: one scheduler per device, what each client used of them, and a recording of it."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import openvino as ov

from staticllm.daemon.sharing.device_scheduler import ClientId, DeviceRequest, DeviceScheduler, Share
from staticllm.errors import ConfigError
from staticllm.system.files import write_whole

MAX_EVENTS = 200_000
VIRTUAL_DEVICES = ("AUTO", "HETERO", "MULTI", "BATCH")
"""Devices of OpenVINO that stand for others, and that cannot export what they compile."""


@dataclass(frozen=True)
class Event:
    """One use of a device."""

    track: str
    """The track of recordings that shows it."""
    name: str
    start: float
    """A moment of ``time.perf_counter``."""
    seconds: float
    queued: float = 0.0
    """Seconds for which it waited before."""
    more: Mapping[str, float] = field(default_factory=dict)
    """What the viewer shows of it besides."""


class Timeline:
    """The events of one recording. Any thread may call; outside of a recording nothing is kept."""

    def __init__(self) -> None:
        self._events: deque[Event] | None = None
        self._lock = threading.Lock()

    @property
    def is_recording(self) -> bool:
        return self._events is not None

    def add(
        self,
        track: str,
        name: str,
        start: float,
        seconds: float,
        queued: float = 0.0,
        more: Mapping[str, float] | None = None,
    ) -> None:
        """Add an event to a recording in progress. The oldest of more than ``MAX_EVENTS`` are dropped."""
        events = self._events
        if events is not None:
            events.append(Event(track, name, start, seconds, queued, more or {}))

    def begin(self) -> None:
        """Begin a recording.

        Raises:
            ConfigError: another one is in progress.
        """
        with self._lock:
            if self._events is not None:
                raise ConfigError("another recording of the daemon is in progress: wait for its end")
            self._events = deque(maxlen=MAX_EVENTS)

    def cancel(self) -> None:
        """End a recording without a file, because the program that wanted it has gone."""
        with self._lock:
            self._events = None

    def end(self, path: Path) -> int:
        """End the recording, write it to ``path``, and return its number of events.

        Raises:
            ConfigError: none is in progress.
            OSError: the file cannot be written.
        """
        with self._lock:
            events = self._events
            self._events = None
        if events is None:
            raise ConfigError("no recording of the daemon is in progress")
        write_whole(path, json.dumps({"traceEvents": _chrome(list(events))}).encode())
        return len(events)


def _chrome(events: list[Event]) -> list[dict[str, object]]:
    """Return events in Chrome's format: a process for each track, with its calls and the time before them."""
    tracks = {track: number for number, track in enumerate(dict.fromkeys(event.track for event in events), 1)}
    found: list[dict[str, object]] = [
        {"ph": "M", "name": "process_name", "pid": number, "tid": 0, "args": {"name": track}}
        for track, number in tracks.items()
    ]
    for event in events:
        pid = tracks[event.track]
        found.append(_slice(event.name, pid, 1, event.start, event.seconds) | {"args": dict(event.more)})
        if event.queued > 0:
            found.append(_slice("queued", pid, 2, event.start - event.queued, event.queued))
    return found


def _slice(name: str, pid: int, tid: int, start: float, seconds: float) -> dict[str, object]:
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, "ts": start * 1e6, "dur": seconds * 1e6}


@dataclass
class DeviceUsage:
    """What a client used since it came."""

    track: str
    """Names its track in recordings."""
    calls: int = 0
    """Calls of models, and tokens of requests."""
    device_seconds: float = 0.0
    """Device time; of calls that it shared, the part of its rows."""
    queued_seconds: float = 0.0
    """Time that its calls, and its requests before their first device call, waited."""
    tensor_bytes: int = 0
    """Bytes of the outputs that were sent to it."""
    read_bytes: int = 0
    """What the device read for it: weights, keys and values; of shared calls its part."""
    by_model: dict[int, float] = field(default_factory=dict)
    """Device seconds by the model's number."""
    by_phase: dict[str, float] = field(default_factory=dict)
    """Device seconds by phase: ``prefill``, ``decode``, ``call``."""
    rows_by_phase: dict[str, int] = field(default_factory=dict)
    """The rows of device calls by phase."""

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
        self.schedulers: dict[str, DeviceScheduler] = {}
        self.usages: dict[ClientId, DeviceUsage] = {}
        self._lock = threading.Lock()

    def scheduler(self, device: str) -> DeviceScheduler:
        with self._lock:
            found = self.schedulers.get(device)
            if found is None:
                found = DeviceScheduler(on_use=self._record)
                self.schedulers[device] = found
            return found

    def open(self, owner: ClientId, track: str) -> DeviceUsage:
        """Return the usage of a new client, which grows from now on until ``forget``."""
        with self._lock:
            usage = DeviceUsage(track)
            self.usages[owner] = usage
        return usage

    def forget(self, owner: ClientId) -> None:
        with self._lock:
            self.usages.pop(owner, None)
        for each in self._all_schedulers():
            each.forget(owner)

    def set_priority(self, owner: ClientId, priority: int) -> None:
        """Change the priority of the calls of a client that wait for a device."""
        for each in self._all_schedulers():
            each.set_priority(owner, priority)

    def _all_schedulers(self) -> tuple[DeviceScheduler, ...]:
        with self._lock:
            return tuple(self.schedulers.values())

    def _record(self, request: DeviceRequest, seconds: float, shares: Sequence[Share]) -> None:
        """Count a use of a device for its clients, and record it."""
        if isinstance(request.owner, ClientId):
            shares = (Share(request.owner, request.phase, seconds, request.rows, request.num_bytes),)
        with self._lock:
            used = [
                (usage, share)
                for share in shares
                if share.owner is not None and (usage := self.usages.get(share.owner)) is not None
            ]
            for usage, share in used:
                usage.add_share(request.model, share)
        if self.timeline.is_recording:
            self._draw(request, seconds, used)

    def _draw(self, request: DeviceRequest, seconds: float, used: Sequence[tuple[DeviceUsage, Share]]) -> None:
        """Record a use of a device that ends now on the tracks of the clients that had it."""
        start = time.perf_counter() - seconds
        waited = max(0.0, start - request.arrival)
        if request.owner.is_engine:
            self.timeline.add(f"engine of model {request.model}", "step", start, seconds, waited)
        for usage, share in used:
            more = {"rows": share.rows, "device_ms": share.seconds * 1e3, "read_MB": share.num_bytes / 1e6}
            name = f"{share.phase} of model {request.model}"
            self.timeline.add(usage.track, name, start, seconds, 0.0 if request.owner.is_engine else waited, more)


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
