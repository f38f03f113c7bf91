"""Describes the bodies of loops, so that equal descriptions mean equal loops."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import openvino as ov

_LOOPS = frozenset({"Loop", "TensorIterator"})


def describe_body(node: ov.Node) -> Hashable | None:
    """Return a description of what is inside a node: empty if it has no body, None if its body cannot be compared."""
    kind = node.get_type_name()
    if kind == "If":
        return None
    if kind not in _LOOPS:
        return ()
    loop: Any = node
    ports = tuple(loop.get_special_body_ports()) if kind == "Loop" else ()
    described = (*loop.get_input_descriptions(), *loop.get_output_descriptions())
    nodes = _describe_nodes(loop.get_function())
    return None if nodes is None else (ports, tuple(map(_fields, described)), nodes)


def _describe_nodes(body: ov.Model) -> Hashable | None:
    """Return what each node of a body is and reads, and the values of its constants."""
    nodes = body.get_ordered_ops()
    places = {node.get_instance_id(): place for place, node in enumerate(nodes)}
    found = list[Hashable]()
    for node in nodes:
        inner = describe_body(node)
        if inner is None:
            return None
        reads = tuple((places[value.get_node().get_instance_id()], value.get_index()) for value in node.input_values())
        types = tuple((str(out.get_element_type()), str(out.get_partial_shape())) for out in node.outputs())
        is_constant = node.get_type_name() == "Constant"
        value = np.asarray(node.data).tobytes() if is_constant else describe_attributes(node)
        found.append((node.get_type_name(), reads, types, value, inner))
    order = [places[node.get_instance_id()] for node in (*body.get_parameters(), *body.get_results())]
    return tuple(order), tuple(found)


def describe_attributes(node: ov.Node) -> Hashable:
    return str(sorted((name, str(value)) for name, value in node.get_attributes().items()))


def _fields(description: Any) -> Hashable:
    names = [name for name in dir(description) if not name.startswith("_")]
    return type(description).__name__, tuple((name, str(getattr(description, name))) for name in names)
