"""Saves the KV slots of a conversation to disk and loads them, between two steps of the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from staticllm.errors import SnapshotError, quoted

from ...kvcache.sequence import Conditions
from ...kvcache.snapshot import load, save
from ...kvcache.stored import StoredSequence
from .client import SnapshotTarget
from .engine_core import EngineCore

Result = TypeVar("Result")


class SnapshotEngine(Protocol):
    """What a snapshot needs of an engine."""

    @property
    def core(self) -> EngineCore: ...

    def run_between_steps(self, function: Callable[[], Result]) -> Result: ...


def save_snapshot(engine: SnapshotEngine, tokens: list[int], target: SnapshotTarget) -> int:
    """Save a snapshot as ``EngineClient.save_snapshot`` says. Any thread may call."""

    def find() -> StoredSequence | None:
        manager = engine.core.device.kv_manager
        kinds = [Conditions(target.adapters, factors=each) for each in range(manager.cache.layout.num_factors)]
        copies = (manager.prefix.find(tokens, manager.sequences(), conditions) for conditions in kinds)
        return max(filter(None, copies), key=lambda stored: len(stored.tokens), default=None)

    stored = engine.run_between_steps(find)
    if stored is None:
        raise SnapshotError("no known sequence begins like this prompt: generate first, with PREFIX_CACHING on")
    save(stored, target.path, target.identity, target.key)
    return len(stored.tokens)


def load_snapshot(engine: SnapshotEngine, target: SnapshotTarget) -> int:
    """Read a snapshot into the host pool as ``EngineClient.load_snapshot`` says. Any thread may call."""
    device = engine.core.device
    num_slots = device.kv_manager.host_pool.num_slots
    stored = load(target.path, target.identity, device.runner.cache.layout, num_slots, target.key)
    stored = replace(stored, conditions=replace(stored.conditions, adapters=target.adapters))

    def restore() -> None:
        device = engine.core.device  # the engine may have switched to another one meanwhile
        if not device.runner.cache.layout.fits(stored):
            raise SnapshotError(f"{quoted(target.path)} has another layout than this model's: save it again")
        if not device.kv_manager.prefix.restore(stored):
            raise SnapshotError(
                f"{quoted(target.path)} has {len(stored.tokens)} tokens, the host pool has no room for them now: wait until "
                "requests have ended, or load the model with more HOST_KV_SLOTS"
            )

    engine.run_between_steps(restore)
    return len(stored.tokens)
