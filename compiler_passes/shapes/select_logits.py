"""Lets the head process only the R rows that need logits, not all S rows.

A prefill of 1024 tokens needs one row of logits, and the head of a 150 k vocabulary is a large part of a small model. The input
``logit_rows [R]`` picks rows from the hidden states before the head.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from staticllm.errors import UnsupportedModelError
from staticllm.ports import LOGIT_ROWS, LOGITS

from ..graph.step_graph import StepGraph, consumers

STAGE = "select_logits"
TOKEN_AXIS = 1
_ROW_WISE = frozenset({"Convert", "Multiply", "Divide", "Add", "Subtract", "Tanh", "Clamp", "Minimum", "Maximum"})
"""Ops between head and result (scaling, soft caps, bias) that treat every row alike."""


def select_logits(graph: StepGraph) -> None:
    """Gather ``logit_rows [R]`` from the input of the head, or from the logits if no head is recognised.

    Raises:
        UnsupportedModelError: the model has no output ``logits``.
    """
    result = logits_result(graph, STAGE)
    head = find_head(result)
    port = head.input(0) if head is not None else result.input(0)
    rows = graph.add_parameter(LOGIT_ROWS, ov.PartialShape([-1]), ov.Type.i64)
    hidden = port.get_source_output()
    # over pages, rows are a batch of sequences of one token, or one sequence by constant shapes
    is_batch = graph.page_size and hidden.get_partial_shape()[0].is_dynamic
    picked = ops.gather(hidden, rows, ops.constant(np.int64(0 if is_batch else TOKEN_AXIS)))
    if graph.page_size:
        picked = ops.reshape(picked, np.array([1, -1, _width(hidden)], np.int64), special_zero=False)
    picked.set_friendly_name("picked_rows")
    port.replace_source_output(picked.output(0))
    graph.model.validate_nodes_and_infer_types()
    where = f"before {head.get_friendly_name()!r}" if head is not None else "after the head: none was recognised"
    graph.note(STAGE, f"rows are picked {where}")


def _width(hidden: ov.Output) -> int:
    width = hidden.get_partial_shape()[-1]
    if width.is_dynamic:
        raise UnsupportedModelError(STAGE, "the width of the values that the head reads is not known")
    return int(width.get_length())


def logits_result(graph: StepGraph, stage: str) -> ov.Node:
    """Return the result ``logits``.

    Raises:
        UnsupportedModelError: the model has no such output; ``stage`` is the pass that the message names.
    """
    for port in graph.model.outputs:
        if LOGITS in port.get_names():
            return port.get_node()
    states = {state.present_name for state in graph.ports}
    names = sorted(name for port in graph.model.outputs for name in port.get_names() - states)
    raise UnsupportedModelError(
        stage, f"the model has no output {LOGITS!r} (it has {names}): not a causal language model"
    )


def find_head(result: ov.Node) -> ov.Node | None:
    """Return the MatMul that computes the logits, if only row-wise ops follow it."""
    output = result.input_value(0)
    while len(consumers(output)) == 1:
        node = output.get_node()
        if node.get_type_name() == "MatMul":
            rank = node.input_value(0).get_partial_shape().rank
            plain = not node.get_attributes()["transpose_a"] and rank.is_static and rank.get_length() == 3
            return node if plain else None
        if node.get_type_name() not in _ROW_WISE or not _others_are_scalar(node):
            return None
        output = node.input_value(0)
    return None


def _others_are_scalar(node: ov.Node) -> bool:
    """Return whether no side input varies along the tokens: all dimensions but the last are 1."""
    for value in node.input_values()[1:]:
        dims = list(value.get_partial_shape())[:-1]
        if any(dim.is_dynamic or dim.get_length() != 1 for dim in dims):
            return False
    return True
