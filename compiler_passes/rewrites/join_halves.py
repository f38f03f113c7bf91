"""Lets positions rotate heads in the form of most exports: all numbers times a cosine, and the halves, swapped, times a sine.

Some graphs rotate each half by itself. Plugins fuse that as well, but a blob of it computes something else (OpenVINO 2026.4.1 on
the CPU: differences of half the logits' range, or numbers that are not finite).
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from ..graph.step_graph import redirect, through

_RANK = 4
_MINUS = -1.0


def rotated_halves(heads: ov.Output, cosine: ov.Output, sine: ov.Output) -> ov.Output:
    """Return heads ``[1, heads, tokens, size]`` rotated by angles that broadcast to them, ``[1, 1, tokens, size]``."""
    size = heads.get_partial_shape()[3].get_length()
    first, second = (
        ops.slice(heads, *(ops.constant([place]) for place in (begin, end, 1, 3)))
        for begin, end in ((0, size // 2), (size // 2, size))
    )
    turned = ops.concat([ops.multiply(second, ops.constant(np.float32(_MINUS))), first], -1)
    return ops.add(ops.multiply(heads, cosine), ops.multiply(turned, sine)).output(0)


def join_halves(model: ov.Model) -> int:
    """Change rotations of halves by themselves in place, and return their number."""
    joined = sum(_join(node) for node in model.get_ordered_ops() if node.get_type_name() == "Concat")
    if joined:
        model.validate_nodes_and_infer_types()
    return joined


def _join(concat: ov.Node) -> bool:
    """Replace ``[a * cos - b * sin, b * cos + a * sin]``."""
    sums = [value.get_node() for value in concat.input_values()]
    if [each.get_type_name() for each in sums] != ["Add", "Add"]:
        return False
    products = [value for each in sums for value in each.input_values()]
    less = products[1].get_node()
    if less.get_type_name() != "Multiply" or not is_constant(less.input_value(1), _MINUS):
        return False
    products[1] = less.input_value(0)
    if any(value.get_node().get_type_name() != "Multiply" for value in products):
        return False
    halves = [value.get_node().input_value(0) for value in products]
    angles = [value.get_node().input_value(1) for value in products]
    first, second = halves[:2]
    cosine, sine = angles[:2]
    split = first.get_node()
    if halves[2:] != [second, first] or angles[2:] != [cosine, sine] or not _is_halved(split, first, second):
        return False
    if len(cosine.get_partial_shape()) != _RANK or len(sine.get_partial_shape()) != _RANK:
        return False
    doubled = (ops.concat([each, each], -1).output(0) for each in (cosine, sine))
    redirect(concat.output(0), rotated_halves(split.input_value(0), *doubled))
    return True


def _is_halved(split: ov.Node, first: ov.Output, second: ov.Output) -> bool:
    """Return whether two values are the halves of the last axis that a node gives."""
    if split.get_type_name() not in ("Split", "VariadicSplit") or split.get_output_size() != 2:
        return False
    sizes = [value.get_partial_shape()[-1] for value in split.outputs()]
    axis = split.input_value(1).get_node()
    is_last = axis.get_type_name() == "Constant" and int(axis.data.reshape(-1)[0]) in (-1, _RANK - 1)
    is_known = len(first.get_partial_shape()) == _RANK and sizes[0].is_static and sizes[0] == sizes[1]
    return is_last and is_known and [first, second] == split.outputs()


def is_constant(value: ov.Output, number: float) -> bool:
    """Return whether a value is a constant, all of whose numbers are ``number``."""
    node = through(value, "Convert", "Reshape").get_node()
    return node.get_type_name() == "Constant" and bool(np.all(node.get_data(dtype=np.float32) == number))
