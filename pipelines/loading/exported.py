"""Compiles a model and writes its programs to ``BLOB_PATH`` as a blob set."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

from staticllm.errors import ConfigError
from staticllm.pipelines.artifacts.blob_set import is_ours
from staticllm.pipelines.artifacts.measurements import CostsPlace
from staticllm.pipelines.loading.export import (
    check_writable,
    compile_for_export,
    export_programs,
    is_weightless_wanted,
    plan_for_export,
    write_exported,
)
from staticllm.pipelines.loading.kind import Job, LoadJob, R
from staticllm.pipelines.loading.loaded import Loaded
from staticllm.pipelines.loading.staged import is_staged, load_staged, runner_of
from staticllm.pipelines.programs.build import CompiledPrograms
from staticllm.pipelines.programs.lowered import S, V

DEFAULT_BLOB = "openvino_model.blob"
"""The name that NPUW gives to a blob beside a model, too."""


@dataclass(frozen=True)
class BlobSetStore(Generic[V, S, R]):
    """The blob set at ``target``, which is written when all programs have been compiled."""

    job: Job[V, S, R]
    target: Path
    is_weightless: bool

    def write(self, programs: CompiledPrograms[V, S]) -> None:
        """Export all programs of the model.

        Raises:
            BlobError: a blob does not compute what its program computes.
            ConfigError: the folder cannot be written.
        """
        exported = export_programs(self.job, programs, self.is_weightless)
        write_exported(self.job, self.target, exported, self.job.kind.fingerprint(self.job), {})


def load_and_export(job: Job[V, S, R]) -> Loaded[V, S, R]:
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
        return load_staged(job, plan_for_export(job, is_weightless), BlobSetStore(job, target, is_weightless))
    exported = compile_for_export(job)
    runner = runner_of(job, exported.programs)
    fingerprint = job.kind.fingerprint(job)
    write_exported(job, target, exported, fingerprint, runner.measured_costs)
    kept = CostsPlace(target, fingerprint, job.key).costs_of(job.kind.variant, exported.programs.options)
    return Loaded(runner, exported.programs, job.config, "compiled", kept_costs=kept)


def export_target(job: LoadJob[Any]) -> Path:
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
