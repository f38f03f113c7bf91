"""Compiles the programs of a plan, and makes a warm runner of compiled programs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Generic, TypeAlias

import openvino as ov

from staticllm.adapters.adapter_set import AdapterSet
from staticllm.core import ModelShape, OnProgress, ProgressEvent, Variant
from staticllm.devices import get_core
from staticllm.errors import ConfigError
from staticllm.kvcache.cache import KVCache
from staticllm.kvcache.step import BufferPool, StepBuffers
from staticllm.pipelines.programs.bind import BoundPrograms, bind
from staticllm.pipelines.programs.compile import CompileOptions, compile_programs, first_variants
from staticllm.pipelines.programs.compile_plan import CompilePlan
from staticllm.pipelines.programs.lowered import S, V
from staticllm.pipelines.programs.model_runner import ModelRunner
from staticllm.pipelines.programs.warm_up import warm_up


@dataclass(frozen=True)
class CompiledPrograms(Generic[V, S]):
    """Compiled programs of any origin, and what the host must know to run them.

    ``costs``: seconds per call, if a warm-up measured them before. ``kept_costs``: those that an earlier process measured at
    leisure.
    """

    shape: S
    options: CompileOptions
    compiled: Mapping[V, ov.CompiledModel]
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


def compile_each(plan: CompilePlan[V, S], on_progress: OnProgress) -> Iterator[tuple[V, ov.CompiledModel]]:
    """Compile the variants in order, with an event before and after each program. A shared one is compiled for its first variant.

    Raises:
        DeviceError: the device refused a program.
    """
    programs = compile_programs(get_core(), plan.lowered, plan.variants, plan.options)
    compiled_for = first_variants(plan.variants, plan.options)
    for variant in plan.variants:
        if variant not in compiled_for:
            yield variant, next(programs)
            continue
        index, total = compiled_for.index(variant) + 1, len(compiled_for)
        on_progress(ProgressEvent("compile", index, total, 0.0, variant, is_done=False))
        start = time.perf_counter()
        compiled = next(programs)
        on_progress(ProgressEvent("compile", index, total, time.perf_counter() - start, variant))
        yield variant, compiled


@dataclass(frozen=True)
class HostMemory:
    """The memory that programs are bound to."""

    cache: KVCache
    pool: BufferPool


class Allocation:
    """Allocates the memory for ``variants`` on a thread of its own while a block compiles or imports their programs."""

    def __init__(self, shape: ModelShape, variants: Sequence[Variant]) -> None:
        self._arguments = shape, tuple(variants)
        self._thread = ThreadPoolExecutor(1, "staticllm-memory")
        self._result: Future[HostMemory] | None = None

    def __enter__(self) -> Allocation:
        self._result = self._thread.submit(_allocated, *self._arguments)
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.shutdown()

    def result(self) -> HostMemory:
        """Wait for the memory.

        Raises:
            ConfigError: there is not enough.
        """
        assert self._result is not None, "outside of the block"
        return self._result.result()


def _allocated(shape: ModelShape, variants: Sequence[Variant]) -> HostMemory:
    try:
        return HostMemory(KVCache(shape, [variant.kv_len for variant in variants]), BufferPool(variants, shape))
    except MemoryError as error:
        raise ConfigError(
            f"not enough memory for the KV slots or masks ({error}): lower MAX_PROMPT_LEN or PREFILL_ROWS"
        ) from None


def make_runner(
    programs: DecoderPrograms,
    on_progress: OnProgress = lambda event: None,
    planned: Sequence[Variant] = (),
    memory: Allocation | None = None,
    adapters: AdapterSet | None = None,
) -> ModelRunner:
    """Bind programs to the arena and to buffers, and warm them up.

    ``planned``: all variants, if some of them are compiled later; memory is allocated for these as well. ``memory``: is being
    allocated already. ``adapters``: what the inputs of ``shape.adapted`` hold.

    Raises:
        ConfigError: there is not enough memory for the arena or the masks.
    """
    shape, variants = programs.shape, tuple(planned) or tuple(programs.compiled)
    host = _allocated(shape, variants) if memory is None else memory.result()
    cache, pool = host.cache, host.pool
    if adapters is not None:
        for name, matrix in adapters.matrices(shape.adapted, shape.adapter_type).items():
            pool.adapters[name][:] = matrix
    bound = BoundPrograms(
        programs.compiled, lambda variant, compiled: bind(compiled, shape, cache, StepBuffers(variant, pool))
    )
    return ModelRunner(cache, bound, warm_up(bound, programs.costs, on_progress, programs.kept_costs), planned)
