"""Compiles a model so that its programs can be exported, exports them as blobs, and checks the blobs against the programs."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, cast

from staticllm.core import ProgramVariant, ProgressEvent
from staticllm.devices import get_core
from staticllm.errors import BlobError, ConfigError
from staticllm.pipelines.artifacts.blob_set import MANIFEST, ImportTarget, is_ours, json_properties, write_set
from staticllm.pipelines.artifacts.check import matches
from staticllm.pipelines.artifacts.fingerprint import Fingerprint
from staticllm.pipelines.artifacts.manifest import Manifest, VariantFile
from staticllm.pipelines.artifacts.stored import to_json
from staticllm.pipelines.loading.kind import Job, LoadJob, R
from staticllm.pipelines.programs.build import CompiledPrograms, compile_all
from staticllm.pipelines.programs.compile_plan import CompilePlan
from staticllm.pipelines.programs.lowered import S, V
from staticllm.system.files import refusal_of

WEIGHTS = "WEIGHTS_PATH"
"""A property of devices that can leave weights out of blobs."""
_REASON = "they do not compute what their programs compute"


@dataclass(frozen=True)
class Exported(Generic[V, S]):
    """Compiled programs and their blobs.

    ``files``: variant → name of its blob. ``blobs``: name → bytes; None if a blob does not compute what its program computes.
    """

    programs: CompiledPrograms[V, S]
    files: Mapping[V, str]
    blobs: Mapping[str, bytes] | None
    is_weightless: bool


def export_set(job: Job[V, S, R], target: Path) -> Manifest:
    """Compile a model, write a blob set to ``target``, a new folder, and return its manifest.

    Raises:
        ConfigError: ``target`` exists or cannot be written, or an option is impossible for this model.
        ModelError: a file of the model is missing or damaged.
        UnsupportedModelError: a pass cannot lower the model.
        DeviceError: the device is missing, or refused a program.
        BlobError: the device's blobs of this model failed verification.
    """
    check_new(target)
    return write_exported(job, target, compile_for_export(job), job.kind.fingerprint(job), {})


def check_new(target: Path) -> None:
    """Check that a set can be written to ``target``: nothing is there, or only what a writer that died has left.

    Raises:
        ConfigError: ``target`` exists, or the folder around it does not.
    """
    if target.exists() and not (is_ours(target) and not (target / MANIFEST).exists()):
        raise ConfigError(f"{str(target)!r} exists already: choose another path or remove it")
    if not target.resolve().parent.is_dir():
        raise ConfigError(f"the folder {str(target.resolve().parent)!r} does not exist: create it first")
    check_writable(target)


def check_writable(target: Path) -> None:
    """Check that a set can be written to ``target``, before the model is compiled, which may take minutes.

    Raises:
        ConfigError: the folder around it is read-only, or takes no files.
    """
    parent = target.resolve().parent
    reason = "is read-only" if not os.access(parent, os.W_OK) else refusal_of(parent)
    if reason:
        raise ConfigError(
            f"the blob set {str(target)!r} cannot be written, {str(parent)!r} {reason}: give another path with "
            "BLOB_PATH or --export-blob PATH"
        )


def compile_for_export(job: Job[V, S, R]) -> Exported[V, S]:
    """Compile and export: weightless blobs if they are wanted and pass verification, else whole blobs.

    Raises:
        ModelError: a file of the model is missing or damaged.
        UnsupportedModelError: a pass cannot lower the model.
        DeviceError: the device is missing, or refused a program.
        ConfigError: an option is impossible for this model.
    """
    if is_weightless_wanted(job):
        exported = _export(job, is_weightless=True)
        if exported.blobs is not None:
            return exported
    return _export(job, is_weightless=False)


def _export(job: Job[V, S, R], is_weightless: bool) -> Exported[V, S]:
    plan = plan_for_export(job, is_weightless)
    with plan.weights.released():
        return export_programs(job, compile_all(plan, job.on_progress), is_weightless)


def is_weightless_wanted(job: LoadJob[Any]) -> bool:
    """Return whether the user wants blobs without weights and the device can write them."""
    supported = get_core().get_property(job.device, "SUPPORTED_PROPERTIES")
    is_plain = job.config.weights_decryption_callback is None
    return job.config.cache_mode == "OPTIMIZE_SIZE" and WEIGHTS in supported and is_plain


def plan_for_export(job: Job[V, S, R], is_weightless: bool) -> CompilePlan[V, S]:
    """Lower a model so that its programs can be exported, with or without their weights.

    Raises:
        As ``ProgramKind.plan``.
    """
    plan = job.kind.plan(job, for_blobs=True)
    return plan.without_weights() if is_weightless else plan


def export_programs(job: Job[V, S, R], programs: CompiledPrograms[V, S], is_weightless: bool) -> Exported[V, S]:
    """Export the program of each variant as a blob, and compare each blob with its program on random inputs."""
    files, blobs, names = dict[V, str](), dict[str, bytes](), dict[int, str]()
    weights = job.weights if is_weightless else None
    for index, (variant, compiled) in enumerate(programs.compiled.items(), 1):
        start = time.perf_counter()
        if id(compiled) not in names:
            names[id(compiled)] = name = f"{len(names)}-{_label(variant)}.blob"
            blobs[name] = compiled.export_model().getvalue()
            target = ImportTarget(job.device, programs.options.program_group(variant).properties, weights)
            if not matches(compiled, job.kind.random_call(programs, variant), blobs[name], target):
                return Exported(programs, {}, None, is_weightless)
        files[variant] = names[id(compiled)]
        event = ProgressEvent("export", index, len(programs.compiled), time.perf_counter() - start, variant)
        job.on_progress(event)
    return Exported(programs, files, blobs, is_weightless)


def _label(variant: ProgramVariant) -> str:
    """Return the sizes of a variant as a part of a file's name."""
    sizes = asdict(cast(Any, variant)).values()
    return f"{variant.phase}-{'x'.join(map(str, list(sizes)[:2]))}"


def write_exported(
    job: Job[V, S, R], target: Path, exported: Exported[V, S], fingerprint: Fingerprint, costs: Mapping[V, float]
) -> Manifest:
    """Write programs as a set at ``target``. ``costs``: measured seconds per call of a variant.

    Raises:
        BlobError: a blob does not compute what its program computes.
        ConfigError: the disk is full, or the folder cannot be written.
    """
    return write_blobs(job, target, manifest_of(job, exported, fingerprint, costs), exported.blobs)


def write_blobs(job: LoadJob[Any], target: Path, manifest: Manifest, blobs: Mapping[str, bytes] | None) -> Manifest:
    """Write a set to ``target``, and return its manifest as written.

    Raises:
        BlobError: ``blobs`` is None: one of them does not compute what its program computes.
        ConfigError: the disk is full, or the folder cannot be written.
    """
    if blobs is None:
        raise BlobError(
            f"nothing was exported: the blobs of this model on {job.device} failed verification, {_REASON}; leave EXPORT_BLOB out"
        )
    return _write(job, target, manifest, blobs)


def write_quarantined(job: LoadJob[Any], target: Path, manifest: Manifest) -> None:
    """Write a set without blobs that records the failed verification, so that the next start does not export again.

    Raises:
        ConfigError: the folder cannot be written.
    """
    verification = {"is_ok": False, "reason": _REASON, "when": "export"}
    _write(job, target, replace(manifest, verification=verification), {})


def _write(job: LoadJob[Any], target: Path, manifest: Manifest, blobs: Mapping[str, bytes]) -> Manifest:
    callbacks = job.config.cache_encryption_callbacks
    try:
        return write_set(target, manifest, blobs, callbacks[0] if callbacks else None, job.key)
    except OSError as error:
        raise ConfigError(f"the blobs cannot be written to {str(target)!r}: {error.strerror or error}") from error


def manifest_of(
    job: Job[V, S, R], exported: Exported[V, S], fingerprint: Fingerprint, costs: Mapping[V, float]
) -> Manifest:
    """Return the manifest as it will be written, without the digests of the blobs."""
    options = exported.programs.options
    return Manifest(
        fingerprint=fingerprint,
        config=job.kind.choices(job),
        programs=options.layout,
        kv_type=options.kv_type or "",
        shape=to_json(exported.programs.shape),
        properties={part: json_properties(values) for part, values in options.properties.items()},
        variants=tuple(VariantFile(variant, name) for variant, name in exported.files.items()),
        blobs={},
        is_weightless=exported.is_weightless,
        is_encrypted=False,
        costs=dict(costs),
        few_rows=options.few_rows,
    )
