"""A program run apart from everybody: on random rows, in memory of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.core import KEY_POSITIONS, QUERY_POSITIONS, Variant
from staticllm.kvcache.step import HIDDEN

_OURS = re.compile(r"logits|present\..*|state\.\d+\.next")
ROW_SCALE = 0.5  # of random rows and states: about what keys and values are


def run_apart(compiled: ov.CompiledModel, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """What a program answers to ``feeds``: copies, by the names of its ports."""
    request = compiled.create_infer_request()
    for port in compiled.inputs:
        (name,) = port.get_names() & feeds.keys()
        array = feeds[name]
        request.set_tensor(port, ov.Tensor(array, ov.Shape(array.shape), port.get_element_type()))
    request.infer()
    return {_name(port): np.array(request.get_tensor(port).data) for port in compiled.outputs}


def _name(port: Any) -> str:
    """The name that a pass gave; plugins add names of their own."""
    names: set[str] = port.get_names()
    return next(name for name in names if _OURS.fullmatch(name))


def random_feeds(compiled: ov.CompiledModel, variant: Variant) -> dict[str, NDArray[Any]]:
    """Random rows under a causal mask, at one variant."""
    random, feeds = np.random.default_rng(0), dict[str, NDArray[Any]]()
    rows, kv_len = variant.rows, variant.kv_len
    for port in compiled.inputs:
        for name in port.get_names():
            shape = _shape(name, port.partial_shape, variant)
            if name == "input_ids":
                feeds[name] = random.integers(0, 100, shape)
            elif name == "position_ids":
                feeds[name] = np.broadcast_to(np.arange(kv_len, kv_len + rows), shape).copy()
            elif name == "logit_rows":
                feeds[name] = np.arange(rows - variant.sequences, rows)
            elif name == KEY_POSITIONS:
                feeds[name] = np.arange(kv_len + rows, dtype=np.int32).reshape(shape)
            elif name == QUERY_POSITIONS:
                feeds[name] = np.arange(kv_len, kv_len + rows, dtype=np.int32).reshape(shape)
            elif name.startswith("mask."):
                seen = np.arange(kv_len + rows)[None] <= np.arange(kv_len, kv_len + rows)[:, None]
                feeds[name] = np.where(seen, 0, HIDDEN).astype(np.float32).reshape(shape)
            elif name.startswith(("past.", "state.")):
                feeds[name] = _rows(random, shape, port.get_element_type())
    return feeds


def _shape(name: str, shape: ov.PartialShape, variant: Variant) -> tuple[int, ...]:
    """The sizes of a port at a variant; what is static stays."""
    rows, kv_len = variant.rows, variant.kv_len
    last = shape.rank.get_length() - 1
    dynamic = {last: rows}
    if name.startswith("past."):
        dynamic = {2: kv_len}
    elif name.startswith("mask."):
        dynamic = {2: rows, 3: kv_len + rows}
    elif name == KEY_POSITIONS:
        dynamic = {3: kv_len + rows}
    elif name == QUERY_POSITIONS:
        dynamic = {2: rows}
    elif name == "logit_rows":
        dynamic = {0: variant.sequences}
    return tuple(dim.get_length() if dim.is_static else dynamic[axis] for axis, dim in enumerate(shape))


def _rows(random: np.random.Generator, shape: tuple[int, ...], element_type: ov.Type) -> NDArray[Any]:
    values = (random.standard_normal(shape) * ROW_SCALE).astype(np.float32)
    kind = element_type.get_type_name()
    if kind == "bf16":  # the upper half of an f32; numpy has no such type
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return random.integers(0, 256, shape).astype(np.uint8) if kind == "u8" else values.astype(element_type.to_dtype())
