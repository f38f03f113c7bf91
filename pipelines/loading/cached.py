"""The set of one job in a cache of blob sets."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from filelock import Timeout

from staticllm.errors import ConfigError
from staticllm.system.file_lock import Lease

from ...compiler_passes.artifacts.blob_set import failed_verification_text, read_manifest
from ...compiler_passes.artifacts.cache import BlobCache, key_of
from ...compiler_passes.artifacts.crashes import quarantine_text
from ...compiler_passes.artifacts.manifest import Manifest
from ...compiler_passes.compiling.compile import CompiledPrograms, S, V
from .export import ExportedPrograms, SetPlace
from .kind import Job, R

GB = 1_000_000_000


class CacheUnusableError(Exception):
    """A cache cannot be written; the text says why."""


@dataclass(frozen=True, kw_only=True)
class CacheEntry(SetPlace[V, S, R]):
    """The place of a job's set in ``cache``. Writing warns where a ``SetPlace`` raises: the model runs without a cache too."""

    cache: BlobCache
    key: str

    @classmethod
    def of(cls, job: Job[V, S, R], cache_dir: str) -> CacheEntry[V, S, R]:
        """Return the entry of a job in the cache at ``cache_dir``.

        Raises:
            ModelError: a file of the model cannot be read.
        """
        cache = BlobCache(cache_dir, int(job.config.cache_limit_gb * GB), job.key)
        fingerprint = job.kind.fingerprint(job)
        key = key_of(fingerprint)
        return cls(job, cache.path(key), fingerprint, cache=cache, key=key)

    def lease(self) -> Lease:
        """Lock the set.

        Raises:
            CacheUnusableError: the folder cannot be written, or this thread holds the lock already.
        """
        try:
            return self.cache.lease(self.key)
        except (OSError, Timeout) as error:
            reason = getattr(error, "strerror", None) or "this thread is already loading the same model from it"
            raise CacheUnusableError(reason) from None

    def read(self) -> Manifest:
        """Return the manifest, and record that the set is used.

        Raises:
            BlobError: none, or a damaged one.
        """
        manifest = read_manifest(self.folder, self.job.key)
        self.cache.touch(self.key)
        return manifest

    def quarantine(self, manifest: Manifest) -> str | None:
        """Return why the set may not be used, None if it may: it failed verification, or two processes crashed with it."""
        crashed = quarantine_text(self.folder)
        if crashed is None and manifest.has_failed_verification:
            return failed_verification_text(self.folder, manifest)
        return crashed

    def put(self, exported: ExportedPrograms[V, S], costs: Mapping[V, float]) -> None:
        """Write a set; without blobs, one that is in quarantine. Warn if that fails, for example on a full disk."""
        try:
            if exported.blobs is not None:
                super().put(exported, costs)
                return
            self.put_quarantined(exported)
        except ConfigError as error:
            warnings.warn(f"nothing was cached: {error}", RuntimeWarning, stacklevel=2)
            return
        text = failed_verification_text(self.folder, read_manifest(self.folder, self.job.key))
        warnings.warn(f"CACHE_DIR is not used: {text}", RuntimeWarning, stacklevel=3)

    def write(self, programs: CompiledPrograms[V, S]) -> None:
        """Export and write all programs of the model, and remove the least recently used sets beyond the cache's limit."""
        super().write(programs)
        self.cache.prune(keep=self.key)
