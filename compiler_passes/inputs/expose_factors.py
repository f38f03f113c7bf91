"""Lets each row of a call choose the RoPE factors of its own sequence, where a graph chooses them by all positions of the call.

LongRoPE (arXiv 2402.13753) has short factors for texts up to a length and long ones for longer texts. An exported graph takes the
largest of ``position_ids`` for that length, or another value of all positions, which is right if one call has a whole text. Calls
of step programs have chunks of texts, and rows of several. So the graph is *evaluated* at many lengths: where the values that it
computes of positions change, the factors change. The program computes with each set of factors, and the input
``rope_factors [1, S]`` says for each row which one it takes. Keys of different factors are different numbers (``Conditions``).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from staticllm.devices import get_core
from staticllm.errors import UnsupportedModelError
from staticllm.ports import POSITION_IDS, ROPE_FACTORS

from ..graph.step_graph import StepGraph, consumers, part_of, redirect, upstream
from .expose_positions import probe_shape

STAGE = "expose_factors"
MAX_FACTORS = 4
"""The most sets of factors. A graph with more of them has other factors at every length, as dynamic NTK has."""
NUM_LENGTHS = 64
"""The number of lengths that are compared before the limits between them are searched."""
PLACES = (0, 1, 2, 3, 5, 8, 13, 34, 89, 233, 610, 1597, 4181)
"""Positions whose values are compared at two lengths, if both have them."""
PROBE_ROWS = (7, 11)
"""Numbers of rows in two probes. The axis that differs between them is that of the rows."""
PROBE_PAST = 3
Values = list[NDArray[np.generic]]


@dataclass(frozen=True)
class _Join:
    """Where the length of a call meets the rows: index in ``get_ordered_ops``, rank of the output, and its axis of rows."""

    index: int
    rank: int
    axis: int


def expose_factors(graph: StepGraph, max_len: int) -> None:
    """Replace what all positions of a call decide by an input with the factors of each row, for up to ``max_len`` tokens.

    ``graph.rope_limits`` gets the largest length of each set of factors except the last.

    Raises:
        UnsupportedModelError: the factors change at every length, or the largest position decides something that is not computed
            of positions alone; the message names the length or the node.
    """
    reaches = [] if graph.parameter(POSITION_IDS) is None else _reaches(graph.model)
    joins = _joins(graph.model, reaches) if reaches else []
    if not joins:
        return
    lengths = _Lengths(graph.model, reaches, joins)
    limits = _limits(lengths, max_len)
    if len(limits) >= MAX_FACTORS:
        raise UnsupportedModelError(
            STAGE,
            f"above {limits[0]} tokens the RoPE factors change {_changes(limits)}, so all keys would be computed anew for each: "
            f"load with MAX_PROMPT_LEN + MIN_RESPONSE_LEN of at most {limits[0]} (here {max_len})",
        )
    graph.rope_limits = tuple(limits)
    _select(graph, reaches, joins, [lengths.reach_of(length) for length in (*limits, max_len)])
    graph.model.validate_nodes_and_infer_types()
    bounds = ", ".join(map(str, limits))
    graph.note(
        STAGE, f"other RoPE factors above {bounds} tokens" if limits else f"the same factors up to {max_len} tokens"
    )


def _changes(limits: list[int]) -> str:
    if limits[-1] - limits[0] < len(limits):
        return "with every token"
    return f"more often than {MAX_FACTORS - 1} times (after {', '.join(map(str, limits))} tokens and perhaps more)"


def _reaches(model: ov.Model) -> list[int]:
    """Return the index of each node that makes one value of the positions of all rows, such as the largest one."""
    nodes = model.get_ordered_ops()
    few, many = (_shaped(model, rows, []) for rows in PROBE_ROWS)
    sizes = set[int]()  # instances: constants, and what is computed of shapes
    of_rows = set[int]()  # computed of positions alone, with an axis of rows
    found = []
    for index, node in enumerate(nodes):
        key = node.get_instance_id()
        producers = {value.get_node().get_instance_id() for value in node.input_values()}
        if node.get_type_name() == "Parameter" and POSITION_IDS in node.output(0).get_names():
            of_rows.add(key)
        elif node.get_type_name() in ("Constant", "ShapeOf") or (producers and producers <= sizes):
            sizes.add(key)
        elif not producers.isdisjoint(of_rows) and producers <= of_rows | sizes:
            if _sizes(few[index]) == _sizes(many[index]):
                found.append(index)
            else:
                of_rows.add(key)
    return found


def _joins(model: ov.Model, reaches: list[int]) -> list[_Join]:
    """Return the nodes at which what is computed of the largest position meets the rows, in topological order.

    Raises:
        UnsupportedModelError: such a node reads other data than positions; the message names it.
    """
    nodes = model.get_ordered_ops()
    places = {node.get_instance_id(): index for index, node in enumerate(nodes)}
    few, many = ([_sizes(each) for each in _shaped(model, rows, reaches)] for rows in PROBE_ROWS)
    queue = [reader for index in reaches for reader in consumers(nodes[index].output(0))]
    seen = set[int]()
    found = dict[int, _Join]()
    while queue:
        node = queue.pop()
        index = places.get(node.get_instance_id())
        if index is None or index in seen:
            continue
        seen.add(index)
        axes = [axis for axis, sizes in enumerate(zip(few[index], many[index], strict=True)) if len(set(sizes)) > 1]
        if axes:
            _check_join(node, axes)
            found[index] = _Join(index, len(few[index]), axes[0])
        else:
            queue += [reader for output in node.outputs() for reader in consumers(output)]
    return [found[index] for index in sorted(found)]


def _check_join(node: ov.Node, axes: list[int]) -> None:
    name = f"{node.get_type_name()} {node.get_friendly_name()!r}"
    if len(axes) > 1 or len(node.outputs()) > 1 or node.get_type_name() == "Result":
        raise UnsupportedModelError(STAGE, f"{name} mixes the largest position of a call with its rows")
    stack = [node]
    seen = set[int]()
    while stack:
        current = stack.pop()
        if current.get_instance_id() in seen or current.get_type_name() == "ShapeOf":
            continue
        seen.add(current.get_instance_id())
        if current.get_type_name() == "Parameter" and POSITION_IDS not in current.output(0).get_names():
            raise UnsupportedModelError(
                STAGE,
                f"{name} combines the largest position of a call with {current.get_friendly_name()!r}, not positions alone",
            )
        stack += [value.get_node() for value in current.input_values()]


def _copy(model: ov.Model, rows: int) -> tuple[ov.Model, list[ov.Node]]:
    """Return a copy for calls of ``rows`` rows, and its nodes in the order of ``get_ordered_ops`` of the model."""
    copy = model.clone()
    for parameter in copy.get_parameters():
        parameter.set_partial_shape(probe_shape(parameter.output(0), PROBE_PAST, rows))
    return copy, copy.get_ordered_ops()


def _shaped(model: ov.Model, rows: int, reaches: list[int]) -> list[ov.Node]:
    """Return the nodes of a copy with the shapes that they have in a call of ``rows`` rows."""
    copy, nodes = _copy(model, rows)
    for index in reaches:  # as constants, so that the size of a table of this length is known
        output = nodes[index].output(0)
        shape = [size.get_length() if size.is_static else 1 for size in output.get_partial_shape()]
        value = np.full(shape, max(PLACES)).astype(output.get_element_type().to_dtype())
        redirect(output, ops.constant(value).output(0))
    copy.validate_nodes_and_infer_types()
    return nodes


def _sizes(node: ov.Node) -> list[int]:
    """Return the shape of a node's first output, -1 for a size that is not known."""
    if not node.outputs() or node.output(0).get_partial_shape().rank.is_dynamic:
        return []
    return [size.get_length() if size.is_static else -1 for size in node.output(0).get_partial_shape()]


class _Lengths:
    """What the graph computes of positions in a call over a whole text, for each length of the text."""

    def __init__(self, model: ov.Model, reaches: list[int], joins: list[_Join]) -> None:
        self._joins = joins
        copy, nodes = _copy(model, len(PLACES))
        copy.validate_nodes_and_infer_types()
        self._rows = _position_parameter(nodes)
        self._row_shape = [size.get_length() for size in self._rows.get_partial_shape()]
        _fold_shapes(nodes)
        largest = [nodes[index].output(0) for index in reaches]
        inputs = [ops.parameter(output.get_partial_shape(), output.get_element_type()) for output in largest]
        outputs = [nodes[join.index].output(0) for join in joins]
        for output, parameter in zip(largest, inputs, strict=True):
            redirect(output, parameter.output(0))
        self._at_reach = _compiled(part_of(outputs, [self._rows, *inputs]))
        self._reach = _reach_program(model, reaches)

    def reach_of(self, length: int) -> Values:
        """Return what the graph takes for the largest position in a call over a whole text of this length."""
        shape = [*self._row_shape[:-1], length]
        return list(self._reach([np.broadcast_to(np.arange(length), shape).copy()]).values())

    def at(self, length: int) -> Values:
        """Return the values at ``PLACES`` for a text of this length, with the rows first."""
        rows = np.broadcast_to(np.minimum(PLACES, length - 1), self._row_shape).copy()
        values = self._at_reach([rows, *self.reach_of(length)]).values()
        return [np.moveaxis(value.copy(), join.axis, 0) for value, join in zip(values, self._joins, strict=True)]


def _position_parameter(nodes: list[ov.Node]) -> ov.Node:
    return next(
        node for node in nodes if node.get_type_name() == "Parameter" and POSITION_IDS in node.output(0).get_names()
    )


def _fold_shapes(nodes: list[ov.Node]) -> None:
    """Replace sizes of inputs by constants, so that nothing but positions is needed to compute what positions decide."""
    for node in nodes:
        if node.get_type_name() == "ShapeOf" and node.input_value(0).get_partial_shape().is_static:
            shape = np.array(node.input_value(0).get_partial_shape().to_shape())
            redirect(node.output(0), ops.constant(shape, node.get_output_element_type(0)).output(0))


def _reach_program(model: ov.Model, reaches: list[int]) -> ov.CompiledModel:
    """Return a program from the positions of a call to what the graph takes for the largest of them."""
    copy = model.clone()
    nodes = copy.get_ordered_ops()
    return _compiled(part_of([nodes[index].output(0) for index in reaches], [_position_parameter(nodes)]))


def _compiled(model: ov.Model) -> ov.CompiledModel:
    return get_core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})


def _limits(lengths: _Lengths, max_len: int) -> list[int]:
    """Return the lengths after which the factors change, up to ``max_len``, in ascending order; at most ``MAX_FACTORS``."""
    limits: list[int] = []
    checked: list[int] = np.unique(np.linspace(min(2, max_len), max_len, NUM_LENGTHS, dtype=int)).tolist()
    known = {length: lengths.at(length) for length in checked}
    for begin, end in pairwise(checked):
        start = begin
        while len(limits) < MAX_FACTORS and _differ(known[start], known[end], start):
            limits.append(_last_equal(lengths, known[start], start, end))
            start = limits[-1] + 1
            known[start] = lengths.at(start)
    return limits


def _last_equal(lengths: _Lengths, values: Values, shorter: int, longer: int) -> int:
    """Return the largest length below ``longer`` with the same factors as ``shorter``, whose values are ``values``."""
    low = shorter
    high = longer
    while high - low > 1:
        middle = (low + high) // 2
        if _differ(values, lengths.at(middle), shorter):
            high = middle
        else:
            low = middle
    return low


def _differ(values: Values, others: Values, shorter: int) -> bool:
    """Return whether texts of ``shorter`` and of more tokens have other values at a position that both have."""
    count = int(np.searchsorted(PLACES, shorter))
    return any(not np.array_equal(one[:count], other[:count]) for one, other in zip(values, others, strict=True))


def _select(graph: StepGraph, reaches: list[int], joins: list[_Join], reach_values: list[Values]) -> None:
    """Compute each join once for each set of factors, and let every row take the value of its own.

    ``reach_values`` are the largest positions at the largest length of each set.
    """
    nodes = graph.model.get_ordered_ops()
    copies = [_joins_at(graph, reaches, joins, values) for values in reach_values]
    factors = graph.add_parameter(ROPE_FACTORS, ov.PartialShape([1, -1]), ov.Type.i32) if len(copies) > 1 else None
    for place, join in enumerate(joins):
        chosen = copies[0][place]
        for number, others in enumerate(copies[1:], 1):
            shape = [1] * join.rank
            shape[join.axis] = -1
            is_later = ops.greater_equal(factors, ops.constant(np.int32(number)))
            of_rows = ops.reshape(is_later, np.array(shape), special_zero=False)
            chosen = ops.select(of_rows, others[place], chosen).output(0)
        redirect(nodes[join.index].output(0), chosen)


def _joins_at(graph: StepGraph, reaches: list[int], joins: list[_Join], values: Values) -> list[ov.Output]:
    """Return the joins as the graph computes them of its positions if ``values`` are the largest ones of the call."""
    copy = graph.model.clone()
    nodes = copy.get_ordered_ops()
    for index, value in zip(reaches, values, strict=True):
        output = nodes[index].output(0)
        redirect(output, ops.constant(value, output.get_element_type()).output(0))
    outputs = [nodes[join.index].output(0) for join in joins]
    own = {name: node for node in graph.model.get_parameters() for name in node.output(0).get_names()}
    for node in list(upstream([output.get_node() for output in outputs])):
        for port in node.inputs():
            producer = port.get_source_output()
            if producer.get_node().get_type_name() == "Parameter":
                port.replace_source_output(own[next(iter(producer.get_names()))].output(0))
    return outputs
