"""Binds programs to host memory: one inference request per variant, whose ports are the host's own arrays from the start.

``kvcache/`` owns that memory. Ports are bound before the first inference, because OpenVINO kills the process if an output that
ran with the plugin's own buffer gets another one later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import openvino as ov
from numpy.typing import NDArray

from staticllm.core import KEY_POSITIONS, QUERY_POSITIONS, ModelShape, Variant
from staticllm.errors import ConfigError
from staticllm.ports import (
    ADAPTER_SCALES,
    CROSS_MASK,
    INPUT_IDS,
    LOGIT_ROWS,
    LOGITS,
    POSITION_IDS,
    ROPE_FACTORS,
    port_of,
)
from staticllm.system.threads import ThreadPool

from ...compiler_passes.compiling.chain import AnyProgram, bind_calls
from ...compiler_passes.states.store_kv_as import ELEMENT_TYPES
from ...kvcache.arena import Allocate
from ...kvcache.cache import KVCache
from ...kvcache.paged import kv_cache
from ...kvcache.step import BufferPool, StepBuffers


@dataclass(frozen=True)
class HostMemory:
    """The memory that programs are bound to."""

    cache: KVCache
    pool: BufferPool


@contextmanager
def allocating(
    shape: ModelShape, variants: Sequence[Variant], of_device: Allocate | None = None
) -> Iterator[Future[HostMemory]]:
    """Allocate the memory for ``variants`` on a thread of its own while a block compiles or imports their programs."""
    with ThreadPool(1, "staticllm-memory") as thread:
        yield thread.submit(allocate, shape, tuple(variants), of_device)


def allocate(shape: ModelShape, variants: Sequence[Variant], of_device: Allocate | None = None) -> HostMemory:
    """Allocate the memory for ``variants``, KV slots by ``of_device`` if it is given.

    Raises:
        ConfigError: there is not enough.
    """
    try:
        kv_lens = [variant.kv_len for variant in variants]
        cache = kv_cache(shape, kv_lens, of_device, max(variant.sequences for variant in variants))
        pool = BufferPool(variants, shape)
        pool.pages.idle_page = cache.idle_page
        return HostMemory(cache, pool)
    except MemoryError as error:
        raise ConfigError(
            f"not enough memory for the KV slots or masks ({error}): lower MAX_PROMPT_LEN or PREFILL_ROWS"
        ) from None


class BoundRequest:
    """A program that is bound to host memory. This is the one place where a program runs.

    A program is one compiled model or a chain of several calls (``chain.py``). For both:

    - Ports: every input and output of ``compiled`` is bound once, by its name in ``staticllm/ports.py``, before the first run.
      ``tensors`` may hold more names than the program has ports. What one call of a chain hands to the next is in memory of its
      own, which is no port.
    - Buffers: the caller owns the memory behind ``tensors``, writes inputs and reads outputs only between two runs, and never
      replaces an array. The inputs of cross-attention are the exception: ``Program`` binds them again.
    - ``run`` reads the bound inputs, overwrites all bound outputs, and calls ``meanwhile`` once, while the device runs. If it
      raises, the device has ended, and the outputs are undefined.
    """

    def __init__(self, compiled: AnyProgram, tensors: Mapping[str, ov.Tensor]) -> None:
        self.compiled = compiled
        self._tensors = tensors  # keeps them, and the arrays behind them, alive
        self._calls = bind_calls(compiled, tensors)

    @property
    def num_blocks(self) -> int:
        """The number of calls of which a run consists, apart from the host's; 1 for a whole program."""
        return max(len(self._calls) - 1, 1)

    def run(self, meanwhile: Callable[[], None] | None = None, between: Callable[[], None] | None = None) -> float:
        """Run once, call ``meanwhile`` while the device runs, and return the seconds that the device took.

        ``between`` is called after each call of the device but the last, while the device is free. It may run another program.
        """
        start = time.perf_counter()
        for block in range(self.num_blocks):
            self.run_blocks(range(block, block + 1), None if block else meanwhile)
            if between is not None and block < self.num_blocks - 1:
                between()
        return time.perf_counter() - start

    def run_blocks(self, blocks: range, meanwhile: Callable[[], None] | None = None) -> float:
        """Run some blocks of a run, the host's call with the first one, and return the seconds that they took.

        The blocks of a run come in their order, whatever other programs run between them. The outputs are there after the last.
        """
        start = time.perf_counter()
        num_before = len(self._calls) - self.num_blocks
        first = num_before + blocks.start
        for index in range(first if blocks.start else 0, num_before + blocks.stop):
            self._calls[index].start()
            try:
                if meanwhile is not None and index == first:
                    meanwhile()
            finally:
                self._calls[index].wait()
        return time.perf_counter() - start


class Program(BoundRequest):
    """One variant of a step program, ready to run.

    ``cross_tensors``: returns the tensors of cross-attention, by port, if the program takes one window or several;
    they are bound again when their number has changed.
    """

    def __init__(
        self,
        compiled: AnyProgram,
        buffers: StepBuffers,
        tensors: Mapping[str, ov.Tensor],
        cross_tensors: Callable[[], dict[str, ov.Tensor]] | None = None,
    ) -> None:
        super().__init__(compiled, tensors)
        self.variant = buffers.variant
        self.buffers = buffers
        self._cross_tensors = cross_tensors
        self._num_cross_windows = buffers.num_cross_windows

    def run_blocks(self, blocks: range, meanwhile: Callable[[], None] | None = None) -> float:
        """Run some blocks, as ``BoundRequest`` does."""
        if self._cross_tensors is not None and self._num_cross_windows != self.buffers.num_cross_windows:
            self._num_cross_windows = self.buffers.num_cross_windows
            self._calls[0].rebind(self._cross_tensors())
        return super().run_blocks(blocks, meanwhile)


class PagedProgram(Program):
    """A variant of a program that writes and reads pages. A call has as many rows as tokens, whatever the variant's."""

    def __init__(self, compiled: AnyProgram, buffers: StepBuffers, tensors: Mapping[str, ov.Tensor]) -> None:
        self._sizes = buffers.pool.pages.sizes
        self._names = {name for port in (*compiled.inputs, *compiled.outputs) for name in port.get_names()}
        super().__init__(compiled, buffers, {**tensors, **_row_tensors(buffers)})

    def run_blocks(self, blocks: range, meanwhile: Callable[[], None] | None = None) -> float:
        """Run the only block, as ``BoundRequest`` does."""
        if self._sizes != self.buffers.pool.pages.sizes:
            self._sizes = self.buffers.pool.pages.sizes
            tensors = _row_tensors(self.buffers)
            self._calls[0].rebind({name: tensor for name, tensor in tensors.items() if name in self._names})
        return super().run_blocks(blocks, meanwhile)


def _row_tensors(buffers: StepBuffers) -> dict[str, ov.Tensor]:
    """Return the tensors of a paged program's ports whose sizes are those of the next call."""
    pages = buffers.pool.pages
    arrays: dict[str, NDArray[Any]] = {
        INPUT_IDS: buffers.input_ids[0, : pages.num_rows],
        POSITION_IDS: buffers.position_ids[0, : pages.num_rows],
        LOGIT_ROWS: buffers.logit_rows[: pages.num_logits],
        LOGITS: buffers.logits[:, : pages.num_logits],
        ADAPTER_SCALES: buffers.adapter_scales[:, : pages.num_rows],
        **pages.arrays(),
    }
    return {name: ov.Tensor(array, shared_memory=True) for name, array in arrays.items() if array.size}


class BoundPrograms(Mapping[Variant, Program]):
    """The programs of all variants. A variant of a shared program is bound when it first runs; most variants never run."""

    def __init__(
        self,
        compiled: Mapping[Variant, AnyProgram],
        bind_one: Callable[[Variant, AnyProgram], Program],
    ) -> None:
        self._compiled = dict(compiled)
        self._bind = bind_one
        self._bound: dict[Variant, Program] = {}

    def add(self, variant: Variant, compiled: AnyProgram) -> None:
        """Add a variant for which there are buffers, or replace its program."""
        self._compiled[variant] = compiled
        self._bound.pop(variant, None)

    def __getitem__(self, variant: Variant) -> Program:
        program = self._bound.get(variant)
        if program is None:
            program = self._bind(variant, self._compiled[variant])
            self._bound[variant] = program
        return program

    def __iter__(self) -> Iterator[Variant]:
        return iter(self._compiled)

    def __len__(self) -> int:
        return len(self._compiled)

    @property
    def bound(self) -> tuple[Program, ...]:
        return tuple(self._bound.values())

    def compiled(self, variant: Variant) -> AnyProgram:
        """Return the compiled model of a variant, whether it is bound or not."""
        return self._compiled[variant]

    def is_static(self, variant: Variant) -> bool:
        """Return whether no other variant shares the program."""
        return not any(port.partial_shape.is_dynamic for port in self._compiled[variant].inputs)


def bind(compiled: AnyProgram, shape: ModelShape, cache: KVCache, buffers: StepBuffers) -> Program:
    """Bind the program of one variant to the host's memory: the arena, the recurrent states, and ``buffers``.

    docs/contract.md gives the shapes of the ports.
    """
    variant = buffers.variant
    adapters = {
        name: ov.Tensor(array, ov.Shape(array.shape), ELEMENT_TYPES[shape.adapter_type])
        for name, array in buffers.adapters.items()
    }
    if shape.page_size:
        for index, state in enumerate(shape.kv_states):
            pages = cache.arena.state_view(index, variant.kv_len)
            adapters[state.pages_name] = ov.Tensor(pages, ov.Shape(pages.shape), ELEMENT_TYPES[state.kv_type])
        return PagedProgram(compiled, buffers, adapters)
    tensors = {name: ov.Tensor(array, shared_memory=True) for name, array in _step_arrays(buffers).items()} | adapters
    for index, state in enumerate(shape.kv_states):
        slots = {
            state.past_name: cache.arena.state_view(index, variant.kv_len),
            state.present_name: buffers.present_of(index),
        }
        for name, array in slots.items():  # numpy has no bf16, so the type is given, not taken from the array
            tensors[name] = ov.Tensor(array, ov.Shape(array.shape), ELEMENT_TYPES[state.kv_type])
    takes_few = bool(shape.cross_states) and any(
        CROSS_MASK in port.get_names() and port.partial_shape[-1].is_dynamic for port in compiled.inputs
    )
    buffers.sees_all_cross_windows = not takes_few
    tensors |= _cross_tensors(shape, cache, buffers)
    for index, recurrent in enumerate(shape.recurrent_states):
        tensors[recurrent.past_name] = ov.Tensor(cache.states.past[index], shared_memory=True)
        tensors[recurrent.present_name] = ov.Tensor(cache.states.present[index], shared_memory=True)
    for name, tensor in tensors.items():
        assert port_of([name])[1].fits(list(tensor.shape), variant), f"{name} has shape {tensor.shape} at {variant}"
    again = partial(_cross_tensors, shape, cache, buffers) if takes_few else None
    return Program(compiled, buffers, tensors, again)


def _cross_tensors(shape: ModelShape, cache: KVCache, buffers: StepBuffers) -> dict[str, ov.Tensor]:
    """Return the tensors of cross-attention, by port: the mask, and the frames of the places that it has columns for."""
    if buffers.cross_mask is None:
        return {}
    tensors = {CROSS_MASK: ov.Tensor(buffers.cross_mask, shared_memory=True)}
    for index, state in enumerate(shape.cross_states):
        frames = cache.cross.state_view(index, buffers.num_cross_windows)
        tensors[state.past_name] = ov.Tensor(frames, ov.Shape(frames.shape), ELEMENT_TYPES[state.kv_type])
    return tensors


def _step_arrays(buffers: StepBuffers) -> dict[str, NDArray[Any]]:
    """Return the array of every port that holds neither KV slots nor states, by the port's name."""
    arrays: dict[str, NDArray[Any] | None] = {
        INPUT_IDS: buffers.input_ids,
        POSITION_IDS: buffers.position_ids,
        LOGIT_ROWS: buffers.logit_rows,
        LOGITS: buffers.logits,
        **{kind.port_name: mask for kind, mask in buffers.masks.items()},
        KEY_POSITIONS: buffers.key_positions,
        QUERY_POSITIONS: buffers.query_positions,
        ADAPTER_SCALES: buffers.adapter_scales if buffers.adapters else None,
        ROPE_FACTORS: buffers.rope_factors,
    }
    return {name: array for name, array in arrays.items() if array is not None}
