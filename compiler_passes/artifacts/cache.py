"""A cache is a folder of blob sets, one per fingerprint, locked between processes; the least recently used are removed first."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout

from staticllm.errors import BlobError
from staticllm.system.file_lock import Lease, acquire

from .blob_set import MANIFEST, read_manifest, read_stored, remove_set
from .fingerprint import Fingerprint, bytes_digest
from .manifest import Manifest

PREFIX = "staticllm-"
"""Prefix of our folders. OpenVINO and others may use the same cache folder."""
_NAME = re.compile(re.escape(PREFIX) + "[0-9a-f]{24}")
NOT_NOW = 0.0


@dataclass(frozen=True)
class CachedSet:
    """One set in a cache. ``used``: the time of its last load or write (seconds since the epoch). ``problem``: the reason why
    it cannot be read; empty if it can."""

    key: str
    folder: Path
    num_bytes: int
    used: float
    manifest: Manifest | None
    problem: str

    @property
    def is_unfinished(self) -> bool:
        """Whether the writer of the set ended before it wrote the manifest."""
        return self.manifest is None and not _has_manifest(self.folder)


def key_of(fingerprint: Fingerprint) -> str:
    """Return the name of a set in a cache. It is the same for equal fingerprints, in every process and on every machine."""
    return bytes_digest(json.dumps(fingerprint.to_json(), sort_keys=True).encode())[:24]


def _is_entry(path: Path) -> bool:
    return _NAME.fullmatch(path.name) is not None and path.is_dir() and not path.is_symlink()


def _has_manifest(folder: Path) -> bool:
    """Return whether a folder has a manifest; True also if that cannot be seen, since the folder is then another user's."""
    try:
        (folder / MANIFEST).stat()
    except FileNotFoundError:
        return False
    except OSError:
        pass
    return True


class BlobCache:
    """Blob sets of ``limit`` bytes at most; the set that was written or loaded last always stays.

    ``key``: the sets are signed with it; empty for sets without a signature.
    """

    def __init__(self, folder: str | os.PathLike[str], limit: int | None = None, key: bytes = b"") -> None:
        self.folder = Path(folder)
        self.limit = limit
        self._key = key

    def path(self, key: str) -> Path:
        """Return the folder of the set ``key``."""
        return self.folder / f"{PREFIX}{key}"

    def lease(self, key: str, timeout: float = -1) -> Lease:
        """Lock the set ``key`` for a block, or until it is released. Raises ``Timeout`` and ``OSError`` as ``acquire``."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return acquire(self.folder / f"{PREFIX}{key}.lock", timeout)

    def touch(self, key: str) -> None:
        """Record that a set is used now, if the folder can be written."""
        with suppress(OSError):
            os.utime(self.path(key) / MANIFEST)

    def entries(self) -> list[CachedSet]:
        """Return all sets, the most recently used first."""
        return sorted((self._entry(path) for path in self._folders()), key=lambda entry: -entry.used)

    def _folders(self) -> list[Path]:
        return [path for path in self.folder.glob(f"{PREFIX}*") if _is_entry(path)] if self.folder.is_dir() else []

    def verify(self) -> Iterator[tuple[CachedSet, str]]:
        """Compare the bytes of each set with their digests; yield the set and the problem, which is empty if there is none."""
        for entry in self.entries():
            problem = entry.problem
            if entry.manifest is not None and not problem:
                try:
                    for _ in read_stored(entry.folder, entry.manifest):
                        pass
                except BlobError as error:
                    problem = str(error)
            yield entry, problem

    def prune(self, limit: int | None = None, keep: str | None = None) -> list[CachedSet]:
        """Remove sets, the least recently used first, until at most ``limit`` bytes are left, and return the removed sets.

        Sets in use are kept, and so is ``keep``. Unfinished sets of processes that died are removed as well.
        """
        limit = self.limit if limit is None else limit
        if limit is None:
            return []
        if sum(_used(folder)[0] for folder in self._folders()) <= limit and all(map(_has_manifest, self._folders())):
            return []  # the usual case, in which no manifest need be read
        removed = []
        total = 0
        for entry in self.entries():
            total += entry.num_bytes
            if entry.is_unfinished and entry.key != keep:
                self.remove(entry.key)
            elif total > limit and entry.key != keep and self.remove(entry.key):
                removed.append(entry)
                total -= entry.num_bytes
        return removed

    def remove(self, key: str) -> bool:
        """Remove one set, unless it is being loaded or written, and return whether it was removed."""
        try:
            with self.lease(key, NOT_NOW):
                remove_set(self.path(key))
        except (Timeout, OSError):
            return False
        return True

    def _entry(self, folder: Path) -> CachedSet:
        manifest = None
        problem = ""
        try:
            manifest = read_manifest(folder, self._key)
        except BlobError as error:
            problem = str(error)
        num_bytes, used = _used(folder)
        return CachedSet(folder.name.removeprefix(PREFIX), folder, num_bytes, used or time.time(), manifest, problem)


def _used(folder: Path) -> tuple[int, float]:
    """Return the bytes of a folder's files, and the time of the last change (seconds since the epoch; 0 if it is empty)."""
    num_bytes = 0
    used = 0.0
    try:
        paths = list(folder.iterdir())
    except OSError:  # it was removed, or is another user's
        return 0, 0.0
    for path in paths:
        try:
            stat = path.lstat()
        except OSError:  # another process removed it meanwhile
            continue
        num_bytes += stat.st_size
        used = max(used, stat.st_mtime)
    return num_bytes, used
