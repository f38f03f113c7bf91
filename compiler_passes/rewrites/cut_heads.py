"""Cuts keys and values into their heads with Split and Concat, for programs of several rows on NPUs.

Exporters write ``Transpose(Reshape(k, [1, S, heads, head_dim]), [0, 2, 1, 3])``. Intel's compiler for NPU 3720 refuses that for
the keys of several rows (``UnrollPermuteDMA``); on 4000, both forms cost the same. With one row, a Transpose is only a Reshape.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from ..graph.step_graph import StepGraph, redirect

HEADS_FIRST = [0, 2, 1, 3]
_ENDS = frozenset({"MatMul", "Parameter", "Constant", "ShapeOf", "Softmax", "ScaledDotProductAttention"})
"""Operations that keys and values are not followed through: products, what has no inputs, and shapes, maybe of another layer."""


def cut_heads(graph: StepGraph, model: ov.Model) -> int:
    """Cut the keys and values of ``model``, which has static shapes, and return how many were cut."""
    found: dict[int, ov.Node] = {}
    for state in graph.kv_states:
        if not state.is_scale:
            present = model.output(state.present_name).get_node()
            found |= {node.get_instance_id(): node for node in _transposes(present)}
    done = [_cut(node) for node in found.values()]
    model.validate_nodes_and_infer_types()
    return sum(done)


def _transposes(result: ov.Node) -> list[ov.Node]:
    """Return the Transposes nearest to a result on every way up to the product that computes keys or values."""
    found = []
    stack = [result]
    seen = set[int]()
    while stack:
        node = stack.pop()
        if node.get_instance_id() in seen or node.get_type_name() in _ENDS:
            continue
        seen.add(node.get_instance_id())
        if node.get_type_name() == "Transpose":
            found.append(node)
        else:
            stack.extend(value.get_node() for value in node.input_values())
    return found


def _cut(transpose: ov.Node) -> bool:
    """Cut what one Transpose moves, and return whether it moves heads."""
    order = transpose.input_value(1).get_node()
    shape = list(transpose.input_value(0).get_shape())
    is_ours = order.get_type_name() == "Constant" and list(order.data) == HEADS_FIRST and shape[0] == 1
    if not is_ours or 1 in shape[1:3]:
        return False
    _, rows, heads, head_dim = shape
    parts = ops.split(transpose.input_value(0), 2, heads).outputs()
    planes = [ops.reshape(part, np.array([1, 1, rows, head_dim]), special_zero=False) for part in parts]
    cut = ops.concat(planes, axis=1)
    cut.set_friendly_name(transpose.get_friendly_name())
    redirect(transpose.output(0), cut.output(0))
    return True
