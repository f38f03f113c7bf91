"""From a model to a blob set: compiled so that it can be exported, exported, and asked whether the blobs say the same."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import openvino as ov

from staticllm.config import StaticLLMConfig
from staticllm.core import Part, ProgressEvent, Variant
from staticllm.devices import check_device, default_kv_type, get_core
from staticllm.errors import BlobError, ConfigError
from staticllm.model_dir import check_model_dir, weights_of
from staticllm.pipelines.blobs.blob_set import MANIFEST, is_ours, plain, write_set
from staticllm.pipelines.blobs.check import matches
from staticllm.pipelines.blobs.fingerprint import Identity, layout_identity, machine_identity, model_identity
from staticllm.pipelines.blobs.manifest import LAYOUT_FIELDS, Manifest, shape_to_json
from staticllm.pipelines.programs.build import (
    CompiledPrograms,
    CompilePlan,
    OnProgress,
    compile_all,
    phase_properties,
    prepare,
    program_layout,
    with_kv_slots,
)

WEIGHTS = "WEIGHTS_PATH"  # a property of devices that can leave weights out of blobs


@dataclass(frozen=True)
class Job:
    """One model for one device."""

    directory: Path
    device: str
    config: StaticLLMConfig
    on_progress: OnProgress

    @property
    def weights(self) -> Path:
        return weights_of(self.directory, self.config.weights_path)

    @property
    def key(self) -> bytes:
        """What sets are signed with; empty for not at all."""
        return self.config.integrity_key or b""


def job_of(
    models_path: str | os.PathLike[str],
    device: str,
    config: StaticLLMConfig,
    on_progress: OnProgress = lambda event: None,
) -> Job:
    """
    Raises:
        ModelError, DeviceError: the directory or the device is not there.
    """
    is_encrypted = config.weights_decryption_callback is not None
    directory = check_model_dir(models_path, False, config.weights_path, is_encrypted)
    core, name = get_core(), check_device(get_core(), device)
    kv_type = config.kv_cache_precision or default_kv_type(core, name, *phase_properties(name, config).values())
    return Job(directory, name, with_kv_slots(config, directory, kv_type), on_progress)


@dataclass(frozen=True)
class Exported:
    """Programs and their blobs; none where the device does not say from a blob what it says from the model."""

    programs: CompiledPrograms
    files: Mapping[Variant, str]
    blobs: Mapping[str, bytes] | None
    is_weightless: bool


def export_set(job: Job, target: Path) -> Manifest:
    """Compile, and write a blob set to ``target``, a new folder.

    Raises:
        ConfigError: ``target`` exists, or cannot be written.
        ModelError, UnsupportedModelError, DeviceError
        BlobError: the device's blobs of this model are no good.
    """
    if target.exists() and not (is_ours(target) and not (target / MANIFEST).exists()):
        raise ConfigError(f"{str(target)!r} exists already: choose another path or remove it")
    if not target.resolve().parent.is_dir():
        raise ConfigError(f"the folder {str(target.resolve().parent)!r} does not exist: make it first")
    return write_exported(job, target, compile_for_export(job), identity_of(job), {})


def compile_for_export(job: Job) -> Exported:
    """Compile and export. Blobs without weights first, where they are wanted and can be had; whole ones where those are wrong."""
    is_weightless = wants_weightless(job)
    exported = _export(job, is_weightless)
    return _export(job, is_weightless=False) if exported.blobs is None and is_weightless else exported


def _export(job: Job, is_weightless: bool) -> Exported:
    core, layout = prepare_for_export(job, is_weightless)
    return export_programs(job, compile_all(core, layout, job.on_progress), is_weightless)


def wants_weightless(job: Job) -> bool:
    """Whether blobs should leave the weights where they are, and the device can."""
    supported = get_core().get_property(job.device, "SUPPORTED_PROPERTIES")
    is_plain = job.config.weights_decryption_callback is None
    return job.config.cache_mode == "OPTIMIZE_SIZE" and WEIGHTS in supported and is_plain


def prepare_for_export(job: Job, is_weightless: bool) -> tuple[ov.Core, CompilePlan]:
    """Lower a model so that its programs can be exported, with or without their weights."""
    core, layout = prepare(job.directory, job.device, job.config, job.on_progress, for_blobs=True)
    return core, _without_weights(layout) if is_weightless else layout


def export_programs(job: Job, programs: CompiledPrograms, is_weightless: bool) -> Exported:
    """Blobs of compiled programs, each asked whether it says the same."""
    core, files, blobs = get_core(), dict[Variant, str](), dict[str, bytes]()
    names: dict[int, str] = {}
    weights = job.weights if is_weightless else None
    for index, (variant, compiled) in enumerate(programs.compiled.items(), 1):
        start = time.perf_counter()
        if id(compiled) not in names:
            names[id(compiled)] = name = f"{len(names)}-{variant.phase}-{variant.rows}x{variant.kv_len}.blob"
            blobs[name] = compiled.export_model().getvalue()
            properties = programs.options.family(variant)[1]
            if not matches(core, (compiled, variant), blobs[name], (job.device, properties, weights)):
                return Exported(programs, {}, None, is_weightless)
        files[variant] = names[id(compiled)]
        job.on_progress(ProgressEvent("export", index, len(programs.compiled), time.perf_counter() - start, variant))
    return Exported(programs, files, blobs, is_weightless)


def _without_weights(layout: CompilePlan) -> CompilePlan:
    properties: dict[Part, Mapping[str, Any]] = {
        phase: {**values, "CACHE_MODE": "OPTIMIZE_SIZE"} for phase, values in layout.options.properties.items()
    }
    return replace(layout, options=replace(layout.options, properties=properties))


def write_exported(
    job: Job, target: Path, exported: Exported, identity: Identity, costs: Mapping[Variant, float]
) -> Manifest:
    """
    Raises:
        BlobError: there are no blobs that say what the programs say.
        ConfigError: the disk is full, or the place cannot be written.
    """
    if exported.blobs is None:
        raise BlobError(
            f"nothing was exported: on {job.device} the blobs of this model answer otherwise than the programs they were "
            "made from; leave EXPORT_BLOB out"
        )
    return _write(job, target, manifest_of(job, exported, identity, costs), exported.blobs)


def write_bad(job: Job, target: Path, exported: Exported, identity: Identity) -> None:
    """Leave word that this model's blobs are no good here, so that the next start does not try again."""
    reason = "they answer otherwise than the programs they were made from"
    manifest = replace(
        manifest_of(job, exported, identity, {}), verification={"is_ok": False, "reason": reason, "when": "export"}
    )
    _write(job, target, manifest, {})


def _write(job: Job, target: Path, manifest: Manifest, blobs: Mapping[str, bytes]) -> Manifest:
    callbacks = job.config.cache_encryption_callbacks
    try:
        return write_set(target, manifest, blobs, callbacks[0] if callbacks else None, job.key)
    except OSError as error:
        raise ConfigError(f"the blobs cannot be written to {str(target)!r}: {error.strerror or error}") from error


def manifest_of(job: Job, exported: Exported, identity: Identity, costs: Mapping[Variant, float]) -> Manifest:
    """What will be written, but for the blobs' digests."""
    options = exported.programs.options
    return Manifest(
        identity=identity,
        config=_layout_of(job.config),
        programs=options.layout,
        kv_type=options.kv_type,
        shape=shape_to_json(exported.programs.shape),
        properties={phase: plain(values) for phase, values in options.properties.items()},
        variants=tuple(
            {"rows": v.rows, "kv_len": v.kv_len, "sequences": v.sequences, "file": name}
            for v, name in exported.files.items()
        ),
        blobs={},
        is_weightless=exported.is_weightless,
        is_encrypted=False,
        costs=tuple((v.rows, v.kv_len, v.sequences, seconds) for v, seconds in costs.items()),
    )


def identity_of(job: Job) -> Identity:
    core, device, config = get_core(), job.device, job.config
    properties = phase_properties(device, config)
    kv_type = config.kv_cache_precision or default_kv_type(core, device, *properties.values())
    programs = program_layout(device, job.directory, config)
    return {
        **model_identity(job.directory, job.weights),
        **machine_identity(core, device),
        **layout_identity(config, programs, kv_type, {phase: plain(values) for phase, values in properties.items()}),
    }


def _layout_of(config: StaticLLMConfig) -> dict[str, Any]:
    values = {name: getattr(config, name) for name in LAYOUT_FIELDS}
    return {name: plain(value) if isinstance(value, Mapping) else value for name, value in values.items()}
