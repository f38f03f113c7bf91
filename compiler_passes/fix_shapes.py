"""From any size to the sizes of one variant (``separate``), or to bounds that hold all variants (``shared``)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from staticllm.compiler_passes.graph import StepGraph, redirect
from staticllm.core import KEY_POSITIONS, QUERY_POSITIONS, Variant

Range = tuple[int, int]


def fix_shapes(graph: StepGraph, variant: Variant) -> ov.Model:
    """A copy of the model at exactly the sizes of ``variant``. With KV length 0 the past ports are gone."""
    model = graph.model.clone()
    if variant.kv_len == 0:
        _drop_past(model)
    rows, kv_len = (variant.rows, variant.rows), (variant.kv_len, variant.kv_len)
    num_logits = (variant.sequences, variant.sequences)
    model.reshape({port: _shape(port, rows, kv_len, num_logits) for port in model.inputs})
    return model


def bound_shapes(graph: StepGraph, variants: Sequence[Variant]) -> ov.Model:
    """A copy of the model whose dynamic dimensions are bounded by the largest of ``variants``."""
    model = graph.model.clone()
    rows = (min(v.rows for v in variants), max(v.rows for v in variants))
    kv_len = (min(v.kv_len for v in variants), max(v.kv_len for v in variants))
    num_logits = (min(v.sequences for v in variants), max(v.sequences for v in variants))
    model.reshape({port: _shape(port, rows, kv_len, num_logits) for port in model.inputs})
    return model


def _shape(port: ov.Output, rows: Range, kv_len: Range, num_logits: Range) -> ov.PartialShape:
    """The contract of the ports, by name: the names were given by the passes before."""
    name = port.get_any_name()
    shape = port.get_partial_shape()
    if name.startswith("past."):
        shape[2] = ov.Dimension(*kv_len)
    elif name.startswith("mask."):
        shape[2] = ov.Dimension(*rows)
        shape[3] = ov.Dimension(rows[0] + kv_len[0], rows[1] + kv_len[1])
    elif name == KEY_POSITIONS:
        shape[3] = ov.Dimension(rows[0] + kv_len[0], rows[1] + kv_len[1])
    elif name == QUERY_POSITIONS:
        shape[2] = ov.Dimension(*rows)
    elif name.startswith("state."):
        pass
    elif name == "logit_rows":
        shape[0] = ov.Dimension(*num_logits)
    else:  # input_ids [1, S], position_ids [..., S]
        shape[shape.rank.get_length() - 1] = ov.Dimension(*rows)
    return shape


def _drop_past(model: ov.Model) -> None:
    for parameter in model.get_parameters():
        if not parameter.output(0).get_any_name().startswith("past."):
            continue
        _bypass_concats(parameter.output(0))
        redirect(parameter.output(0), _no_rows(parameter).output(0))
        model.remove_parameter(parameter)


def _bypass_concats(past: ov.Output) -> None:
    """Concat(past, new) with an empty past is new; rows of another type are converted before."""
    for target in past.get_target_inputs():
        node = target.get_node()
        if node.get_type_name() in ("Convert", "Slice", "Multiply", "Add"):
            _bypass_concats(node.output(0))
        elif node.get_type_name() == "Concat":
            redirect(node.output(0), node.input_value(1))


def _no_rows(parameter: ov.Node) -> ov.Node:
    """What readers other than the Concat see of an empty past: in practice only its shape, which folds away."""
    shape = parameter.get_partial_shape()
    shape[2] = 0
    return ops.constant(np.zeros(shape.to_shape()), parameter.get_element_type())
