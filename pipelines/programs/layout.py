"""Chooses which variants share a program, by the device, the size of the weights and the memory limit."""

from __future__ import annotations

from pathlib import Path

from staticllm.config import StaticLLMConfig
from staticllm.core import KV_TYPE_BYTES, KVType, ProgramLayout, ProgramMode
from staticllm.devices import default_mode, kind
from staticllm.errors import ConfigError
from staticllm.model_dir import kv_shapes, weights_size

SMALL_WEIGHTS, LARGE_WEIGHTS = 256 << 20, 1 << 30
"""Bytes. Weights below the second may be in memory twice."""
BASE_BYTES, PACKED_SHARE = 410 << 20, 1.1
"""Bytes of interpreter, libraries, graph, buffers and the activations of the largest calls, and the bytes of packed weights as
a share of their file. Measured with the 0.5B model (docs/decisions.md)."""


def program_mode(device: str, config: StaticLLMConfig) -> ProgramMode:
    """Return ``separate`` if each variant has a program of its own on this device, else ``shared``."""
    if config.programs == "auto":
        return default_mode(device)
    return "separate" if config.programs == "separate" else "shared"


def program_layout(device: str, path: Path, config: StaticLLMConfig) -> ProgramLayout:
    """Return which variants share a program.

    A shared program prepares all its nodes again, about 20 microseconds each, when it runs with another number of rows than
    before, and on the CPU a program compiled for a single row is faster. A second program needs a copy of the weights. Therefore
    small models have one program per phase, medium ones a second program for calls of few rows, and large ones one program. On a
    CPU with ``MEMORY_LIMIT_MB``, a model has one program if two would exceed the limit.

    Raises:
        ConfigError: even one program would exceed ``MEMORY_LIMIT_MB``.
    """
    if config.programs == "separate" or (config.programs == "auto" and default_mode(device) == "separate"):
        return "separate"
    size = weights_size(path, config.weights_path)
    layout: ProgramLayout = "shared"
    if config.programs != "auto":
        layout = config.programs
    elif size < SMALL_WEIGHTS:
        layout = "phases"
    elif size < LARGE_WEIGHTS and kind(device) == "CPU":
        layout = "few_rows"
    if config.memory_limit_mb is None or kind(device) != "CPU":
        return layout
    rest = BASE_BYTES + config.num_kv_slots("shared") * slot_bytes(path, config.kv_cache_precision or "f32")
    return _within(config.memory_limit_mb, layout, rest, int(PACKED_SHARE * size), config.programs == "auto")


def slot_bytes(directory: Path, kv_type: KVType) -> int:
    """Return the bytes of one KV slot of a model, over all layers."""
    scales = 2 * KV_TYPE_BYTES["f32"] if kv_type == "u8" else 0
    return sum(heads * (size * KV_TYPE_BYTES[kv_type] + scales) for heads, size in kv_shapes(directory))


def _within(limit_mb: int, layout: ProgramLayout, rest: int, packed: int, is_free: bool) -> ProgramLayout:
    """Return ``layout`` if it fits into the limit; else one program for all variants, if the layout ``is_free``."""
    copies = 1 if layout == "shared" else 2
    if rest + copies * packed <= limit_mb * 10**6:
        return layout
    if is_free and rest + packed <= limit_mb * 10**6:
        return "shared"
    needed = rest + (1 if is_free else copies) * packed
    what = "one program" if is_free else f"PROGRAMS={layout}"
    raise ConfigError(
        f"MEMORY_LIMIT_MB={limit_mb}: this model needs about {-(-needed // 10**6)} MB with {what}: raise the limit, or lower "
        "KV_SLOTS, MAX_NUM_SEQS or MAX_PROMPT_LEN"
    )
