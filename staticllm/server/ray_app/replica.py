"""One replica: the server of one machine without its socket. Ray sends requests to it, and stops and replaces it."""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from typing import Any

from ray import serve

from staticllm.errors import ModelError, StaticLLMError
from staticllm.pipelines.llm_pipeline import StaticLLMPipeline
from staticllm.server.app import OPEN_PATHS, create_app
from staticllm.server.http.access import AccessMiddleware, Origins
from staticllm.server.http.errors import ApiError
from staticllm.server.models.served import ModelSpec, ServedModel
from staticllm.server.ray_app.cluster_settings import ClusterSettings
from staticllm.server.ray_app.messages import ReplicaHead, ReplicaRequest, answer_parts, scope_of
from staticllm.server.state import LOOK_SECONDS, ServerState

MAX_BAD_CHECKS = 2
"""Checks in a row in which calls failed and none succeeded: a single bad request fails calls, too."""


class DeviceWatch:
    """Compares the counts of device calls from check to check."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[int, int]] = {}
        self._num_bad: dict[str, int] = {}

    def failing(self, models: Iterable[ServedModel]) -> str | None:
        """Return the name of a loaded model whose device fails every call, or None. Call it every few seconds."""
        for model in models:
            if not isinstance(model.pipeline, StaticLLMPipeline):
                continue
            stats = model.pipeline.stats()
            name = model.spec.name
            if self._is_bad(name, stats.num_failed_steps, stats.num_steps - stats.num_failed_steps):
                return name
        return None

    def _is_bad(self, name: str, num_failed: int, num_good: int) -> bool:
        old_failed, old_good = self._counts.get(name, (0, 0))
        self._counts[name] = num_failed, num_good
        if num_good != old_good:  # also after the model was loaded again, and counts from zero
            self._num_bad[name] = 0
        elif num_failed > old_failed:
            self._num_bad[name] = self._num_bad.get(name, 0) + 1
        return self._num_bad.get(name, 0) >= MAX_BAD_CHECKS


_unloading: set[asyncio.Future[None]] = set()  # the loop itself holds tasks weakly


class Replica:
    """The server of one machine, inside an actor of Ray. ``specs`` are all models of the application."""

    def __init__(self, specs: Sequence[ModelSpec], settings: ClusterSettings) -> None:
        self._state = ServerState.of(specs, settings.of_replica())
        self._app = create_app(self._state)
        own = self._state.settings
        self._access = AccessMiddleware(
            self._app, own, Origins(own), lambda error: None, OPEN_PATHS
        )  # the application counts it
        self._watch = DeviceWatch()
        self._start: asyncio.Task[Any] | None = None
        self._keep = serve.multiplexed(max_num_models_per_replica=settings.models_per_replica)(self._loaded())

    async def answer(self, request: ReplicaRequest) -> AsyncGenerator[ReplicaHead | bytes, None]:
        """Yield the head of the answer, then parts of its body. The answer ends if Ray cancels the call."""
        if self._start is None:  # on the loop of the requests
            self._start = asyncio.ensure_future(self._app.router.lifespan_context(self._app).__aenter__())
        await asyncio.shield(self._start)
        if request.model and self._access.refusal(scope_of(request)) is None:  # a request without a key loads no model
            with contextlib.suppress(ApiError, StaticLLMError):  # the answer says it
                await self._keep(request.model)
        async with contextlib.aclosing(answer_parts(self._app, request)) as parts:
            async for part in parts:
                yield part

    def _loaded(self) -> Callable[[str], Awaitable[LoadedModel]]:
        """Return the function that loads a model for Ray, which says when to unload it."""
        hub = self._state.hub

        async def load(name: str) -> LoadedModel:
            model = hub.named(name)
            async with hub.using(model):
                pass
            return LoadedModel(name, self._state)

        return load

    async def metrics(self) -> tuple[str, bytes]:
        """Return the name of this replica, and its metrics in Prometheus' text format."""
        name = serve.get_replica_context().replica_id.unique_id
        return name, await self._state.observers.run_within(LOOK_SECONDS, self._state.metrics.text)

    async def check_health(self) -> None:
        """Tell Ray whether requests can be served. Ray calls it every few seconds, and replaces a replica that raises.

        Raises:
            ModelError: a device fails every call.
        """
        name = self._watch.failing(self._state.hub.loaded)
        if name is not None:
            raise ModelError(f"the device fails every call of the model {name!r}")

    async def __del__(self) -> None:  # Ray awaits it after the last answer
        if self._start is not None:
            await self._state.hub.close()
        self._state.workers.close()


class LoadedModel:
    """A model that Ray keeps in a replica, until it deletes it to make room for another one."""

    def __init__(self, name: str, state: ServerState) -> None:
        self._name = name
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._is_deleted = False

    def __del__(self) -> None:  # Ray calls it, on a thread, and the interpreter does once more
        if not self._is_deleted and not self._loop.is_closed():
            self._is_deleted = True
            self._loop.call_soon_threadsafe(_unload, self._name, self._state)


def _unload(name: str, state: ServerState) -> None:
    task = asyncio.ensure_future(state.hub.unload(name))
    _unloading.add(task)
    task.add_done_callback(_unloading.discard)
