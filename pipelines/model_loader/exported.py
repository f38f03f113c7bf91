"""Compiles a model and writes its programs to ``BLOB_PATH`` as a blob set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from staticllm.errors import ConfigError
from staticllm.pipelines.blobs.blob_set import is_ours
from staticllm.pipelines.blobs.measurements import CostsPlace
from staticllm.pipelines.model_loader.blob_export import (
    check_writable,
    compile_for_export,
    export_programs,
    fingerprint_of,
    is_weightless_wanted,
    prepare_for_export,
    write_exported,
)
from staticllm.pipelines.model_loader.job import LoadJob
from staticllm.pipelines.model_loader.loaded import Loaded
from staticllm.pipelines.model_loader.staged import is_staged, load_staged
from staticllm.pipelines.programs.build import CompiledPrograms, make_runner

DEFAULT_BLOB = "openvino_model.blob"
"""The name that NPUW gives to a blob beside a model, too."""


@dataclass(frozen=True)
class BlobSetStore:
    """The blob set at ``target``, which is written when all programs have been compiled."""

    job: LoadJob
    target: Path
    is_weightless: bool

    def write(self, programs: CompiledPrograms) -> None:
        """Export all programs of the model.

        Raises:
            BlobError: a blob does not compute what its program computes.
            ConfigError: the folder cannot be written.
        """
        exported = export_programs(self.job, programs, self.is_weightless)
        write_exported(self.job, self.target, exported, fingerprint_of(self.job), {})


def load_and_export(job: LoadJob) -> Loaded:
    """Compile, and write a set to ``BLOB_PATH``. An existing set is replaced; anything else is not touched.

    Raises:
        ModelError: a file of the model is missing or damaged.
        UnsupportedModelError: a pass cannot lower the model.
        DeviceError: the device is missing, or refused a program.
        ConfigError: the path exists and is not a blob set, the folder cannot be written, or an option is impossible.
        BlobError: a blob does not compute what its program computes.
    """
    target = export_target(job)
    if is_staged(job):
        is_weightless = is_weightless_wanted(job)
        core, plan = prepare_for_export(job, is_weightless)
        return load_staged(job, core, plan, BlobSetStore(job, target, is_weightless))
    exported = compile_for_export(job)
    runner = make_runner(exported.programs, job.on_progress)
    fingerprint = fingerprint_of(job)
    write_exported(job, target, exported, fingerprint, runner.costs.measured)
    kept = CostsPlace(target, fingerprint, job.key).costs_of(exported.programs.options)
    return Loaded(runner, exported.programs, job.config, "compiled", kept_costs=kept)


def export_target(job: LoadJob) -> Path:
    """Return the folder that ``EXPORT_BLOB`` writes to; the folder around it is created.

    Raises:
        ConfigError: the path exists and is not a blob set, or cannot be written.
    """
    target = Path(job.config.blob_path) if job.config.blob_path else job.directory / DEFAULT_BLOB
    if _exists(target) and not is_ours(target):
        raise ConfigError(f"BLOB_PATH={str(target)!r} exists and is not a blob set: choose another path or remove it")
    try:
        target.resolve().parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"BLOB_PATH={str(target)!r} cannot be written: {error.strerror or error}") from None
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
        raise ConfigError(f"BLOB_PATH={str(path)[:80]!r} cannot be written: {error}") from None
