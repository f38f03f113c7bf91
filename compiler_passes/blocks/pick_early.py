"""Moves the choice of the rows that get logits up to the end of the last layer, where the host can make it.

Then nothing after the layers depends on the number of rows of a call, so that one compiled head serves all calls.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import openvino as ov

from staticllm.ports import LOGIT_ROWS

from ..graph.step_graph import consumers, redirect, through
from .dataflow import Dataflow, port_name

TOKEN_AXIS = 1
_ROW_WISE = frozenset(
    {"Convert", "Multiply", "Divide", "Add", "Subtract", "Power", "Sqrt", "Tanh", "Clamp", "Minimum", "Maximum", "Abs"}
)
_REDUCING = frozenset({"ReduceMean", "ReduceSum", "ReduceMax", "MVN"})


def find_pick(model: ov.Model) -> ov.Node | None:
    """Return the node that picks rows by ``logit_rows`` from values ``[1, S, n]``; None if there is no such node."""
    rows = next((node for node in model.get_parameters() if port_name(node) == LOGIT_ROWS), None)
    found = [] if rows is None else consumers(rows.output(0))
    is_pick = len(found) == 1 and found[0].get_type_name() == "Gather" and len(found[0].get_input_shape(0)) == 3
    axis = found[0].input_value(2).get_node() if is_pick else None
    is_by_token = axis is not None and axis.get_type_name() == "Constant" and int(np.ravel(axis.data)[0]) == TOKEN_AXIS
    return found[0] if is_by_token else None


def pick_early(model: ov.Model) -> None:
    """Move the choice of rows up through everything that treats each row alike, if there is such a choice."""
    pick = find_pick(model)
    if pick is None:
        return
    flow = Dataflow.of(model)
    producer = pick.input_value(0).get_node()
    last = flow.places.get(producer.get_instance_id(), -1)
    for place in reversed([cut for cut in flow.cuts if cut < last]):
        begin = flow.chain[place]
        inner = _between(flow, begin, producer)
        if not all(_is_row_wise(node, begin, inner) for node in inner):
            return
        _move(pick, begin, inner)
        model.validate_nodes_and_infer_types()
        producer = begin


def _between(flow: Dataflow, begin: ov.Node, end: ov.Node) -> list[ov.Node]:
    """Return the nodes of the chain after ``begin``, up to ``end``."""
    first = flow.places[begin.get_instance_id()]
    last = flow.places[end.get_instance_id()]
    return list(flow.chain[first + 1 : last + 1])


def _is_row_wise(node: ov.Node, begin: ov.Node, inner: Sequence[ov.Node]) -> bool:
    """Return whether a node computes each row ``[1, S, ...]`` from the same row of what it reads."""
    known = {each.get_instance_id() for each in (begin, *inner)}
    kind = node.get_type_name()
    rest = node.input_values()
    if kind in _REDUCING:
        rest = rest[:1]
        axes = np.ravel(node.input_value(1).get_node().data) if _is_constant(node.input_value(1)) else [0]
        if any(axis not in (-1, 2) for axis in axes):
            return False
    elif kind not in _ROW_WISE:
        return False
    others = [value for value in rest if value.get_node().get_instance_id() not in known]
    has_rows = len(node.get_output_shape(0)) == len(begin.get_output_shape(0))
    return has_rows and all(_is_constant(value) and not _varies(value) for value in others)


def _is_constant(value: ov.Output) -> bool:
    kind: str = through(value, "Convert").get_node().get_type_name()
    return kind == "Constant"


def _varies(value: ov.Output) -> bool:
    """Return whether a constant has an axis of rows with more than one row."""
    shape = list(value.get_shape())
    return len(shape) >= 2 and any(size != 1 for size in shape[:-1])


def _move(pick: ov.Node, begin: ov.Node, inner: Sequence[ov.Node]) -> None:
    """Let the nodes after ``begin`` read picked rows only."""
    readers = {node.get_instance_id() for node in inner}
    targets = [port for port in begin.output(0).get_target_inputs() if port.get_node().get_instance_id() in readers]
    redirect(pick.output(0), pick.input_value(0))
    pick.input(0).replace_source_output(begin.output(0))
    for port in targets:
        port.replace_source_output(pick.output(0))
