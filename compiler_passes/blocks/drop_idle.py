"""Drops operations that compute nothing at the sizes of a static program: those that return what they read, and empty values.

Exporters write them for sizes that other programs have. Intel's NPU compiler crashes on empty values, and a Reshape to the
shape that a value has hides that rows are treated alike. A number that an export stores in f16 gets its own type: of the same
number in each layer, an export stores some in f16 and some in f32, by their values.
"""

from __future__ import annotations

import math

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from ..graph.step_graph import redirect

_RESHAPING = frozenset({"Reshape", "Broadcast"})
_NUMBERS = frozenset({"f16", "f32"})
"""Types that numpy has too; it would read the bytes of bf16 as numbers of another type."""


def drop_idle(model: ov.Model) -> int:
    """Drop such operations from a model whose shapes are static, and return how many were dropped."""
    count = 0
    for node in model.get_ordered_ops():
        found = _replacement(node)
        if found is not None:
            redirect(node.output(0), found)
            count += 1
    return count


def _replacement(node: ov.Node) -> ov.Output | None:
    """Return a value that is equal to what a node computes, if there is one."""
    kind = node.get_type_name()
    if kind == "Concat":
        return _without_empty(node)
    if kind == "Pad":
        return _padding_alone(node)
    if kind == "Convert":
        return _converted_number(node)
    is_kept = kind in _RESHAPING or (kind == "Slice" and _is_forward(node))
    return node.input_value(0) if is_kept and _has_shape_of_data(node) else None


def _has_shape_of_data(node: ov.Node) -> bool:
    return list(node.get_input_shape(0)) == list(node.get_output_shape(0))


def _is_forward(node: ov.Node) -> bool:
    """Return whether a Slice keeps the order of what it reads."""
    steps = node.input_value(3).get_node()
    return steps.get_type_name() == "Constant" and bool(np.all(np.asarray(steps.data) > 0))


def _without_empty(node: ov.Node) -> ov.Output | None:
    """Return a Concat of the inputs that are not empty, if some are."""
    inputs = node.input_values()
    kept = [value for value in inputs if not _is_empty(value)]
    if len(kept) == len(inputs) or not kept:
        return None
    if len(kept) == 1:
        return kept[0]
    joined = ops.concat(kept, node.get_attributes()["axis"])
    joined.set_friendly_name(node.get_friendly_name())
    return joined.output(0)


def _padding_alone(node: ov.Node) -> ov.Output | None:
    """Return what a Pad with a constant value makes of an empty input."""
    is_constant = node.get_attributes()["pad_mode"] == "constant" and len(node.inputs()) > 3
    if not is_constant or not _is_empty(node.input_value(0)) or _is_empty(node.output(0)):
        return None
    filled = ops.broadcast(node.input_value(3), np.array(list(node.get_output_shape(0))))
    filled.set_friendly_name(node.get_friendly_name())
    return filled.output(0)


def _converted_number(node: ov.Node) -> ov.Output | None:
    """Return a constant of one number in the type that it is converted to."""
    producer = node.input_value(0)
    is_known = {
        producer.get_element_type().get_type_name(),
        node.get_output_element_type(0).get_type_name(),
    } <= _NUMBERS
    is_number = producer.get_node().get_type_name() == "Constant" and math.prod(producer.get_shape()) == 1
    if not (is_known and is_number):
        return None
    return ops.constant(np.asarray(producer.get_node().data), node.get_output_element_type(0)).output(0)


def _is_empty(value: ov.Output) -> bool:
    return bool(math.prod(value.get_shape()) == 0)
