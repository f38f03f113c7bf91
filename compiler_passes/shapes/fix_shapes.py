"""Fixes the shapes of a graph to one variant (``separate``), or bounds them to several variants (``shared``)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from staticllm.core import Variant
from staticllm.ports import CallSizes, port_of

from ..graph.step_graph import StepGraph, redirect, sized


def fix_shapes(graph: StepGraph, variant: Variant) -> ov.Model:
    """Return a copy of the model at exactly the sizes of ``variant``. With KV length 0 it has no past ports."""
    model = graph.model.clone()
    if variant.kv_len == 0:
        _drop_past(model, {state.past_name for state in graph.kv_states})
    return _reshaped(model, CallSizes.of(variant))


def bound_shapes(graph: StepGraph, variants: Sequence[Variant]) -> ov.Model:
    """Return a copy of the model whose dynamic dimensions are bounded by the smallest and the largest of ``variants``.

    Cross-attention sees the frames of one window or of several, so that those which are not in use cost nothing.
    """
    model = graph.model.clone()
    if graph.page_size:  # a call has as many rows as tokens, whatever its variant
        return model
    frames = (graph.cross_window_len, graph.cross_window_len * graph.num_cross_windows) if graph.cross_states else None
    sizes = replace(CallSizes.of(*variants), frames=frames)
    for parameter in model.get_parameters():
        parameter.set_partial_shape(_sized(parameter.output(0), sizes))
    model.validate_nodes_and_infer_types()  # a third of the time of Model.reshape
    return model


def _reshaped(model: ov.Model, sizes: CallSizes) -> ov.Model:
    model.reshape({port: _sized(port, sizes) for port in model.inputs})
    return model


def _sized(port: ov.Output, sizes: CallSizes) -> ov.PartialShape:
    """Return the shape of an input with the sizes of a call in the axes that its contract names."""
    _, contract = port_of(port.get_names())
    return sized(port.get_partial_shape(), contract, sizes)


def _drop_past(model: ov.Model, past_names: Collection[str]) -> None:
    for parameter in model.get_parameters():
        if parameter.output(0).get_any_name() not in past_names:
            continue
        _bypass_concats(parameter.output(0))
        redirect(parameter.output(0), _no_rows(parameter).output(0))
        model.remove_parameter(parameter)


def _bypass_concats(past: ov.Output) -> None:
    """Replace Concat(past, new) by new, because the past is empty; slots of another type are converted before."""
    for target in past.get_target_inputs():
        node = target.get_node()
        if node.get_type_name() in ("Convert", "Slice", "Multiply", "Add"):
            _bypass_concats(node.output(0))
        elif node.get_type_name() == "Concat":
            redirect(node.output(0), node.input_value(1))


def _no_rows(parameter: ov.Node) -> ov.Node:
    """Return an empty constant for readers other than the Concat. In practice they read only its shape, which is folded."""
    shape = parameter.get_partial_shape()
    shape[2] = 0
    return ops.constant(np.zeros(shape.to_shape()), parameter.get_element_type())
