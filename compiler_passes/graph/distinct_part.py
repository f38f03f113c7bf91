"""Finds the part of a model that holds one of each kind of node, because its later layers only repeat them.

A proof that runs this part says as much as one that runs the whole model. Two nodes are of one kind if they have the same type,
attributes, shapes and sizes, and if they get their inputs from nodes of one kind, and so on upstream for a few nodes. Weights
make no difference.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import openvino as ov

from .control_values import PROBE_BATCH, PROBE_ROWS, at_sizes, divide
from .step_graph import upstream

_UPSTREAM = 4
"""How far upstream two nodes are compared: from a softmax through its mask to the product of queries and keys."""
_FEW = 16
"""The most elements of a constant that is compared: axes, sizes and orders, not weights."""


def distinct_end(model: ov.Model) -> ov.Node | None:
    """Return the first node of shape ``[B, S, width]`` that depends on one node of each kind and on every input.

    Return None if only the last one does, or if none is found.
    """
    nodes = model.get_ordered_ops()
    probes = at_sizes(model, PROBE_BATCH, PROBE_ROWS[0]).get_ordered_ops()
    data = divide(model).data
    needed = {node.get_instance_id() for node in model.get_parameters()}
    known = set[Hashable]()
    last = 0
    for index, (node, kind) in enumerate(zip(nodes, _kinds(probes), strict=True)):
        is_data = node.get_instance_id() in data and node.get_type_name() != "Result"
        if is_data and kind not in known:
            known.add(kind)
            needed.add(node.get_instance_id())
            last = index
    ends = {result.input_value(0).get_node().get_instance_id() for result in model.get_results()}
    for node, probe in zip(nodes[last:], probes[last:], strict=True):
        if node.get_instance_id() in ends:
            return None
        is_candidate = node.get_instance_id() in data and _has_rows(probe)
        if is_candidate and needed <= {other.get_instance_id() for other in upstream([node])}:
            return node
    return None


def _has_rows(probe: ov.Node) -> bool:
    shape = probe.get_output_partial_shape(0) if probe.get_output_size() == 1 else ov.PartialShape([])
    return len(shape) == 3 and shape.is_static and tuple(shape.to_shape())[:2] == (PROBE_BATCH, PROBE_ROWS[0])


def _kinds(nodes: list[ov.Node]) -> list[int]:
    """Return a number for the kind of each node."""
    places = {node.get_instance_id(): index for index, node in enumerate(nodes)}
    producers = [tuple(places[value.get_node().get_instance_id()] for value in node.input_values()) for node in nodes]
    kinds = [hash(_own_kind(node)) for node in nodes]
    for _ in range(_UPSTREAM):
        kinds = [
            hash((kinds[index], *(kinds[producer] for producer in found))) for index, found in enumerate(producers)
        ]
    return kinds


def _own_kind(node: ov.Node) -> Hashable:
    name = node.get_friendly_name() if node.get_type_name() == "Parameter" else ""
    inputs = tuple(_description(value) for value in node.input_values())
    outputs = tuple(str(output.get_partial_shape()) for output in node.outputs())
    return node.get_type_name(), name, str(node.get_attributes()), inputs, outputs


def _description(value: ov.Output) -> str:
    """Return the shape of an input, and its values if they are few whole numbers."""
    node = value.get_node()
    is_size = node.get_type_name() == "Constant" and value.get_element_type().is_integral()
    is_size = is_size and node.get_output_partial_shape(0).is_static and int(np.prod(node.get_output_shape(0))) <= _FEW
    return f"{value.get_partial_shape()} {np.asarray(node.data).tolist() if is_size else ''}"
