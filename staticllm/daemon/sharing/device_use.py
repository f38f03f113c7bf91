"""The engine of a language model as one of the users of a device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from staticllm.daemon.sharing.device_scheduler import ClientId, DeviceRequest, DeviceScheduler, EngineId, Share
from staticllm.pipelines.costs.model import SMOOTHING, averaged
from staticllm.pipelines.engine.device_use import Rows, SoleUse, Worker
from staticllm.pipelines.scheduling.request_table import Limits


class DeviceUse(SoleUse):
    """One engine among the users of a device. Runs on the engine's thread.

    The engine requests the device with the highest priority of its requests. After each step the clients pay for their rows,
    and the engine announces when it needs the device for the next token. Its own prompts also delay that token by at most
    ``token_bound``.

    Args:
        scheduler: That of the device.
        engine: Pays for requests of no client.
        weight_bytes: The weights that each call reads.
    """

    def __init__(self, scheduler: DeviceScheduler, engine: EngineId, weight_bytes: int = 0) -> None:
        self._scheduler = scheduler
        self._engine = engine
        self._weight_bytes = weight_bytes
        self.step_seconds = 0.0

    @property
    def is_wanted(self) -> bool:
        return self._scheduler.is_wanted

    @contextmanager
    def turn(self, worker: Worker, limits: Limits) -> Iterator[None]:
        """Use the device for one step inside the ``with`` block. Tokens are posted first if the device may be busy."""
        if self._scheduler.is_busy:
            worker.post()
        demand = worker.demand
        known = self.step_seconds
        payers = tuple(map(ClientId, demand.owners))
        request = DeviceRequest(self._engine, known, demand.priority, self._engine.model, payers=payers)
        self._scheduler.acquire(request)
        start = self._scheduler.clock()
        try:
            yield
        finally:
            seconds = self._scheduler.clock() - start
            self.step_seconds = averaged(known or None, seconds, SMOOTHING)
            shares = self._shares(worker.rows, seconds)
            self._scheduler.release(request, seconds, self.due(worker.last_token_times(), limits), shares)

    @contextmanager
    def measure(self) -> Iterator[None]:
        with self._scheduler.use(DeviceRequest(self._engine, self.step_seconds, model=self._engine.model)):
            yield

    def hurry(self, priority: int, client: int) -> None:
        """Raise the priority of a waiting step, and let ``client`` (0: none) pay for it. Any thread may call."""
        self._scheduler.raise_priority(self._engine, priority, (ClientId(client),) if client else ())

    def close(self) -> None:
        self._scheduler.forget(self._engine)

    def _shares(self, rows: Sequence[Rows], seconds: float) -> list[Share]:
        """Return each client's part of a step, by its rows."""
        total = sum(each.count for each in rows)
        return [
            Share(
                ClientId(each.owner) if each.owner else None, each.phase, seconds * each.count / total, each.count,
                self._weight_bytes * each.count // total + each.num_bytes,
            )
            for each in rows
        ]  # fmt: skip

    def due(self, last_tokens: Iterable[float], limits: Limits) -> float | None:
        """Return the latest moment at which the next step should begin; None if no request waits for a next token."""
        oldest = min(last_tokens, default=None)
        if oldest is None:
            return None
        step = self.step_seconds
        return oldest + limits.token_bound.of(step, limits.tpot_ms) - step
