"""Proves that what a graph computes of positions is, for each row, a function of that row's own position and RoPE factors.

Rows of a call belong to several sequences, some are idle, and a text comes in several calls. A value that also depends on other
rows, on their number or on that of past KV slots is another one than in a call over the whole text. Such values are found by
evaluation, as in encoders (``prove_packing``), whatever the graph computes them with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from staticllm.errors import UnsupportedModelError
from staticllm.ports import INPUT_IDS, POSITION_IDS, ROPE_FACTORS

from ..graph.control_values import close, divide, key_of
from ..graph.step_graph import StepGraph, evaluated, part_of, redirect, upstream
from .expose_positions import probe_shape

STAGE = "prove_rows"
OWN = (1, 2, 3, 5, 8, 13, 34)
"""Positions of the rows that are compared."""
SHIFT = 2
"""The number of rows before them in the other call."""
MOST_ROWS = 2048
"""The most rows of the other call. No program has more by default."""
SHORTEST = 16
"""The fewest tokens for which calls are compared: those of both calls."""


@dataclass(frozen=True)
class _ProbedCall:
    """A call to evaluate: its positions, and the number of KV slots before it."""

    past: int
    positions: NDArray[np.int64]


def prove_rows(graph: StepGraph, max_len: int) -> None:
    """Compare rows of a short call with those of the same positions among others, for texts of up to ``max_len`` tokens.

    Raises:
        UnsupportedModelError: a value differs; the message names the node, and for how many tokens it does not.
    """
    values = _values_of_positions(graph)
    if not values:
        return
    max_len = max(max_len, SHORTEST)
    wrong = _first_mixed(graph.model, values, max_len)
    if wrong is None:
        graph.note(STAGE, f"{len(values)} values of positions depend on the own position alone")
        return
    name = f"{wrong.get_node().get_type_name()} {wrong.get_node().get_friendly_name()!r}"
    what = f"{name} computes with the number of tokens of a call, or with positions of other tokens"
    low = SHORTEST
    if _first_mixed(graph.model, values, low) is not None:
        raise UnsupportedModelError(STAGE, what)
    high = max_len
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _first_mixed(graph.model, values, middle) is None else (low, middle)
    raise UnsupportedModelError(
        STAGE,
        f"{what} above {low} tokens: load with MAX_PROMPT_LEN + MIN_RESPONSE_LEN of at most {low} (here {max_len})",
    )


def _values_of_positions(graph: StepGraph) -> list[ov.Output]:
    """Return the values that data is computed with and that depend on ``position_ids``, as more than a size."""
    parameter = graph.parameter(POSITION_IDS)
    if parameter is None:
        return []
    control_names = {INPUT_IDS, POSITION_IDS, ROPE_FACTORS}
    names = {name for node in graph.model.get_parameters() for name in node.output(0).get_names()}
    control = divide(graph.model, names - control_names)
    dependent = {parameter.get_instance_id()}
    for node in graph.model.get_ordered_ops():
        producers = {value.get_node().get_instance_id() for value in node.input_values()}
        if node.get_type_name() != "ShapeOf" and not producers.isdisjoint(dependent):
            dependent.add(node.get_instance_id())
    boundaries = (port.get_source_output() for port in control.boundaries)
    found = {key_of(value): value for value in boundaries if value.get_node().get_instance_id() in dependent}
    return list(found.values())


def _first_mixed(model: ov.Model, values: Sequence[ov.Output], max_len: int) -> ov.Output | None:
    """Return the first of the values that differs in a row with the same position in two calls; None if none does."""
    last = max_len - 1
    own = np.minimum(OWN, last)
    num_rows = min(max_len, MOST_ROWS)
    others = np.full(num_rows, last)
    others[0] = 0
    others[SHIFT : SHIFT + len(own)] = own
    alone = _evaluate(model, values, _ProbedCall(0, own))
    among = _evaluate(model, values, _ProbedCall(max_len - num_rows, others))
    for value, one, other in zip(values, alone, among, strict=True):
        if not _are_alike(one, other):
            return value
    return None


def _are_alike(alone: NDArray[np.generic], among: NDArray[np.generic]) -> bool:
    """Return whether a value has one axis of rows at most, and is the same in the rows that both calls have."""
    if alone.ndim != among.ndim:
        return False
    axes = [axis for axis, (few, many) in enumerate(zip(alone.shape, among.shape, strict=True)) if few != many]
    if len(axes) > 1:
        return False
    rows = np.take(among, range(SHIFT, SHIFT + len(OWN)), axes[0]) if axes else among
    return rows.shape == alone.shape and close(alone, rows)


def _evaluate(model: ov.Model, values: Sequence[ov.Output], call: _ProbedCall) -> list[NDArray[np.generic]]:
    places = {node.get_instance_id(): index for index, node in enumerate(model.get_ordered_ops())}
    copy = model.clone()
    for parameter in copy.get_parameters():
        parameter.set_partial_shape(probe_shape(parameter.output(0), call.past, len(call.positions)))
    copy.validate_nodes_and_infer_types()
    nodes = copy.get_ordered_ops()
    for node in nodes:
        if node.get_type_name() == "ShapeOf" and node.input_value(0).get_partial_shape().is_static:
            shape = np.array(node.input_value(0).get_partial_shape().to_shape())
            redirect(node.output(0), ops.constant(shape, node.get_output_element_type(0)).output(0))
    wanted = [nodes[places[value.get_node().get_instance_id()]].output(value.get_index()) for value in values]
    needed = {node.get_instance_id() for node in upstream([value.get_node() for value in wanted])}
    parameters = [node for node in copy.get_parameters() if node.get_instance_id() in needed]
    return evaluated(part_of(wanted, parameters), [_feed(parameter, call) for parameter in parameters])


def _feed(parameter: ov.Node, call: _ProbedCall) -> NDArray[np.generic]:
    shape = parameter.get_partial_shape().to_shape()
    dtype = parameter.get_element_type().to_dtype()
    if POSITION_IDS in parameter.output(0).get_names():
        return np.broadcast_to(call.positions.astype(dtype), shape).copy()
    return np.zeros(shape, dtype)
