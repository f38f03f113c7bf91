"""Which kind of model a directory holds, its job, and the questions about it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import openvino as ov

from staticllm.core import OnProgress, ProgramMode
from staticllm.devices import check_device, get_core
from staticllm.kinds import KINDS
from staticllm.model_dir import read_model
from staticllm.model_files.hub import located
from staticllm.model_files.model_at import check_model_dir

from ...compiler_passes.artifacts.blob_set import read_manifest, rewrite_manifest
from ...compiler_passes.artifacts.manifest import Manifest
from ..loading.kind import LoadJob
from .diagnosis import Diagnosis, Jobs
from .reports import Verdict
from .tokenizer_verdicts import tokenizer_verdicts

AnyDiagnosis = Diagnosis[Any]


def diagnosis_of(kind_name: str) -> AnyDiagnosis:
    """Return the questions about a kind of model."""
    known = KINDS[kind_name]
    found: AnyDiagnosis = known.diagnosis_class(known.program_class)
    return found


def known_kind(directory: Path, weights: str | None = None) -> str | None:
    """Return the name of the kind of the model in a checked directory; None if it is none of ``KINDS``.

    Raises:
        ModelError: a file of the model is damaged.
    """
    model = read_model(get_core(), directory, weights)
    programs = ((name, known.program_class) for name, known in KINDS.items())
    return next((name for name, program in programs if program and program.fits(model, directory)), None)


def job_in(
    models_path: str | os.PathLike[str],
    device: str,
    properties: Mapping[str, Any],
    on_progress: OnProgress = lambda event: None,
    check: Callable[[ov.Core, object], str] = check_device,
) -> LoadJob[Any]:
    """Return the job for the model in a directory, whatever kind it is.

    ``check`` raises a ``DeviceError`` for a device that cannot be used.

    Args:
        properties: The properties of a pipeline for this kind.

    Raises:
        ModelError: a file of the model is missing or damaged.
        DeviceError: ``check`` refuses the device.
        ConfigError: a property is unknown, or its value is impossible for this model.
    """
    directory, diagnosis = _of_one_graph(models_path, properties)
    return diagnosis.job(directory, device, properties, on_progress, check)


def jobs_in(
    models_path: str | os.PathLike[str],
    device: str,
    properties: Mapping[str, Any],
    on_progress: OnProgress = lambda event: None,
    check: Callable[[ov.Core, object], str] = check_device,
) -> Jobs:
    """Return the jobs for the model in a directory: one, named "", or those of its parts.

    Arguments and errors are those of ``job_in``.
    """
    found = located(models_path)
    if found.kind.has_parts:
        whole = diagnosis_of(found.kind.name)
        return whole.jobs(found.directory, device, properties, on_progress, check)
    directory, diagnosis = _of_one_graph(models_path, properties)
    return diagnosis.jobs(directory, device, properties, on_progress, check)


def _of_one_graph(models_path: str | os.PathLike[str], properties: Mapping[str, Any]) -> tuple[Path, AnyDiagnosis]:
    weights = properties.get("WEIGHTS_PATH")
    directory = check_model_dir(models_path, False, weights)
    return directory, diagnosis_of(known_kind(directory, weights) or "decoder")  # whose passes say what the graph lacks


def verdicts_of(jobs: Jobs, modes: Sequence[ProgramMode]) -> Iterator[Verdict]:
    """Compare the tokenizer of a model and its programs in each mode with the originals, and yield each verdict."""
    yield from tokenizer_verdicts(next(iter(jobs.values())).directory)
    yield from jobs.diagnosis.verdicts_of(jobs, modes)


def verify_set(job: LoadJob[Any], folder: Path) -> Manifest:
    """Compare the set that a job has written with the original on the CPU in f32, and write the result into its manifest.

    Raises:
        BlobError: the set cannot be loaded.
    """
    stored = replace(job, config=replace(job.config, blob_path=str(folder), cache_dir=None))
    found = diagnosis_of(job.kind.name).agreement(stored)
    manifest = replace(read_manifest(folder), verification=found.as_dict())
    rewrite_manifest(folder, manifest)
    return manifest
