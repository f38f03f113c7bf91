"""Decoders: language models that run step by step over one KV arena."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

import openvino as ov
from numpy.typing import NDArray

from staticllm.config import StaticLLMConfig
from staticllm.core import ModelShape, OnProgress, Part, Phase, Variant
from staticllm.devices import check_device, check_known, default_kv_type, get_core
from staticllm.model_dir import check_model_dir
from staticllm.pipelines.artifacts.blob_set import json_properties
from staticllm.pipelines.artifacts.fingerprint import StepFingerprint, fingerprint_model, layout_values, machine_values
from staticllm.pipelines.artifacts.manifest import LAYOUT_FIELDS, Manifest
from staticllm.pipelines.loading.kind import Loaded, LoadJob, ProgramKind, probes_of
from staticllm.pipelines.programs.bind import HostMemory, allocating
from staticllm.pipelines.programs.compile import CompiledPrograms, CompilePlan, StartWith
from staticllm.pipelines.programs.compile_plan import phase_properties, prepare, with_kv_slots
from staticllm.pipelines.programs.dry_run import random_feeds
from staticllm.pipelines.programs.layout import program_layout, with_host_slots
from staticllm.pipelines.programs.model_runner import ModelRunner
from staticllm.pipelines.programs.variants import first_to_serve
from staticllm.pipelines.programs.warm_up import make_runner


@dataclass(frozen=True)
class DecoderKind(ProgramKind[Variant, ModelShape, ModelRunner]):
    """The kind of a causal language model. All choices of a load are in its config."""

    name = "decoder"
    variant = Variant
    shape = ModelShape
    compiles_in_background = True

    def plan(
        self, job: DecoderJob, for_blobs: bool = False, start: StartWith = "all programs"
    ) -> CompilePlan[Variant, ModelShape]:
        """Read and lower the model, choose its variants, and probe how their programs are best compiled."""
        probes = probes_of(job)
        return prepare(job.directory, job.device, job.config, job.on_progress, for_blobs, start, probes, check_known)

    def random_call(
        self, programs: CompiledPrograms[Variant, ModelShape], variant: Variant
    ) -> Mapping[str, NDArray[Any]]:
        """Return random tokens and KV slots under a causal mask."""
        return random_feeds(programs.compiled[variant], variant)

    def runner(
        self,
        job: DecoderJob,
        programs: CompiledPrograms[Variant, ModelShape],
        memory: Future[HostMemory] | None,
        planned: Sequence[Variant] = (),
    ) -> ModelRunner:
        """Bind the programs to one KV arena, and warm them up.

        Raises ``ConfigError`` (there is not enough memory for the arena or the masks).
        """
        return make_runner(programs, job.on_progress, planned, memory, job.config.adapters)

    def fingerprint(self, job: DecoderJob) -> StepFingerprint:
        """Return the digests of the model, the machine, and the resolved layout."""
        core = get_core()
        device = job.device
        config = job.config
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

    def properties(self, job: DecoderJob) -> Mapping[Part, Mapping[str, Any]]:
        """Return OpenVINO's properties for each phase."""
        phases = phase_properties(job.device, job.config)
        return {"prefill": phases["prefill"], "generate": phases["generate"]}

    def choices(self, job: DecoderJob) -> dict[str, Any]:
        """Return the layout."""
        values = {name: getattr(job.config, name) for name in LAYOUT_FIELDS}
        return {name: json_properties(value) if isinstance(value, Mapping) else value for name, value in values.items()}

    def decided_by(self, manifest: Manifest, job: DecoderJob) -> DecoderJob:
        """Return the job with the set's value for every layout field that the user did not give."""
        decided = {name: value for name, value in manifest.config.items() if name not in job.explicit}
        return replace(job, config=replace(job.config, **decided), explicit=job.explicit | decided.keys())

    def memory(self, shape: ModelShape, variants: Sequence[Variant]) -> AbstractContextManager[Future[HostMemory]]:
        """Return a block that allocates the arena and the buffers."""
        return allocating(shape, variants)

    def first_to_serve(self, variants: Sequence[Variant]) -> tuple[Variant, ...]:
        """Return the fewest variants that can run any prompt."""
        return first_to_serve(tuple(variants))


DecoderJob: TypeAlias = LoadJob[ProgramKind[Variant, ModelShape, ModelRunner]]
LoadedDecoder: TypeAlias = Loaded[Variant, ModelShape, ModelRunner]


def job_of(
    models_path: str | os.PathLike[str],
    device: str,
    config: StaticLLMConfig,
    on_progress: OnProgress = lambda event: None,
    explicit: Collection[str] | None = None,
    check: Callable[[ov.Core, object], str] = check_device,
) -> DecoderJob:
    """Check directory and device, resolve ``KV_CACHE_GB`` to a number of KV slots, and fit the host pool to ``MEMORY_LIMIT_MB``.

    ``explicit``: names of the config's fields that the user gave. If it is None, the fields whose values differ from their
    defaults. ``check`` raises a ``DeviceError`` for a device that cannot be used. Raises ``ModelError`` (the directory is missing
    or incomplete), ``DeviceError`` (``check`` refuses the device) and ``ConfigError`` (the model does not fit into
    ``MEMORY_LIMIT_MB``).
    """
    is_encrypted = config.weights_decryption_callback is not None
    directory = check_model_dir(models_path, False, config.weights_path, is_encrypted)
    core = get_core()
    name = check(get_core(), device)
    kv_type = config.kv_cache_precision or default_kv_type(core, name, *phase_properties(name, config).values())
    resolved = with_host_slots(name, directory, with_kv_slots(config, directory, kv_type), kv_type)
    given = frozenset(config.non_default if explicit is None else explicit)
    given |= {"kv_slots"} if config.kv_cache_gb else set()
    return LoadJob(DecoderKind(), directory, name, resolved, on_progress, given)
