"""Checks that nothing depends on the place of a token any more but what is right for several texts in a sequence.

What remains at the boundaries (``control_values.py``) after masks and positions are inputs must be the same for all rows and
numbers of rows, or depend only on the distance of two tokens, which is the same in a sequence of several texts, because the
tokens of a text are consecutive. What depends on the place itself keeps texts apart: each has a sequence of its own then. So
does what depends on the number of rows. Most of that is wrong, because a program has more rows than a text has tokens, but some
models count from the middle of a table that grows with the rows: ``prove_packing`` runs one text in many numbers of rows then.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import openvino as ov

from staticllm.ports import INPUT_IDS, POSITION_IDS

from ..graph.control_values import (
    PROBE_BATCH,
    PROBE_ROWS,
    Value,
    at_sizes,
    depends_on_distance,
    divide,
    evaluate,
    is_prefix,
    is_uniform,
    key_of,
    row_axes,
)
from ..graph.encoder_graph import EncoderGraph
from ..graph.step_graph import consumers
from .expose_encoder_positions import exposed_names

STAGE = "check_places"
MANY_ROWS = 512
"""The most rows at which a bias by distance is evaluated: beyond, relative positions are clipped or grouped."""


@dataclass(frozen=True, eq=False)
class Remains:
    """A value at a boundary, computed with both ``PROBE_ROWS``."""

    port: ov.Input
    small: Value
    large: Value
    axes: tuple[int, ...] | None
    """The axes that count rows, if they are known."""

    @property
    def producer(self) -> ov.Output:
        """The output that holds it."""
        return self.port.get_source_output()

    @property
    def reader(self) -> str:
        node = self.port.get_node()
        return f"{node.get_type_name()} {node.get_friendly_name()!r}"


def check_places(graph: EncoderGraph) -> None:
    """Keep texts apart if anything depends on the place of a token other than through an input or by distance.

    What depends on the number of rows is noted in ``graph.counters``.
    """
    remains = _what_remains(graph)
    singles = [one for one in remains if one.axes is not None and len(one.axes) < 2]  # pairs would take rows² elements
    most = dict(zip(singles, evaluate(graph.model, [one.producer for one in singles], 1, graph.num_rows), strict=True))
    pairs = 0
    for one in remains:
        largest = most.get(one, one.large)
        if one.axes is not None and not is_prefix(one.small, largest):
            graph.counters.append(f"{one.reader} computes with the number of rows, other than as a size")
            continue
        reason = _reason(graph, one, largest)
        pairs += reason is None and one.axes is not None and len(one.axes) == 2
        if reason is not None:
            graph.keep_texts_apart(STAGE, f"{one.reader} reads {reason}")
    if graph.counters:
        graph.keep_texts_apart(STAGE, graph.counters[0])
    if pairs:
        graph.note(STAGE, f"{pairs} values depend on the distance of two tokens")
    reduced = _reduced_positions(graph)
    if reduced is not None:
        name = f"{reduced.get_type_name()} {reduced.get_friendly_name()!r}"
        graph.keep_calls_apart(STAGE, f"{name} makes one value of the positions of all tokens")


def _reduced_positions(graph: EncoderGraph) -> ov.Node | None:
    """Return a node that computes one value of the positions of all tokens, such as their largest; None if there is none.

    Such a value chooses the rotary factors of some models, so it must be that of one text, and of the whole text.
    """
    positions = graph.parameter(POSITION_IDS)
    ids = graph.parameter(INPUT_IDS)
    if positions is None or ids is None:
        return None
    nodes = graph.model.get_ordered_ops()
    probes = at_sizes(graph.model, PROBE_BATCH, PROBE_ROWS[0]).get_ordered_ops()
    from_ids = _downstream(ids)
    from_positions = _downstream(positions)
    for node, probe in zip(nodes, probes, strict=True):
        key = node.get_instance_id()
        if key in from_positions and key not in from_ids and node.get_type_name() != "Result":
            shapes = [output.get_partial_shape() for output in probe.outputs()]
            if not any(ov.Dimension(PROBE_ROWS[0]) in list(shape) for shape in shapes if shape.rank.is_static):
                return node
    return None


def _downstream(parameter: ov.Node) -> set[int]:
    """Return the nodes whose values depend on those of a parameter, not only on its shape."""
    found = set[int]()
    left = [parameter]
    while left:
        node = left.pop()
        key = node.get_instance_id()
        if key not in found and node.get_type_name() != "ShapeOf":
            found.add(key)
            left += [target for output in node.outputs() for target in consumers(output)]
    return found


def _what_remains(graph: EncoderGraph) -> list[Remains]:
    """Return what remains at the boundaries, without token ids and what is computed from them, which is data."""
    ports = divide(graph.model, exposed_names(graph)).boundaries
    unique = list({key_of(port.get_source_output()): port for port in ports}.values())
    small, large, other = (
        evaluate(graph.model, [port.get_source_output() for port in unique], PROBE_BATCH, rows, seed)
        for rows, seed in ((PROBE_ROWS[0], 0), (PROBE_ROWS[1], 0), (PROBE_ROWS[1], 1))
    )
    return [
        Remains(port, few, many, row_axes(few, many))
        for port, few, many, another in zip(unique, small, large, other, strict=True)
        if np.array_equal(many, another)
    ]


def _reason(graph: EncoderGraph, one: Remains, largest: Value) -> str | None:
    """Return why a value that remains keeps texts apart, or None. ``largest``: the value at the most rows that are known."""
    if one.axes is None:
        return "a value whose size depends on the number of rows"
    if len(one.axes) != 2:
        return None if is_uniform(largest, one.axes) else "the places of tokens"
    (value,) = evaluate(graph.model, [one.producer], 1, min(graph.num_rows, MANY_ROWS))
    is_right = is_uniform(value, one.axes) or depends_on_distance(value, (one.axes[0], one.axes[1]))
    return None if is_right else "the places of two tokens, not only their distance"
