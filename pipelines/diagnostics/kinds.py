"""The kinds of models that the commands know, and which of them a directory holds."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import openvino as ov

from staticllm.compiler_passes.model_kind import is_lowered_as, kind_in
from staticllm.core import OnProgress
from staticllm.devices import check_device
from staticllm.model_dir import check_model_dir
from staticllm.pipelines.artifacts.blob_set import read_manifest, rewrite_manifest
from staticllm.pipelines.artifacts.manifest import Manifest
from staticllm.pipelines.diagnostics.decoder_diagnosis import DecoderDiagnosis
from staticllm.pipelines.diagnostics.diagnosis import Diagnosis
from staticllm.pipelines.diagnostics.encoder_diagnosis import EncoderDiagnosis
from staticllm.pipelines.embedding.encoder_files import read_encoder_files
from staticllm.pipelines.loading.kind import LoadJob

AnyDiagnosis = Diagnosis[Any]
DIAGNOSES: dict[str, AnyDiagnosis] = {"decoder": DecoderDiagnosis(), "encoder": EncoderDiagnosis()}
"""By the name of a ``ProgramKind``. A kind that is not here gets the default answers."""


def diagnosis_of(kind_name: str) -> AnyDiagnosis:
    """Return the questions about a kind of model."""
    return DIAGNOSES.get(kind_name) or Diagnosis()


def job_in(
    models_path: str | os.PathLike[str],
    device: str,
    properties: Mapping[str, Any],
    on_progress: OnProgress = lambda event: None,
    check: Callable[[ov.Core, object], str] = check_device,
) -> LoadJob[Any]:
    """Return the job for the model in a directory, whatever kind it is.

    ``properties``: those of a pipeline for this kind. ``check`` raises a ``DeviceError`` for a device that cannot be used.

    Raises:
        ModelError: a file of the model is missing or damaged.
        DeviceError: ``check`` refuses the device.
        ConfigError: a property is unknown, or its value is impossible for this model.
    """
    weights = properties.get("WEIGHTS_PATH")
    directory = check_model_dir(models_path, False, weights)
    can_embed = read_encoder_files(directory).pooling is not None
    name = "encoder" if is_lowered_as(kind_in(directory, weights), "encoder", can_embed) else "decoder"
    return diagnosis_of(name).job(directory, device, properties, on_progress, check)


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
