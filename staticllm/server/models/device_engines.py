"""One engine per device: encoders and speech models run as jobs of the chat model on their device, while one is loaded there."""

from __future__ import annotations

import threading

from staticllm.devices import get_core, kind
from staticllm.pipelines.engine.engine import Engine
from staticllm.pipelines.engine.job_engine import JobEngine
from staticllm.pipelines.engine.jobs import JobHost, JobSource
from staticllm.pipelines.llm_pipeline import StaticLLMPipeline


class DeviceEngine:
    """The ``JobHost`` of encoders and speech models on one device, whatever chat model comes and goes there. Any thread may call.

    The jobs run in the engine of the chat model that was loaded last; without one in an engine for jobs alone.
    """

    def __init__(self) -> None:
        self._own = JobEngine()
        self._hosts: list[tuple[str | None, JobHost]] = [(None, self._own)]
        self._sources: list[JobSource] = []
        self._lock = threading.RLock()

    @property
    def owner(self) -> str | None:
        """The name of the chat model whose engine runs the jobs; None for an engine for jobs alone."""
        return self._hosts[-1][0]

    def add_jobs(self, source: JobSource) -> None:
        """Run the jobs of a source until ``remove_jobs``.

        Raises:
            ClosedError: the server has ended.
        """
        with self._lock:
            self._hosts[-1][1].add_jobs(source)
            self._sources.append(source)

    def remove_jobs(self, source: JobSource) -> None:
        """Close a source after its current job."""
        self.detach_jobs(source)
        source.close()

    def detach_jobs(self, source: JobSource) -> None:
        """Begin no more jobs of a source, which stays open for another host. One that runs now goes on."""
        with self._lock:
            self._sources = [other for other in self._sources if other is not source]
            self._hosts[-1][1].detach_jobs(source)

    def join(self, name: str, engine: Engine) -> None:
        """Run all jobs in the engine of a chat model, from their next one on."""
        with self._lock:
            self._move(self._hosts[-1][1], engine)
            self._hosts.append((name, engine))

    def leave(self, engine: Engine) -> None:
        """Run no more jobs in the engine of a chat model, which is about to be closed."""
        with self._lock:
            before = self._hosts[-1][1]
            self._hosts = [each for each in self._hosts if each[1] is not engine]
            if self._hosts[-1][1] is not before:
                self._move(before, self._hosts[-1][1])

    def _move(self, old: JobHost, new: JobHost) -> None:
        for source in self._sources:
            old.detach_jobs(source)
            new.add_jobs(source)

    def close(self) -> None:
        """End the engine for jobs alone. A second call does nothing."""
        self._own.close()


class DeviceEngines:
    """The engines of all devices of a server. Any thread may call; models are loaded and released one at a time."""

    def __init__(self) -> None:
        self._engines: dict[str, DeviceEngine] = {}
        self._joined: dict[int, tuple[DeviceEngine, Engine]] = {}  # by the id of the pipeline
        self._lock = threading.Lock()

    def of(self, device: str) -> DeviceEngine:
        """Return the engine of a device, which may be named in another way (``GPU`` for ``GPU.0``, ``CPU#0-3`` for ``CPU``)."""
        name = _actual(device)
        with self._lock:
            return self._engines.setdefault(name, DeviceEngine())

    def join(self, name: str, pipeline: StaticLLMPipeline) -> None:
        """Let the encoders and speech models on the device of a chat model run in its engine, until ``leave``."""
        device_engine = self.of(pipeline.device)
        device_engine.join(name, pipeline.engine)
        self._joined[id(pipeline)] = device_engine, pipeline.engine

    def leave(self, pipeline: object) -> None:
        """Take the others out of a pipeline that is about to be closed, if they are in it."""
        device_engine, engine = self._joined.pop(id(pipeline), (None, None))
        if device_engine is not None and engine is not None:
            device_engine.leave(engine)

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()


def _actual(device: str) -> str:
    name = device.partition("#")[0].strip().upper()
    available = get_core().available_devices
    alike = sorted(other for other in available if kind(other) == kind(name))
    if name in available or not alike:
        return name
    return alike[0] if name in (kind(name), f"{kind(name)}.0") else name
