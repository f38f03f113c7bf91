"""Loads programs through a cache of blob sets: imports the job's set, or compiles the programs and writes a set."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from filelock import Timeout

from staticllm.errors import BlobError, ConfigError
from staticllm.pipelines.artifacts.blob_set import failed_verification_text, read_manifest, read_steadily, remove_set
from staticllm.pipelines.artifacts.cache import BlobCache, key_of
from staticllm.pipelines.artifacts.crashes import check_crashes, quarantine_text
from staticllm.pipelines.artifacts.fingerprint import Fingerprint
from staticllm.pipelines.artifacts.manifest import Manifest
from staticllm.pipelines.artifacts.measurements import CostsPlace
from staticllm.pipelines.loading.export import (
    Exported,
    compile_for_export,
    export_programs,
    is_weightless_wanted,
    manifest_of,
    plan_for_export,
    write_blobs,
    write_quarantined,
)
from staticllm.pipelines.loading.imported import import_set
from staticllm.pipelines.loading.kind import Job, R
from staticllm.pipelines.loading.loaded import Loaded
from staticllm.pipelines.loading.staged import is_staged, load_compiled, load_staged, runner_of
from staticllm.pipelines.programs.build import CompiledPrograms
from staticllm.pipelines.programs.lowered import S, V
from staticllm.system.file_lock import Lease

GB = 1_000_000_000
Result = TypeVar("Result")


@dataclass(frozen=True)
class CacheEntry(Generic[V, S, R]):
    """The place of one job's set in a cache. ``is_weightless``: whether its blobs are written without weights."""

    job: Job[V, S, R]
    cache: BlobCache
    fingerprint: Fingerprint
    is_weightless: bool

    @property
    def key(self) -> str:
        """The name of the set in the cache."""
        return key_of(self.fingerprint)

    @property
    def path(self) -> Path:
        """The folder of the set."""
        return self.cache.path(self.key)

    @property
    def costs_place(self) -> CostsPlace:
        """The place of the measured costs of the set's programs."""
        return CostsPlace(self.path, self.fingerprint, self.job.key)

    def lease(self) -> Lease | str:
        """Lock the set until the lease is released; return why the folder cannot be written, if it cannot."""
        try:
            return self.cache.lease(self.key)
        except (OSError, Timeout) as error:
            return getattr(error, "strerror", None) or "this thread is already loading the same model from it"

    def read_only(self, reason: str, import_set: Callable[[Manifest], Result]) -> Result | None:
        """Return what ``import_set`` makes of the set in a folder that cannot be written, such as that of an image.

        Without a set that can be read, warn with the ``reason`` and return None.
        """

        def import_checked(manifest: Manifest) -> Result:
            check_crashes(self.path)
            if manifest.has_failed_verification:
                raise BlobError(failed_verification_text(self.path, manifest))
            return import_set(manifest)

        problem = reason
        try:
            if self.path.is_dir():
                return read_steadily(self.path, import_checked, self.job.key)
        except BlobError as error:
            problem = f"{reason}, and {error}"
        except OSError:
            problem = f"{reason}, nor read"
        text = f"CACHE_DIR={str(self.cache.folder)!r} cannot be used: {problem}"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
        return None

    def read(self, import_set: Callable[[Manifest], Result], compile_again: Callable[[], Result]) -> Result | None:
        """Return what ``import_set`` makes of the cached set; None, with a warning, if there is none or it cannot be read.

        If the blobs of this model failed verification before, or crashed twice, ``compile_again`` compiles the programs and
        writes nothing.
        """
        if not self.path.is_dir():
            return None
        try:
            manifest = read_manifest(self.path, self.job.key)
            self.cache.touch(self.key)
            crashed = quarantine_text(self.path)
            if crashed is not None:
                warnings.warn(f"CACHE_DIR is not used: {crashed}", RuntimeWarning, stacklevel=2)
                return compile_again()
            if manifest.has_failed_verification:
                self._warn_of_quarantine(manifest)
                return compile_again()
            return import_set(manifest)
        except BlobError as error:
            warnings.warn(f"compiled again: {error}", RuntimeWarning, stacklevel=2)
            remove_set(self.path)
            return None

    def keep(self, manifest: Manifest, blobs: Mapping[str, bytes] | None) -> None:
        """Write a set; without ``blobs``, one that is in quarantine. Warn if that fails, for example on a full disk."""
        try:
            if blobs is not None:
                write_blobs(self.job, self.path, manifest, blobs)
                return
            write_quarantined(self.job, self.path, manifest)
        except ConfigError as error:
            warnings.warn(f"nothing was cached: {error}", RuntimeWarning, stacklevel=2)
            return
        self._warn_of_quarantine(read_manifest(self.path, self.job.key))

    def _warn_of_quarantine(self, manifest: Manifest) -> None:
        text = failed_verification_text(self.path, manifest)
        warnings.warn(f"CACHE_DIR is not used: {text}", RuntimeWarning, stacklevel=3)

    def write(self, programs: CompiledPrograms[V, S]) -> None:
        """Export all programs of the model, and remove the least recently used sets beyond the cache's limit."""
        self.keep_exported(export_programs(self.job, programs, self.is_weightless), {})
        self.cache.prune(keep=self.key)

    def keep_exported(self, exported: Exported[V, S], costs: Mapping[V, float]) -> None:
        """Write a set with the measured ``costs`` (seconds per call). Warn if that fails."""
        self.keep(manifest_of(self.job, exported, self.fingerprint, costs), exported.blobs)


def load_through_cache(job: Job[V, S, R], folder: str) -> Loaded[V, S, R]:
    """Load the job's set from the cache; compile it and write it there if the cache has none that can be read.

    Raises:
        ModelError: a file of the model is missing or damaged.
        UnsupportedModelError: a pass cannot lower the model.
        DeviceError: the device is missing, or refused a program.
        ConfigError: an option is impossible for this model, or there is not enough memory for KV slots or masks.
    """
    cache = BlobCache(folder, int(job.config.cache_limit_gb * GB), job.key)
    entry = CacheEntry(job, cache, job.kind.fingerprint(job), is_weightless_wanted(job))
    lease = entry.lease()
    if isinstance(lease, str):
        return entry.read_only(lease, partial(_import, entry)) or load_compiled(job)
    try:
        loaded = _from_cache(entry) or _into_cache(entry)
    except BaseException:
        lease.release()
        raise
    if loaded.deferred is None:
        lease.release()
        entry.cache.prune(keep=entry.key)
        return loaded
    loaded.deferred.hold(lease)
    return loaded


def _into_cache(entry: CacheEntry[V, S, R]) -> Loaded[V, S, R]:
    """Compile, and write a set to the cache, at once or when the deferred programs have been compiled."""
    job = entry.job
    if is_staged(job):
        return load_staged(job, plan_for_export(job, entry.is_weightless), entry)
    exported = compile_for_export(job)
    runner = runner_of(job, exported.programs)
    entry.keep_exported(exported, runner.measured_costs)
    kept = entry.costs_place.costs_of(job.kind.variant, exported.programs.options)
    return Loaded(runner, exported.programs, job.config, "compiled", kept_costs=kept)


def _from_cache(entry: CacheEntry[V, S, R]) -> Loaded[V, S, R] | None:
    return entry.read(partial(_import, entry), lambda: load_compiled(entry.job, entry.costs_place))


def _import(entry: CacheEntry[V, S, R], manifest: Manifest) -> Loaded[V, S, R]:
    return import_set(entry.job, entry.path, manifest, "cache", entry.fingerprint)
