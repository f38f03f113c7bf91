"""Records the uses of devices, and writes them as a Chrome trace with a track per program and per engine."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from staticllm.errors import ConfigError
from staticllm.system.files import write_whole

MAX_EVENTS = 200_000


@dataclass(frozen=True)
class Event:
    """One use of a device: on a ``track``, from ``start`` (``time.perf_counter``) on, for ``seconds``; ``queued`` before it.

    ``more`` is what the viewer shows of it besides.
    """

    track: str
    name: str
    start: float
    seconds: float
    queued: float = 0.0
    more: Mapping[str, float] = field(default_factory=dict)


class Timeline:
    """The events of one recording. Any thread may call; outside of a recording nothing is kept."""

    def __init__(self) -> None:
        self._events: deque[Event] | None = None
        self._lock = threading.Lock()

    @property
    def is_recording(self) -> bool:
        """Whether a recording is in progress."""
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
        """Begin a recording. Raises ``ConfigError`` (another one is in progress)."""
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

        Raises ``ConfigError`` (none is in progress) and ``OSError`` (the file cannot be written).
        """
        with self._lock:
            events, self._events = self._events, None
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
