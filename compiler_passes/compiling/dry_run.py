"""Runs a program apart from the engine, on random inputs and in memory of its own."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.core import KEY_POSITIONS, QUERY_POSITIONS, Variant
from staticllm.ports import (
    BLOCK_INDICES,
    BLOCK_INDICES_BEGINS,
    HIDDEN,
    INPUT_IDS,
    LOGIT_ROWS,
    MAX_CONTEXT_LEN,
    PAST_LENS,
    POSITION_IDS,
    SUBSEQUENCE_BEGINS,
    CallSizes,
    find_encoder_port,
    find_port,
    port_of,
)
from staticllm.system.long_calls import attended

from ..graph.paged_graph import PAGE_SIZE
from .chain import AnyProgram, CompiledChain

VALUE_SCALE = 0.5
"""Standard deviation of random KV slots and states, close to real ones."""
ADAPTER_SCALE = 0.02
"""Standard deviation of random adapter matrices; with larger ones, values explode in deep layers."""


def run_apart(compiled: AnyProgram, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Run a program of any kind once in memory of its own; feeds and copied outputs are by port name. Raises ``RuntimeError``."""
    return attended(partial(_run_apart, compiled, feeds))


def _run_apart(compiled: AnyProgram, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    if isinstance(compiled, CompiledChain):
        return _run_chain(compiled, feeds)
    request = bound_request(compiled, feeds)
    request.infer()
    return {_name_of(port): np.array(request.get_tensor(port).data) for port in compiled.outputs}


def _run_chain(chain: CompiledChain, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    tensors = {port.name: ov.Tensor(port.element_type, ov.Shape(port.shape)) for port in chain.outputs}
    for port in chain.inputs:
        array = feeds[port.name]
        tensors[port.name] = ov.Tensor(array, ov.Shape(array.shape), port.element_type)
    for call in chain.bound_calls(tensors):
        call.start()
        call.wait()
    return {port.name: np.array(tensors[port.name].data) for port in chain.outputs}


def bound_request(compiled: ov.CompiledModel, feeds: Mapping[str, NDArray[Any]]) -> ov.InferRequest:
    """Return a request that reads ``feeds``, by port name, which the caller keeps.

    Raises:
        RuntimeError: a wrong shape.
    """
    request = compiled.create_infer_request()
    for port in compiled.inputs:
        (name,) = port.get_names() & feeds.keys()  # plugins add names of their own
        array = feeds[name]
        request.set_tensor(port, ov.Tensor(array, ov.Shape(array.shape), port.get_element_type()))
    return request


def _name_of(port: ov.ConstOutput) -> str:
    """Return the port's name in the contract of step programs or encoder programs, or the first of its names."""
    names: list[str] = sorted(port.get_names())
    return next((name for name in names if find_port(name) or find_encoder_port(name)), names[0])


def random_feeds(compiled: AnyProgram, variant: Variant) -> dict[str, NDArray[Any]]:
    """Return inputs of a program at one variant, by port name, the same in every process: tokens and KV slots, causal mask.

    Over pages, the rows and the KV length are divided among the variant's sequences.
    """
    random = np.random.default_rng(0)
    feeds = dict[str, NDArray[Any]]()
    pages = _pages(variant)
    num_pages = len(pages[BLOCK_INDICES])
    rows = variant.rows
    kv_len = variant.kv_len
    for port in compiled.inputs:
        name, contract = port_of(port.get_names())
        of_call = contract.ranges(len(port.partial_shape), CallSizes.of(variant))
        if name in pages:
            feeds[name] = pages[name]
            continue
        own = [
            None
            if axis in of_call and dim.is_dynamic
            else num_pages
            if dim.get_max_length() < 0
            else dim.get_max_length()
            for axis, dim in enumerate(port.partial_shape)
        ]
        shape = contract.shape_at(own, variant)
        if name == POSITION_IDS and len(shape) == 1:
            feeds[name] = pages[POSITIONS_IN_PAGES]
        elif name == INPUT_IDS:
            feeds[name] = random.integers(0, 100, shape)
        elif name == POSITION_IDS:
            feeds[name] = np.broadcast_to(np.arange(kv_len, kv_len + rows), shape).copy()
        elif name == LOGIT_ROWS:
            feeds[name] = np.arange(rows - variant.num_logits, rows)
        elif name == KEY_POSITIONS:
            feeds[name] = np.arange(kv_len + rows, dtype=np.int32).reshape(shape)
        elif name == QUERY_POSITIONS:
            feeds[name] = np.arange(kv_len, kv_len + rows, dtype=np.int32).reshape(shape)
        elif name.startswith("mask."):
            seen = np.arange(kv_len + rows)[None] <= np.arange(kv_len, kv_len + rows)[:, None]
            feeds[name] = np.where(seen, 0, HIDDEN).astype(np.float32).reshape(shape)
        else:  # KV slots, recurrent states and adapters
            scale = ADAPTER_SCALE if name.startswith("adapter") else VALUE_SCALE
            feeds[name] = _random_values(random, shape, port.get_element_type(), scale)
    return feeds


POSITIONS_IN_PAGES = "positions"


def _pages(variant: Variant) -> dict[str, NDArray[Any]]:
    """Return the ports of page tables for a call whose sequences have equal shares of the rows and of the KV length."""
    count = variant.sequences
    past = np.full(count, variant.kv_len // count)
    rows = np.full(count, variant.rows // count)
    rows[0] += variant.rows - rows.sum()
    pages = -(-(past + rows) // PAGE_SIZE)
    return {
        PAST_LENS: past.astype(np.int32),
        SUBSEQUENCE_BEGINS: np.cumsum([0, *rows]).astype(np.int32),
        BLOCK_INDICES: np.arange(pages.sum(), dtype=np.int32),
        BLOCK_INDICES_BEGINS: np.cumsum([0, *pages]).astype(np.int32),
        MAX_CONTEXT_LEN: np.array((past + rows).max(), np.int32),
        POSITIONS_IN_PAGES: np.concatenate(
            [np.arange(start, start + each) for start, each in zip(past, rows, strict=True)]
        ),
    }


def _random_values(
    random: np.random.Generator, shape: tuple[int, ...], element_type: ov.Type, scale: float
) -> NDArray[Any]:
    values = (random.standard_normal(shape) * scale).astype(np.float32)
    kind = element_type.get_type_name()
    if kind == "bf16":  # the upper half of an f32; numpy has no bf16
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return random.integers(0, 256, shape).astype(np.uint8) if kind == "u8" else values.astype(element_type.to_dtype())
