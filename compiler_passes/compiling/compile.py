"""Compiles the programs of a plan: one per variant (``separate``), one for all (``shared``), or one per group of variants."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar

import openvino as ov

from staticllm.core import (
    KVType,
    ModelShape,
    OnProgress,
    Part,
    ProgramLayout,
    ProgramMode,
    ProgramVariant,
    ProgressEvent,
    Variant,
    mode_of,
)
from staticllm.devices import default_mode, for_one_row, get_core
from staticllm.system.long_calls import attended, attended_each, told
from staticllm.system.mapped_weights import MappedWeights

from ..pass_pipeline import PassReport
from .chain import AnyProgram, CompiledChain
from .chain_compiler import ChainCompiler, UncompiledChain, compile_model

V = TypeVar("V", bound=ProgramVariant)
"""The sizes of a program."""
S = TypeVar("S")
"""The shape of a lowered model: its inputs, outputs and states."""
S_co = TypeVar("S_co", covariant=True)
V_contra = TypeVar("V_contra", bound=ProgramVariant, contravariant=True)
StartWith = Literal["all programs", "one program"]
"""Programs compiled before a model serves, if its variants use two."""
SECONDS_TO_HALF, SECONDS_PER_BYTE = 2.0, 3e-9
"""What compiling takes until it is shown as half done: something, and more for large weights."""


class Lowered(Protocol[V_contra, S_co]):
    """A model after its passes, with any sizes."""

    @property
    def shape(self) -> S_co:
        """The contract between the passes and the host."""
        ...

    @property
    def reports(self) -> Sequence[PassReport]:
        """What each pass did, in their order."""
        ...

    def specialise(self, variant: V_contra, is_static: bool = True) -> ov.Model:
        """Return the model of one variant's program. ``is_static``: check that every shape in it is static."""
        ...

    def share(self, variants: tuple[V_contra, ...]) -> ov.Model:
        """Return the model of one program for all ``variants``, with bounded dynamic sizes."""
        ...


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
        """``separate`` if each variant has a program of its own, whole or in blocks, else ``shared``."""
        return mode_of(self.layout)

    def program_group(self, variant: ProgramVariant) -> ProgramGroup:
        """Return the group of a variant. In ``shared`` mode the variants of one group share a program."""
        part = self._part(variant)
        is_apart = self.layout in (part, "phases")
        properties = dict(self.properties[part])
        if self._has_one_row(variant, part):
            properties = for_one_row(get_core(), self.device, properties)
        return ProgramGroup(part if is_apart else None, properties)

    def _has_one_row(self, variant: ProgramVariant, part: Part) -> bool:
        """Return whether the program of a variant may be one of static shape with one row."""
        return variant.rows == 1 and (self.mode == "separate" or (part == "few_rows" and self.few_rows == 1))

    def _part(self, variant: ProgramVariant) -> Part:
        return "few_rows" if variant.rows <= self.few_rows and "few_rows" in self.properties else variant.phase


@dataclass(frozen=True)
class CompilePlan(Generic[V, S]):
    """A model lowered for a device, and every choice that is made before compiling.

    ``later`` chooses the options with which some variants get a program of their own while the model serves; None if all programs
    are compiled with ``options``. ``chains`` compiles programs in blocks, if that is the layout. ``proof`` compares the lowered
    model with the original while it is compiled, and raises ``UnsupportedModelError`` if they differ; None if that was done.
    """

    lowered: Lowered[V, S]
    options: CompileOptions
    variants: tuple[V, ...]
    weights: MappedWeights
    later: Callable[[], CompileOptions] | None = None
    chains: ChainCompiler = field(default_factory=ChainCompiler)
    proof: Callable[[], object] | None = None

    def restricted(self, variants: Iterable[V]) -> CompilePlan[V, S]:
        """Return the plan for some of its variants only."""
        return replace(self, variants=tuple(variants))

    def without_weights(self) -> CompilePlan[V, S]:
        """Return the plan for programs whose blobs hold no weights."""
        properties: dict[Part, Mapping[str, Any]] = {
            part: {**values, "CACHE_MODE": "OPTIMIZE_SIZE"} for part, values in self.options.properties.items()
        }
        return replace(self, options=replace(self.options, properties=properties))


@dataclass(frozen=True)
class CompiledPrograms(Generic[V, S]):
    """Compiled programs of any origin, and what the host must know to run them.

    ``costs``: seconds per call, if a warm-up measured them before. ``kept_costs``: those that an earlier process measured at
    leisure.
    """

    shape: S
    options: CompileOptions
    compiled: Mapping[V, AnyProgram]
    costs: Mapping[V, float] = field(default_factory=dict)
    kept_costs: Mapping[V, float] = field(default_factory=dict)


DecoderPrograms: TypeAlias = CompiledPrograms[Variant, ModelShape]
"""The programs of a decoder."""


def compile_all(plan: CompilePlan[V, S], on_progress: OnProgress = lambda event: None) -> CompiledPrograms[V, S]:
    """Compile every variant of a plan.

    Raises:
        DeviceError: the device refused a program.
    """
    compiled = dict(compile_each(plan, on_progress))
    return CompiledPrograms(plan.lowered.shape, plan.options, compiled)


def compile_each(plan: CompilePlan[V, S], on_progress: OnProgress) -> Iterator[tuple[V, AnyProgram]]:
    """Compile the variants in order, a shared program for its first one, with events around each. Raises ``DeviceError``."""
    in_blocks = plan.options.layout == "blocks"
    programs = (
        _compile_chains(plan) if in_blocks else compile_programs(get_core(), plan.lowered, plan.variants, plan.options)
    )
    compiled_for = first_variants(plan.variants, plan.options)
    with closing(programs):  # or programs that nobody takes are compiled after an error
        for variant in plan.variants:
            if variant not in compiled_for:
                yield variant, next(programs)
                continue
            index = compiled_for.index(variant) + 1
            total = len(compiled_for)
            event = ProgressEvent("compile", index, total, 0.0, variant, is_done=False)
            on_progress(event)
            start = time.perf_counter()
            with told(on_progress, event, SECONDS_TO_HALF + plan.weights.num_bytes * SECONDS_PER_BYTE):
                compiled = next(programs)
            on_progress(replace(event, seconds=time.perf_counter() - start, is_done=True))
            yield variant, compiled


def _compile_chains(plan: CompilePlan[V, S]) -> Generator[CompiledChain, None, None]:
    def uncompiled(variant: V) -> UncompiledChain:
        properties = plan.options.program_group(variant).properties
        make = partial(plan.lowered.specialise, variant)
        return UncompiledChain(make, variant.rows, plan.options.device, properties, str(variant))

    return plan.chains.compile_each([uncompiled(variant) for variant in plan.variants])


def compile_programs(
    core: ov.Core, lowered: Lowered[V, S], variants: Sequence[V], options: CompileOptions
) -> Generator[AnyProgram, None, None]:
    """Compile the variants in their order. In ``shared`` mode those of one group get the same compiled model.

    Shared programs are compiled in parallel, because each compilation uses one core.

    Raises:
        DeviceError: the device refused a program.
        ClosedError: the calling thread leaves.
    """
    if options.mode == "separate":
        for variant in variants:
            model = lowered.specialise(variant, is_static=default_mode(options.device) == "separate")
            properties = options.program_group(variant).properties
            yield attended(partial(compile_model, core, model, options.device, properties, str(variant)))
        return
    groups = [options.program_group(variant) for variant in first_variants(variants, options)]
    models = [lowered.share(tuple(v for v in variants if options.program_group(v) == group)) for group in groups]
    calls = [
        partial(compile_model, core, model, options.device, group.properties, "the shared program")
        for model, group in zip(models, groups, strict=True)
    ]
    del models
    with closing(attended_each(calls)) as running:
        compiled: list[AnyProgram] = []
        for variant in variants:
            while len(compiled) <= groups.index(options.program_group(variant)):
                compiled.append(next(running))
            yield compiled[groups.index(options.program_group(variant))]


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
