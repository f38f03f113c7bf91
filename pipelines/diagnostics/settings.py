"""Describes the settings of programs, precision and quantization of activations, and times the calibration's candidates."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, cast

import openvino as ov

from staticllm.config import StaticLLMConfig
from staticllm.core import Part, Variant
from staticllm.devices import get_core, is_present, kind, type_name
from staticllm.model_files.model_at import check_model_dir

from ...compiler_passes.compiling.autotune import LARGE_GROUP, Probe, repeated_matrices
from ...compiler_passes.compiling.chain import device_models
from ...compiler_passes.compiling.compile import CompileOptions
from ..loading.decoder_kind import prepare
from ..programs.bind import BoundPrograms
from .reports import ChosenSettings, TokenTimes

PRECISION, GROUP_SIZE = "INFERENCE_PRECISION_HINT", "DYNAMIC_QUANTIZATION_GROUP_SIZE"
GROUP_SIZES = (0, 32, 128)
"""Activations that share a scale: 0 quantizes none, 32 is the plugin's own, 128 is faster and diverges more."""
PRECISIONS = {"FP32": "f32", "BF16": "bf16"}
"""Element types of a CPU's computation, by OpenVINO's name of the capability."""
PROBED_ROWS = (1, 8, 32, 128)
"""Rows of a decode step, a packed step, a short prompt and a longer one."""


def label_of(core: ov.Core, device: str, properties: Mapping[str, Any]) -> str:
    """Return the settings in words, for example ``bf16, groups of 32``; what ``properties`` leave open is the device's own."""
    supported = core.get_property(device, "SUPPORTED_PROPERTIES") if is_present(core, device) else ()
    own = {name: core.get_property(device, name) for name in (PRECISION, GROUP_SIZE) if name in supported}
    return _label({**own, **properties})


def chosen_settings(programs: BoundPrograms) -> list[ChosenSettings]:
    """Return the settings of each compiled program of a pipeline, and the calls that it runs."""
    groups: dict[int, list[Variant]] = {}
    for variant in programs:
        groups.setdefault(id(programs.compiled(variant)), []).append(variant)
    found = [_of_program(device_models(programs.compiled(variants[0]))[0], variants) for variants in groups.values()]
    return sorted(found, key=lambda each: (each.least_rows, each.most_rows))


def planned_settings(core: ov.Core, options: CompileOptions) -> dict[Part, str]:
    """Return the settings with which the calls of each part of the work will be compiled."""
    return {part: label_of(core, options.device, each) for part, each in options.properties.items()}


def candidates(core: ov.Core, options: CompileOptions) -> dict[str, Mapping[str, Any]]:
    """Return the properties of each setting by its label: all that this CPU can compute, and the chosen ones."""
    usual = next(iter(options.properties.values()))
    capabilities = core.get_property(options.device, "OPTIMIZATION_CAPABILITIES")
    precisions = [name for capability, name in PRECISIONS.items() if capability in capabilities]
    grid = [{**usual, PRECISION: name, GROUP_SIZE: size} for name in precisions for size in GROUP_SIZES]
    return {label_of(core, options.device, each): each for each in (*grid, *options.properties.values())}


def probe_times(models_path: str | os.PathLike[str], device: str, config: StaticLLMConfig) -> Iterator[TokenTimes]:
    """Yield the times of one product with each shape of matrix that the model repeats, with each setting and number of rows.

    The calibration chooses by the same products (``compiler_passes/compiling/autotune.py``). The candidates run in turn, and no
    cache holds the weights. Only the CPU has candidates, and only models with compressed weights.

    Raises:
        StaticLLMError: as for ``prepare``.
    """
    plan = prepare(check_model_dir(models_path, False), device, config)
    matrices = repeated_matrices(plan.lowered.graph.model) if kind(device) == "CPU" else []
    if not matrices:
        return
    probe = Probe(get_core(), device, matrices)
    settings = candidates(get_core(), plan.options)
    if not probe.takes_large_groups:
        settings = {label: each for label, each in settings.items() if each.get(GROUP_SIZE) != LARGE_GROUP}
    for rows in PROBED_ROWS:
        seconds = probe.seconds(rows, list(settings.values()), is_cold=True)
        yield TokenTimes(rows, {label: 1e3 * time for label, time in zip(settings, seconds, strict=True)})


def _of_program(compiled: ov.CompiledModel, variants: list[Variant]) -> ChosenSettings:
    rows = [variant.rows for variant in variants]
    return ChosenSettings(
        settings=_label(settings_in(compiled)),
        phases=tuple(sorted({variant.phase for variant in variants})),
        least_rows=min(rows),
        most_rows=max(rows),
    )


def settings_in(compiled: ov.CompiledModel) -> dict[str, Any]:
    """Return the properties that a program was compiled with, of those that are its settings."""
    supported = compiled.get_property("SUPPORTED_PROPERTIES")
    return {name: compiled.get_property(name) for name in (PRECISION, GROUP_SIZE) if name in supported}


def _label(properties: Mapping[str, Any]) -> str:
    """Return the settings in words; the CPU's plugin and users give the size of groups as a number or as its digits."""
    words = []
    if PRECISION in properties:
        words.append(type_name(properties[PRECISION]))
    if GROUP_SIZE in properties:
        size = int(cast("str", properties[GROUP_SIZE]))
        words.append(f"groups of {size}" if size else "no quantization")
    return ", ".join(words) or "the device's own"
