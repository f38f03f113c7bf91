"""Compiles a model so that its programs can be exported, exports them as blobs, and checks the blobs against the programs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic

import openvino as ov
from numpy.typing import NDArray

from staticllm.config import StaticLLMConfig
from staticllm.core import Part, Phase, ProgressEvent, Variant
from staticllm.devices import default_kv_type, get_core
from staticllm.errors import BlobError, ConfigError
from staticllm.files import refusal_of
from staticllm.pipelines.blobs.blob_set import MANIFEST, ImportTarget, is_ours, json_properties, write_set
from staticllm.pipelines.blobs.check import matches
from staticllm.pipelines.blobs.fingerprint import (
    Fingerprint,
    StepFingerprint,
    fingerprint_model,
    layout_values,
    machine_values,
)
from staticllm.pipelines.blobs.manifest import (
    ENCODE,
    LAYOUT_FIELDS,
    AnyVariant,
    Manifest,
    V,
    VariantFile,
)
from staticllm.pipelines.blobs.shape_fields import shape_to_json
from staticllm.pipelines.model_loader.job import LoadJob, probes_of
from staticllm.pipelines.programs.build import CompiledPrograms, compile_all
from staticllm.pipelines.programs.compile_plan import CompilePlan, phase_properties, prepare
from staticllm.pipelines.programs.dry_run import random_feeds
from staticllm.pipelines.programs.layout import program_layout

WEIGHTS = "WEIGHTS_PATH"
"""A property of devices that can leave weights out of blobs."""
_REASON = "they do not compute what their programs compute"


@dataclass(frozen=True)
class ExportedBlobs(Generic[V]):
    """Blobs of compiled programs.

    ``files``: variant → name of its blob. ``blobs``: name → bytes; None if a blob does not compute what its program computes.
    """

    files: Mapping[V, str]
    blobs: Mapping[str, bytes] | None
    is_weightless: bool


@dataclass(frozen=True)
class Exported:
    """A decoder's programs and their blobs."""

    programs: CompiledPrograms
    stored: ExportedBlobs[Variant]


def export_set(job: LoadJob, target: Path) -> Manifest:
    """Compile a model, write a blob set to ``target``, a new folder, and return its manifest.

    Raises:
        ConfigError: ``target`` exists or cannot be written, or an option is impossible for this model.
        ModelError: a file of the model is missing or damaged.
        UnsupportedModelError: a pass cannot lower the model.
        DeviceError: the device is missing, or refused a program.
        BlobError: the device's blobs of this model failed verification.
    """
    check_new(target)
    return write_exported(job, target, compile_for_export(job), fingerprint_of(job), {})


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


def compile_for_export(job: LoadJob) -> Exported:
    """Compile and export: weightless blobs if they are wanted and pass verification, else whole blobs.

    Raises:
        ModelError: a file of the model is missing or damaged.
        UnsupportedModelError: a pass cannot lower the model.
        DeviceError: the device is missing, or refused a program.
        ConfigError: an option is impossible for this model.
    """
    if is_weightless_wanted(job):
        exported = _export(job, is_weightless=True)
        if exported.stored.blobs is not None:
            return exported
    return _export(job, is_weightless=False)


def _export(job: LoadJob, is_weightless: bool) -> Exported:
    core, plan = prepare_for_export(job, is_weightless)
    with plan.weights.released():
        return export_programs(job, compile_all(core, plan, job.on_progress), is_weightless)


def is_weightless_wanted(job: LoadJob) -> bool:
    """Return whether the user wants blobs without weights and the device can write them."""
    supported = get_core().get_property(job.device, "SUPPORTED_PROPERTIES")
    is_plain = job.config.weights_decryption_callback is None
    return job.config.cache_mode == "OPTIMIZE_SIZE" and WEIGHTS in supported and is_plain


def prepare_for_export(job: LoadJob, is_weightless: bool) -> tuple[ov.Core, CompilePlan]:
    """Lower a model so that its programs can be exported, with or without their weights.

    Raises:
        ModelError: a file of the model is missing or damaged.
        UnsupportedModelError: a pass cannot lower the model.
        DeviceError: the device is missing.
        ConfigError: an option is impossible for this model.
    """
    core, plan = prepare(job.directory, job.device, job.config, job.on_progress, for_blobs=True, probes=probes_of(job))
    return core, _without_weights(plan) if is_weightless else plan


def export_programs(job: LoadJob, programs: CompiledPrograms, is_weightless: bool) -> Exported:
    """Export the compiled programs of a decoder as blobs, and compare each blob with its program on random inputs."""
    options, compiled = programs.options, programs.compiled
    stored = export_each(
        job,
        compiled,
        lambda variant: options.program_group(variant).properties,
        lambda variant: random_feeds(compiled[variant], variant),
        is_weightless,
    )
    return Exported(programs, stored)


def export_each(
    job: LoadJob,
    programs: Mapping[V, ov.CompiledModel],
    properties_of: Callable[[V], Mapping[str, Any]],
    feeds_of: Callable[[V], Mapping[str, NDArray[Any]]],
    is_weightless: bool,
) -> ExportedBlobs[V]:
    """Export the program of each variant, and compare its blob with it.

    ``properties_of``: the properties that the program of a variant was compiled with. ``feeds_of``: inputs to compare it on.
    """
    files, blobs, names = dict[V, str](), dict[str, bytes](), dict[int, str]()
    weights = job.weights if is_weightless else None
    for index, (variant, compiled) in enumerate(programs.items(), 1):
        start = time.perf_counter()
        if id(compiled) not in names:
            names[id(compiled)] = name = f"{len(names)}-{_label(variant)}.blob"
            blobs[name] = compiled.export_model().getvalue()
            target = ImportTarget(job.device, properties_of(variant), weights)
            if not matches(compiled, feeds_of(variant), blobs[name], target):
                return ExportedBlobs({}, None, is_weightless)
        files[variant] = names[id(compiled)]
        job.on_progress(ProgressEvent("export", index, len(programs), time.perf_counter() - start, variant))
    return ExportedBlobs(files, blobs, is_weightless)


def _label(variant: AnyVariant) -> str:
    if isinstance(variant, Variant):
        return f"{variant.phase}-{variant.rows}x{variant.kv_len}"
    return f"{ENCODE}-{variant.batch}x{variant.rows}"


def _without_weights(plan: CompilePlan) -> CompilePlan:
    properties: dict[Part, Mapping[str, Any]] = {
        part: {**values, "CACHE_MODE": "OPTIMIZE_SIZE"} for part, values in plan.options.properties.items()
    }
    return replace(plan, options=replace(plan.options, properties=properties))


def write_exported(
    job: LoadJob, target: Path, exported: Exported, fingerprint: Fingerprint, costs: Mapping[Variant, float]
) -> Manifest:
    """Write a decoder's programs as a set at ``target``. ``costs``: measured seconds per call of a variant.

    Raises:
        BlobError: a blob does not compute what its program computes.
        ConfigError: the disk is full, or the folder cannot be written.
    """
    return write_blobs(job, target, manifest_of(job, exported, fingerprint, costs), exported.stored.blobs)


def write_blobs(job: LoadJob, target: Path, manifest: Manifest, blobs: Mapping[str, bytes] | None) -> Manifest:
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


def write_quarantined(job: LoadJob, target: Path, manifest: Manifest) -> None:
    """Write a set without blobs that records the failed verification, so that the next start does not export again.

    Raises:
        ConfigError: the folder cannot be written.
    """
    verification = {"is_ok": False, "reason": _REASON, "when": "export"}
    _write(job, target, replace(manifest, verification=verification), {})


def _write(job: LoadJob, target: Path, manifest: Manifest, blobs: Mapping[str, bytes]) -> Manifest:
    callbacks = job.config.cache_encryption_callbacks
    try:
        return write_set(target, manifest, blobs, callbacks[0] if callbacks else None, job.key)
    except OSError as error:
        raise ConfigError(f"the blobs cannot be written to {str(target)!r}: {error.strerror or error}") from error


def manifest_of(job: LoadJob, exported: Exported, fingerprint: Fingerprint, costs: Mapping[Variant, float]) -> Manifest:
    """Return the manifest as it will be written, without the digests of the blobs."""
    options = exported.programs.options
    return Manifest(
        fingerprint=fingerprint,
        config=_layout_of(job.config),
        programs=options.layout,
        kv_type=options.kv_type,
        shape=shape_to_json(exported.programs.shape),
        properties={part: json_properties(values) for part, values in options.properties.items()},
        variants=tuple(VariantFile(variant, name) for variant, name in exported.stored.files.items()),
        blobs={},
        is_weightless=exported.stored.is_weightless,
        is_encrypted=False,
        costs=dict(costs),
        few_rows=options.few_rows,
    )


def fingerprint_of(job: LoadJob) -> StepFingerprint:
    """Return the fingerprint that a set must have to be loaded for this job.

    Raises:
        ModelError: a file of the model cannot be read.
    """
    core, device, config = get_core(), job.device, job.config
    properties = phase_properties(device, config)
    kv_type = config.kv_cache_precision or default_kv_type(core, device, *properties.values())
    layout = program_layout(device, job.directory, config, kv_type)
    values: dict[Phase, Mapping[str, Any]] = {
        phase: json_properties(of_phase) for phase, of_phase in properties.items()
    }
    return StepFingerprint(
        **asdict(fingerprint_model(job.directory, job.weights)),
        **machine_values(core, device),
        **layout_values(config, layout, kv_type, values),
    )


def _layout_of(config: StaticLLMConfig) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in LAYOUT_FIELDS}
    return {name: json_properties(value) if isinstance(value, Mapping) else value for name, value in values.items()}
