"""The requests that wait, prefill and decode in a model, and what each device call held; no text of them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from staticllm.errors import ClosedError
from staticllm.pipelines.profiling.call_watch import RecentCalls
from staticllm.pipelines.profiling.records import RequestProgress
from staticllm.pipelines.profiling.stats import Stats
from staticllm.server.models.served import ServedModel

PULL_SECONDS = 0.2
"""Another process is asked at most this often, however many read."""
MAX_PULLS = 8
"""Questions per pull: an answer has a bounded number of calls."""
MAX_ENTRIES = 1024
"""Calls and ended answers in one answer to a reader; the next one goes on."""
SAME_CLOCK_SECONDS = 1.0
"""Processes of one machine share a clock; a larger difference than this is that of two clocks, and not of a slow answer."""
CallsAfter = Callable[[int], dict[str, Any]]
"""An engine's ``calls_after``; raises ``ClosedError`` if its process has ended."""


@dataclass(frozen=True)
class EngineState:
    """The answers that run, the KV slots of the engine, and its statistics."""

    requests: tuple[RequestProgress, ...]
    num_slots: int
    stats: Stats


class Mirror:
    """The last calls of a model's engines, one after the other, with numbers that go on. Any thread may call.

    ``origin`` is the moment that is 0.
    """

    def __init__(self, origin: float) -> None:
        self.log = RecentCalls()
        self._origin = origin
        self._lock = threading.Lock()
        self._name = ""
        self._cursor = 0
        self._state: EngineState | None = None
        self._pulled = float("-inf")

    def read(self, calls_after: CallsAfter, pause: float = 0.0) -> EngineState | None:
        """Take over new calls, and return the state of the engine; None if nothing is known.

        One thread asks at a time, at most every ``pause`` seconds; with a pause, others get meanwhile what is known.

        Raises:
            ClosedError: the process has ended.
        """
        if self._lock.acquire(blocking=self._state is None or not pause):
            try:
                if time.monotonic() - self._pulled >= pause:
                    self._state = self._pull(calls_after)
                    self._pulled = time.monotonic()
            finally:
                self._lock.release()
        return self._state

    def _pull(self, calls_after: CallsAfter) -> EngineState | None:
        state = None
        for _ in range(MAX_PULLS):
            found = calls_after(self._cursor)
            if "watch" not in found:  # a daemon of an earlier version
                return None
            if found["watch"] != self._name:  # another engine, which has numbers of its own
                self._name = found["watch"]
                if self._cursor:
                    self._cursor = 0
                    continue
            shift = time.perf_counter() - found["now"]
            shift = 0.0 if abs(shift) < SAME_CLOCK_SECONDS else shift
            self._take(found, shift)
            requests = tuple(_moved(each, shift) for each in found["requests"])
            state = EngineState(requests, found["num_slots"], Stats(**found["stats"]))
            if not found["more"]:
                break
        return state

    def _take(self, found: dict[str, Any], shift: float) -> None:
        self._cursor = found["cursor"]
        self.log.skip(found["dropped"])
        for entry in found["entries"]:
            for name in ("start", "end"):
                if entry.get(name) is not None:
                    entry[name] = round(entry[name] + shift - self._origin, 6)
            self.log.add(entry)


def _moved(values: dict[str, Any], shift: float) -> RequestProgress:
    """Return the progress of a request in the time of this process."""
    moments = {name: values[name] for name in ("arrival", "started", "first_token")}
    return RequestProgress(**{**values, **{name: None if at is None else at + shift for name, at in moments.items()}})


class SchedulerFeed:
    """The calls of one server's engines, by model. Belongs to one event loop.

    Of an engine that is not read, only its ring of records is kept.
    """

    def __init__(self) -> None:
        self._origin = time.perf_counter()
        self._mirrors: dict[str, Mirror] = {}

    def reader(self, model: ServedModel | None, after: int) -> Callable[[], dict[str, Any]]:
        """Return a function that returns the state of a chat model as JSON, with what came after the record ``after``.

        None if there is no chat model. It may run in any thread, and waits for the process of the model.
        """
        if model is None:
            nothing = Mirror(self._origin)
            return lambda: self._document(nothing, after)
        mirror = self._mirrors.setdefault(model.spec.name, Mirror(self._origin))
        calls_after = model.calls_after
        loaded = model.loaded
        now = time.perf_counter()
        if loaded is None:
            return lambda: self._document(mirror, after)
        pause = 0.0 if loaded.home is None else PULL_SECONDS
        waiting = [round((now - since) * 1e3, 3) for each in model.admissions for since in each.waiting_since]
        clients = loaded.admission.shares.numbers
        limits = loaded.admission.limits
        bounds = {
            "num_seqs": loaded.num_seqs,
            "max_running": limits.max_running,
            "max_per_client": limits.max_per_client,
            "max_waiting": limits.max_waiting,
            "kv_slots": None,
        }

        def read() -> dict[str, Any]:
            state = None
            with contextlib.suppress(ClosedError):  # it has ended just now
                state = mirror.read(calls_after, pause)
            told = {**self._document(mirror, after), "waiting_ms": waiting, "clients": clients, "limits": bounds}
            if state is None:
                return told
            return {
                **told,
                "requests": [self._request(each) for each in state.requests],
                "totals": totals_of(state.stats),
                "limits": {**bounds, "kv_slots": state.num_slots},
            }

        return read

    def _document(self, mirror: Mirror, after: int) -> dict[str, Any]:
        """Return what is known of a model that is not loaded, and a moment that is later than all of it."""
        known = mirror.log.after(after, lambda entries: entries[:MAX_ENTRIES])
        return {
            "now": round(time.perf_counter() - self._origin, 6),
            "cursor": known.cursor,
            "dropped": known.num_dropped,
            "waiting_ms": [],
            "clients": [],
            "requests": [],
            "calls": [entry for entry in known.entries if "rows" in entry],
            "ended": [entry for entry in known.entries if "rows" not in entry],
            "totals": None,
            "limits": None,
        }

    def _request(self, progress: RequestProgress) -> dict[str, Any]:
        first = progress.first_token
        return {
            "id": progress.id,
            "status": progress.status,
            "arrival": round(progress.arrival - self._origin, 6),
            "prompt_tokens": progress.num_prompt,
            "cached_tokens": progress.num_cached,
            "computed_tokens": progress.num_computed,
            "output_tokens": progress.num_generated,
            "max_output_tokens": progress.max_new_tokens,
            "priority": progress.priority,
            "class": "proactive" if progress.priority < 0 else "reactive",
            "ttft_ms": None if first is None else round((first - progress.arrival) * 1e3, 3),
        }


def totals_of(stats: Stats) -> dict[str, Any]:
    """Return an engine's statistics since its model was loaded."""
    return {
        "requests": stats.num_requests,
        "calls": stats.num_steps,
        "failed_calls": stats.num_failed_steps,
        "preemptions": stats.num_preemptions,
        "prompt_tokens": stats.prompt_tokens,
        "cached_tokens": stats.prefix_hit_tokens,
        "output_tokens": stats.num_tokens,
        "prefill_seconds": round(stats.device_seconds * stats.prefill_share, 6),
        "decode_seconds": round(stats.device_seconds * stats.decode_share, 6),
        "proactive_seconds": round(stats.proactive_seconds, 6),
        "jobs": stats.num_jobs,
        "job_seconds": round(stats.job_seconds, 6),
        "padding": round(stats.padding, 4),
        "slots_in_use": stats.slots_in_use,
        "peak_slots_in_use": stats.peak_slots_in_use,
        "ttft_ms": round(stats.ttft_ms, 3),
        "ttft_p95_ms": round(stats.ttft_p95_ms, 3),
        "tpot_ms": round(stats.tpot_ms, 3),
        "longest_gap_ms": round(stats.longest_gap_ms, 3),
        "finish_reasons": stats.finish_reasons,
    }


def encoder_of(model: ServedModel) -> dict[str, Any]:
    """Return an encoder that is loaded: the chat model whose engine runs it, and the queue of each of its devices."""
    return {
        "model": model.spec.name,
        "type": model.spec.kind,
        "engine": model.engine_owner,
        "devices": [
            {
                "name": device.name,
                "waiting": device.num_waiting,
                "running": device.num_running,
                "embedded": device.num_embedded,
                "depth": device.depth or None,
                "health": device.health,
                "is_shared": device.is_shared,
            }
            for device in model.devices
        ],
    }
