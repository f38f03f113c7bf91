"""Loads programs through a cache of blob sets: imports the job's set, or compiles the programs and writes a set."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from filelock import Timeout

from staticllm.core import Variant
from staticllm.errors import BlobError, ConfigError
from staticllm.pipelines.blobs.blob_set import failed_verification_text, read_manifest, remove_set
from staticllm.pipelines.blobs.cache import BlobCache, key_of
from staticllm.pipelines.blobs.fingerprint import Fingerprint
from staticllm.pipelines.blobs.manifest import Manifest
from staticllm.pipelines.blobs.measurements import CostsPlace
from staticllm.pipelines.model_loader.blob_export import (
    Exported,
    compile_for_export,
    export_programs,
    fingerprint_of,
    is_weightless_wanted,
    prepare_for_export,
    write_exported,
    write_quarantined,
)
from staticllm.pipelines.model_loader.imported import import_set
from staticllm.pipelines.model_loader.job import LoadJob
from staticllm.pipelines.model_loader.loaded import Loaded
from staticllm.pipelines.model_loader.staged import is_staged, load_compiled, load_staged
from staticllm.pipelines.programs.build import CompiledPrograms, make_runner

GB = 1_000_000_000


@dataclass(frozen=True)
class CacheEntry:
    """The place of one job's set in a cache. ``is_weightless``: whether its blobs are written without weights."""

    job: LoadJob
    cache: BlobCache
    fingerprint: Fingerprint
    is_weightless: bool

    @property
    def key(self) -> str:
        """The name of the set in the cache."""
        return key_of(self.fingerprint)

    @property
    def costs_place(self) -> CostsPlace:
        """The place of the measured costs of the set's programs."""
        return CostsPlace(self.cache.path(self.key), self.fingerprint, self.job.key)

    def write(self, programs: CompiledPrograms) -> None:
        """Export all programs of the model, and remove the least recently used sets beyond the cache's limit."""
        self.keep(export_programs(self.job, programs, self.is_weightless), {})
        self.cache.prune(keep=self.key)

    def keep(self, exported: Exported, costs: Mapping[Variant, float]) -> None:
        """Write a set with the measured ``costs`` (seconds per call). Warn if that fails, for example on a full disk."""
        path = self.cache.path(self.key)
        try:
            if exported.blobs is not None:
                write_exported(self.job, path, exported, self.fingerprint, costs)
                return
            write_quarantined(self.job, path, exported, self.fingerprint)
        except ConfigError as error:
            warnings.warn(f"nothing was cached: {error}", RuntimeWarning, stacklevel=2)
            return
        _warn_of_quarantine(self, read_manifest(path, self.job.key))


def load_through_cache(job: LoadJob, folder: str) -> Loaded:
    """Load the job's set from the cache; compile it and write it there if the cache has none that can be read.

    Raises:
        ModelError: a file of the model is missing or damaged.
        UnsupportedModelError: a pass cannot lower the model.
        DeviceError: the device is missing, or refused a program.
        ConfigError: an option is impossible for this model, or there is not enough memory for KV slots or masks.
    """
    cache = BlobCache(folder, int(job.config.cache_limit_gb * GB), job.key)
    entry = CacheEntry(job, cache, fingerprint_of(job), is_weightless_wanted(job))
    try:
        lease = cache.lease(entry.key)
    except (OSError, Timeout) as error:
        reason = getattr(error, "strerror", None) or "this thread is already loading the same model from it"
        warnings.warn(f"CACHE_DIR={folder!r} cannot be used: {reason}", RuntimeWarning, stacklevel=2)
        return load_compiled(job)
    try:
        loaded = _from_cache(entry) or _into_cache(entry)
    except BaseException:
        lease.release()
        raise
    if loaded.deferred is None:
        lease.release()
        cache.prune(keep=entry.key)
        return loaded
    loaded.deferred.hold(lease)
    return loaded


def _into_cache(entry: CacheEntry) -> Loaded:
    """Compile, and write a set to the cache, at once or when the deferred programs have been compiled."""
    job = entry.job
    if is_staged(job):
        core, plan = prepare_for_export(job, entry.is_weightless)
        return load_staged(job, core, plan, entry)
    exported = compile_for_export(job)
    runner = make_runner(exported.programs, job.on_progress)
    entry.keep(exported, runner.costs.measured)
    kept = entry.costs_place.costs_of(exported.programs.options)
    return Loaded(runner, exported.programs, job.config, "compiled", kept_costs=kept)


def _from_cache(entry: CacheEntry) -> Loaded | None:
    """Load the cached set; None if there is none or it cannot be read.

    If the blobs of this model failed verification before, the programs are compiled.
    """
    path = entry.cache.path(entry.key)
    if not path.is_dir():
        return None
    try:
        manifest = read_manifest(path, entry.job.key)
        entry.cache.touch(entry.key)
        if manifest.has_failed_verification:
            _warn_of_quarantine(entry, manifest)
            return load_compiled(entry.job, entry.costs_place)
        return import_set(entry.job, path, manifest, "cache", entry.fingerprint)
    except BlobError as error:
        warnings.warn(f"compiled again: {error}", RuntimeWarning, stacklevel=2)
        remove_set(path)
        return None


def _warn_of_quarantine(entry: CacheEntry, manifest: Manifest) -> None:
    text = failed_verification_text(entry.cache.path(entry.key), manifest)
    warnings.warn(f"CACHE_DIR is not used: {text}", RuntimeWarning, stacklevel=3)
