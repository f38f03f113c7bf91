"""Makes the second form of a decoder's encoder, whose calls continue a text: past keys and values become inputs again.

``drop_past`` has left each state empty, as the first input of a Concat with the new rows. Here it becomes the input
``past.<i> [B, heads, P, head_dim]``, and the rows that ``kept_rows [K]`` picks of the new ones the output ``present.<i>``. So a
text of any length runs in chunks, whose rows see those of the chunks before. With P = K = 0 it computes what the first form does.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from staticllm.ports import KEPT_ROWS, PAST, PRESENT

from ..graph.encoder_graph import EncoderGraph
from ..graph.step_graph import named_parameter, named_result, upstream

STAGE = "expose_past"
ROW_AXIS = 2
MASK = "mask."


def expose_past(graph: EncoderGraph) -> None:
    """Make ``graph.continued``, if ``prove_past`` allowed it; the graph itself keeps its form for texts that run whole."""
    if graph.joins:
        graph.continued = continued_graph(graph)
        graph.note(STAGE, f"{len(graph.joins)} ports of earlier keys and values")


def continued_graph(graph: EncoderGraph, end: ov.Node | None = None) -> ov.Model:
    """Return a copy with ports for past and new rows, as a whole or with ``end`` as its first output."""
    places = {node.get_instance_id(): index for index, node in enumerate(graph.model.get_ordered_ops())}
    copy = graph.model.clone()
    nodes = copy.get_ordered_ops()
    kept = named_parameter(KEPT_ROWS, ov.PartialShape([-1]), ov.Type.i64)
    parameters = [kept]
    results = list(copy.get_results())
    if end is not None:
        results = [ops.result(nodes[places[end.get_instance_id()]].output(0))]
    used = {node.get_instance_id() for node in upstream(results)}
    joins = {index: nodes[places[join.get_instance_id()]] for index, join in enumerate(graph.joins)}
    own = {concat.get_instance_id() for concat in joins.values()}
    for index, concat in joins.items():
        if concat.get_instance_id() not in used:
            continue
        new = concat.input_value(1)
        shape = concat.get_output_partial_shape(0)
        past = named_parameter(f"{PAST}{index}", ov.PartialShape([-1, shape[1], -1, shape[3]]), ov.Type.f32)
        rows = ops.gather(new, kept, ops.constant(np.int64(ROW_AXIS)))
        is_f32 = new.get_element_type() == ov.Type.f32
        read = past.output(0) if is_f32 else ops.convert_like(past, new).output(0)
        for port in concat.input_value(0).get_target_inputs():  # also what asks for the number of earlier rows
            if port.get_node().get_instance_id() not in own - {concat.get_instance_id()}:
                port.replace_source_output(read)
        parameters.append(past)
        results.append(named_result(f"{PRESENT}{index}", (rows if is_f32 else ops.convert(rows, "f32")).output(0)))
    found = ov.Model(results, [*copy.get_parameters(), *parameters])  # pyright: ignore[reportGeneralTypeIssues]
    for parameter in found.get_parameters():
        if parameter.get_friendly_name().startswith(MASK):
            shape = parameter.get_partial_shape()
            shape[3] = ov.Dimension(-1)
            parameter.set_partial_shape(shape)
    found.validate_nodes_and_infer_types()
    return found
