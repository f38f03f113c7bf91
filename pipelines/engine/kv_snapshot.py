"""Rows of a conversation to disk and back, between two steps of the engine."""

from __future__ import annotations

import os

from staticllm.errors import SavedRowsError
from staticllm.kvcache.cache import StoredRows
from staticllm.kvcache.snapshot import Identity, load, save
from staticllm.pipelines.engine.engine import Engine


def save_rows(
    engine: Engine, tokens: list[int], path: str | os.PathLike[str], identity: Identity, key: bytes = b""
) -> int:
    """Save the rows of the longest known prefix of ``tokens``; how many tokens that is.

    Raises:
        SavedRowsError: nothing that is known begins like this, or the file cannot be written.
    """

    def find() -> StoredRows | None:
        return engine.tenancy.prefix.find(tokens, engine.tenancy.sequences())

    stored = engine.call(find)
    if stored is None:
        raise SavedRowsError("nothing that is known begins like this prompt: generate first, with PREFIX_CACHING on")
    save(stored, path, identity, key)
    return len(stored.tokens)


def load_rows(engine: Engine, path: str | os.PathLike[str], identity: Identity, key: bytes = b"") -> int:
    """Read saved rows onto the shelf; how many tokens they are.

    Raises:
        SavedRowsError: no such file, a damaged one, rows of another model, or more rows than the shelf holds.
    """
    stored = load(path, identity, engine.runner.cache.layout, engine.tenancy.shelf.max_rows, key)

    def restore() -> None:
        if not engine.runner.cache.layout.fits(stored):  # another device has taken over meanwhile
            raise SavedRowsError(f"{str(path)!r} holds rows of another layout than this model's: save them again")
        engine.tenancy.prefix.restore(stored)

    engine.call(restore)
    return len(stored.tokens)
