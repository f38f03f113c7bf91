"""Exports compiled programs as blobs, checks the blobs against the programs, and writes them as a blob set.

OpenVINO does not check blobs. On its CPU plugin (2026.4) a blob without weights read changed constants from the weights file
again, so that short convolutions had other shapes. A whole blob of a mixture of experts gave other tokens than its program.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Generic, cast

import msgspec
import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.core import ProgramVariant, ProgressEvent
from staticllm.devices import get_core
from staticllm.errors import BlobError, ConfigError, quoted
from staticllm.system.files import refusal_of
from staticllm.system.long_calls import attended, told

from ...compiler_passes.artifacts.blob_set import (
    MANIFEST,
    Blob,
    ImportTarget,
    import_blob,
    is_ours,
    json_properties,
    read_manifest,
    tensor_of,
    write_set,
)
from ...compiler_passes.artifacts.fingerprint import Fingerprint
from ...compiler_passes.artifacts.manifest import Manifest, VariantFile
from ...compiler_passes.artifacts.measurements import CostsPlace
from ...compiler_passes.artifacts.stored_chain import ChainFiles, export_part, import_part
from ...compiler_passes.compiling.chain import CompiledChain
from ...compiler_passes.compiling.compile import CompiledPrograms, CompilePlan, S, V, compile_all
from ...compiler_passes.compiling.dry_run import run_apart
from ...compiler_passes.compiling.weight_bank import WeightBank
from .kind import Job, LoadJob, R

DEFAULT_BLOB = "openvino_model.blob"
"""Name of a blob beside a model, as in NPUW."""
WEIGHTS = "WEIGHTS_PATH"
"""Property of devices that can leave weights out of blobs."""
TOLERANCE = 1e-3
"""Largest difference between a blob and its program, as a share of the output's range. Usually both are bitwise equal."""
_REASON = "they do not compute what their programs compute"


@dataclass(frozen=True)
class ExportedPrograms(Generic[V, S]):
    """Compiled programs and their blobs."""

    programs: CompiledPrograms[V, S]
    files: Mapping[V, str]
    """Variant → name of its blob."""
    blobs: Mapping[str, Blob] | None
    """Name → contents; None if a blob does not compute what its program computes."""
    is_weightless: bool


@dataclass(frozen=True)
class SetPlace(Generic[V, S, R]):
    """The folder to which a job's programs are written as a blob set."""

    job: Job[V, S, R]
    folder: Path
    known: Fingerprint | None = None
    """The job's fingerprint; it is computed when it is needed if it is None."""

    @cached_property
    def fingerprint(self) -> Fingerprint:
        return self.known or self.job.kind.fingerprint(self.job)

    @property
    def is_weightless(self) -> bool:
        """Whether the blobs are to be written without weights."""
        return is_weightless_wanted(self.job)

    @property
    def costs_place(self) -> CostsPlace:
        """The place of the measured costs of the set's programs."""
        return CostsPlace(self.folder, self.fingerprint, self.job.key)

    def write(self, programs: CompiledPrograms[V, S]) -> None:
        """Export and write all programs of the model.

        Raises:
            BlobError, ConfigError: as ``put``.
        """
        self.put(export_programs(self.job, programs, self.is_weightless), {})

    def put(self, exported: ExportedPrograms[V, S], costs: Mapping[V, float]) -> None:
        """Write a set; ``costs`` in seconds.

        Raises:
            BlobError: a blob differs from its program.
            ConfigError: the place cannot be written.
        """
        if exported.blobs is None:
            raise BlobError(
                f"nothing was exported: the blobs of this model on {self.job.device} failed verification, {_REASON}; "
                "leave EXPORT_BLOB out"
            )
        self._write(self._manifest(exported, costs), exported.blobs)

    def put_quarantined(self, exported: ExportedPrograms[V, S]) -> None:
        """Write a set without blobs, so that the next start does not export again.

        Raises:
            ConfigError: cannot write.
        """
        verification = {"is_ok": False, "reason": _REASON, "when": "export"}
        self._write(replace(self._manifest(exported, {}), verification=verification), {})

    def _write(self, manifest: Manifest, blobs: Mapping[str, Blob]) -> None:
        callbacks = self.job.config.cache_encryption_callbacks
        try:
            write_set(self.folder, manifest, blobs, callbacks[0] if callbacks else None, self.job.key)
        except OSError as error:
            raise ConfigError(
                f"the blobs cannot be written to {quoted(self.folder)}: {error.strerror or error}"
            ) from error

    def _manifest(self, exported: ExportedPrograms[V, S], costs: Mapping[V, float]) -> Manifest:
        """Return the manifest as it will be written, without the digests of the blobs."""
        options = exported.programs.options
        return Manifest(
            fingerprint=self.fingerprint,
            config=self.job.kind.choices(self.job),
            programs=options.layout,
            kv_type=options.kv_type or "",
            shape=msgspec.to_builtins(exported.programs.shape),
            properties={part: json_properties(values) for part, values in options.properties.items()},
            variants=tuple(VariantFile(variant, name) for variant, name in exported.files.items()),
            blobs={},
            is_weightless=exported.is_weightless,
            is_encrypted=False,
            costs=dict(costs),
            few_rows=options.few_rows,
        )


def export_set(job: Job[V, S, R], target: Path) -> Manifest:
    """Compile a model, write a blob set to ``target``, a new folder, and return its manifest.

    Raises:
        StaticLLMError: as for ``load``.
    """
    check_new(target)
    SetPlace(job, target).put(compile_for_export(job), {})
    return read_manifest(target, job.key)


def check_new(target: Path) -> None:
    """Check that ``target`` is new, no link to nothing either, or holds only a dead writer's leftovers.

    Raises:
        ConfigError: it exists, its folder does not, or a set cannot be written there.
    """
    if os.path.lexists(target) and not (is_ours(target) and not (target / MANIFEST).exists()):
        raise ConfigError(f"{quoted(target)} exists already: choose another path or remove it")
    if not target.resolve().parent.is_dir():
        raise ConfigError(f"the folder {quoted(target.resolve().parent)} does not exist: create it first")
    check_writable(target)


def check_writable(target: Path) -> None:
    """Check that a set can be written to ``target``, before minutes of compiling.

    Raises:
        ConfigError: its folder is read-only or refuses files.
    """
    parent = target.resolve().parent
    reason = "is read-only" if not os.access(parent, os.W_OK) else refusal_of(parent)
    if reason:
        raise ConfigError(
            f"the blob set {quoted(target)} cannot be written, {quoted(parent)} {reason}: give another path with "
            "BLOB_PATH or --export-blob PATH"
        )


def export_target(job: LoadJob[Any]) -> Path:
    """Return the folder that ``EXPORT_BLOB`` writes to; its parent is created.

    Raises:
        ConfigError: no set, not writable.
    """
    target = Path(job.config.blob_path) if job.config.blob_path else job.directory / DEFAULT_BLOB
    if _exists(target) and not is_ours(target):
        raise ConfigError(f"BLOB_PATH={quoted(target)} exists and is not a blob set: choose another path or remove it")
    try:
        target.resolve().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"BLOB_PATH={quoted(target)} cannot be written: {error.strerror or error}") from None
    check_writable(target)
    return target


def _exists(path: Path) -> bool:
    """Return whether ``path`` exists.

    Raises:
        ConfigError: the path is impossible.
    """
    try:
        return path.exists()
    except (OSError, ValueError) as error:
        raise ConfigError(f"BLOB_PATH={quoted(str(path)[:80])} cannot be written: {error}") from None


def compile_for_export(job: Job[V, S, R]) -> ExportedPrograms[V, S]:
    """Compile and export: weightless blobs if they are wanted and pass verification, else whole blobs. Raises as ``load``."""
    if is_weightless_wanted(job):
        exported = _export(job, is_weightless=True)
        if exported.blobs is not None:
            return exported
    return _export(job, is_weightless=False)


def _export(job: Job[V, S, R], is_weightless: bool) -> ExportedPrograms[V, S]:
    plan = plan_for_export(job, is_weightless)
    with plan.weights.released():
        return export_programs(job, compile_all(plan, job.on_progress), is_weightless)


def is_weightless_wanted(job: LoadJob[Any]) -> bool:
    """Return whether the user wants blobs without weights and the device can write them."""
    if job.target is not None:
        return False
    supported = get_core().get_property(job.device, "SUPPORTED_PROPERTIES")
    is_plain = job.config.weights_decryption_callback is None
    return job.config.cache_mode == "OPTIMIZE_SIZE" and WEIGHTS in supported and is_plain


def plan_for_export(job: Job[V, S, R], is_weightless: bool) -> CompilePlan[V, S]:
    """Lower a model for export, with or without its weights. Raises as ``ProgramKind.plan``."""
    plan = job.kind.plan(job, for_blobs=True)
    return plan.without_weights() if is_weightless else plan


def export_programs(job: Job[V, S, R], programs: CompiledPrograms[V, S], is_weightless: bool) -> ExportedPrograms[V, S]:
    """Export the program of each variant as a blob, and compare each blob with its program on random inputs."""
    if programs.options.layout == "blocks":
        return export_chains(job, programs)
    files = dict[V, str]()
    blobs = dict[str, Blob]()
    names = dict[int, str]()
    weights = job.weights if is_weightless else None
    for index, (variant, compiled) in enumerate(programs.compiled.items(), 1):
        start = time.perf_counter()
        event = ProgressEvent("export", index, len(programs.compiled), 0.0, variant)
        if id(compiled) not in names:
            name = f"{len(names)}-{_label(variant)}.blob"
            names[id(compiled)] = name
            assert not isinstance(compiled, CompiledChain), "chains are a layout of their own"
            blob = attended(partial(_blob_of, compiled))
            blobs[name] = blob
            target = ImportTarget(job.device, programs.options.program_group(variant).properties, weights)
            with told(job.on_progress, event):
                is_same = matches(compiled, job.kind.random_call(programs, variant), blob, target)
            if not is_same:
                return ExportedPrograms(programs, {}, None, is_weightless)
        files[variant] = names[id(compiled)]
        job.on_progress(replace(event, seconds=time.perf_counter() - start))
    return ExportedPrograms(programs, files, blobs, is_weightless)


def _blob_of(compiled: ov.CompiledModel) -> bytes:
    blob: bytes = compiled.export_model().getvalue()
    return blob


def export_chains(job: Job[V, S, R], programs: CompiledPrograms[V, S]) -> ExportedPrograms[V, S]:
    """Export the parts of each variant's chain, and the weights once; compare what can run here with its blobs."""
    files = dict[V, str]()
    chains = ChainFiles(export_part)
    bank: WeightBank | None = None
    for index, (variant, chain) in enumerate(programs.compiled.items(), 1):
        assert isinstance(chain, CompiledChain), "the layout is blocks"
        start = time.perf_counter()
        files[variant] = f"{len(files)}-{_label(variant)}"
        chains.add(chain, files[variant])
        bank = chain.bank
        target = ImportTarget(job.device, programs.options.program_group(variant).properties)
        if chain.is_here and not _chain_matches(chain, job.kind.random_call(programs, variant), chains, target):
            return ExportedPrograms(programs, {}, None, is_weightless=False)
        event = ProgressEvent("export", index, len(programs.compiled), time.perf_counter() - start, variant)
        job.on_progress(event)
    assert bank is not None, "a model has programs"
    chains.add_bank(bank)
    return ExportedPrograms(programs, files, chains.files, is_weightless=False)


def _chain_matches(
    chain: CompiledChain, feeds: Mapping[str, NDArray[Any]], files: ChainFiles, target: ImportTarget
) -> bool:
    try:
        parts = [import_part(files.contents_of(part), place, target) for part, place in chain.placed_parts]
        return _agree(run_apart(chain, feeds), run_apart(CompiledChain(chain.plan, parts, chain.bank), feeds))
    except (BlobError, RuntimeError, ValueError):
        return False


def matches(compiled: ov.CompiledModel, feeds: Mapping[str, NDArray[Any]], blob: bytes, target: ImportTarget) -> bool:
    """Return whether ``blob``, imported for ``target``, computes what ``compiled`` computes from ``feeds``, by port name."""
    try:
        imported = attended(partial(import_blob, get_core(), tensor_of(blob), target))
        expected = run_apart(compiled, feeds)
        found = run_apart(imported, feeds)
    except (BlobError, RuntimeError, ValueError):
        return False
    return _agree(expected, found)


def _agree(expected: Mapping[str, NDArray[Any]], found: Mapping[str, NDArray[Any]]) -> bool:
    return expected.keys() == found.keys() and all(_is_close(expected[name], found[name]) for name in expected)


def _is_close(expected: NDArray[Any], found: NDArray[Any]) -> bool:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return False
    expected, found = (np.asarray(array, np.float64) for array in (expected, found))
    spread = float(np.ptp(expected)) if expected.size else 0.0
    return bool(np.all(np.abs(expected - found) <= TOLERANCE * spread)) or np.array_equal(
        expected, found, equal_nan=True
    )


def _label(variant: ProgramVariant) -> str:
    """Return the sizes of a variant as a part of a file's name."""
    sizes = asdict(cast(Any, variant)).values()
    return f"{variant.phase}-{'x'.join(map(str, list(sizes)[:2]))}"
