"""Sets the element type of the KV slots, independent of the type in which attention computes.

f16 and bf16 slots halve the arena; the Converts that this pass adds are fused or cheap on every plugin tested so far. u8 slots
quarter it: each slot of each head has its own scale and smallest value in another state, as the values in KIVI (arXiv
2402.02750).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from staticllm.core import KVState, KVType

from ..graph.step_graph import StepGraph, named_parameter, named_result, redirect

STAGE = "store_kv_as"
ELEMENT_TYPES: dict[KVType, ov.Type] = {
    "f32": ov.Type.f32,
    "f16": ov.Type.f16,
    "bf16": ov.Type.bf16,
    "u8": ov.Type.u8,
}
LEVELS = 255.0
SMALLEST_SCALE = 1e-8  # of a row whose values are all the same


def store_kv_as(graph: StepGraph, kv_type: KVType) -> None:
    """Give the ports ``past.*`` and ``present.*`` the type ``kv_type``, and convert between it and the type of attention."""
    graph.kv_states = [replace(state, kv_type=kv_type) for state in graph.kv_states]
    scales = []
    changed = 0
    for kv_state in graph.kv_states:
        if kv_type == "u8":
            scales.append(_quantize(graph.model, kv_state, _past(graph, kv_state)))
            changed += 1
        else:
            changed += _convert(graph.model, kv_state, _past(graph, kv_state))
    graph.kv_states += scales
    graph.cross_states = [replace(state, kv_type=cross_type(kv_type)) for state in graph.cross_states]
    for state in graph.cross_states:
        changed += _convert_past(graph.model, state, _past(graph, state))
    graph.model.validate_nodes_and_infer_types()
    graph.note(STAGE, f"KV slots are {kv_type}, {changed} inputs converted")


def _past(graph: StepGraph, kv_state: KVState) -> ov.Node:
    past = graph.parameter(kv_state.past_name)
    assert past is not None
    return past


def _convert(model: ov.Model, kv_state: KVState, past: ov.Node) -> bool:
    """Convert one state, and return whether its past had another type."""
    wanted = ELEMENT_TYPES[kv_state.kv_type]
    present = model.output(kv_state.present_name).get_node()
    if present.get_element_type() != wanted:
        converted = ops.convert(present.input_value(0), wanted.get_type_name())
        present.input(0).replace_source_output(converted.output(0))
    return _convert_past(model, kv_state, past)


def cross_type(kv_type: KVType) -> KVType:
    """Return the type of keys and values of cross-attention, which are written once and have no scales."""
    return "f16" if kv_type == "u8" else kv_type


def _convert_past(model: ov.Model, kv_state: KVState, past: ov.Node) -> bool:
    """Give an input of keys or values the type of its state, and return whether it had another type."""
    wanted = ELEMENT_TYPES[kv_state.kv_type]
    if past.get_element_type() == wanted:
        return False
    stored = named_parameter(kv_state.past_name, past.get_partial_shape(), wanted)
    _swap(model, past, [stored], ops.convert(stored, past.get_element_type().get_type_name()))
    return True


def _quantize(model: ov.Model, kv_state: KVState, past: ov.Node) -> KVState:
    """Store slots as u8 between the smallest and the largest value of a head, and return the state of their scales."""
    scale_state = replace(kv_state, head_dim=2, kv_type="f32", is_scale=True)
    kind = past.get_element_type().get_type_name()
    shape = past.get_partial_shape()
    stored = named_parameter(kv_state.past_name, shape, ov.Type.u8)
    shape[3] = 2
    scales = named_parameter(scale_state.past_name, shape, ov.Type.f32)
    unit, lowest = (_column(scales, index) for index in (0, 1))
    values = ops.add(ops.multiply(ops.convert(stored, "f32"), unit), lowest)
    _swap(model, past, [stored, scales], ops.convert(values, kind))

    present = model.output(kv_state.present_name).get_node()
    new = ops.convert(present.input_value(0), "f32")
    axis = ops.constant(np.array([3]))
    bottom = ops.reduce_min(new, axis, keep_dims=True)
    span = ops.subtract(ops.reduce_max(new, axis, keep_dims=True), bottom)
    step = ops.maximum(ops.divide(span, np.float32(LEVELS)), np.float32(SMALLEST_SCALE))
    levels = ops.clamp(ops.round(ops.divide(ops.subtract(new, bottom), step), "half_to_even"), 0.0, LEVELS)
    present.input(0).replace_source_output(ops.convert(levels, "u8").output(0))
    model.add_results([named_result(scale_state.present_name, ops.concat([step, bottom], 3).output(0))])
    return scale_state


def _column(scales: ov.Node, index: int) -> ov.Node:
    start, stop, step, axis = (np.array([value]) for value in (index, index + 1, 1, 3))
    return ops.slice(scales, start, stop, step, axis)


def _swap(model: ov.Model, past: ov.Node, stored: list[ov.Node], values: ov.Node) -> None:
    redirect(past.output(0), values.output(0))
    model.remove_parameter(past)
    model.add_parameters(stored)
