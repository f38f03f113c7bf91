"""Who waits, prefills and decodes in a model, and what each device call held. It holds no text."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from staticllm.errors import ClosedError
from staticllm.pipelines.llm_pipeline import StaticLLMPipeline
from staticllm.pipelines.profiling.engine_watch import EngineWatch, Watched
from staticllm.pipelines.profiling.progress import RequestProgress
from staticllm.pipelines.profiling.stats import Profiler, Stats
from staticllm.server.feed.mirror import RemoteWatch
from staticllm.server.models.homes import ModelHome
from staticllm.server.models.served import ServedModel

WATCH_SECONDS = 15.0
"""An engine is no longer watched when the feed was not read for this long."""
NOTHING = Watched([], [], 0, 0)


class SchedulerFeed:
    """The watches of one server's engines, by model. Belongs to one event loop.

    An engine is watched from the first reading on, until nobody has read for ``WATCH_SECONDS``. Otherwise it costs nothing.
    """

    def __init__(self) -> None:
        self._origin = time.perf_counter()
        self._watches: dict[str, _Watching] = {}
        self._mirrors: dict[str, RemoteWatch] = {}  # of models in other processes

    def reader(self, model: ServedModel, device: str, after: int) -> Callable[[], dict[str, Any]]:
        """Return a function that returns the state of a chat model as JSON, with what came after the record ``after``.

        It may run in any thread. ``device``: that of the server's settings. The engine is watched from now on.
        """
        pipeline, admission, now = model.pipeline, model.admission, time.perf_counter()
        if not isinstance(pipeline, StaticLLMPipeline) or admission is None:
            return lambda: self._document(self._known(model.spec.name, after))
        limits, waiting = admission.limits, [round((now - since) * 1e3, 3) for since in admission.waiting_since]
        bounds = {
            "num_seqs": model.num_seqs(device),
            "max_running": limits.max_running,
            "max_per_client": limits.max_per_client,
            "max_waiting": limits.max_waiting,
        }
        head = {**self._document(NOTHING), "waiting_ms": waiting}
        if model.home is not None:  # another process knows the calls
            mirror = self._mirrors.setdefault(model.spec.name, RemoteWatch(self._origin))
            return self._remote_reader(
                model, model.home, mirror, {**head, "limits": {**bounds, "kv_slots": None}}, after
            )
        watch = self._watch(model.spec.name, pipeline.engine.profiler)

        def read() -> dict[str, Any]:
            progress = pipeline.engine.progress()
            return {
                **self._document(watch.since(after)),
                "waiting_ms": waiting,
                "requests": [self._request(each) for each in progress.requests],
                "totals": totals_of(pipeline.stats()),
                "limits": {**bounds, "kv_slots": progress.num_slots},
            }

        return read

    def _remote_reader(
        self, model: ServedModel, home: ModelHome, mirror: RemoteWatch, head: dict[str, Any], after: int
    ) -> Callable[[], dict[str, Any]]:
        """Return the function that reads what the process ``home`` knows; it waits for an answer of that process."""

        def read() -> dict[str, Any]:
            state = None
            if not model.is_lost:
                with contextlib.suppress(ClosedError):  # it has ended just now
                    state = mirror.read(home)
            found = mirror.log.since(after)
            told = {**self._document(found), **{name: head[name] for name in ("waiting_ms", "limits")}}
            if state is None:
                return told
            return {
                **told,
                "requests": [self._request(each) for each in state.requests],
                "totals": totals_of(state.stats),
                "limits": {**head["limits"], "kv_slots": state.num_slots},
            }

        return read

    def close(self) -> None:
        """Watch no more."""
        for name in list(self._watches):
            self._end(name)

    def _known(self, name: str, after: int) -> Watched:
        """Return what is known of a model that is not loaded."""
        if name in self._mirrors:
            return self._mirrors[name].log.since(after)
        return self._watches[name].watch.since(after) if name in self._watches else NOTHING

    def _document(self, watched: Watched) -> dict[str, Any]:
        """Return what is known, and a moment that is later than all of it."""
        return {
            "now": round(time.perf_counter() - self._origin, 6),
            "cursor": watched.cursor,
            "dropped": watched.num_dropped,
            "waiting_ms": [],
            "requests": [],
            "calls": watched.calls,
            "ended": watched.ended,
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
            "ttft_ms": None if first is None else round((first - progress.arrival) * 1e3, 3),
        }

    def _watch(self, name: str, profiler: Profiler) -> EngineWatch:
        """Return the watch of an engine; of one that was loaded again it goes on with the numbers of the last."""
        found = self._watches.get(name)
        if found is None or found.profiler is not profiler:
            first = 1 if found is None else found.watch.next_number
            found = self._watches[name] = _Watching(profiler, EngineWatch(first, self._origin), found)
        found.renew(lambda: self._end(name))
        return found.watch

    def _end(self, name: str) -> None:
        self._watches[name].end()


class _Watching:
    """A watch, the profiler that it is attached to while it is read, and the timer that detaches it."""

    def __init__(self, profiler: Profiler, watch: EngineWatch, previous: _Watching | None) -> None:
        self.profiler, self.watch = profiler, watch
        self._timer: asyncio.TimerHandle | None = None
        if previous is not None:
            previous.end()

    def renew(self, on_end: Callable[[], object]) -> None:
        """Attach the watch, and set the timer again."""
        if self._timer is not None:
            self._timer.cancel()
        if self.profiler.watcher is not self.watch:
            self.watch.restart()
            self.profiler.watcher = self.watch
        self._timer = asyncio.get_running_loop().call_later(WATCH_SECONDS, on_end)

    def end(self) -> None:
        """Detach the watch."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.profiler.watcher = None


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
        "padding": round(stats.padding, 4),
        "slots_in_use": stats.slots_in_use,
        "peak_slots_in_use": stats.peak_slots_in_use,
        "ttft_ms": round(stats.ttft_ms, 3),
        "ttft_p95_ms": round(stats.ttft_p95_ms, 3),
        "tpot_ms": round(stats.tpot_ms, 3),
        "longest_gap_ms": round(stats.longest_gap_ms, 3),
        "finish_reasons": stats.finish_reasons,
    }
