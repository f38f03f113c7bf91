"""Decoders: language models that run step by step over one KV arena."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import openvino as ov
from numpy.typing import NDArray

from staticllm.adapters.adapter_set import AdapterSet
from staticllm.config import StaticLLMConfig
from staticllm.core import AdapterLayout, KVType, ModelShape, OnProgress, Part, ProgramLayout, Variant, mode_of
from staticllm.devices import check_device, default_kv_type, get_core, kind, npu_platform, type_name
from staticllm.errors import UnsupportedModelError
from staticllm.model_dir import check_model_files, path_of, weights_size

from ...compiler_passes.artifacts.blob_set import json_properties
from ...compiler_passes.artifacts.manifest import Manifest
from ...compiler_passes.compiling.autotune import (
    PRECISION,
    ProbedProgram,
    ProbeTimes,
    calibrated,
    for_all_rows,
    layers_speedup,
)
from ...compiler_passes.compiling.compile import CompiledPrograms, CompileOptions, CompilePlan, StartWith
from ...compiler_passes.compiling.device_memory import device_allocator
from ...compiler_passes.compiling.dry_run import random_feeds
from ...compiler_passes.compiling.layout import (
    is_worth_a_copy,
    may_have_few_rows,
    phase_properties,
    program_layout,
    program_mode,
    with_host_slots,
    with_kv_slots,
    with_own_lengths,
)
from ...compiler_passes.compiling.variants import choose_variants, first_to_serve
from ...compiler_passes.decoder import decoder_passes, with_adapters
from ...compiler_passes.lower import LoweredModel, lower, lower_paged
from ...compiler_passes.model_kind import check_kind, is_lowered_as, kind_of
from ...compiler_passes.pass_pipeline import LoweringOptions
from ...compiler_passes.rewrites.fuse_adapters import fuse_adapters
from ..programs.bind import HostMemory, allocating
from ..programs.model_runner import ModelRunner
from ..programs.warm_up import make_runner
from .kind import Loaded, LoadJob, OpenedModel, ProgramKind, probes_of, properties_text

logger = logging.getLogger(__name__)
LAYOUT_FIELDS = (
    "max_prompt_len", "min_response_len", "programs", "prefill_rows", "prefill_kv_lens", "generate_kv_lens",
    "kv_cache_precision", "max_num_seqs", "kv_slots", "device_properties", "prefill_config", "generate_config",
)  # fmt: skip
"""Config fields that a blob set decides unless the user gives them."""
MAX_STATE_BYTES = 1 << 34
MAX_ADAPTER_VALUES = 1 << 32
"""Upper bound on the values of all adapters' matrices: 16 GiB."""


@dataclass(frozen=True)
class DecoderPlan(CompilePlan[Variant, ModelShape]):
    """The plan of a decoder."""

    lowered: LoweredModel

    @property
    def kv_type(self) -> KVType:
        assert self.options.kv_type is not None, "a decoder has KV slots"
        return self.options.kv_type


@dataclass(frozen=True)
class DecoderKind(ProgramKind[Variant, ModelShape, ModelRunner]):
    """The kind of a causal language model. All choices of a load are in its config."""

    name = "decoder"
    variant = Variant
    shape = ModelShape
    compiles_in_background = True

    def check_graph(self, model: ov.Model, directory: Path) -> None:
        """Check that the model has logits for every token; else the error says what it is."""
        check_kind(model, directory, "decoder")

    def lower(self, job: DecoderJob, opened: OpenedModel, start: StartWith) -> DecoderPlan:
        """Lower the model, choose its variants, and probe how their programs are best compiled.

        Raises:
            AdapterError: an adapter does not fit the model.
            StaticLLMError: as for ``ProgramKind.lower``.
        """
        core = get_core()
        device = job.device
        config = job.config
        properties = phase_properties(device, config)
        usual = default_kv_type(core, device, *properties.values())
        kv_type = config.kv_cache_precision or usual
        mode = program_mode(device, config)
        cross_window_len, num_cross_windows = (0, 0) if config.cross_windows is None else config.cross_windows.frames
        lowering = LoweringOptions(
            config.max_seq_len,
            kv_type,
            adapter_type="bf16" if usual == "bf16" else "f32",
            cross_window_len=cross_window_len,
            num_cross_windows=num_cross_windows,
            adapters=_as_inputs(opened.model, config.adapters),
        )
        platform = npu_platform(core, device) if job.target is None else job.target.platform.number
        layout = program_layout(device, job.directory, config, kv_type)
        if may_be_paged(job) and (plan := _paged_plan(job, opened, lowering)) is not None:
            return plan
        passes = decoder_passes(device, platform)
        lowered = lower(opened.model, lowering, with_adapters(passes) if lowering.adapters else passes)
        variants = choose_variants(config, mode, lowered.shape, layout)
        probes = probes_of(job)

        def options_of(layout: ProgramLayout) -> CompileOptions:
            may_be_apart = may_have_few_rows(layout, device, job.directory, config, kv_type)
            probed = "few_rows" if may_be_apart else layout
            calibration = calibrated(core, device, lowered.graph.model, properties, probed, probes)
            options = CompileOptions(device, layout, kv_type, calibration.properties, calibration.few_rows)
            is_tiny = layout == "phases" and "few_rows" not in calibration.properties
            if not may_be_apart or is_tiny:
                return options
            is_paid = partial(is_worth_a_copy, weights_size(job.directory, config.weights_path, config.model_file))
            probe = partial(_speedup_of_few_rows, core, lowered, variants, probes=probes)
            with_few_rows = replace(
                options, properties={"few_rows": options.properties["generate"], **options.properties}
            )
            if config.programs == layout or is_paid(calibration.speedup) or is_paid(probe(with_few_rows)):
                return with_few_rows
            return _without_few_rows(options)

        is_later = start == "one program" and _can_start_with_one(layout, properties)
        options = options_of("shared" if is_later else layout)
        return DecoderPlan(
            lowered, options, variants, opened.weights, partial(options_of, layout) if is_later else None
        )

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

        Raises:
            ConfigError: there is not enough memory for the arena or the masks.
        """
        return make_runner(programs, job.on_progress, planned, memory, job.config.adapters)

    @classmethod
    def fits(cls, model: ov.Model, directory: Path) -> bool:
        """Return whether the model has logits for every token."""
        return is_lowered_as(kind_of(model), "decoder")

    @staticmethod
    def check_stored(shape: ModelShape, content: Mapping[str, Any]) -> None:
        """Check the layout, the properties of each phase, the states and the adapters.

        Raises:
            ValueError: one of them is impossible.
        """
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
        mode = mode_of(layout)
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
            **(
                {}
                if config.cross_windows is None
                else {"windows": "{1} of {0} frames".format(*config.cross_windows.frames)}
            ),
        }

    def may_have_no_blobs(self, job: DecoderJob) -> bool:
        """Return whether the programs may work on pages; OpenVINO 2026.4 refuses to import what it has exported of these."""
        return may_be_paged(job)

    def properties(self, job: DecoderJob) -> Mapping[Part, Mapping[str, Any]]:
        """Return OpenVINO's properties for each phase."""
        return phase_properties(job.device, job.config)

    def choices(self, job: DecoderJob) -> dict[str, Any]:
        """Return the layout."""
        values = {name: getattr(job.config, name) for name in LAYOUT_FIELDS}
        return {name: json_properties(value) if isinstance(value, Mapping) else value for name, value in values.items()}

    def decided_by(self, manifest: Manifest, job: DecoderJob) -> DecoderJob:
        """Return the job with the set's value for every layout field that the user did not give."""
        decided = {name: value for name, value in manifest.config.items() if name not in job.explicit}
        return replace(job, config=replace(job.config, **decided), explicit=job.explicit | decided.keys())

    def memory(
        self, device: str, shape: ModelShape, variants: Sequence[Variant]
    ) -> AbstractContextManager[Future[HostMemory]]:
        """Return a block that allocates the arena and the buffers."""
        return allocating(shape, variants, device_allocator(get_core(), device))

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


def _as_inputs(model: ov.Model, adapters: AdapterSet | None) -> tuple[AdapterLayout, ...]:
    """Return the adapters that become inputs; others are folded into the weights of the model. Raises ``AdapterError``."""
    if adapters is not None and adapters.is_fused:
        fuse_adapters(model, adapters.layouts, adapters.deltas())
        return ()
    return () if adapters is None else adapters.layouts


def may_be_paged(job: LoadJob[Any]) -> bool:
    """Return whether the program of a decoder may work on pages: on a CPU, unless a blob is made of it.

    Cross-attention has no pages: ``PROGRAMS=paged`` is refused for it later, by name.
    """
    config = job.config
    is_stored = job.has_blobs or config.export_blob or config.blob_path is not None
    is_wanted = config.programs == "paged" or (config.programs == "auto" and config.cross_windows is None)
    return kind(job.device) == "CPU" and is_wanted and not is_stored and job.proof != "failed"


def _paged_plan(job: DecoderJob, opened: OpenedModel, options: LoweringOptions) -> DecoderPlan | None:
    """Return the plan of one program over pages for all calls; None if there is none, and the user has asked for none.

    Raises:
        UnsupportedModelError: there is none, with ``PROGRAMS=paged``.
        AdapterError: an adapter does not fit the model.
    """
    config = job.config
    try:
        if config.cross_windows is not None:
            raise UnsupportedModelError("page_attention", "cross-attention has no pages")
        found = _paged_properties(job, opened.model)
        if found is None:
            raise UnsupportedModelError("page_attention", "slots in pages have the type in which attention computes")
        options = replace(options, kv_type=found.kv_type, narrows_attention=found.narrows_attention)
        lowered = lower_paged(opened.model, options, job.proof)
    except UnsupportedModelError as error:
        if config.programs == "paged":
            raise
        logger.info("not in pages: %s", error)
        return None
    variants = choose_variants(config, "shared", lowered.shape, "paged")
    compiled = CompileOptions(job.device, "paged", found.kv_type, found.properties)
    return DecoderPlan(lowered, compiled, variants, opened.weights, proof=lowered.proof)


def _paged_properties(job: DecoderJob, model: ov.Model) -> PagedProperties | None:
    """Return how one program over pages is compiled. Its slots have the type in which attention computes.

    Return None if the user has chosen another type for them.
    """
    core = get_core()
    asked = job.config.kv_cache_precision
    phases = phase_properties(job.device, job.config)
    if asked == "f32":
        phases = {part: {PRECISION: "f32", **values} for part, values in phases.items()}
    usual = {type_name(values.get(PRECISION) or core.get_property(job.device, PRECISION)) for values in phases.values()}
    found = for_all_rows(core, job.device, model, phases, probes_of(job), may_be_f32=usual == {"bf16"})
    if usual not in ({"f32"}, {"bf16"}) or asked not in (None, *usual):
        return None
    kv_type: KVType = "f32" if usual == {"f32"} else "bf16"
    properties = {part: {**values, "KV_CACHE_PRECISION": kv_type} for part, values in found.items()}
    return PagedProperties(properties, kv_type, kv_type == "bf16" and found["generate"].get(PRECISION) == "f32")


@dataclass(frozen=True)
class PagedProperties:
    """How a program over pages is compiled."""

    properties: Mapping[Part, Mapping[str, Any]]
    """OpenVINO's, of each part."""
    kv_type: KVType
    """The type of the slots, and that in which attention computes."""
    narrows_attention: bool
    """Whether the rest computes in f32, and attention in bf16."""


def _speedup_of_few_rows(
    core: ov.Core,
    lowered: LoweredModel,
    variants: Sequence[Variant],
    options: CompileOptions,
    probes: ProbeTimes | None,
) -> float:
    """Return how many times faster a decode step of one sequence is in the program for calls of few rows, as probed."""
    few = tuple(variant for variant in variants if options.program_group(variant).part == "few_rows")
    others = tuple(variant for variant in variants if options.layout != "phases" or variant.phase == "generate")
    alone = sorted(variant for variant in few if variant.rows == 1 and variant.kv_len)
    if not alone or set(others) <= set(few):
        return 1.0
    programs = (
        ProbedProgram(others, options.properties["generate"]),
        ProbedProgram(few, options.properties["few_rows"]),
    )
    try:
        return layers_speedup(core, options.device, lowered, alone[0], programs, probes)
    except RuntimeError:  # without the probe, one program serves
        logger.warning("the first layers could not be timed", exc_info=True)
        return 1.0


def _without_few_rows(options: CompileOptions) -> CompileOptions:
    """Return the options without a program for calls of few rows."""
    parts = dict(options.properties)
    parts.pop("few_rows", None)
    return replace(options, layout="shared" if options.layout == "few_rows" else options.layout, properties=parts)


def _can_start_with_one(layout: ProgramLayout, properties: Mapping[Part, Mapping[str, Any]]) -> bool:
    """Return whether one program can run all variants until those of the second program get theirs, and computes alike."""
    return layout == "few_rows" or (layout == "phases" and properties["prefill"] == properties["generate"])


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

    ``check`` raises a ``DeviceError`` for a device that cannot be used.

    Args:
        explicit: Names of the config's fields that the user gave. If it is None, the fields whose values differ from
            their defaults.

    Raises:
        ModelError: the directory is missing or incomplete.
        DeviceError: ``check`` refuses the device.
        ConfigError: the model does not fit into ``MEMORY_LIMIT_MB``.
    """
    is_encrypted = config.weights_decryption_callback is not None
    file = config.model_file
    directory = check_model_files(path_of(models_path), False, config.weights_path, is_encrypted, file)
    core = get_core()
    name = check(get_core(), device)
    kv_type = config.kv_cache_precision or default_kv_type(core, name, *phase_properties(name, config).values())
    given = frozenset(config.non_default if explicit is None else explicit)
    given |= {"kv_slots"} if config.kv_cache_gb else set()
    resolved = with_own_lengths(name, directory, with_kv_slots(config, directory, kv_type), kv_type, given)
    resolved = with_host_slots(name, directory, resolved, kv_type)
    return LoadJob(DecoderKind(), directory, name, resolved, on_progress, given)


def prepare(models_path: str | os.PathLike[str], device: str, config: StaticLLMConfig) -> DecoderPlan:
    """Read and lower the decoder in a directory; nothing is compiled.

    Raises:
        StaticLLMError: as for ``job_of`` and ``ProgramKind.plan``.
    """
    job = job_of(models_path, device, config)
    return cast(DecoderPlan, job.kind.plan(job))
