"""The models that are served: loaded on first use, one at a time, and unloaded when they are idle or memory is needed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from staticllm.core import ProgressEvent
from staticllm.errors import ClosedError, ConfigError, ProcessLostError, StaticLLMError
from staticllm.pipelines.embedding.pool.instances import WorkerLostError
from staticllm.server.http.errors import SERVER, ApiError, busy, model_missing
from staticllm.server.models.admission import Admission, AdmissionLimits
from staticllm.server.models.device_engines import DeviceEngines
from staticllm.server.models.homes import ModelHome, WorkerHome
from staticllm.server.models.kinds import Pipeline, served_kinds
from staticllm.server.models.model_options import options_of
from staticllm.server.models.served import UNLOADED, Loading, LoadPipeline, ModelSpec, ReadyModel, ServedModel
from staticllm.server.models.tenants import TenantShares
from staticllm.server.settings import ServerSettings, client_name
from staticllm.server.telemetry import current_record
from staticllm.system.long_calls import unless

Result = TypeVar("Result")
MIN_IDLE_CHECK, MAX_IDLE_CHECK = 0.05, 0.5
"""Seconds between two looks for idle models."""
REVIVE_SECONDS = 5.0
"""A process that ends again within this time after a start is started by the next request, not at once."""
UNLIMITED = 1 << 20
"""``MAX_WAITING`` of an engine that only the server uses: ``Admission`` limits what is in it."""
_log = logging.getLogger("staticllm.server")
HOMES: dict[str, type[ModelHome]] = {"daemon": ModelHome, "worker": WorkerHome}
"""The other process in which engines run, by ``runs_in`` of the settings."""


class ModelHub:
    """The served models by name. Belongs to one event loop; ``load`` and the ends of pipelines run on a thread of the hub."""

    def __init__(self, specs: Sequence[ModelSpec], settings: ServerSettings, load: LoadPipeline) -> None:
        names = [spec.name for spec in specs]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"two models are named {name!r}: give them as NAME=PATH")
        self.models = {spec.name: ServedModel(spec) for spec in specs}
        self.engines = DeviceEngines()
        self._settings = settings
        self._load_pipeline = load
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="staticllm-loader")
        self._lock = asyncio.Lock()  # held while a model is loaded or unloaded
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._idle: asyncio.Task[None] | None = None
        self.first_load: asyncio.Task[None] | None = None  # of the first model, if it is loaded at the start
        self._is_closed = False
        self._num_waiting = 0
        self._told_of: set[str] = set()
        self.tenants = TenantShares({client_name(each): each.share for each in settings.clients})
        self._revived: dict[str, float] = {}  # when a model was last loaded again because its process had ended

    def start(self) -> None:
        """Begin to load the first model, unless the settings say otherwise, and watch for idle ones."""
        if not self._settings.is_lazy:
            self.first_load = self._begin_load(next(iter(self.models.values())))
        if self._settings.idle_unload is not None:
            self._watch_idle()

    def _watch_idle(self) -> None:
        if self._idle is None and not self._is_closed:
            self._idle = asyncio.create_task(self._unload_idle())

    def keep_alive(self, model: ServedModel, seconds: float | None) -> None:
        """Set after how many seconds without a request a model is unloaded: 0 for at once, ``math.inf`` for never, None for the
        server's own."""
        model.keep_for(seconds)
        if seconds is not None:
            self._watch_idle()

    def idle_limit(self, model: ServedModel) -> float:
        """Return after how many seconds without a request a model is unloaded; ``math.inf`` for never."""
        own = self._settings.idle_unload if model.keep_alive is None else model.keep_alive
        return math.inf if own is None else own

    def find(self, name: str | None, kind: str) -> ServedModel:
        """Return the model of a request. Without a name it is the first of its kind.

        Raises:
            ApiError: there is none (404), or it is of another kind (400).
        """
        if name is None:
            model = next((each for each in self.models.values() if each.spec.kind == kind), None)
            if model is None:
                raise ApiError(
                    404,
                    f"{served_kinds()[kind].what} is not served: the models are {self._listed()}",
                    code="model_not_found",
                )
            return model
        model = self.named(name)
        if model.spec.kind != kind:
            raise ApiError(
                400,
                f"The model {name!r} is {model.kind.what}, this endpoint needs {served_kinds()[kind].what}",
                param="model",
                code="wrong_model_kind",
            )
        return model

    def named(self, name: str) -> ServedModel:
        """Return the model of this name.

        Raises:
            ApiError: there is none (404).
        """
        model = self.models.get(name)
        if model is None:
            message = f"The model {name[:200]!r} does not exist: the models are {self._listed()}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return model

    def _listed(self) -> str:
        return ", ".join(map(repr, self.models))

    async def acquire(self, model: ServedModel) -> None:
        """Load a model if necessary, and keep it loaded until ``release``.

        Raises:
            ApiError: too many requests wait for a model to be loaded, or memory for it is in use.
            StaticLLMError: it cannot be loaded.
        """
        model.enter()
        current_record().model = model.spec.name
        try:
            while not model.is_ready:
                await self._wait_until_loaded(model)
        except BaseException:
            self.release(model)
            raise

    async def _wait_until_loaded(self, model: ServedModel) -> None:
        if self._is_closed:
            raise ClosedError("the server is stopping")
        limit = self._settings.max_waiting
        if self._num_waiting >= limit:
            raise busy(f"{self._num_waiting} requests wait for a model to be loaded, --max-waiting is {limit}", 5.0)
        self._num_waiting += 1
        try:
            await asyncio.shield(self._begin_load(model))
        finally:
            self._num_waiting -= 1

    def release(self, model: ServedModel) -> None:
        """End the use that ``acquire`` began."""
        model.leave()

    @contextlib.asynccontextmanager
    async def using(self, model: ServedModel) -> AsyncIterator[None]:
        """Keep a model loaded during a block, as ``acquire`` and ``release`` do."""
        await self.acquire(model)
        try:
            yield
        finally:
            self.release(model)

    @property
    def loading(self) -> list[ServedModel]:
        """The models that are being loaded, or wait for it."""
        return [self.models[name] for name in self._loads]

    def status(self, model: ServedModel) -> str:
        """Return ``loaded``, ``loading`` or ``unloaded``."""
        return "loaded" if model.is_ready else "loading" if model.spec.name in self._loads else "unloaded"

    @property
    def loaded(self) -> list[ServedModel]:
        return [model for model in self.models.values() if model.loaded is not None]

    def _begin_load(self, model: ServedModel) -> asyncio.Task[None]:
        name = model.spec.name
        task = self._loads.get(name)
        if task is None:
            task = asyncio.create_task(self._load(model))
            self._loads[name] = task
            task.add_done_callback(lambda done: self._end_load(name, done))
        return task

    def _end_load(self, name: str, task: asyncio.Task[None]) -> None:
        self._loads.pop(name, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("the model %r was not loaded: %s", name, error)

    async def _load(self, model: ServedModel) -> None:
        settings = self._settings
        async with self._lock:
            if self._is_closed:
                raise ClosedError("the server is stopping")
            if model.is_lost and model.home is None:
                await self._unload(model)
            elif model.is_lost:
                await self._reload(model)
            if model.loaded is not None:
                return
            if not await self._in_thread(lambda: model.kind.has_files(model.spec.path)):
                raise model_missing(model.spec.name)
            if settings.memory_limit is not None:
                await self._make_room(model, settings.memory_limit)
            _log.info("loading %r", model.spec.name)
            start = time.monotonic()
            model.become(Loading())
            try:
                model.become(await self._loaded(model))
            finally:
                if model.loaded is None:
                    model.become(UNLOADED)
            _log.info("loaded %r in %.1f s", model.spec.name, time.monotonic() - start)

    async def _loaded(self, model: ServedModel) -> ReadyModel:
        """Load a model, and once more if its process ended meanwhile: a server ends if its first model cannot be loaded.

        Raises:
            StaticLLMError: it cannot be loaded.
        """
        settings = self._settings
        home = self._home_of(model)
        options = options_of(model.spec, settings)
        is_apart = settings.runs_in == "worker" and not model.kind.has_engine

        def on_progress(event: ProgressEvent) -> None:  # on the thread that loads
            if self._is_closed:
                raise ClosedError("the server is stopping")
            model.note_progress(event)

        properties = options.properties
        if model.kind.has_engine and settings.runs_in != "daemon":  # which keeps its limit for other programs
            properties = {"MAX_WAITING": UNLIMITED, **properties}
        load = partial(
            self._load_pipeline,
            model.spec,
            options.device,
            properties,
            on_progress,
            home or False,
            is_apart,
            self.engines,
        )
        pipeline: Pipeline | None = None
        try:
            pipeline = await self._in_process(model, partial(self._until_closed, load))
            num_seqs = model.kind.num_seqs(pipeline, options.device)
            limits = AdmissionLimits.of(num_seqs, settings.max_per_client, settings.max_waiting)
        except BaseException:
            await self._release(pipeline, home)
            raise
        return ReadyModel(
            model.kind, pipeline, Admission(limits, self.tenants), num_seqs, home, is_apart,
            Admission(limits, self.tenants),
        )  # fmt: skip

    async def _make_room(self, model: ServedModel, limit: int) -> None:
        """Unload the models that were not used for the longest time, until this one fits.

        Raises:
            ApiError: it needs more than the limit by itself, or the others are in use.
        """
        options = options_of(model.spec, self._settings)
        estimate = partial(model.estimate, options.device, options.properties)
        needed = await self._in_thread(partial(self._until_closed, estimate))
        if needed > limit:
            raise ApiError(
                400,
                f"the model {model.spec.name!r} needs {needed >> 20} MiB, --memory-limit-mb is {limit >> 20}: raise it",
                code="model_too_large",
                knob="--memory-limit-mb",
            )
        while sum(each.size or 0 for each in self.loaded) + needed > limit:
            idle = [each for each in self.loaded if each.num_users == 0]
            if not idle:
                raise ApiError(
                    503,
                    f"the model {model.spec.name!r} needs {needed >> 20} MiB, and the loaded models are in use: try again later, "
                    "or raise --memory-limit-mb",
                    kind=SERVER,
                    code="no_memory",
                    headers={"Retry-After": "5"},
                    knob="--memory-limit-mb",
                )
            await self._unload(min(idle, key=lambda each: each.last_used))

    async def _unload(self, model: ServedModel) -> None:
        """Release an unused model. The caller holds the lock."""
        loaded = model.loaded
        model.become(UNLOADED)
        if loaded is not None:
            _log.info("unloading %r", model.spec.name)
            await self._release(loaded.pipeline, loaded.home)

    def _home_of(self, model: ServedModel) -> ModelHome | None:
        """Return the other process in which a model is loaded; None for this one."""
        home = HOMES.get(self._settings.runs_in)
        if home is None or not model.kind.has_engine:
            if home is ModelHome and model.spec.name not in self._told_of:
                _log.warning("%r runs in the server's process: --daemon is for chat and speech models", model.spec.name)
                self._told_of.add(model.spec.name)
            return None
        loop = asyncio.get_running_loop()

        def on_lost() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(self._revive, model)

        return home(model.spec.name, on_lost)

    async def _release(self, pipeline: Pipeline | None, home: ModelHome | None) -> None:
        """Close a pipeline, and then the process that it ran in, also if the pipeline's end fails."""
        try:
            if pipeline is not None:
                await self._in_thread(lambda: self.engines.leave(pipeline))
                await self._in_thread(pipeline.close)
        finally:
            if home is not None:
                await self._in_thread(home.close)

    def _revive(self, model: ServedModel) -> None:
        """Load a model again whose process has ended, so that the next request need not wait for it as long."""
        _log.warning("the process that runs %r has ended", model.spec.name)
        now = time.monotonic()
        is_wanted = model.is_lost and model.home is not None and model.home.starts_at_once
        if is_wanted and not self._is_closed and now - self._revived.get(model.spec.name, -math.inf) > REVIVE_SECONDS:
            self._revived[model.spec.name] = now
            self._begin_load(model)

    async def _reload(self, model: ServedModel) -> None:
        """Load a model again, in another process. The caller holds the lock.

        Raises:
            StaticLLMError: that failed; the next request tries again.
        """
        assert model.home is not None, "it runs in this process"
        start = time.monotonic()
        await self._in_process(model, model.home.engine.reconnect)
        _log.info("loaded %r again in %.1f s", model.spec.name, time.monotonic() - start)

    async def unload(self, name: str) -> None:
        """Release a model after its last answer. Does nothing if it is not loaded."""
        model = self.models[name]
        while True:
            async with self._lock:
                if model.loaded is None or model.num_users == 0:
                    await self._unload(model)
                    return
            await asyncio.sleep(0.1)

    async def _unload_idle(self) -> None:
        while True:
            shortest = min((self.idle_limit(model) for model in self.loaded), default=math.inf)
            await asyncio.sleep(min(MAX_IDLE_CHECK, max(MIN_IDLE_CHECK, shortest / 4)))
            async with self._lock:
                for model in self.loaded:
                    is_idle = model.num_users == 0 and time.monotonic() - model.last_used >= self.idle_limit(model)
                    if is_idle:
                        with contextlib.suppress(StaticLLMError):
                            await self._unload(model)

    def give_up_loading(self) -> None:
        """Load no more models; a loading in progress ends after its current part, and requests that wait get an error."""
        self._is_closed = True

    async def close(self) -> None:
        """Unload all models, also if the end of one fails. Raises the first error."""
        self.give_up_loading()
        if self._idle is not None:
            self._idle.cancel()
        errors: list[Exception] = []
        async with self._lock:
            for model in self.loaded:
                try:
                    await self._unload(model)
                except Exception as error:
                    errors.append(error)
        await self._in_thread(self.engines.close)
        self._thread.shutdown()  # its last call has returned: this waits for the end of the thread only
        if errors:
            raise errors[0]

    def _until_closed(self, work: Callable[[], Result]) -> Result:
        """Do what takes long, on the thread that loads. Raises what that raises, and ``ClosedError`` (the server is stopping)."""
        with unless(lambda: self._is_closed, "the server is stopping"):
            return work()

    async def _in_process(self, model: ServedModel, load: Callable[[], Result]) -> Result:
        """Run what loads a model in another process, and once more if the process ends meanwhile."""
        try:
            return await self._in_thread(load)
        except (ProcessLostError, WorkerLostError) as error:
            _log.warning("loading %r again: %s", model.spec.name, error)
            return await self._in_thread(load)

    async def _in_thread(self, function: Callable[[], Result]) -> Result:
        future: asyncio.Future[Any] = asyncio.get_running_loop().run_in_executor(self._thread, function)
        result: Result = await future
        return result
