"""Compiles one static program per variant (``separate``), one for all variants (``shared``), or one per group of variants."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import openvino as ov

from staticllm.core import KVType, Part, ProgramLayout, ProgramMode, ProgramVariant
from staticllm.devices import default_mode
from staticllm.errors import DeviceError, last_line
from staticllm.pipelines.programs.lowered import Lowered, S, V


@dataclass(frozen=True)
class ProgramGroup:
    """Variants that share a program: those of one part, or of all parts (None). They are compiled with the same properties."""

    part: Part | None
    properties: Mapping[str, Any]


@dataclass(frozen=True)
class CompileOptions:
    """Where and how programs are compiled.

    ``properties``: OpenVINO's properties of each part that has its own. ``few_rows``: the most rows of a call of the part
    ``few_rows``. ``kv_type`` is None for a model without KV slots.
    """

    device: str
    layout: ProgramLayout
    kv_type: KVType | None
    properties: Mapping[Part, Mapping[str, Any]]
    few_rows: int = 1

    @property
    def mode(self) -> ProgramMode:
        """``separate`` if each variant has a program of its own, else ``shared``."""
        return "separate" if self.layout == "separate" else "shared"

    def program_group(self, variant: ProgramVariant) -> ProgramGroup:
        """Return the group of a variant. In ``shared`` mode the variants of one group share a program."""
        part = self._part(variant)
        is_apart = self.layout in (part, "phases")
        return ProgramGroup(part if is_apart else None, dict(self.properties[part]))

    def _part(self, variant: ProgramVariant) -> Part:
        return "few_rows" if variant.rows <= self.few_rows and "few_rows" in self.properties else variant.phase


def compile_programs(
    core: ov.Core, lowered: Lowered[V, S], variants: Sequence[V], options: CompileOptions
) -> Iterator[ov.CompiledModel]:
    """Compile the variants in their order. In ``shared`` mode those of one group get the same compiled model.

    Shared programs are compiled in parallel, because each compilation uses one core.

    Raises:
        DeviceError: the device refused a program.
    """
    if options.mode == "separate":
        for variant in variants:
            model = lowered.specialise(variant, is_static=default_mode(options.device) == "separate")
            yield _compile(core, model, options.device, options.program_group(variant).properties, str(variant))
        return
    groups = [options.program_group(variant) for variant in first_variants(variants, options)]
    models = [lowered.share(tuple(v for v in variants if options.program_group(v) == group)) for group in groups]
    if len(groups) == 1:  # without a pool, which an interpreter that ends refuses to the thread in the background
        program = _compile(core, models[0], options.device, groups[0].properties, "the shared program")
        yield from (program for _ in variants)
        return
    with ThreadPoolExecutor(len(groups)) as pool:
        compiled = [
            pool.submit(_compile, core, model, options.device, group.properties, "the shared program")
            for model, group in zip(models, groups, strict=True)
        ]
        for variant in variants:
            yield compiled[groups.index(options.program_group(variant))].result()


def first_variants(variants: Sequence[V], options: CompileOptions) -> list[V]:
    """Return the variants for which a program is compiled: all, or the first of each group if programs are shared."""
    if options.mode == "separate":
        return list(variants)
    groups: list[ProgramGroup] = []
    found: list[V] = []
    for variant in variants:
        group = options.program_group(variant)
        if group not in groups:
            groups.append(group)
            found.append(variant)
    return found


def _compile(core: ov.Core, model: ov.Model, device: str, properties: Mapping[str, Any], what: str) -> ov.CompiledModel:
    try:
        return core.compile_model(model, device, dict(properties))
    except RuntimeError as error:
        raise DeviceError(f"{device} refused {what}: {last_line(error)}") from error
