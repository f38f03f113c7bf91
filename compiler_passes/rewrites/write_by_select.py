"""Writes one number at the best place of each row by Select, on NPUs.

A router that chooses an expert, hides it and chooses again writes a number at the place that TopK has found, with
ScatterElementsUpdate. Intel's compiler for NPU 4000 and 5010 refuses that for one row (``ConvertLayers2VPU``) if the row is read
elsewhere too. Select by a comparison of places gives the same numbers.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from ..graph.step_graph import StepGraph, redirect, through

_FORMS = ("Convert", "Broadcast", "Reshape", "Slice")
"""Operations that leave a number that is the same everywhere."""


def write_by_select(graph: StepGraph, model: ov.Model) -> int:
    """Replace such writes in ``model``, which has static shapes, and return how many were replaced."""
    done = [_replace(node) for node in model.get_ordered_ops() if node.get_type_name() == "ScatterElementsUpdate"]
    model.validate_nodes_and_infer_types()
    return sum(done)


def _replace(scatter: ov.Node) -> bool:
    """Replace one write ``[..., n]`` of one number along the last axis, and return whether it was one."""
    data, places, numbers, axis = scatter.input_values()
    number = _only_value(numbers)
    shape = list(data.get_shape())
    chosen = through(places, "Convert")
    is_found = chosen.get_node().get_type_name() == "TopK" and chosen.get_index() == 1
    is_one = list(places.get_shape()) == [*shape[:-1], 1]
    is_last = axis.get_node().get_type_name() == "Constant" and int(axis.get_node().data) % len(shape) == len(shape) - 1
    is_written = scatter.get_attributes().get("reduction", "none") == "none"
    if number is None or not (is_found and is_one and is_last and is_written):
        return False
    every_place = np.arange(shape[-1], dtype=np.int32).reshape([1] * (len(shape) - 1) + [-1])
    is_place = ops.equal(ops.convert(places, "i32"), ops.constant(every_place))
    written = ops.constant(np.full([1] * len(shape), number, np.float32))
    selected = ops.select(is_place, ops.convert(written, data.get_element_type().get_type_name()), data)
    selected.set_friendly_name(scatter.get_friendly_name())
    redirect(scatter.output(0), selected.output(0))
    return True


def _only_value(numbers: ov.Output) -> float | None:
    """Return the number that a constant consists of; None if it is not constant or has several."""
    producer = through(numbers, *_FORMS).get_node()
    if producer.get_type_name() != "Constant" or producer.get_element_type().get_type_name() not in ("f16", "f32"):
        return None  # numpy would read the bytes of bf16 as another type's
    values = np.unique(np.asarray(producer.data, np.float32))
    return float(values[0]) if values.size == 1 else None
