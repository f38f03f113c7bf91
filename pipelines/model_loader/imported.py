"""Loads programs from a blob set, without reading a graph and without compiling."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import cast

import openvino as ov

from staticllm.core import KVType, OnProgress, Part, ProgramLayout, ProgressEvent, Variant
from staticllm.devices import get_core
from staticllm.errors import BlobError, StaticLLMError, last_line
from staticllm.pipelines.blobs.blob_set import (
    ImportTarget,
    check_kind,
    check_properties,
    check_set,
    import_blob,
    read_blobs,
    read_steadily,
)
from staticllm.pipelines.blobs.crashes import check_crashes
from staticllm.pipelines.blobs.fingerprint import Fingerprint
from staticllm.pipelines.blobs.manifest import Manifest, V
from staticllm.pipelines.blobs.measurements import CostsPlace
from staticllm.pipelines.blobs.shape_fields import shape_from_json
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
        check_kind(folder, manifest, "decoder")
        check_crashes(folder)
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
    config, job = job.config, replace(job, on_progress=_naming(folder, job.on_progress))
    blobs = read_checked(job, folder, manifest, lambda: fingerprint or fingerprint_of(job))
    check_properties(folder, manifest, phase_properties(job.device, config))
    kept = CostsPlace(folder, manifest.fingerprint, job.key).costs_of(_options(job, manifest))
    with Allocation(shape_from_json(manifest.shape), list(manifest.files_of(Variant))) as memory:
        programs = replace(_programs(job, manifest, blobs), kept_costs=kept.read())
        runner = _runner(job, folder, programs, memory)
    return Loaded(runner, programs, config, origin, has_mapped_weights=manifest.is_weightless, kept_costs=kept)


def _naming(folder: Path, on_progress: OnProgress) -> OnProgress:
    """Return a callback that adds the folder to events of importing: should the process crash, it is known with which set."""

    def tell(event: ProgressEvent) -> None:
        on_progress(replace(event, message=str(folder)) if event.stage == "import" else event)

    return tell


def read_checked(
    job: LoadJob, folder: Path, manifest: Manifest, fingerprint: Callable[[], Fingerprint]
) -> dict[str, bytes]:
    """Read the blobs of a set while ``fingerprint`` compares the model's files, and return them by their file names.

    Raises:
        BlobError: the set is damaged, or was made for something else.
    """
    callbacks = job.config.cache_encryption_callbacks
    with ThreadPoolExecutor(1) as pool:
        here = pool.submit(fingerprint)
        blobs = read_blobs(folder, manifest, callbacks[1] if callbacks else None)
        check_set(folder, manifest, here.result())
    return blobs


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


def _programs(job: LoadJob, manifest: Manifest, blobs: Mapping[str, bytes]) -> CompiledPrograms:
    options = _options(job, manifest)
    weights = job.weights if manifest.is_weightless else None
    compiled = import_each(
        job,
        manifest.files_of(Variant),
        blobs,
        lambda variant: ImportTarget(job.device, options.program_group(variant).properties, weights),
    )
    shape, costs = shape_from_json(manifest.shape), manifest.costs_of(Variant)
    return CompiledPrograms(shape, options, compiled, costs, adapters=job.config.adapters)


def import_each(
    job: LoadJob, files: Mapping[V, str], blobs: Mapping[str, bytes], target_of: Callable[[V], ImportTarget]
) -> dict[V, ov.CompiledModel]:
    """Import the blob of each variant, ``NUM_IMPORTS`` at a time; variants that name the same file share a program.

    ``target_of``: the target of a variant's program, asked for the first variant of each file.

    Raises:
        BlobError: the device refused a blob.
    """
    firsts: dict[str, V] = {}
    for variant, file in files.items():
        firsts.setdefault(file, variant)
    compiled: dict[str, ov.CompiledModel] = {}
    with ThreadPoolExecutor(min(len(firsts), NUM_IMPORTS) or 1) as pool:
        imported = {
            name: pool.submit(import_blob, get_core(), blobs[name], target_of(variant))
            for name, variant in firsts.items()
        }
        try:
            for index, (name, variant) in enumerate(firsts.items(), 1):
                start = time.perf_counter()
                job.on_progress(ProgressEvent("import", index, len(blobs), 0.0, variant, is_done=False))
                compiled[name] = imported[name].result()
                job.on_progress(ProgressEvent("import", index, len(blobs), time.perf_counter() - start, variant))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    return {variant: compiled[file] for variant, file in files.items()}
