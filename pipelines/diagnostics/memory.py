"""Estimates the memory that a model would need on a device, before anything is compiled, and whether it fits."""

from __future__ import annotations

import os
from dataclasses import asdict

import openvino as ov
import psutil

from staticllm.config import StaticLLMConfig
from staticllm.devices import get_core, is_present, kind
from staticllm.pipelines.diagnostics.inspect import inspect_model
from staticllm.pipelines.diagnostics.reports import MemoryEstimate, ProgramsEstimate, VariantEstimate, VariantReport


def estimate_memory(models_path: str | os.PathLike[str], device: str, config: StaticLLMConfig) -> MemoryEstimate:
    """Estimate the bytes of weights, KV slots, states and buffers on ``device``, and whether they fit into its memory.

    Raises:
        ModelError: a file of the model is missing or damaged.
        UnsupportedModelError: a pass cannot lower the model.
        ConfigError: an option is impossible for this model.
        DeviceError: the device is not on this machine, and is neither an NPU nor a GPU.
    """
    report = inspect_model(models_path, device, config)
    copies = report.num_programs if kind(device) == "CPU" else 1  # the CPU packs the weights for each program
    parts = {
        "weights": report.weights_bytes * copies,
        "KV slots": report.kv.bytes,
        "host pool, at most": report.kv.host_bytes,
        "recurrent states": report.recurrent.bytes_a_sequence * 2,
        "buffers": report.buffers_bytes,
    }
    needed, available = sum(parts.values()), device_memory(get_core(), device)
    return MemoryEstimate(
        model=report.model,
        device=device,
        is_present=is_present(get_core(), device),
        programs=ProgramsEstimate(report.programs, report.num_programs, copies),
        variants=tuple(_with_mask_bytes(variant, len(report.masks)) for variant in report.variants),
        bytes=parts,
        needed=needed,
        available=available,
        fits=None if available is None else needed <= available,
    )


def _with_mask_bytes(variant: VariantReport, num_masks: int) -> VariantEstimate:
    mask_bytes = 4 * variant.rows * (variant.kv_len + variant.rows) * num_masks
    return VariantEstimate(**asdict(variant), mask_bytes=mask_bytes)


def device_memory(core: ov.Core, device: str) -> int | None:
    """Return the free bytes of a CPU's memory, or all bytes of a GPU or NPU; None if the device does not report them."""
    if kind(device) == "CPU":
        return int(psutil.virtual_memory().available)
    for name in ("GPU_DEVICE_TOTAL_MEM_SIZE", "NPU_DEVICE_TOTAL_MEM_SIZE"):
        try:
            return int(core.get_property(device, name))
        except (RuntimeError, TypeError, ValueError):
            continue
    return None
