"""Decides where the programs of a model come from: a blob set, a cache of such sets, or the compiler.

``load_job`` is the only place that decides. It calls ``ProgramKind.plan`` (read, lower, choose variants), ``compile_all`` or
``import_set``, ``ProgramKind.runner`` (bind, warm up), and a ``SetPlace`` that writes what was compiled.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from staticllm.config import StaticLLMConfig
from staticllm.core import OnProgress
from staticllm.devices import kind
from staticllm.errors import BlobError, DeviceError, StaticLLMError, UnsupportedModelError, last_line, quoted
from staticllm.system.long_calls import beside

from ...compiler_passes.artifacts.blob_set import check_kind, read_steadily, remove_set
from ...compiler_passes.artifacts.crashes import check_crashes
from ...compiler_passes.artifacts.manifest import Manifest
from ...compiler_passes.artifacts.measurements import CostsPlace
from ...compiler_passes.compiling.compile import CompiledPrograms, CompilePlan, S, StartWith, V, compile_all
from ...compiler_passes.compiling.layout import program_mode
from .background import DeferredPrograms, SecondProgram
from .cached import CacheEntry, CacheUnusableError
from .decoder_kind import LoadedDecoder, job_of
from .export import SetPlace, compile_for_export, export_target, plan_for_export
from .import_set import import_set
from .kind import Job, Loaded, LoadJob, R

logger = logging.getLogger(__name__)
PROVEN = {"pages": True}
"""What is kept of a proof."""


def load(
    models_path: str | os.PathLike[str],
    device: str,
    config: StaticLLMConfig,
    on_progress: OnProgress = lambda event: None,
    explicit: Collection[str] | None = None,
) -> LoadedDecoder:
    """Load a decoder and warm it up. The graph and the weights that were read with it are released.

    Args:
        explicit: Names of the config's fields that the user gave; a blob set decides the others. If it is None, the
            fields whose values differ from their defaults.

    Raises:
        ModelError: a file of the model is missing or damaged.
        UnsupportedModelError: a pass cannot lower the model.
        DeviceError: the device is missing, refused a program, or has not enough memory.
        ConfigError: an option is impossible for this model, or there is not enough memory for KV slots or masks.
        BlobError: the set at ``BLOB_PATH`` is damaged or was made for something else, or exported blobs failed verification.
    """
    with _explained(device):
        job = job_of(models_path, device, config, on_progress, explicit)
        return load_job(replace(job, is_launched=config.background_compile is not False))


def load_job(job: Job[V, S, R]) -> Loaded[V, S, R]:
    """Load a model of any kind and warm it up.

    With ``EXPORT_BLOB``, compile it and write a set to ``BLOB_PATH``, which replaces an existing set. Else with ``BLOB_PATH``,
    import that set. Else with ``CACHE_DIR``, import the cached set, or compile the model and cache it. Else compile it.

    Raises:
        As ``load``.
    """
    config = job.config
    if config.export_blob:
        return _compile_into(SetPlace(job, export_target(job)))
    if config.blob_path:
        return _from_set(job, Path(config.blob_path))
    if config.cache_dir:
        return _through_cache(job, config.cache_dir)
    return _compile(job)


def _from_set(job: Job[V, S, R], folder: Path) -> Loaded[V, S, R]:
    """Import the set in ``folder``, which decides whatever the user did not choose. Raises ``BlobError``."""

    def import_it(manifest: Manifest) -> Loaded[V, S, R]:
        check_kind(folder, manifest, job.kind.name)
        check_crashes(folder)
        return import_set(job.kind.decided_by(manifest, job), folder, manifest, "blob")

    return read_steadily(folder, import_it, job.key)


def _through_cache(job: Job[V, S, R], cache_dir: str) -> Loaded[V, S, R]:
    """Import the job's set from a cache, or compile and cache it. A cache that cannot be written is only read."""
    entry = CacheEntry.of(job, cache_dir)
    try:
        loaded = _without_blobs(entry)
    except _DifferentError as error:
        error.explain(job)
        entry = replace(entry, job=replace(job, proof="failed"))
        loaded = None
    if loaded is not None:
        return loaded
    try:
        lease = entry.lease()
    except CacheUnusableError as error:
        return _from_read_only_cache(entry, str(error)) or _compile(entry.job)
    try:
        loaded = _from_cache(entry) or _compile_into(entry)
    except BaseException:
        lease.release()
        raise
    if loaded.deferred is None:
        lease.release()
        entry.cache.prune(keep=entry.key)
    else:
        loaded.deferred.hold(lease)
    return loaded


def _from_cache(entry: CacheEntry[V, S, R]) -> Loaded[V, S, R] | None:
    """Import the cached set; None if there is none, or, with a warning, if it is damaged: then it is removed.

    If blobs of this model failed verification before, or crashed twice, compile it for this start and write nothing.
    """
    if not entry.folder.is_dir():
        return None
    try:
        manifest = entry.read()
        problem = entry.quarantine(manifest)
        if problem is None:
            return import_set(entry.job, entry.folder, manifest, "cache", entry.fingerprint)
    except BlobError as error:
        warnings.warn(f"compiled again: {error}", RuntimeWarning, stacklevel=2)
        remove_set(entry.folder)
        return None
    warnings.warn(f"CACHE_DIR is not used: {problem}", RuntimeWarning, stacklevel=2)
    return _compile(entry.job, entry.costs_place)


def _from_read_only_cache(entry: CacheEntry[V, S, R], reason: str) -> Loaded[V, S, R] | None:
    """Import the set in a cache that cannot be written for this ``reason``; None, with a warning, if that is impossible."""

    def import_it(manifest: Manifest) -> Loaded[V, S, R]:
        if (problem := entry.quarantine(manifest)) is not None:
            raise BlobError(problem)
        return import_set(entry.job, entry.folder, manifest, "cache", entry.fingerprint)

    problem = reason
    try:
        if entry.folder.is_dir():
            return read_steadily(entry.folder, import_it, entry.job.key)
    except BlobError as error:
        problem = f"{reason}, and {error}"
    except OSError:
        problem = f"{reason}, nor read"
    text = f"CACHE_DIR={quoted(entry.cache.folder)} cannot be used: {problem}"
    warnings.warn(text, RuntimeWarning, stacklevel=3)
    return None


def _compile_into(place: SetPlace[V, S, R]) -> Loaded[V, S, R]:
    """Compile, and write the programs as a set: at once, or when the deferred ones have been compiled."""
    job = place.job
    if is_staged(job):
        return _compile_staged(job, plan_for_export(job, place.is_weightless), place)
    exported = compile_for_export(job)
    programs = exported.programs
    with job.kind.memory(job.device, programs.shape, list(programs.compiled)) as memory:
        runner = job.kind.runner(job, programs, memory)
    place.put(exported, runner.costs.measured)
    kept = place.costs_place.costs_of(job.kind.variant, programs.options)
    return Loaded(runner, programs, job.config, "compiled", kept_costs=kept)


def _without_blobs(entry: CacheEntry[V, S, R]) -> Loaded[V, S, R] | None:
    """Compile a model whose programs cannot be imported, with the measurements in the cache; None if they can.

    A cached set says that they can, without reading the model. Raises ``_DifferentError``.
    """
    job = entry.job
    if entry.folder.is_dir() or not job.kind.may_have_no_blobs(job):
        return None
    place = replace(entry.costs_place, folder=entry.cache.folder / f"costs-{entry.key}")
    with suppress(OSError):  # a cache that cannot be written is only read
        entry.cache.folder.mkdir(parents=True, exist_ok=True)
    is_proven = place.proofs.read() == PROVEN
    job = replace(job, proof="known" if is_proven else "beside compiling")
    plan = job.kind.plan(job)
    if plan.options.layout != "paged":
        return None
    problem = ""
    try:
        place.folder.mkdir(exist_ok=True)
    except OSError as error:
        problem = error.strerror or str(error)
    loaded = _compile_plan(job, plan, place)
    if problem:
        text = f"CACHE_DIR={quoted(entry.cache.folder)} cannot be used: {problem}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    if not is_proven:
        place.proofs.write(PROVEN)
    return loaded


def _compile(job: Job[V, S, R], place: CostsPlace | None = None) -> Loaded[V, S, R]:
    """Compile; no blobs are written. ``place``: where the costs of the programs are kept, if anywhere."""
    if job.proof != "failed":
        job = replace(job, proof="beside compiling")
    start: StartWith = "all programs" if job.config.background_compile is False else "one program"
    try:
        return _compile_plan(job, job.kind.plan(job, start=start), place)
    except _DifferentError as error:
        error.explain(job)
    job = replace(job, proof="failed")
    return _compile_plan(job, job.kind.plan(job, start=start), place)


class _DifferentError(Exception):
    """A lowered graph computes other numbers than the original; ``reason`` says where. Another form of it may not."""

    def __init__(self, reason: UnsupportedModelError) -> None:
        super().__init__(str(reason))
        self.reason = reason

    def explain(self, job: LoadJob[Any]) -> None:
        """Log the reason, or raise it if the user has asked for this form."""
        if job.config.programs == "paged":
            raise self.reason
        logger.info("not in pages: %s", self)


def _compile_plan(job: Job[V, S, R], plan: CompilePlan[V, S], place: CostsPlace | None) -> Loaded[V, S, R]:
    """Compile the programs of a plan, and prove beside it what is left to prove. Raises ``_DifferentError``."""
    if is_staged(job):
        return _compile_staged(job, plan)
    kept = place.costs_of(job.kind.variant, plan.options) if place is not None else None
    with plan.weights.released(), job.kind.memory(job.device, plan.lowered.shape, plan.variants) as memory:
        programs = _compiled(plan, job.on_progress)
        programs = replace(programs, kept_costs=kept.read() if kept is not None else {})
        runner = job.kind.runner(job, programs, memory)
    deferred = SecondProgram(plan, job.on_progress) if plan.later is not None else None
    return Loaded(runner, programs, job.config, "compiled", deferred, kept_costs=kept)


def _compiled(plan: CompilePlan[V, S], on_progress: OnProgress) -> CompiledPrograms[V, S]:
    """Compile, and prove beside it what is left to prove: the compiler uses one core. Raises ``_DifferentError``."""
    if plan.proof is None:
        return compile_all(plan, on_progress)
    with beside(plan.proof) as proof:
        try:
            programs = compile_all(plan, on_progress)
        except Exception:
            _check(proof)  # a form that computes something else need not compile
            raise
        _check(proof)
    return programs


def _check(proof: Callable[[], object]) -> None:
    reason = None
    try:
        proof()
    except UnsupportedModelError as error:
        reason = error.with_traceback(None)  # which would keep the plan in memory
    if reason is not None:
        raise _DifferentError(reason) from None


def _compile_staged(
    job: Job[V, S, R], plan: CompilePlan[V, S], place: SetPlace[V, S, R] | None = None
) -> Loaded[V, S, R]:
    """Compile the fewest programs that can serve, and defer the others. All of them are written to ``place`` at the end."""
    first = job.kind.first_to_serve(plan.variants)
    with plan.weights.released(), job.kind.memory(job.device, plan.lowered.shape, plan.variants) as memory:
        programs = compile_all(plan.restricted(first), job.on_progress)
        runner = job.kind.runner(job, programs, memory, plan.variants)
    others = (variant for variant in plan.variants if variant not in first)
    return Loaded(runner, programs, job.config, "compiled", DeferredPrograms(plan, others, job.on_progress, place))


def is_staged(job: LoadJob[Any]) -> bool:
    """Return whether the fewest programs that can serve are compiled first, and the others in the background."""
    if not job.kind.compiles_in_background or program_mode(job.device, job.config) != "separate":
        return False
    wanted = job.config.background_compile
    return kind(job.device) != "CPU" if wanted is None else wanted


@contextmanager
def _explained(device: str) -> Iterator[None]:
    """Turn exceptions of OpenVINO, for example if memory runs out, into a ``DeviceError`` of one line."""
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
            raise  # a callback raised it
        raise DeviceError(f"{device} failed while the model was loaded: {last_line(error)}") from error


def _is_openvinos(error: RuntimeError) -> bool:
    """Return whether an extension raised it. Extensions have no Python frames, so the last frame is ours or OpenVINO's."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_globals.get("__name__", "").startswith(("staticllm.", "openvino"))
