"""Checks that nothing depends on the place of a token any more but what is right for several texts in a sequence.

What remains at the boundaries (``control_values.py``) after masks and positions are inputs must be the same for all rows and
numbers of rows, or depend only on the distance of two tokens, which is the same in a sequence of several texts, because the
tokens of a text are consecutive. What depends on the place itself keeps texts apart: each has a sequence of its own then. What
depends on the number of rows is refused, because a program has more rows than a text has tokens.
"""

from __future__ import annotations

import numpy as np
import openvino as ov

from staticllm.compiler_passes.graph.control_values import (
    PROBE_BATCH,
    PROBE_ROWS,
    Value,
    depends_on_distance,
    divide,
    evaluate,
    is_prefix,
    is_uniform,
    key_of,
    row_axes,
)
from staticllm.compiler_passes.graph.encoder_graph import EncoderGraph
from staticllm.compiler_passes.inputs.expose_encoder_positions import exposed_names
from staticllm.errors import UnsupportedModelError

STAGE = "check_places"
MANY_ROWS = 512
"""The most rows at which a bias by distance is evaluated: beyond, relative positions are clipped or grouped."""


def check_places(graph: EncoderGraph) -> None:
    """Keep texts apart if anything depends on the place of a token other than through an input or by distance.

    Raises:
        UnsupportedModelError: something depends on the number of rows; the message names the node.
    """
    control = divide(graph.model, exposed_names(graph))
    ports = list({key_of(port.get_source_output()): port for port in control.boundaries}.values())
    outputs = [port.get_source_output() for port in ports]
    small, large, other = (
        evaluate(graph.model, outputs, PROBE_BATCH, rows, seed)
        for rows, seed in ((PROBE_ROWS[0], 0), (PROBE_ROWS[1], 0), (PROBE_ROWS[1], 1))
    )
    pairs = 0
    for port, few, many, another in zip(ports, small, large, other, strict=True):
        if not np.array_equal(many, another):
            continue  # computed from token ids, which are data
        axes = row_axes(few, many)
        if axes is not None and not is_prefix(few, many):
            raise UnsupportedModelError(STAGE, f"{_name(port)} computes with the number of rows, other than as a size")
        reason = _reason(graph, port, axes, many)
        pairs += reason is None and axes is not None and len(axes) == 2
        if reason is not None:
            graph.keep_texts_apart(STAGE, f"{_name(port)} reads {reason}")
    if pairs:
        graph.note(STAGE, f"{pairs} values depend on the distance of two tokens")


def _reason(graph: EncoderGraph, port: ov.Input, axes: tuple[int, ...] | None, value: Value) -> str | None:
    """Return why a value that remains keeps texts apart, or None."""
    if axes is None:
        return "a value whose size depends on the number of rows"
    if is_uniform(value, axes):
        return None
    if len(axes) != 2:
        return "the places of tokens"
    rows = min(graph.num_rows, MANY_ROWS)
    (value,) = evaluate(graph.model, [port.get_source_output()], 1, rows)
    return (
        None if depends_on_distance(value, (axes[0], axes[1])) else "the places of two tokens, not only their distance"
    )


def _name(port: ov.Input) -> str:
    node = port.get_node()
    return f"{node.get_type_name()} {node.get_friendly_name()!r}"
