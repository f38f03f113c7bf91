"""From a model directory to a runner: read, lower, compile, bind, warm up."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import openvino as ov

from staticllm.compiler_passes.lower import LoweredModel, LoweringOptions, lower
from staticllm.config import StaticLLMConfig
from staticllm.core import (
    KV_TYPE_BYTES,
    KVType,
    ModelShape,
    Phase,
    ProgramLayout,
    ProgramMode,
    ProgressEvent,
    Variant,
)
from staticllm.devices import (
    check_device,
    default_kv_type,
    default_mode,
    exact_if_asked,
    get_core,
    merges_projections,
    supported_properties,
)
from staticllm.errors import ConfigError
from staticllm.kvcache.cache import KVCache
from staticllm.kvcache.step import BufferPool, StepBuffers
from staticllm.model_dir import check_model_dir, kv_shapes, read_model, weights_size
from staticllm.pipelines.programs.autotune import calibrated
from staticllm.pipelines.programs.compile import BoundPrograms, CompileOptions, bind, compile_programs, first_variants
from staticllm.pipelines.programs.cost_model import CostModel
from staticllm.pipelines.programs.keep_small_constants import keep_small_constants
from staticllm.pipelines.programs.model_runner import ModelRunner
from staticllm.pipelines.programs.variants import choose_variants

OnProgress = Callable[[ProgressEvent], None]
MAX_KV_SLOTS = 1 << 24
LONG_SECONDS = 0.25  # a variant of a shared program that would run longer than this is not warmed up
NEAR_ROWS, FAR_ROWS, FAR_KV_LEN = (1, 4, 16, 64, 256), (1, 4, 64), 1024  # sizes from which all costs are estimated
SMALL_WEIGHTS, LARGE_WEIGHTS = 256 << 20, 1 << 30  # bytes; less than the second may be there twice
QUICK_SECONDS = 0.05  # a variant that runs faster than this is timed again: its first run is mostly one-time work


@dataclass(frozen=True)
class CompilePlan:
    """A model lowered for a device, and every choice made on the way: all that is known before compiling."""

    lowered: LoweredModel
    options: CompileOptions
    variants: tuple[Variant, ...]


@dataclass(frozen=True)
class CompiledPrograms:
    """Compiled programs, wherever they came from, and what the host must know to run them. ``costs``: seconds, if known."""

    shape: ModelShape
    options: CompileOptions
    compiled: Mapping[Variant, ov.CompiledModel]
    costs: Mapping[Variant, float] = field(default_factory=dict)


def prepare(
    models_path: str | os.PathLike[str],
    device: str,
    config: StaticLLMConfig,
    on_progress: OnProgress = lambda event: None,
    for_blobs: bool = False,
    check: Callable[[ov.Core, object], str] = check_device,
) -> tuple[ov.Core, CompilePlan]:
    """Read and lower a model directory for ``device``; nothing is compiled. ``for_blobs``: so that it can be exported.
    ``check`` refuses devices.

    Raises:
        ModelError, UnsupportedModelError, DeviceError, ConfigError
    """
    start = time.perf_counter()
    core = get_core()
    check(core, device)
    mode = program_mode(device, config)
    properties = phase_properties(device, config)
    kv_type = config.kv_cache_precision or default_kv_type(core, device, *properties.values())
    decrypt = config.weights_decryption_callback
    path = check_model_dir(models_path, False, config.weights_path, decrypt is not None)
    config = with_kv_slots(config, path, kv_type)
    model = read_model(core, path, config.weights_path, decrypt)
    if for_blobs:
        keep_small_constants(model)
    on_progress(ProgressEvent("read", 1, 1, time.perf_counter() - start))
    start = time.perf_counter()
    lowered = lower(model, LoweringOptions(config.num_kv_slots(mode), kv_type, merges_projections(device)))
    layout = program_layout(device, path, config)
    parts = calibrated(core, device, lowered.graph.model, properties, layout)
    if layout == "single_row" and parts.setdefault("single_row", parts["generate"]) == parts["generate"]:
        layout = layout if config.programs == layout else "shared"  # nothing to gain from one of their own
    variants = choose_variants(config, mode, lowered.shape)
    on_progress(ProgressEvent("passes", 1, 1, time.perf_counter() - start))
    options = CompileOptions(device, layout, kv_type, parts)
    return core, CompilePlan(lowered, options, variants)


def with_kv_slots(config: StaticLLMConfig, directory: Path, kv_type: KVType) -> StaticLLMConfig:
    """The config with ``KV_CACHE_GB`` as a number of rows of this model: one longest sequence at least."""
    if config.kv_cache_gb is None:
        return config
    item = KV_TYPE_BYTES[kv_type]
    scales = 2 * KV_TYPE_BYTES["f32"] if kv_type == "u8" else 0
    slot_bytes = sum(heads * (size * item + scales) for heads, size in kv_shapes(directory))
    rows = int(config.kv_cache_gb * 1e9) // slot_bytes if slot_bytes else 0
    kv_slots = min(max(rows, config.max_seq_len), MAX_KV_SLOTS)
    asked = frozenset({*(config.asked or ()), "kv_slots"}) - {"kv_cache_gb"}
    return replace(config, kv_cache_gb=None, kv_slots=kv_slots, asked=asked)


def make_runner(
    programs: CompiledPrograms, on_progress: OnProgress = lambda event: None, planned: Sequence[Variant] = ()
) -> ModelRunner:
    """Bind programs to rows and buffers, and warm them up. There is room for ``planned`` ones that come later."""
    shape, variants = programs.shape, tuple(planned) or tuple(programs.compiled)
    try:
        cache = KVCache(shape, [variant.kv_len for variant in variants])
        pool = BufferPool(variants, shape)
    except MemoryError as error:
        raise ConfigError(
            f"not enough memory for the rows or masks ({error}): lower MAX_PROMPT_LEN or PREFILL_ROWS"
        ) from None
    bound = BoundPrograms(
        programs.compiled, lambda variant, compiled: bind(compiled, shape, cache, StepBuffers(variant, pool))
    )
    return ModelRunner(cache, bound, _warm_up(bound, programs, on_progress), planned)


def compile_all(core: ov.Core, layout: CompilePlan, on_progress: OnProgress = lambda event: None) -> CompiledPrograms:
    """Compile what ``prepare`` laid out."""
    return CompiledPrograms(layout.lowered.shape, layout.options, dict(compile_layout(core, layout, on_progress)))


def compile_layout(
    core: ov.Core, layout: CompilePlan, on_progress: OnProgress
) -> Iterator[tuple[Variant, ov.CompiledModel]]:
    """Compile variant after variant, and say so before and after each; of a shared program, for its first variant."""
    programs = compile_programs(core, layout.lowered, layout.variants, layout.options)
    compiled_for = first_variants(layout.variants, layout.options)
    for variant in layout.variants:
        if variant not in compiled_for:
            yield variant, next(programs)
            continue
        index, total = compiled_for.index(variant) + 1, len(compiled_for)
        on_progress(ProgressEvent("compile", index, total, 0.0, variant, is_done=False))
        start = time.perf_counter()
        compiled = next(programs)
        on_progress(ProgressEvent("compile", index, total, time.perf_counter() - start, variant))
        yield variant, compiled


def program_mode(device: str, config: StaticLLMConfig) -> ProgramMode:
    """Whether a variant has a program of its own on this device."""
    if config.programs == "auto":
        return default_mode(device)
    return "separate" if config.programs == "separate" else "shared"


def program_layout(device: str, path: Path, config: StaticLLMConfig) -> ProgramLayout:
    """Which variants have programs in common.

    A shared program that ran with another number of rows prepares all its nodes anew, some 20 microseconds each, and on the
    CPU one for a single row is faster for being told so. A second program costs a copy of the weights: small models have one
    a phase, medium ones one for single rows, of large ones there is one.
    """
    if config.programs != "auto":
        return config.programs
    if default_mode(device) == "separate":
        return "separate"
    size = weights_size(path, config.weights_path)
    if size < SMALL_WEIGHTS:
        return "phases"
    return "single_row" if size < LARGE_WEIGHTS and device.split(".", maxsplit=1)[0] == "CPU" else "shared"


def device_properties(device: str) -> frozenset[str]:
    """Names of the properties that ``device`` takes.

    Raises:
        DeviceError: the device is not on this machine.
    """
    core = get_core()
    return supported_properties(core, check_device(core, device))


def phase_properties(device: str, config: StaticLLMConfig) -> dict[Phase, Mapping[str, Any]]:
    common = {"PERFORMANCE_HINT": "LATENCY", **config.device_properties}
    phases: dict[Phase, Mapping[str, Any]] = {"prefill": config.prefill_config, "generate": config.generate_config}
    return {phase: exact_if_asked(device, {**common, **extra}) for phase, extra in phases.items()}


def _warm_up(bound: BoundPrograms, programs: CompiledPrograms, on_progress: OnProgress) -> CostModel:
    """Run variants once, so that no user waits for a first inference; time what is quick once more.

    Each program is run. Of a shared one a few sizes, near and far, as long as a run is expected to stay under
    ``LONG_SECONDS``: there a first run costs a tenth more than the next (docs/measurements.md), not more, and the costs of all
    others are estimated from these. Where the costs are known each program runs once, to pack its weights.
    """
    if programs.costs:
        return _first_runs(bound, programs, on_progress)
    costs = CostModel()
    chosen = _worth_running(bound)
    packed: set[int] = set()
    for index, variant in enumerate(chosen, 1):
        first, key = 0.0, id(bound.compiled(variant))
        if key not in packed or bound.is_static(variant) or costs(variant) < LONG_SECONDS:
            program = bound[variant]
            first = program.run()
            is_worth_it = first < QUICK_SECONDS or key not in packed  # a program's first run packs its weights
            costs.update(variant, program.run() if is_worth_it else first)
            packed.add(key)
        on_progress(ProgressEvent("warm-up", index, len(chosen), first, variant))
    return costs


def _first_runs(bound: BoundPrograms, programs: CompiledPrograms, on_progress: OnProgress) -> CostModel:
    costs = CostModel({variant: cost for variant, cost in programs.costs.items() if variant in bound})
    first = list({id(bound.compiled(variant)): variant for variant in reversed(list(bound))}.values())[::-1]
    for index, variant in enumerate(first, 1):
        seconds = bound[variant].run()
        on_progress(ProgressEvent("warm-up", index, len(first), seconds, variant))
    return costs


def _worth_running(programs: BoundPrograms) -> list[Variant]:
    """In the order of the programs, decoding first."""
    chosen: dict[tuple[int, bool], Variant] = {}
    for variant in sorted(programs, key=lambda variant: (variant.kv_len, variant.sequences)):
        is_far = variant.kv_len >= FAR_KV_LEN
        if variant.rows in (FAR_ROWS if is_far else NEAR_ROWS):
            chosen.setdefault((variant.rows, is_far), variant)
    return [variant for variant in programs if variant in chosen.values() or programs.is_static(variant)]
