"""Decoders: language models that run step by step over one KV arena."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import openvino as ov
from numpy.typing import NDArray

from staticllm.compiler_passes.model_kind import is_lowered_as, kind_of
from staticllm.config import StaticLLMConfig
from staticllm.core import ModelShape, OnProgress, Part, ProgramMode, Variant
from staticllm.devices import check_device, check_known, default_kv_type, get_core
from staticllm.model_dir import check_model_dir
from staticllm.pipelines.artifacts.blob_set import json_properties
from staticllm.pipelines.artifacts.manifest import Manifest
from staticllm.pipelines.loading.kind import Loaded, LoadJob, ProgramKind, probes_of, properties_text
from staticllm.pipelines.programs.bind import HostMemory, allocating
from staticllm.pipelines.programs.compile import CompiledPrograms, CompilePlan, StartWith
from staticllm.pipelines.programs.compile_plan import phase_properties, prepare, with_kv_slots
from staticllm.pipelines.programs.dry_run import random_feeds
from staticllm.pipelines.programs.layout import program_layout, with_host_slots
from staticllm.pipelines.programs.model_runner import ModelRunner
from staticllm.pipelines.programs.variants import first_to_serve
from staticllm.pipelines.programs.warm_up import make_runner

LAYOUT_FIELDS = (
    "max_prompt_len", "min_response_len", "programs", "prefill_rows", "prefill_kv_lens", "generate_kv_lens",
    "kv_cache_precision", "max_num_seqs", "kv_slots", "device_properties", "prefill_config", "generate_config",
)  # fmt: skip
"""Config fields that a blob set decides unless the user gives them."""
MAX_STATE_BYTES = 1 << 34
MAX_ADAPTER_VALUES = 1 << 32
"""Upper bound on the values of all adapters' matrices: 16 GiB."""


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

    @classmethod
    def fits(cls, model: ov.Model, directory: Path) -> bool:
        """Return whether the model has logits for every token."""
        return is_lowered_as(kind_of(model), cls.name)

    @staticmethod
    def check_stored(shape: ModelShape, content: Mapping[str, Any]) -> None:
        """Check the layout, the properties of each phase, the states and the adapters."""
        config = content["config"]
        parts = content["properties"]
        if different := set(config) ^ set(LAYOUT_FIELDS):
            raise ValueError(f"config has, or lacks, {sorted(different)[0]!r}")
        StaticLLMConfig(**config)
        phases = {"prefill", "generate"}
        needed = phases | ({"few_rows"} if content["programs"] == "few_rows" else set())
        if missing := sorted(needed - set(parts)):
            raise ValueError(f"properties has no part {missing[0]!r}")
        if set(parts) - {*phases, "few_rows"} or not content["kv_type"]:
            raise ValueError("a part or the type of KV slots is not that of a decoder")
        if shape.position_rank not in (0, 2, 3):
            raise ValueError("the rank of its positions is impossible")
        if any(state.num_bytes > MAX_STATE_BYTES for state in shape.recurrent_states):
            raise ValueError("a recurrent state has more than 16 GiB")
        _check_adapters(shape)

    def asked(self, job: DecoderJob) -> dict[str, str]:
        """Return the resolved layout."""
        config = job.config
        phases = phase_properties(job.device, config)
        kv_type = config.kv_cache_precision or default_kv_type(get_core(), job.device, *phases.values())
        layout = program_layout(job.device, job.directory, config, kv_type)
        mode: ProgramMode = "separate" if layout == "separate" else "shared"
        sizes = {
            "MAX_PROMPT_LEN": config.max_prompt_len,
            "MIN_RESPONSE_LEN": config.min_response_len,
            "PROGRAMS": layout,
            "KV_CACHE_PRECISION": kv_type,
            "MAX_NUM_SEQS": config.num_seqs(mode),
            "KV_SLOTS": config.num_kv_slots(mode),
            "PREFILL_ROWS": config.prefill_rows,
            "PREFILL_KV_LENS": config.prefill_kv_lens,
            "GENERATE_KV_LENS": config.generate_kv_lens,
        }
        return {
            **{name: "default" if value is None else str(value) for name, value in sizes.items()},
            **{f"{phase} properties": properties_text(values) for phase, values in phases.items()},
            "adapters": "none" if config.adapters is None else config.adapters.description,
        }

    def properties(self, job: DecoderJob) -> Mapping[Part, Mapping[str, Any]]:
        """Return OpenVINO's properties for each phase."""
        return {**phase_properties(job.device, job.config)}

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


def _check_adapters(shape: ModelShape) -> None:
    """Check that the parts of each group fit into its matrices."""
    if shape.adapted and not shape.num_adapters:
        raise ValueError("it adapts matrices, and has no adapters")
    for index, group in enumerate(shape.adapted):
        if group.index != index:
            raise ValueError("a group of adapters is not in its place")
        first_column = 0
        for part in group.parts:
            is_inside = part.adapter < shape.num_adapters and part.first_row < group.out_size
            if not is_inside or part.first_column != first_column:
                raise ValueError("a part of an adapter is outside of its matrices")
            first_column += part.rank
    if sum(group.rank * (group.in_size + group.out_size) for group in shape.adapted) > MAX_ADAPTER_VALUES:
        raise ValueError("the matrices of adapters have more than 16 GiB")


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
