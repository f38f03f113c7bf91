"""Makes the compile plan of a decoder: the lowered model, the properties of its programs, and their variants."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import openvino as ov

from staticllm.adapters.adapter_set import AdapterSet
from staticllm.compiler_passes.decoder import DECODER, DECODER_UNMERGED, with_adapters
from staticllm.compiler_passes.graph.step_graph import StepGraph
from staticllm.compiler_passes.lower import LoweredModel, lower
from staticllm.compiler_passes.model_kind import check_kind
from staticllm.compiler_passes.pass_pipeline import LoweringOptions, PassPipeline
from staticllm.compiler_passes.rewrites.fuse_adapters import fuse_adapters
from staticllm.config import StaticLLMConfig
from staticllm.core import AdapterType, KVType, ModelShape, OnProgress, Phase, ProgramLayout, ProgressEvent, Variant
from staticllm.devices import (
    check_device,
    default_kv_type,
    get_core,
    merges_projections,
    supported_properties,
    with_exact_f32,
)
from staticllm.model_dir import check_model_dir, read_model, weights_size
from staticllm.pipelines.programs.autotune import ProbedProgram, ProbeTimes, calibrated, layers_speedup
from staticllm.pipelines.programs.compile import CompileOptions, CompilePlan, StartWith
from staticllm.pipelines.programs.keep_small_constants import keep_small_constants
from staticllm.pipelines.programs.layout import is_worth_a_copy, program_layout, program_mode, slot_bytes
from staticllm.pipelines.programs.variants import choose_variants
from staticllm.system.heap import return_large_blocks
from staticllm.system.mapped_weights import MappedWeights

logger = logging.getLogger(__name__)

MAX_KV_SLOTS = 1 << 24


@dataclass(frozen=True)
class DecoderPlan(CompilePlan[Variant, ModelShape]):
    """The plan of a decoder."""

    lowered: LoweredModel

    @property
    def kv_type(self) -> KVType:
        """The element type of the KV slots."""
        assert self.options.kv_type is not None, "a decoder has KV slots"
        return self.options.kv_type


def prepare(
    models_path: str | os.PathLike[str],
    device: str,
    config: StaticLLMConfig,
    on_progress: OnProgress = lambda event: None,
    for_blobs: bool = False,
    start: StartWith = "all programs",
    probes: ProbeTimes | None = None,
    check: Callable[[ov.Core, object], str] = check_device,
) -> DecoderPlan:
    """Read and lower a model directory for ``device``; nothing is compiled.

    ``for_blobs``: whether the programs will be exported. ``start``: which programs are compiled before the model serves, where
    some of its variants can wait for a second program. ``probes``: the times of probes that need not run again. ``check`` raises
    a ``DeviceError`` for a device that cannot be used. Raises ``ModelError``, ``UnsupportedModelError`` (a file is missing or
    damaged, or a pass cannot lower the model), ``DeviceError`` (``check`` refuses the device), ``ConfigError`` (an option is
    impossible for this model) and ``AdapterError`` (an adapter does not fit the model).
    """
    begin = time.perf_counter()
    core = get_core()
    check(core, device)
    if config.memory_limit_mb is not None:
        return_large_blocks()
    properties = phase_properties(device, config)
    kv_type = config.kv_cache_precision or default_kv_type(core, device, *properties.values())
    path = check_model_dir(models_path, False, config.weights_path, config.weights_decryption_callback is not None)
    config = with_kv_slots(config, path, kv_type)
    mode = program_mode(device, config)
    model = _read_decoder(core, path, config, for_blobs)
    weights = MappedWeights(model)
    read = time.perf_counter()
    on_progress(ProgressEvent("read", 1, 1, read - begin))
    adapter_type: AdapterType = "bf16" if default_kv_type(core, device, *properties.values()) == "bf16" else "f32"
    lowering = LoweringOptions(config.num_kv_slots(mode), kv_type, adapter_type=adapter_type)
    lowered = _lowered(model, lowering, DECODER if merges_projections(device) else DECODER_UNMERGED, config.adapters)
    layout = program_layout(device, path, config, kv_type)
    variants = choose_variants(config, mode, lowered.shape)

    def options_of(layout: ProgramLayout) -> CompileOptions:
        calibration = calibrated(core, device, lowered.graph.model, properties, layout, probes)
        options = CompileOptions(device, layout, kv_type, calibration.properties, calibration.few_rows)
        if layout != "few_rows":
            return options
        is_paid = partial(is_worth_a_copy, weights_size(path, config.weights_path))
        probe = partial(_speedup_of_few_rows, core, lowered, variants, probes=probes)
        with_few_rows = replace(options, properties={"few_rows": options.properties["generate"], **options.properties})
        if config.programs == layout or is_paid(calibration.speedup) or is_paid(probe(with_few_rows)):
            return with_few_rows
        return _with_one_program(options)

    is_later = start == "one program" and _can_start_with_one(layout, properties)
    options = options_of("shared" if is_later else layout)
    on_progress(ProgressEvent("passes", 1, 1, time.perf_counter() - read))
    later = partial(options_of, layout) if is_later else None
    return DecoderPlan(lowered, options, variants, weights, later)


def _read_decoder(core: ov.Core, path: Path, config: StaticLLMConfig, for_blobs: bool) -> ov.Model:
    """Read the model in a directory, and check that it is a decoder."""
    model = read_model(core, path, config.weights_path, config.weights_decryption_callback)
    check_kind(model, path, "decoder")
    if for_blobs:
        keep_small_constants(model)
    return model


def _lowered(
    model: ov.Model,
    options: LoweringOptions,
    passes: PassPipeline[StepGraph, LoweringOptions],
    adapters: AdapterSet | None,
) -> LoweredModel:
    """Lower a model with adapters folded into its weights or as inputs. Raises ``UnsupportedModelError``, ``AdapterError``."""
    if adapters is None:
        return lower(model, options, passes)
    if adapters.is_fused:
        fuse_adapters(model, adapters.layouts, adapters.deltas())
        return lower(model, options, passes)
    return lower(model, replace(options, adapters=adapters.layouts), with_adapters(passes))


def _speedup_of_few_rows(
    core: ov.Core,
    lowered: LoweredModel,
    variants: Sequence[Variant],
    options: CompileOptions,
    probes: ProbeTimes | None,
) -> float:
    """Return how many times faster a decode step of one sequence is in the program for calls of few rows, as probed."""
    few = tuple(variant for variant in variants if options.program_group(variant).part == "few_rows")
    rest = tuple(variant for variant in variants if variant not in few)
    alone = sorted(variant for variant in few if variant.rows == 1 and variant.kv_len)
    if not alone or not rest:
        return 1.0
    programs = (
        ProbedProgram(tuple(variants), options.properties["generate"]),
        ProbedProgram(few, options.properties["few_rows"]),
    )
    try:
        return layers_speedup(core, options.device, lowered, alone[0], programs, probes)
    except RuntimeError:  # without the probe, one program serves
        logger.warning("the first layers could not be timed", exc_info=True)
        return 1.0


def _with_one_program(options: CompileOptions) -> CompileOptions:
    """Return the options without a program for calls of few rows."""
    parts = dict(options.properties)
    parts.pop("few_rows", None)
    return replace(options, layout="shared", properties=parts)


def _can_start_with_one(layout: ProgramLayout, properties: Mapping[Phase, Mapping[str, Any]]) -> bool:
    """Return whether one program can run all variants until those of the second program get theirs, and computes alike."""
    return layout == "few_rows" or (layout == "phases" and properties["prefill"] == properties["generate"])


def with_kv_slots(config: StaticLLMConfig, directory: Path, kv_type: KVType) -> StaticLLMConfig:
    """Return the config with ``KV_CACHE_GB`` as a number of KV slots of this model, at least those of one longest sequence."""
    if config.kv_cache_gb is None:
        return config
    num_bytes = slot_bytes(directory, kv_type)
    num_slots = int(config.kv_cache_gb * 1e9) // num_bytes if num_bytes else 0
    kv_slots = min(max(num_slots, config.max_seq_len), MAX_KV_SLOTS)
    return replace(config, kv_cache_gb=None, kv_slots=kv_slots)


def device_properties(device: str) -> frozenset[str]:
    """Return the names of the properties that ``device`` accepts. Raises ``DeviceError`` (the device is not on this machine)."""
    core = get_core()
    return supported_properties(core, check_device(core, device))


def phase_properties(device: str, config: StaticLLMConfig) -> dict[Phase, Mapping[str, Any]]:
    """Return OpenVINO's properties for the programs of each phase, as the user set them."""
    common = {"PERFORMANCE_HINT": "LATENCY", **config.device_properties}
    phases: dict[Phase, Mapping[str, Any]] = {"prefill": config.prefill_config, "generate": config.generate_config}
    return {phase: with_exact_f32(device, {**common, **extra}) for phase, extra in phases.items()}
