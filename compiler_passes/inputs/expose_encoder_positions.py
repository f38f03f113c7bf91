"""Replaces what an encoder computes from the places of tokens by lookups with the input ``position_ids [B, S]``.

A boundary (``control_values.py``) that differs from row to row, and whose value for few rows is the beginning of its value for
more rows, is a function of the position. It may be the index of an embedding (a slice of a constant, a range, or a running sum of
the tokens that are not padding), an embedding itself, the sine and cosine of an angle, or a bias of each key. Positions are
replaced by the input, and everything else by a table with a row for each position, evaluated here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from staticllm.errors import UnsupportedModelError
from staticllm.ports import INPUT_IDS, POSITION_IDS

from ..graph.control_values import (
    PROBE_BATCH,
    PROBE_ROWS,
    Control,
    Key,
    Value,
    divide,
    evaluate,
    is_prefix,
    is_uniform,
    key_of,
    random_ids,
    row_axes,
)
from ..graph.encoder_graph import EncoderGraph
from ..graph.step_graph import through, upstream

STAGE = "expose_encoder_positions"
_BROADCASTING = frozenset({"Add", "Subtract", "Multiply", "Divide"})


@dataclass(frozen=True)
class Place:
    """A boundary that differs from row to row."""

    port: ov.Input
    axis: int
    """The axis of its value that counts rows."""
    small: Value
    large: Value

    @property
    def offset(self) -> int | None:
        """The first position, if the value is ``[1, S]`` or ``[B, S]`` of positions themselves; else None."""
        value = self.large
        if value.dtype.kind != "i" or value.ndim != 2 or self.axis != 1:
            return None
        first = int(value.flat[0])
        return first if np.array_equal(value, np.broadcast_to(first + np.arange(value.shape[1]), value.shape)) else None


def expose_encoder_positions(graph: EncoderGraph) -> None:
    """Replace every boundary that is a function of the position. One that cannot be replaced keeps texts apart.

    A model without any has relative positions only, or none; ``check_places`` makes sure that nothing was missed.

    Raises:
        UnsupportedModelError: a value for few rows is not the beginning of its value for the most rows.
    """
    _limit_to_tables(graph)
    places = find_places(graph)
    indices = [(place, place.offset) for place in places]
    offsets = [offset for _, offset in indices if offset is not None]
    graph.first_position = min(offsets, default=0)
    graph.skipped_id = _skipped_id(graph, [place.port for place, offset in indices if offset is not None])
    for place, offset in indices:
        if offset is not None:
            _limit_rows(graph, place.port, offset)
    looked_up = [place for place, offset in indices if offset is None and _can_be_looked_up(graph, place)]
    producers = {key_of(place.port.get_source_output()): place.port.get_source_output() for place in looked_up}
    tables = dict(zip(producers, evaluate(graph.model, list(producers.values()), 1, graph.num_rows), strict=True))
    for place in looked_up:
        _check_table(graph, place, tables[key_of(place.port.get_source_output())])
    for place, offset in indices:
        if offset is not None:
            _as_positions(graph, place.port, offset)
    known: dict[tuple[Key, int], ov.Output] = {}
    for place in looked_up:
        _as_table(graph, place, tables[key_of(place.port.get_source_output())], known)
    graph.model.validate_nodes_and_infer_types()
    _note(graph, len(offsets), len(tables))


def _skipped_id(graph: EncoderGraph, ports: list[ov.Input]) -> int | None:
    """Return the id of padding if the model counts positions without it, as RoBERTa does, whose positions begin after this id.

    A text may hold it: tokenizers read its name in a text as this token.
    """
    padding = graph.first_position - 1
    if padding < 0:
        return None
    ids = random_ids(graph.model, (1, PROBE_ROWS[1]))
    ids[0, [2, 3, 7]] = padding
    values = evaluate(graph.model, [port.get_source_output() for port in ports], 1, PROBE_ROWS[1], ids=ids)
    is_counted = ids != padding
    expected = np.cumsum(is_counted) * is_counted + padding
    return padding if values and all(np.array_equal(value, expected) for value in values) else None


def _note(graph: EncoderGraph, num_indices: int, num_tables: int) -> None:
    if graph.parameter(POSITION_IDS) is None:
        graph.note(STAGE, "nothing is computed from the place of a single token")
        return
    first = f", which begin at {graph.first_position}" if graph.first_position else ""
    first += f" and are counted without token {graph.skipped_id}" if graph.skipped_id is not None else ""
    graph.note(
        STAGE, f"{num_indices} values were positions{first}, {num_tables} became tables of {graph.num_rows} rows"
    )


def find_places(graph: EncoderGraph) -> list[Place]:
    """Return the boundaries that are functions of the position."""
    control = divide(graph.model, exposed_names(graph))
    ports = _lookup_ports(control)
    small, large, other = (
        evaluate(graph.model, [port.get_source_output() for port in ports], PROBE_BATCH, rows, seed)
        for rows, seed in ((PROBE_ROWS[0], 0), (PROBE_ROWS[1], 0), (PROBE_ROWS[1], 1))
    )
    found = []
    for port, few, many, another in zip(ports, small, large, other, strict=True):
        axes = row_axes(few, many)
        if not np.array_equal(many, another) or axes is None or len(axes) != 1:
            continue  # token ids, which are data, or a value by pairs of tokens
        if is_prefix(few, many) and not is_uniform(many, axes):
            found.append(Place(port, axes[0], few, many))
    return found


def exposed_names(graph: EncoderGraph) -> list[str]:
    """Return the names of the inputs that programs have beside ``input_ids``."""
    return [name for port in graph.model.inputs for name in port.get_names() if name != "input_ids"]


def _lookup_ports(control: Control) -> list[ov.Input]:
    """Return the boundaries; if one is the lookup of a constant table, the input with the index of the lookup instead."""
    found: dict[Key, ov.Input] = {}
    for boundary in control.boundaries:
        port = boundary
        node = through(port.get_source_output(), "Convert").get_node()
        while (
            node.get_type_name() == "Gather" and node.input_value(0).get_node().get_instance_id() in control.constants
        ):
            if not _picks_rows(node):
                break
            port = node.input(1)
            node = through(port.get_source_output(), "Convert").get_node()
        found.setdefault((port.get_node().get_instance_id(), port.get_index()), port)
    return list(found.values())


def _picks_rows(gather: ov.Node) -> bool:
    axis = gather.input_value(2).get_node()
    return (
        axis.get_type_name() == "Constant"
        and not np.any(np.asarray(axis.data))
        and len(gather.input_value(1).get_partial_shape()) == 2
    )


def _limit_rows(graph: EncoderGraph, port: ov.Input, offset: int) -> None:
    """Allow no more rows than the table of positions has, if the index belongs to one."""
    node = port.get_node()
    if node.get_type_name() == "Gather" and port.get_index() == 1:
        rows = node.input_value(0).get_partial_shape()[0]
        if rows.is_static and rows.get_length() - offset < graph.num_rows:
            graph.limit_rows(rows.get_length() - offset)
            graph.note(STAGE, f"at most {graph.num_rows} rows: the model's table of positions has no more")


def _limit_to_tables(graph: EncoderGraph) -> None:
    """Allow no more rows than the tables have that are looked up with the model's own input ``position_ids``."""
    parameter = graph.parameter(POSITION_IDS)
    tokens = graph.parameter(INPUT_IDS)
    if parameter is None or tokens is None:
        return
    own = parameter.get_instance_id()
    ids = tokens.get_instance_id()
    for node in graph.model.get_ordered_ops():
        if node.get_type_name() == "Gather" and _picks_rows(node):
            producers = {other.get_instance_id() for other in upstream([node.input_value(1).get_node()])}
            if own in producers and ids not in producers:
                (value,) = evaluate(graph.model, [node.input_value(1)], 1, PROBE_ROWS[0])  # at positions of 0
                _limit_rows(graph, node.input(1), int(value.max()))


def _check_table(graph: EncoderGraph, place: Place, value: Value) -> None:
    """Refuse a table whose beginning changes with its length, such as RoPE factors that are others for long texts.

    Raises:
        UnsupportedModelError: it does; the message names the node, and for how many tokens it does not.
    """
    if is_prefix(place.small, value):
        return
    low = PROBE_ROWS[0]
    high = graph.num_rows
    while high - low > 1:
        middle = (low + high) // 2
        (found,) = evaluate(graph.model, [place.port.get_source_output()], 1, middle)
        low, high = (middle, high) if is_prefix(place.small, found) else (low, middle)
    node = place.port.get_node()
    raise UnsupportedModelError(
        STAGE,
        f"{node.get_type_name()} {node.get_friendly_name()!r} reads other positions in texts of more than {low} tokens: load "
        f"with max_length of at most {low} (here {graph.num_rows})",
    )


def _can_be_looked_up(graph: EncoderGraph, place: Place) -> bool:
    shape = place.large.shape
    rank = _rank(place.port)
    leads = len(shape) < rank or (place.axis > 0 and shape[0] in (1, PROBE_BATCH))
    if leads and rank - len(shape) + place.axis > 0:
        return True
    node = place.port.get_node()
    graph.keep_texts_apart(
        STAGE,
        f"{node.get_type_name()} {node.get_friendly_name()!r} reads positions that are the same for the whole batch",
    )
    return False


def _rank(port: ov.Input) -> int:
    """Return the rank to which a value is broadcast where it is read."""
    node = port.get_node()
    own = len(port.get_partial_shape())
    return max(own, len(node.get_output_partial_shape(0))) if node.get_type_name() in _BROADCASTING else own


def _positions(graph: EncoderGraph) -> ov.Node:
    parameter = graph.parameter(POSITION_IDS)
    return parameter or graph.add_parameter(POSITION_IDS, ov.PartialShape([-1, -1]), ov.Type.i64)


def _as_positions(graph: EncoderGraph, port: ov.Input, offset: int) -> None:
    positions = _positions(graph)
    if offset != graph.first_position:
        positions = ops.add(positions, ops.constant(np.int64(offset - graph.first_position)))
    port.replace_source_output(ops.convert(positions, port.get_element_type().get_type_name()).output(0))


def _as_table(graph: EncoderGraph, place: Place, value: Value, known: dict[tuple[Key, int], ov.Output]) -> None:
    """Let a boundary read rows of a table. ``value``: its value for all positions, with a batch of 1."""
    rank = _rank(place.port)
    key = key_of(place.port.get_source_output()), rank
    if key not in known:
        axis = place.axis + rank - value.ndim
        aligned = value.reshape((1,) * (rank - value.ndim) + value.shape)[0]
        table = ops.constant(np.ascontiguousarray(np.moveaxis(aligned, axis - 1, 0)))
        positions = _positions(graph)
        if graph.first_position:
            positions = ops.subtract(positions, ops.constant(np.int64(graph.first_position)))
        rows = ops.gather(table, positions, ops.constant(0))
        order = [0, *range(2, axis + 1), 1, *range(axis + 1, rank)]
        known[key] = (rows if axis == 1 else ops.transpose(rows, np.array(order))).output(0)
    place.port.replace_source_output(known[key])
