"""Saves the KV slots of a conversation to disk and loads them, between two steps of the engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, TypeVar

from staticllm.errors import SnapshotError
from staticllm.kvcache.sequence import AdapterScales
from staticllm.kvcache.snapshot import Identity, load, save
from staticllm.kvcache.stored import StoredSequence
from staticllm.pipelines.engine.kv_manager import KVCacheManager
from staticllm.pipelines.programs.model_runner import ModelRunner

Result = TypeVar("Result")


class Owner(Protocol):
    """What a snapshot needs of an engine."""

    @property
    def runner(self) -> ModelRunner: ...

    @property
    def kv_manager(self) -> KVCacheManager: ...

    def run_between_steps(self, function: Callable[[], Result]) -> Result: ...


def save_snapshot(
    engine: Owner,
    tokens: list[int],
    path: str | os.PathLike[str],
    identity: Identity,
    key: bytes = b"",
    adapters: AdapterScales = (),
) -> int:
    """Save the longest prefix of ``tokens`` that is cached with these adapters. Return its number of tokens. Any thread may call.

    Raises:
        SnapshotError: no cached sequence begins with these tokens, or the file cannot be written.
        ClosedError: the engine was closed.
    """

    def find() -> StoredSequence | None:
        return engine.kv_manager.prefix.find(tokens, engine.kv_manager.sequences(), adapters)

    stored = engine.run_between_steps(find)
    if stored is None:
        raise SnapshotError("no known sequence begins like this prompt: generate first, with PREFIX_CACHING on")
    save(stored, path, identity, key)
    return len(stored.tokens)


def load_snapshot(
    engine: Owner,
    path: str | os.PathLike[str],
    identity: Identity,
    key: bytes = b"",
    adapters: AdapterScales = (),
) -> int:
    """Read a snapshot, which has these adapters, into the host pool. Return its number of tokens. Any thread may call.

    Raises:
        SnapshotError: the file is missing, damaged or of another model, or the host pool has no room for its tokens.
        ClosedError: the engine was closed.
    """
    stored = load(path, identity, engine.runner.cache.layout, engine.kv_manager.host_pool.num_slots, key)
    stored = replace(stored, adapters=adapters)

    def restore() -> None:
        if not engine.runner.cache.layout.fits(stored):  # the engine has switched to another device meanwhile
            raise SnapshotError(f"{str(path)!r} has another layout than this model's: save it again")
        if not engine.kv_manager.prefix.restore(stored):
            raise SnapshotError(
                f"{str(path)!r} has {len(stored.tokens)} tokens, the host pool has no room for them now: wait until "
                "requests have ended, or load the model with more HOST_KV_SLOTS"
            )

    engine.run_between_steps(restore)
    return len(stored.tokens)
