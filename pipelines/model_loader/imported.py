"""Loads programs from a blob set, without reading a graph and without compiling."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import cast

import openvino as ov

from staticllm.core import KVType, Part, ProgramLayout, ProgressEvent, Variant
from staticllm.devices import get_core
from staticllm.errors import BlobError, StaticLLMError, last_line
from staticllm.pipelines.blobs.blob_set import (
    ImportTarget,
    check_properties,
    check_set,
    import_blob,
    read_blobs,
    read_steadily,
)
from staticllm.pipelines.blobs.fingerprint import Fingerprint
from staticllm.pipelines.blobs.manifest import Manifest, shape_from_json
from staticllm.pipelines.blobs.measurements import CostsPlace
from staticllm.pipelines.model_loader.blob_export import fingerprint_of
from staticllm.pipelines.model_loader.job import LoadJob
from staticllm.pipelines.model_loader.loaded import Loaded, Origin
from staticllm.pipelines.programs.build import Allocation, CompiledPrograms, make_runner
from staticllm.pipelines.programs.compile import CompileOptions
from staticllm.pipelines.programs.compile_plan import phase_properties
from staticllm.pipelines.programs.model_runner import ModelRunner

NUM_IMPORTS = 2
"""Blobs that are imported at the same time."""


def load_blob_set(job: LoadJob, folder: Path) -> Loaded:
    """Load the set at ``BLOB_PATH``. It decides every layout field of the config that the user did not give.

    Raises:
        BlobError: there is no set, it is damaged, or it was made for something else.
    """

    def import_it(manifest: Manifest) -> Loaded:
        return import_set(decided_by(manifest, job), folder, manifest, "blob")

    return read_steadily(folder, import_it, job.key)


def decided_by(manifest: Manifest, job: LoadJob) -> LoadJob:
    """Return the job with the set's value for every layout field that the user did not give."""
    decided = {name: value for name, value in manifest.config.items() if name not in job.explicit}
    return replace(job, config=replace(job.config, **decided), explicit=job.explicit | decided.keys())


def import_set(
    job: LoadJob, folder: Path, manifest: Manifest, origin: Origin, fingerprint: Fingerprint | None = None
) -> Loaded:
    """Import every program of a set and warm them up. ``fingerprint``: the job's; it is computed here if it is None.

    The model's files are compared while the blobs are read; nothing is imported before both are done.

    Raises:
        BlobError: the set is damaged, or was made for something else.
    """
    config = job.config
    with ThreadPoolExecutor(1) as pool:
        here = pool.submit(lambda: fingerprint or fingerprint_of(job))
        callbacks = config.cache_encryption_callbacks
        blobs = read_blobs(folder, manifest, callbacks[1] if callbacks else None)
        check_set(folder, manifest, here.result())
    check_properties(folder, manifest, phase_properties(job.device, config))
    kept = CostsPlace(folder, manifest.fingerprint, job.key).costs_of(_options(job, manifest))
    with Allocation(shape_from_json(manifest.shape), [entry.variant for entry in manifest.variants]) as memory:
        programs = replace(_programs(job, manifest, blobs), kept_costs=kept.read())
        runner = _runner(job, folder, programs, memory)
    return Loaded(runner, programs, config, origin, has_mapped_weights=manifest.is_weightless, kept_costs=kept)


def _runner(job: LoadJob, folder: Path, programs: CompiledPrograms, memory: Allocation) -> ModelRunner:
    try:
        return make_runner(programs, job.on_progress, memory=memory)
    except (RuntimeError, ValueError, KeyError, IndexError) as error:  # the shapes differ from those of the blobs
        if isinstance(error, StaticLLMError):
            raise
        raise BlobError(f"the blobs in {str(folder)!r} do not match their manifest: {last_line(error)}") from error


def _options(job: LoadJob, manifest: Manifest) -> CompileOptions:
    return CompileOptions(
        job.device,
        cast(ProgramLayout, manifest.programs),
        cast(KVType, manifest.kv_type),
        {cast(Part, part): values for part, values in manifest.properties.items()},
        manifest.few_rows,
    )


def _programs(job: LoadJob, manifest: Manifest, blobs: dict[str, bytes]) -> CompiledPrograms:
    options = _options(job, manifest)
    weights = job.weights if manifest.is_weightless else None
    compiled: dict[str, ov.CompiledModel] = {}
    firsts: dict[str, Variant] = {}
    for entry in manifest.variants:
        firsts.setdefault(entry.file, entry.variant)

    def import_file(name: str) -> ov.CompiledModel:
        target = ImportTarget(job.device, options.program_group(firsts[name]).properties, weights)
        return import_blob(get_core(), blobs[name], target)

    with ThreadPoolExecutor(min(len(firsts), NUM_IMPORTS) or 1) as pool:
        imported = {name: pool.submit(import_file, name) for name in firsts}
        try:
            for index, (name, variant) in enumerate(firsts.items(), 1):
                start = time.perf_counter()
                job.on_progress(ProgressEvent("import", index, len(blobs), 0.0, variant, is_done=False))
                compiled[name] = imported[name].result()
                job.on_progress(ProgressEvent("import", index, len(blobs), time.perf_counter() - start, variant))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    of_variant = {entry.variant: compiled[entry.file] for entry in manifest.variants}
    return CompiledPrograms(shape_from_json(manifest.shape), options, of_variant, dict(manifest.costs))
