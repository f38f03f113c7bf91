"""Chooses which variants share a program, by the device, the size of the weights and the memory limit, and their properties."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from staticllm.config import StaticLLMConfig
from staticllm.core import KV_TYPE_BYTES, KVType, Part, ProgramLayout, ProgramMode, mode_of
from staticllm.devices import default_mode, kind, with_exact_f32
from staticllm.errors import ConfigError
from staticllm.model_dir import DECODER_POSITIONS, kv_shapes, max_positions, model_widths, weights_size
from staticllm.model_paths.path_kind import MODEL_XML

SMALL_WEIGHTS, LARGE_WEIGHTS = 256 << 20, 1 << 30
"""In bytes. Weights below the second limit may be in memory twice."""
BASE_BYTES, PROGRAM_BYTES, PACKED_SHARE = 330 * 10**6, 40 * 10**6, 1.1
"""Bytes of interpreter, libraries, tokenizer and buffers; bytes of each program's graph; packed weights as a share of their
file. ``staticllm plan --measured`` prints them (docs/decisions.md)."""
HIDDEN_VALUES, INNER_VALUES = 16, 6
"""f32 values that a program keeps per row of its largest call, as multiples of the model's two widths."""
LARGEST_CALL, DEFAULT_WIDTHS = 1024, (2048, 8192)
"""Default rows of the largest call, and widths assumed for a model that does not state its own."""
BYTES_PER_SHARE = 6e9
"""Price of a second program: its copy of the weights must save 1 % of a token's time per 60 MB."""


NPU_PROPERTIES = {
    "NPU_COMPILER_DYNAMIC_QUANTIZATION": "YES",
    "NPU_COMPILATION_MODE_PARAMS": "compute-layers-with-higher-precision=Sqrt,Power,ReduceMean,ReduceSum",
}
"""What every program of an NPU is compiled with. Without the first, integer weights that are inputs are expanded in each step.

Without the second, squares that are not part of a norm overflow: f16 holds those of numbers up to 255. A norm that the compiler
recognises is one operation in any case (docs/npu.md).
"""
MAX_KV_SLOTS = 1 << 24
LENGTH_FIELDS = frozenset({"max_prompt_len", "prefill_kv_lens", "generate_kv_lens", "prefill_rows"})
"""Fields that limit a sequence, or say which sizes programs have."""
ARENA_SHARE, POOL_SHARE = 1 / 3, 1 / 6
"""Of the free memory: what the KV slots of one model may take, in the arena and in the host pool."""
DEFAULT_POSITIONS, MAX_SEQUENCE = 32768, 1 << 17
"""Positions of a model that does not say how many it has; the longest sequence without ``MAX_PROMPT_LEN``."""


@dataclass(frozen=True)
class MemoryNeeds:
    """The bytes that a model is estimated to need: ``per_program`` for each program, ``rest`` once."""

    rest: int
    per_program: int

    def of(self, layout: ProgramLayout) -> int:
        """Return the bytes that a layout needs; one copy of the weights per program."""
        return self.with_programs(1 if layout == "shared" else 2)

    def with_programs(self, count: int) -> int:
        """Return the bytes that ``count`` programs need."""
        return self.rest + count * self.per_program


def program_mode(device: str, config: StaticLLMConfig) -> ProgramMode:
    """Return ``separate`` if each variant has a program of its own on this device, else ``shared``."""
    if config.programs == "auto":
        return default_mode(device)
    return mode_of(config.programs)


def fixed_layout(device: str, config: StaticLLMConfig) -> ProgramLayout:
    """Return the layout that device and config decide by themselves: ``blocks``, ``separate`` or ``shared``."""
    if config.programs == "auto":
        return "blocks" if default_mode(device) == "separate" else "shared"
    return config.programs if mode_of(config.programs) == "separate" else "shared"


def program_layout(device: str, path: Path, config: StaticLLMConfig, kv_type: KVType = "f32") -> ProgramLayout:
    """Return which variants share a program, before anything is timed.

    A shared program prepares all its nodes again, about 20 microseconds each, when it runs with another number of rows than
    before, and on the CPU a program compiled for a single row is faster. A second program needs a copy of the weights. Therefore
    small models have one program per phase, medium ones a second program for calls of few rows if ``is_worth_a_copy``, and large
    ones one program. On a CPU with ``MEMORY_LIMIT_MB``, a model has one program if two would exceed the limit.

    Raises:
        ConfigError: even one program would exceed ``MEMORY_LIMIT_MB``.
    """
    if program_mode(device, config) == "separate":
        return fixed_layout(device, config)
    size = weights_size(path, config.weights_path, config.model_file)
    layout: ProgramLayout = "shared"
    if config.programs != "auto":
        layout = config.programs
    elif size < SMALL_WEIGHTS:
        layout = "phases"
    elif size < LARGE_WEIGHTS and kind(device) == "CPU":
        layout = "few_rows"
    if config.memory_limit_mb is None or kind(device) != "CPU":
        return layout
    needs = memory_needs(path, config, kv_type)
    return _within(config.memory_limit_mb, layout, needs, config.programs == "auto")


def may_have_few_rows(layout: ProgramLayout, device: str, path: Path, config: StaticLLMConfig, kv_type: KVType) -> bool:
    """Return whether calls of few rows may have a program of their own: in ``few_rows``, and beside the two of small models.

    The latter only if the user chose no layout, and ``MEMORY_LIMIT_MB`` allows a third copy of the weights.
    """
    if layout != "phases" or config.programs != "auto" or kind(device) != "CPU":
        return layout == "few_rows"
    limit = config.memory_limit_mb
    return limit is None or memory_needs(path, config, kv_type).with_programs(3) <= limit * 10**6


def phase_properties(device: str, config: StaticLLMConfig) -> dict[Part, Mapping[str, Any]]:
    """Return OpenVINO's properties for the programs of each phase, as the user set them."""
    own = NPU_PROPERTIES if kind(device) == "NPU" else {}
    common = {"PERFORMANCE_HINT": "LATENCY", **own, **config.device_properties}
    phases: dict[Part, Mapping[str, Any]] = {"prefill": config.prefill_config, "generate": config.generate_config}
    return {phase: with_exact_f32(device, {**common, **extra}) for phase, extra in phases.items()}


def is_worth_a_copy(weights_bytes: int, speedup: float) -> bool:
    """Return whether a second program pays for its copy of the weights: 1 % of a token's time for each 60 MB.

    ``weights_bytes``: those of the weights file. ``speedup``: how many times faster calls of few rows are in that program.
    """
    return 1 - 1 / speedup >= PACKED_SHARE * weights_bytes / BYTES_PER_SHARE


def memory_needs(path: Path, config: StaticLLMConfig, kv_type: KVType) -> MemoryNeeds:
    """Estimate the private memory of a pipeline on a CPU whose programs are shared, after its largest calls.

    The host pool counts with ``HOST_KV_SLOTS``, or with one longest sequence if that is not set.
    """
    rows = max(config.prefill_rows or (min(config.max_prompt_len, LARGEST_CALL),))
    hidden, inner = model_widths(path) or DEFAULT_WIDTHS
    activations = 4 * rows * (HIDDEN_VALUES * hidden + INNER_VALUES * inner)
    host_slots = config.max_seq_len if config.host_kv_slots is None else config.host_kv_slots
    slots = (config.num_kv_slots("shared") + host_slots + rows) * slot_bytes(
        path, config.kv_cache_precision or kv_type, config.model_file
    )
    packed = int(PACKED_SHARE * weights_size(path, config.weights_path, config.model_file))
    adapters = 0 if config.adapters is None else config.adapters.num_bytes
    return MemoryNeeds(BASE_BYTES + activations + slots + adapters, PROGRAM_BYTES + packed)


def with_host_slots(device: str, path: Path, config: StaticLLMConfig, kv_type: KVType) -> StaticLLMConfig:
    """Return the config with a host pool that fits beside everything else below ``MEMORY_LIMIT_MB``, if it is not set.

    Raises:
        ConfigError: even one program would exceed ``MEMORY_LIMIT_MB``.
    """
    if config.memory_limit_mb is None or config.host_kv_slots is not None or kind(device) != "CPU":
        return config
    layout = program_layout(device, path, config, kv_type)
    num_bytes = slot_bytes(path, kv_type, config.model_file)
    if mode_of(layout) == "separate" or not num_bytes:
        return config
    left = config.memory_limit_mb * 10**6 - memory_needs(path, config, kv_type).of(layout)
    return replace(config, host_kv_slots=min(config.num_host_slots, config.max_seq_len + left // num_bytes))


def with_kv_slots(config: StaticLLMConfig, directory: Path, kv_type: KVType) -> StaticLLMConfig:
    """Return the config with ``KV_CACHE_GB`` as a number of KV slots of this model, at least those of one longest sequence."""
    if config.kv_cache_gb is None:
        return config
    num_bytes = slot_bytes(directory, kv_type, config.model_file)
    num_slots = int(config.kv_cache_gb * 1e9) // num_bytes if num_bytes else 0
    kv_slots = min(max(num_slots, config.max_seq_len), MAX_KV_SLOTS)
    return replace(config, kv_cache_gb=None, kv_slots=kv_slots)


def with_own_lengths(
    device: str, directory: Path, config: StaticLLMConfig, kv_type: KVType, given: Collection[str]
) -> StaticLLMConfig:
    """Return the config for sequences as long as the model can have them, and memory holds, unless lengths are ``given``.

    A prompt may then leave room for a single token, as in GenAI, unless ``MIN_RESPONSE_LEN`` is given.

    Only where the programs of a longer sequence are no others: on a CPU, if no blobs are made. KV slots enter memory when they
    are first written, so that short conversations take no more than before. Arena and host pool may take ``ARENA_SHARE`` and
    ``POOL_SHARE`` of the memory that is free, or of what ``MEMORY_LIMIT_MB`` leaves.
    """
    has_blobs = config.export_blob or config.blob_path is not None or config.cross_windows is not None
    if (
        kind(device) != "CPU"
        or has_blobs
        or program_mode(device, config) == "separate"
        or not LENGTH_FIELDS.isdisjoint(given)
    ):
        return config
    num_bytes = slot_bytes(directory, kv_type, config.model_file)
    if not num_bytes:
        return config
    free = psutil.virtual_memory().available
    if config.memory_limit_mb is not None:
        needs = memory_needs(directory, replace(config, host_kv_slots=0), kv_type)
        without_slots = needs.of("shared") - config.num_kv_slots("shared") * num_bytes
        free = min(free, config.memory_limit_mb * 10**6 - without_slots)
    positions = max_positions(directory, DECODER_POSITIONS) or DEFAULT_POSITIONS
    most = config.kv_slots or max(int(free * ARENA_SHARE) // num_bytes, 0)
    longest = min(positions, most, MAX_SEQUENCE)
    if longest <= config.max_seq_len:
        return config
    room = config.min_response_len if "min_response_len" in given else 1
    pool = min(max(config.num_host_slots, longest), max(int(free * POOL_SHARE) // num_bytes, config.max_seq_len))
    return replace(
        config,
        max_prompt_len=longest - room,
        min_response_len=room,
        kv_slots=min(most, config.num_seqs("shared") * longest, MAX_KV_SLOTS),
        host_kv_slots=pool if config.host_kv_slots is None else config.host_kv_slots,
    )


def slot_bytes(directory: Path, kv_type: KVType, model_file: str = MODEL_XML) -> int:
    """Return the bytes of one KV slot of a model, over all layers."""
    scales = 2 * KV_TYPE_BYTES["f32"] if kv_type == "u8" else 0
    return sum(heads * (size * KV_TYPE_BYTES[kv_type] + scales) for heads, size in kv_shapes(directory, model_file))


def _within(limit_mb: int, layout: ProgramLayout, needs: MemoryNeeds, is_free: bool) -> ProgramLayout:
    """Return ``layout`` if it fits into the limit; else one program for all variants, if the layout ``is_free``."""
    for found in (layout, "shared") if is_free else (layout,):
        if needs.of(found) <= limit_mb * 10**6:
            return found
    needed = needs.of("shared" if is_free else layout)
    what = "one program" if is_free else f"PROGRAMS={layout}"
    raise ConfigError(
        f"MEMORY_LIMIT_MB={limit_mb}: this model needs about {-(-needed // 10**6)} MB with {what}: raise the limit, or lower "
        "KV_SLOTS, HOST_KV_SLOTS, MAX_NUM_SEQS, MAX_PROMPT_LEN or PREFILL_ROWS"
    )
