"""From a model directory to what can run: compiled, loaded from a blob set, or through a cache of them."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import cast

import openvino as ov
from filelock import Timeout

from staticllm.config import StaticLLMConfig
from staticllm.core import KVType, Part, ProgramLayout, ProgressEvent, Variant
from staticllm.devices import get_core
from staticllm.errors import BlobError, ConfigError, DeviceError, StaticLLMError, last_line
from staticllm.pipelines.blobs.blob_set import (
    bad,
    check_properties,
    check_set,
    import_blob,
    is_ours,
    read_blobs,
    read_manifest,
    read_steadily,
    remove_set,
)
from staticllm.pipelines.blobs.cache import BlobCache, key_of
from staticllm.pipelines.blobs.export import (
    Exported,
    Job,
    compile_for_export,
    export_programs,
    identity_of,
    job_of,
    prepare_for_export,
    wants_weightless,
    write_bad,
    write_exported,
)
from staticllm.pipelines.blobs.fingerprint import Identity
from staticllm.pipelines.blobs.manifest import Manifest, shape_from_json
from staticllm.pipelines.engine.engine import Engine
from staticllm.pipelines.engine.options import EngineOptions
from staticllm.pipelines.programs.build import (
    CompiledPrograms,
    CompilePlan,
    OnProgress,
    compile_all,
    compile_layout,
    make_runner,
    phase_properties,
    prepare,
    program_mode,
)
from staticllm.pipelines.programs.compile import CompileOptions
from staticllm.pipelines.programs.model_runner import ModelRunner
from staticllm.pipelines.programs.variants import first_to_serve
from staticllm.pipelines.scheduling.interface import Policy
from staticllm.pipelines.scheduling.request_table import Limits

DEFAULT_BLOB = "openvino_model.blob"
GB = 1_000_000_000


@dataclass(frozen=True)
class DeferredPrograms:
    """Variants that are still to come. ``compile`` makes one; ``finish`` is called with all programs when they are there;
    ``release`` at the end, however it ends."""

    variants: tuple[Variant, ...]
    compile: Callable[[Variant], ov.CompiledModel]
    finish: Callable[[CompiledPrograms], None]
    release: Callable[[], None]


@dataclass(frozen=True)
class Loaded:
    """A model that can run. ``config`` is what holds: a blob set decides what was not asked for. ``origin`` is ``compiled``,
    ``blob`` or ``cache``; ``has_mapped_weights``: whether weights are read from their file as long as it runs."""

    runner: ModelRunner
    programs: CompiledPrograms
    config: StaticLLMConfig
    origin: str
    rest: DeferredPrograms | None = None
    has_mapped_weights: bool = True


def load(
    models_path: str | os.PathLike[str],
    device: str,
    config: StaticLLMConfig,
    on_progress: OnProgress = lambda event: None,
) -> Loaded:
    """A runner that is warm. The graph, and with it the weights as read, is let go.

    Raises:
        ModelError, UnsupportedModelError, DeviceError, ConfigError
        BlobError: ``BLOB_PATH`` names a set that is damaged, or for something else.
    """
    job = job_of(models_path, device, config, on_progress)
    with _explained(device):
        if config.export_blob:
            return _exported(job)
        if config.blob_path:
            return _from_blob_path(job, Path(config.blob_path))
        return _through_cache(job, config.cache_dir) if config.cache_dir else _compiled(job)


@contextmanager
def _explained(device: str) -> Iterator[None]:
    """What OpenVINO raises in its own words, where memory runs out for instance, becomes one line of ours."""
    try:
        yield
    except StaticLLMError:
        raise
    except MemoryError as error:
        raise DeviceError(
            f"{device} has not enough memory for this model: lower MAX_PROMPT_LEN, KV_SLOTS or MAX_NUM_SEQS"
        ) from error
    except RuntimeError as error:
        if type(error) is not RuntimeError or not _is_openvinos(error):
            raise  # a callback's own
        raise DeviceError(f"{device} failed while the model was loaded: {last_line(error)}") from error


def _is_openvinos(error: RuntimeError) -> bool:
    """Whether it was raised below Python: by an extension, whose frames nobody sees."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith(("staticllm.", "openvino"))


def _is_staged(job: Job) -> bool:
    """Whether the fewest programs serve while the others are compiled."""
    if program_mode(job.device, job.config) != "separate":
        return False
    wanted = job.config.background_compile
    return job.device.split(".", maxsplit=1)[0] != "CPU" if wanted is None else wanted


def _staged(
    job: Job,
    prepared: tuple[ov.Core, CompilePlan],
    finish: Callable[[CompiledPrograms], None],
    release: Callable[[], None],
) -> Loaded:
    """Compile what can serve; the rest is for the background."""
    core, layout = prepared
    first = first_to_serve(layout.variants)
    rest = tuple(variant for variant in layout.variants if variant not in first)
    programs = compile_all(core, replace(layout, variants=first), job.on_progress)

    def compile_one(variant: Variant) -> ov.CompiledModel:
        ((_, compiled),) = compile_layout(core, replace(layout, variants=(variant,)), job.on_progress)
        return compiled

    runner = make_runner(programs, job.on_progress, planned=layout.variants)
    return Loaded(runner, programs, job.config, "compiled", DeferredPrograms(rest, compile_one, finish, release))


def make_engine(loaded: Loaded, policy: Policy) -> Engine:
    """The engine of a loaded model; its thread starts with the first request."""
    return Engine(loaded.runner, policy, options_of(loaded))


def options_of(loaded: Loaded) -> EngineOptions:
    """What an engine must know to serve from it."""
    config = loaded.config
    limits = Limits(config.num_seqs(loaded.programs.options.mode), config.ttft_ms, config.tpot_ms)
    state_slots = loaded.programs.shape.slots_of_states(config.max_seq_len)
    return EngineOptions(
        limits, config.max_seq_len, config.max_waiting, config.num_host_slots, config.prefix_caching, state_slots
    )


def _compiled(job: Job) -> Loaded:
    prepared = prepare(job.directory, job.device, job.config, job.on_progress)
    if _is_staged(job):
        return _staged(job, prepared, finish=lambda programs: None, release=lambda: None)
    if prepared[1].options.layout == "single_row" and job.config.background_compile is not False:
        return _single_rows_later(job, *prepared)
    programs = compile_all(*prepared, job.on_progress)
    return Loaded(make_runner(programs, job.on_progress), programs, job.config, "compiled")


def _single_rows_later(job: Job, core: ov.Core, layout: CompilePlan) -> Loaded:
    """One program for all; the faster one for single rows takes its place when it is there."""
    shared = replace(layout.options, layout="shared", properties={
        part: values for part, values in layout.options.properties.items() if part != "single_row"
    })  # fmt: skip
    programs = compile_all(core, replace(layout, options=shared), job.on_progress)
    single = tuple(variant for variant in layout.variants if variant.rows == 1)

    @cache
    def compiled() -> dict[Variant, ov.CompiledModel]:
        return dict(compile_layout(core, replace(layout, variants=single), job.on_progress))

    rest = DeferredPrograms(
        single, lambda variant: compiled()[variant], finish=lambda programs: None, release=lambda: None
    )
    return Loaded(make_runner(programs, job.on_progress), programs, job.config, "compiled", rest)


def _exported(job: Job) -> Loaded:
    """Compile, and leave a set at ``BLOB_PATH``. One that lies there is replaced, anything else is not touched."""
    target = Path(job.config.blob_path) if job.config.blob_path else job.directory / DEFAULT_BLOB
    if _exists(target) and not is_ours(target):
        raise ConfigError(f"BLOB_PATH={str(target)!r} is there and no blob set: choose another path or remove it")
    try:
        target.resolve().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"BLOB_PATH={str(target)!r} cannot be written: {error.strerror or error}") from None
    if _is_staged(job):
        is_weightless = wants_weightless(job)

        def finish(programs: CompiledPrograms) -> None:
            write_exported(job, target, export_programs(job, programs, is_weightless), identity_of(job), {})

        return _staged(job, prepare_for_export(job, is_weightless), finish, release=lambda: None)
    exported = compile_for_export(job)
    runner = make_runner(exported.programs, job.on_progress)
    write_exported(job, target, exported, identity_of(job), runner.costs.measured)
    return Loaded(runner, exported.programs, job.config, "compiled")


def _exists(path: Path) -> bool:
    """
    Raises:
        ConfigError: there can be no such path.
    """
    try:
        return path.exists()
    except (OSError, ValueError) as error:
        raise ConfigError(f"BLOB_PATH={str(path)[:80]!r} cannot be written: {error}") from None


def _from_blob_path(job: Job, folder: Path) -> Loaded:
    def import_it(manifest: Manifest) -> Loaded:
        decided = replace(job, config=_decided_by(manifest, job.config))
        programs, runner = _imported(decided, folder, manifest)
        return Loaded(runner, programs, decided.config, "blob", has_mapped_weights=manifest.is_weightless)

    return read_steadily(folder, import_it, job.key)


def _through_cache(job: Job, folder: str) -> Loaded:
    """What the cache has for exactly this; else compiled, and left there. A set that cannot be read is compiled again."""
    cache, identity = BlobCache(folder, int(job.config.cache_limit_gb * GB), job.key), identity_of(job)
    key = key_of(identity)
    try:
        lease = cache.lease(key)
    except (OSError, Timeout) as error:
        reason = getattr(error, "strerror", None) or "this thread is already loading the same model from it"
        warnings.warn(f"CACHE_DIR={folder!r} cannot be used: {reason}", RuntimeWarning, stacklevel=2)
        return _compiled(job)
    try:
        loaded = _from_cache(job, cache, key, identity) or _into_cache(job, cache, key, identity)
    except BaseException:
        lease.release()
        raise
    if loaded.rest is None:
        lease.release()
        cache.prune(keep=key)
        return loaded
    lease.hand_over()
    return replace(loaded, rest=replace(loaded.rest, release=lease.release))


def _into_cache(job: Job, cache: BlobCache, key: str, identity: Identity) -> Loaded:
    """Compile, and leave a set in the cache: now, or when the rest has been compiled in the background."""
    if not _is_staged(job):
        exported = compile_for_export(job)
        runner = make_runner(exported.programs, job.on_progress)
        _keep(job, cache.path(key), exported, identity, runner.costs.measured)
        return Loaded(runner, exported.programs, job.config, "compiled")
    is_weightless = wants_weightless(job)

    def finish(programs: CompiledPrograms) -> None:
        _keep(job, cache.path(key), export_programs(job, programs, is_weightless), identity, {})
        cache.prune(keep=key)

    return _staged(job, prepare_for_export(job, is_weightless), finish, release=lambda: None)


def _from_cache(job: Job, cache: BlobCache, key: str, identity: Identity) -> Loaded | None:
    path = cache.path(key)
    if not path.is_dir():
        return None
    try:
        manifest = read_manifest(path, job.key)
        cache.touch(key)
        if manifest.is_bad:
            warnings.warn(f"CACHE_DIR is not used: {bad(path, manifest)}", RuntimeWarning, stacklevel=2)
            return _compiled(job)
        programs, runner = _imported(job, path, manifest, identity)
    except BlobError as error:
        warnings.warn(f"compiled again: {error}", RuntimeWarning, stacklevel=2)
        remove_set(path)
        return None
    return Loaded(runner, programs, job.config, "cache", has_mapped_weights=manifest.is_weightless)


def _keep(job: Job, path: Path, exported: Exported, identity: Identity, costs: Mapping[Variant, float]) -> None:
    """Leave a set in the cache. A full disk costs the cache, not the pipeline."""
    try:
        if exported.blobs is None:
            write_bad(job, path, exported, identity)
            warnings.warn(
                f"CACHE_DIR is not used: {bad(path, read_manifest(path, job.key))}", RuntimeWarning, stacklevel=2
            )
        else:
            write_exported(job, path, exported, identity, costs)
    except ConfigError as error:
        warnings.warn(f"nothing was cached: {error}", RuntimeWarning, stacklevel=2)


def _decided_by(manifest: Manifest, config: StaticLLMConfig) -> StaticLLMConfig:
    """The config with what the set has for everything that was not asked for."""
    asked = config.asked or frozenset()
    decided = {name: value for name, value in manifest.config.items() if name not in asked}
    return replace(config, asked=frozenset({*asked, *decided}), **decided)


def _imported(
    job: Job, folder: Path, manifest: Manifest, identity: Identity | None = None
) -> tuple[CompiledPrograms, ModelRunner]:
    """Every program of a set, and a warm runner of them.

    The model is compared while the blobs are read; nothing is imported before both are done.

    Raises:
        BlobError: the set is damaged, or for something else.
    """
    core, config = get_core(), job.config
    with ThreadPoolExecutor(1) as pool:
        here = pool.submit(lambda: identity or identity_of(job))
        callbacks = config.cache_encryption_callbacks
        blobs = read_blobs(folder, manifest, callbacks[1] if callbacks else None)
        check_set(folder, manifest, here.result())
    check_properties(folder, manifest, phase_properties(job.device, config))
    options = CompileOptions(
        job.device,
        cast(ProgramLayout, manifest.programs),
        cast(KVType, manifest.kv_type),
        {cast(Part, part): values for part, values in manifest.properties.items()},
    )
    weights = job.weights if manifest.is_weightless else None
    compiled: dict[str, ov.CompiledModel] = {}
    files = manifest.file_of()
    for variant, name in files.items():
        if name not in compiled:
            start = time.perf_counter()
            job.on_progress(ProgressEvent("import", len(compiled) + 1, len(blobs), 0.0, variant, is_done=False))
            compiled[name] = import_blob(core, blobs[name], job.device, options.family(variant)[1], weights)
            job.on_progress(ProgressEvent("import", len(compiled), len(blobs), time.perf_counter() - start, variant))
    costs = {Variant(rows, kv_len, sequences): seconds for rows, kv_len, sequences, seconds in manifest.costs}
    programs = CompiledPrograms(
        shape_from_json(manifest.shape), options, {variant: compiled[name] for variant, name in files.items()}, costs
    )
    try:
        return programs, make_runner(programs, job.on_progress)
    except (RuntimeError, ValueError, KeyError, IndexError) as error:  # shapes that are not those of the blobs
        if isinstance(error, StaticLLMError):
            raise
        raise BlobError(f"the blobs in {str(folder)!r} are not what their manifest says: {last_line(error)}") from error
