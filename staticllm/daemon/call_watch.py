"""Watches an engine of the daemon for the clients that show what its calls hold."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from staticllm.pipelines.engine.engine import Engine
from staticllm.pipelines.profiling.engine_watch import EngineWatch
from staticllm.pipelines.profiling.records import Record

WATCH_SECONDS = 15.0
"""An engine is no longer watched when nobody has asked for this long."""
MAX_BYTES = 256 << 10
"""About the most bytes of the calls in an answer, and of its requests; the next answer has the next calls."""
MAX_ENTRIES = 256
MAX_REQUESTS = 512


class CallWatch:
    """What an engine does, for any number of readers. It costs nothing unless somebody asks.

    The engine's thread only appends; the thread of any connection may read.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._watch = EngineWatch(1, origin=0.0)
        self._name = secrets.token_hex(8)  # of the numbers: another process begins again
        self._until = 0.0

    def append(self, record: Record) -> None:
        """Keep a record, or end the watch if nobody has asked for long. Runs on the engine's thread."""
        if time.monotonic() > self._until:
            self._engine.profiler.watcher = None
        else:
            self._watch.append(record)

    def after(self, number: int) -> dict[str, Any]:
        """Return the calls and answers after a number, the requests that run, and the statistics, as JSON types.

        Moments are those of this process's ``time.perf_counter``, of which ``now`` is one. ``cursor`` is the number for the
        next reading; what is more than an answer may hold comes then.
        """
        self._until = time.monotonic() + WATCH_SECONDS
        if self._engine.profiler.watcher is not self:
            self._watch.restart()
            self._engine.profiler.watcher = self
        entries, cursor, num_dropped = self._watch.entries_after(number)
        found = _first_of(entries)
        progress = self._engine.progress()
        return {
            "watch": self._name,
            "now": time.perf_counter(),
            "entries": found,
            "more": len(found) < len(entries),
            "cursor": found[-1]["number"] if found else cursor,
            "dropped": num_dropped,
            "requests": [asdict(request) for request in progress.requests[:MAX_REQUESTS]],
            "num_slots": progress.num_slots,
            "stats": asdict(self._engine.stats()),
        }


def _first_of(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return as many of the first entries as one message may hold."""
    size = 0
    for index, entry in enumerate(entries[:MAX_ENTRIES]):
        size += _size_of(entry)
        if index and size > MAX_BYTES:
            return entries[:index]
    return entries[:MAX_ENTRIES]


def _size_of(entry: Mapping[str, Any]) -> int:
    """Return about the bytes of an entry as JSON."""
    return (
        400
        + 12 * sum(len(entry.get(name, ())) for name in ("decode", "preempted"))
        + 30 * len(entry.get("prefill", ()))
    )
