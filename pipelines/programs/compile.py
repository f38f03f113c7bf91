"""Programs: compiled step programs, one for each variant (``separate``), one for all (``shared``), or one for some of them.

Either way the runner sees the same thing: for each variant an inference request whose ports are bound, once, to host memory
that ``kvcache/`` owns. Bound before the first inference: OpenVINO kills the process when an output that ran with the
plugin's own buffer is given another region later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import openvino as ov

from staticllm.compiler_passes.lower import LoweredModel
from staticllm.compiler_passes.store_kv_as import ELEMENT_TYPES
from staticllm.core import (
    KEY_POSITIONS,
    QUERY_POSITIONS,
    KVType,
    ModelShape,
    Part,
    ProgramLayout,
    ProgramMode,
    Variant,
)
from staticllm.devices import default_mode
from staticllm.errors import DeviceError, last_line
from staticllm.kvcache.cache import KVCache
from staticllm.kvcache.step import StepBuffers


@dataclass(frozen=True)
class CompileOptions:
    """Where and how programs are compiled. ``properties`` are OpenVINO's, for each part that has its own."""

    device: str
    layout: ProgramLayout
    kv_type: KVType
    properties: Mapping[Part, Mapping[str, Any]]

    @property
    def mode(self) -> ProgramMode:
        """Whether a variant has a program to itself."""
        return "separate" if self.layout == "separate" else "shared"

    def family(self, variant: Variant) -> tuple[Part | None, dict[str, Any]]:
        """Variants with equal families share a program, in ``shared`` mode."""
        part = self._part(variant)
        is_apart = self.layout in (part, "phases")
        return part if is_apart else None, dict(self.properties[part])

    def _part(self, variant: Variant) -> Part:
        return "single_row" if variant.rows == 1 and "single_row" in self.properties else variant.phase


class Program:
    """One variant, ready to run: ``run`` reads the bound inputs and overwrites the bound outputs."""

    def __init__(self, compiled: ov.CompiledModel, buffers: StepBuffers, tensors: Mapping[str, ov.Tensor]) -> None:
        self.variant = buffers.variant
        self.buffers = buffers
        self.compiled = compiled
        self._request = compiled.create_infer_request()
        self._tensors = tensors  # keeps them, and the arrays behind them, alive
        for port in (*compiled.inputs, *compiled.outputs):
            (name,) = port.get_names() & tensors.keys()  # plugins add names of their own
            self._request.set_tensor(port, tensors[name])

    def run(self, meanwhile: Callable[[], None] | None = None) -> float:
        """Run once, and ``meanwhile`` beside it. Returns the seconds that the device took."""
        start = time.perf_counter()
        self._request.start_async()
        try:
            if meanwhile is not None:
                meanwhile()
        finally:
            self._request.wait()
        return time.perf_counter() - start


class BoundPrograms(Mapping[Variant, Program]):
    """The programs of all variants. A variant of a shared program is bound when it runs first: most never do."""

    def __init__(
        self,
        compiled: Mapping[Variant, ov.CompiledModel],
        bind_one: Callable[[Variant, ov.CompiledModel], Program],
    ) -> None:
        self._compiled, self._bind = dict(compiled), bind_one
        self._bound: dict[Variant, Program] = {}

    def add(self, variant: Variant, compiled: ov.CompiledModel) -> None:
        """One more variant, of those that there are buffers for, or another program for it."""
        self._compiled[variant] = compiled
        self._bound.pop(variant, None)

    def __getitem__(self, variant: Variant) -> Program:
        program = self._bound.get(variant)
        if program is None:
            program = self._bound[variant] = self._bind(variant, self._compiled[variant])
        return program

    def __iter__(self) -> Iterator[Variant]:
        return iter(self._compiled)

    def __len__(self) -> int:
        return len(self._compiled)

    def compiled(self, variant: Variant) -> ov.CompiledModel:
        return self._compiled[variant]

    def is_static(self, variant: Variant) -> bool:
        """Whether the program is this variant's alone."""
        return not any(port.partial_shape.is_dynamic for port in self._compiled[variant].inputs)


def compile_programs(
    core: ov.Core, lowered: LoweredModel, variants: Sequence[Variant], options: CompileOptions
) -> Iterator[ov.CompiledModel]:
    """Compile the variants in their order; in ``shared`` mode those of one family get the same compiled model.

    Shared programs are compiled at once: each keeps one core busy.

    Raises:
        DeviceError: the device refused a program.
    """
    if options.mode == "separate":
        for variant in variants:
            model = lowered.specialise(variant, is_static=default_mode(options.device) == "separate")
            yield _compile(core, model, options.device, options.family(variant)[1], str(variant))
        return
    families = [options.family(variant) for variant in first_variants(variants, options)]
    models = [lowered.share(tuple(v for v in variants if options.family(v) == family)) for family in families]
    with ThreadPoolExecutor(len(families)) as pool:
        compiled = [
            pool.submit(_compile, core, model, options.device, properties, "the shared program")
            for model, (_, properties) in zip(models, families, strict=True)
        ]
        for variant in variants:
            yield compiled[families.index(options.family(variant))].result()


def first_variants(variants: Sequence[Variant], options: CompileOptions) -> list[Variant]:
    """Those for which something is compiled: each, or the first of its family where programs are shared."""
    if options.mode == "separate":
        return list(variants)
    families = [options.family(variant) for variant in variants]
    return [variant for i, variant in enumerate(variants) if families[i] not in families[:i]]


def _compile(core: ov.Core, model: ov.Model, device: str, properties: Mapping[str, Any], what: str) -> ov.CompiledModel:
    try:
        return core.compile_model(model, device, dict(properties))
    except RuntimeError as error:
        raise DeviceError(f"{device} refused {what}: {last_line(error)}") from error


def bind(compiled: ov.CompiledModel, shape: ModelShape, cache: KVCache, buffers: StepBuffers) -> Program:
    """Make a program of one variant whose ports are the host's own memory."""
    arrays: dict[str, Any] = {
        "input_ids": buffers.input_ids,
        "position_ids": buffers.position_ids,
        "logit_rows": buffers.logit_rows,
        "logits": buffers.logits,
        **{kind.port_name: mask for kind, mask in buffers.masks.items()},
        KEY_POSITIONS: buffers.key_positions,
        QUERY_POSITIONS: buffers.query_positions,
    }
    tensors = {name: ov.Tensor(array, shared_memory=True) for name, array in arrays.items() if array is not None}
    for index, state in enumerate(shape.kv_states):
        rows = {
            state.past_name: cache.arena.state_view(index, buffers.variant.kv_len),
            state.present_name: buffers.present_of(index),
        }
        for name, array in rows.items():  # numpy has no bf16: the type is said, not read off the array
            tensors[name] = ov.Tensor(array, ov.Shape(array.shape), ELEMENT_TYPES[state.kv_type])
    for index, recurrent in enumerate(shape.recurrent_states):
        tensors[recurrent.past_name] = ov.Tensor(cache.states.past[index], shared_memory=True)
        tensors[recurrent.present_name] = ov.Tensor(cache.states.present[index], shared_memory=True)
    return Program(compiled, buffers, tensors)
