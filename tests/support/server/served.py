"""Runs a server on a thread of a test, over the embedded model or others, and looks into its state."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time

import httpx

from staticllm.pipelines.diagnostics.reference import EXACT
from staticllm.server.models.served import demo_spec, load_pipeline
from staticllm.server.process import GracefulServer, base_url, listen
from staticllm.server.settings import ServerSettings
from staticllm.server.state import ServerState

SECONDS = 60


class Served:
    """A running server: its URL, its state, and the thread that it runs on."""

    def __init__(self, specs, settings, pipelines):
        self.settings = settings
        self._listener = listen(settings)
        self.url = base_url(self._listener)
        self._specs, self._pipelines, self._begun = specs, pipelines, threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self.thread.start()
        assert self._begun.wait(SECONDS)

    async def _run(self):
        self.loop = asyncio.get_running_loop()
        self.state = ServerState.of(self._specs, self.settings, self._load)
        self.server = GracefulServer(self.state)
        self._begun.set()
        await self.server.serve([self._listener])

    def _load(self, spec, device, properties, on_progress, *rest):
        if load := self._pipelines.get(spec.name):
            return load(device, properties, on_progress)
        return load_pipeline(spec, device, properties, on_progress, *rest)

    def wait_until_ready(self):
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(self.url + "/health", timeout=60).status_code == 200:
                    return
            time.sleep(0.02)
        raise AssertionError("the server is not ready")

    def pipeline(self, name="demo"):
        return self.state.hub.models[name].pipeline

    def stop(self):
        self.server.stop_soon()
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()
        self._listener.close()

    def wait_until_idle(self, name="demo"):
        """Wait until no request is left in the server or the engine, then check that only cached sequences hold slots."""
        from support.helpers import assert_nothing_held

        model = self.state.hub.models[name]
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            left = (
                model.num_users,
                model.admission.num_running,
                model.admission.num_waiting,
                self.state.lifecycle.num_requests,
            )
            if not any(left) and model.pipeline.engine.is_idle:
                return assert_nothing_held(model.pipeline)
            time.sleep(0.01)
        raise AssertionError(f"something is left: {left}")


@contextlib.contextmanager
def serving(specs=None, pipelines=None, **settings):
    """Serve models at a port that the system chooses, in f32: answers do not depend on which requests share a call.

    ``pipelines``: functions of (device, properties, on_progress) that load a model, by its name.
    """
    settings["properties"] = {**EXACT, **settings.get("properties", {})}
    served = Served(specs or [demo_spec()], ServerSettings(port=0, **settings), pipelines or {})
    try:
        served.wait_until_ready()
        yield served
    finally:
        served.stop()
