"""Imports the programs of a blob set, without reading a graph and without compiling."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import openvino as ov

from staticllm.core import KVType, OnProgress, ProgramLayout, ProgressEvent
from staticllm.devices import get_core
from staticllm.errors import BlobError, StaticLLMError, last_line, quoted
from staticllm.system.long_calls import attended, attended_each, told
from staticllm.system.threads import ThreadPool

from ...compiler_passes.artifacts.blob_set import (
    ImportTarget,
    check_properties,
    check_set,
    import_blob,
    read_blobs,
    remove_set,
)
from ...compiler_passes.artifacts.fingerprint import Fingerprint
from ...compiler_passes.artifacts.manifest import Manifest, stored
from ...compiler_passes.artifacts.measurements import CostsPlace
from ...compiler_passes.artifacts.stored_chain import BANK, WEIGHTS, import_part, read_bank, read_chain, stems_of
from ...compiler_passes.compiling.chain import AnyProgram, CompiledChain, CompiledPart
from ...compiler_passes.compiling.compile import CompiledPrograms, CompileOptions, S, V
from ...compiler_passes.compiling.device_memory import device_allocator
from .background import DeferredImports
from .kind import Job, Loaded, LoadJob, ProgramsFrom, R
from .npu_target import check_requirements

NUM_IMPORTS = 2
"""Blobs imported in parallel."""


def import_set(
    job: Job[V, S, R],
    folder: Path,
    manifest: Manifest,
    programs_from: ProgramsFrom,
    fingerprint: Fingerprint | None = None,
) -> Loaded[V, S, R]:
    """Import every program of a set and warm them up.

    The model's files are compared while the blobs are read; nothing is imported before both are done.

    Args:
        fingerprint: The job's; it is computed here if it is None.

    Raises:
        BlobError: the set is damaged, or was made for something else.
    """
    job = replace(job, on_progress=_naming(folder, job.on_progress))
    kind = job.kind
    options = _options(job, manifest)
    blobs = _read_checked(job, folder, manifest, lambda: fingerprint or kind.fingerprint(job))
    check_properties(folder, manifest, kind.properties(job))
    kept = CostsPlace(folder, manifest.fingerprint, job.key).costs_of(kind.variant, options)
    shape = stored(kind.shape, manifest.shape)
    files = manifest.files_of(kind.variant)
    with kind.memory(job.device, shape, list(files)) as memory:
        import_each = _import_chains if options.layout == "blocks" else _import_each
        first = _first_files(job, files, options)
        compiled = import_each(job, manifest, first, blobs, options)
        programs = CompiledPrograms(shape, options, compiled, manifest.costs_of(kind.variant), kept.read())
        runner = _runner(job, folder, programs, memory, () if first == files else list(files))
    is_weightless = manifest.is_weightless
    loaded = Loaded(runner, programs, job.config, programs_from, has_mapped_weights=is_weightless, kept_costs=kept)
    return loaded if first == files else replace(loaded, deferred=_deferred(job, folder, manifest, blobs, loaded))


def _first_files(job: Job[V, S, R], files: Mapping[V, str], options: CompileOptions) -> dict[V, str]:
    """Return the variants, with their files, that are imported before the model serves: whole programs that any prompt needs.

    One program per variant is small, so these are all imported at once.
    """
    if not (job.is_launched and job.kind.compiles_in_background) or options.mode == "separate":
        return dict(files)
    needed = {files[variant] for variant in job.kind.first_to_serve(list(files))}
    return {variant: file for variant, file in files.items() if file in needed}


def _deferred(
    job: Job[V, S, R],
    folder: Path,
    manifest: Manifest,
    blobs: Mapping[str, ov.Tensor],
    loaded: Loaded[V, S, R],
) -> DeferredImports[V, S]:
    """Return the programs of a set that are not loaded; their blobs are held until they are imported.

    If one is refused, a cached set is removed, so that the next start compiles the model again.
    """
    programs = loaded.programs
    files: dict[str, tuple[V, ...]] = {}
    for variant, file in manifest.files_of(job.kind.variant).items():
        if variant not in programs.compiled:
            files[file] = (*files.get(file, ()), variant)
    left = {file: blobs[file] for file in files}
    weights = job.weights if manifest.is_weightless else None

    def import_file(file: str) -> AnyProgram:
        variants = files[file]
        target = ImportTarget(job.device, programs.options.program_group(variants[0]).properties, weights)
        try:
            with _told(job, list(files).index(file) + 1, len(files), variants[0]), _matching(folder):
                program = import_blob(get_core(), left.pop(file), target)
                job.kind.check(replace(programs, compiled=dict.fromkeys(variants, program)))
        except BlobError:
            if loaded.programs_from == "cache":
                remove_set(folder)
            raise
        return program

    return DeferredImports(files, import_file, programs.costs, programs.kept_costs)


def _naming(folder: Path, on_progress: OnProgress) -> OnProgress:
    """Return a callback that adds the folder to events of importing: should the process crash, it is known with which set."""

    def tell(event: ProgressEvent) -> None:
        on_progress(replace(event, message=str(folder)) if event.stage == "import" else event)

    return tell


def _read_checked(
    job: LoadJob[Any], folder: Path, manifest: Manifest, fingerprint: Callable[[], Fingerprint]
) -> dict[str, ov.Tensor]:
    """Read the blobs by name while ``fingerprint`` reads the model's files.

    Raises:
        BlobError: damaged, or another model.
    """
    callbacks = job.config.cache_encryption_callbacks
    with ThreadPool(1, "staticllm-files") as pool:
        here = pool.submit(fingerprint)
        blobs = read_blobs(folder, manifest, callbacks[1] if callbacks else None)
        check_set(folder, manifest, here.result())
    return blobs


def _runner(job: Job[V, S, R], folder: Path, programs: CompiledPrograms[V, S], memory: Any, planned: Sequence[V]) -> R:
    with _matching(folder):
        job.kind.check(programs)
        return job.kind.runner(job, programs, memory, planned)


@contextmanager
def _matching(folder: Path) -> Iterator[None]:
    """Turn exceptions of a block that uses imported programs into a ``BlobError``: they do not match their manifest."""
    try:
        yield
    except (RuntimeError, ValueError, KeyError, IndexError) as error:  # the shapes differ from those of the blobs
        if isinstance(error, StaticLLMError):
            raise
        raise BlobError(f"the blobs in {quoted(folder)} do not match their manifest: {last_line(error)}") from error


def _options(job: LoadJob[Any], manifest: Manifest) -> CompileOptions:
    return CompileOptions(
        job.device,
        cast(ProgramLayout, manifest.programs),
        cast(KVType, manifest.kv_type) if manifest.kv_type else None,
        manifest.properties,
        manifest.few_rows,
    )


def _import_each(
    job: LoadJob[Any],
    manifest: Manifest,
    files: Mapping[V, str],
    blobs: Mapping[str, ov.Tensor],
    options: CompileOptions,
) -> dict[V, AnyProgram]:
    """Import each blob, ``NUM_IMPORTS`` at a time, for all variants that name it.

    Raises:
        BlobError: refused.
    """
    weights = job.weights if manifest.is_weightless else None
    firsts: dict[str, V] = {}
    for variant, file in files.items():
        firsts.setdefault(file, variant)
    compiled: dict[str, ov.CompiledModel] = {}
    calls = [
        partial(
            import_blob,
            get_core(),
            blobs[name],
            ImportTarget(job.device, options.program_group(variant).properties, weights),
        )
        for name, variant in firsts.items()
    ]
    with closing(attended_each(calls, num_parallel=NUM_IMPORTS)) as imported:
        for index, (name, variant) in enumerate(firsts.items(), 1):
            with _told(job, index, len(blobs), variant):
                compiled[name] = next(imported)
    return {variant: compiled[file] for variant, file in files.items()}


def _import_chains(
    job: LoadJob[Any],
    manifest: Manifest,
    files: Mapping[V, str],
    blobs: Mapping[str, ov.Tensor],
    options: CompileOptions,
) -> dict[V, AnyProgram]:
    """Import each part once, and make the chains of all variants over one bank of weights.

    Raises:
        BlobError: refused.
    """
    names = stems_of(list(blobs))

    def contents(stem: str) -> memoryview:
        if stem not in names:
            raise BlobError(f"the set has no file {stem[:60]!r}: export it again")
        data: memoryview = blobs[names[stem]].data.data
        return data

    bank = read_bank(bytes(contents(BANK)), contents(WEIGHTS), device_allocator(get_core(), job.device))
    known = dict[str, CompiledPart]()
    asked = set[str]()
    found = dict[V, CompiledChain]()
    for index, (variant, file) in enumerate(files.items(), 1):
        with _told(job, index, len(files), variant):
            stored = read_chain(blobs[file].data.tobytes(), bank)
            target = ImportTarget(job.device, options.program_group(variant).properties)
            for requirements in stored.requirements:
                if requirements not in asked and (requirements or manifest.fingerprint.is_elsewhere):
                    check_requirements(get_core(), job.device, requirements)
                    asked.add(requirements)
            for stem, place in zip(stored.files, stored.plan.places, strict=True):
                if stem not in known:
                    known[stem] = attended(partial(import_part, bytes(contents(stem)), place, target))
            found[variant] = CompiledChain(stored.plan, [known[stem] for stem in stored.files], bank)
    bank.move({entry for chain in found.values() for entry in chain.entries_of_device})
    return {**found}


@contextmanager
def _told(job: LoadJob[Any], index: int, total: int, variant: Any) -> Iterator[None]:
    """Tell of an import before it and, with its seconds, after it."""
    start = time.perf_counter()
    event = ProgressEvent("import", index, total, 0.0, variant, is_done=False)
    job.on_progress(event)
    with told(job.on_progress, event):
        yield
    job.on_progress(replace(event, seconds=time.perf_counter() - start, is_done=True))
