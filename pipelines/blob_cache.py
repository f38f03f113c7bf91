"""A folder of blob sets, one for each identity: found by key, locked between processes; the least recently used go first."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, Timeout

from staticllm.errors import BlobError
from staticllm.pipelines.blob_set import MANIFEST, SCRATCH, Manifest, read_manifest, read_stored, remove_leftovers
from staticllm.pipelines.identity import Identity, bytes_digest

PREFIX = "staticllm-"
"""Of every folder that is ours: OpenVINO and others may keep their files beside."""
NOT_NOW = 0.0


@dataclass(frozen=True)
class Entry:
    """One set in a cache. ``used`` is when it was last loaded or written (seconds since the epoch); ``problem`` says why it
    cannot be read, or is empty."""

    key: str
    folder: Path
    num_bytes: int
    used: float
    manifest: Manifest | None
    problem: str


def key_of(identity: Identity) -> str:
    """The same for equal identities, in every process and on every machine."""
    return bytes_digest(json.dumps(identity, sort_keys=True).encode())[:24]


class BlobCache:
    """``limit`` bytes at most; the set that was written or loaded last always stays."""

    def __init__(self, folder: str | os.PathLike[str], limit: int | None = None) -> None:
        self.folder = Path(folder)
        self.limit = limit

    def path(self, key: str) -> Path:
        return self.folder / f"{PREFIX}{key}"

    @contextmanager
    def locked(self, key: str, timeout: float = -1) -> Iterator[None]:
        """Alone with the set ``key``, of all processes; what a process that died had begun is removed.

        Raises:
            Timeout: somebody else has it for longer than ``timeout`` seconds.
            OSError: the folder cannot be written.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.folder / f"{PREFIX}{key}.lock", timeout=timeout, thread_local=False)
        with lock:
            remove_leftovers(self.folder, f"{PREFIX}{key}")
            yield

    def touch(self, key: str) -> None:
        """It was used now."""
        os.utime(self.path(key) / MANIFEST)

    def entries(self) -> list[Entry]:
        """All sets, the most recently used first."""
        folders = [path for path in self.folder.glob(f"{PREFIX}*") if path.is_dir()] if self.folder.is_dir() else []
        return sorted((_entry(path) for path in folders), key=lambda entry: -entry.used)

    def verify(self) -> Iterator[tuple[Entry, str]]:
        """Each set, and what is wrong with its bytes; an empty text where nothing is."""
        for entry in self.entries():
            problem = entry.problem
            if entry.manifest is not None and not problem:
                try:
                    for _ in read_stored(entry.folder, entry.manifest):
                        pass
                except BlobError as error:
                    problem = str(error)
            yield entry, problem

    def prune(self, limit: int | None = None, keep: str | None = None) -> list[Entry]:
        """Remove sets, the least recently used first, until ``limit`` bytes are left; what is in use stays. Those removed."""
        limit = self.limit if limit is None else limit
        if limit is None:
            return []
        removed, total = [], 0
        for entry in self.entries():
            total += entry.num_bytes
            if total > limit and entry.key != keep and self.remove(entry.key):
                removed.append(entry)
                total -= entry.num_bytes
        return removed

    def remove(self, key: str) -> bool:
        """Remove one set, unless somebody loads or writes it now."""
        try:
            with self.locked(key, NOT_NOW):
                discard(self.path(key))
        except (Timeout, OSError):
            return False
        return True


def discard(folder: Path) -> None:
    """Out of the way at once, then removed: no half set is ever found under its name."""
    if folder.is_dir():
        grave = Path(tempfile.mkdtemp(prefix=f"{SCRATCH}{folder.name}.", dir=folder.parent))
        folder.rename(grave / "old")
        shutil.rmtree(grave, ignore_errors=True)


def _entry(folder: Path) -> Entry:
    manifest, problem = None, ""
    try:
        manifest = read_manifest(folder)
    except BlobError as error:
        problem = str(error)
    num_bytes, used = 0, 0.0
    for path in folder.glob("*"):
        try:
            stat = path.stat()
        except OSError:  # it goes while we look
            continue
        num_bytes += stat.st_size
        used = max(used, stat.st_mtime)
    return Entry(folder.name.removeprefix(PREFIX), folder, num_bytes, used or time.time(), manifest, problem)
