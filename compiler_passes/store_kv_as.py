"""The element type of the rows, apart from the type that attention computes in.

f16 and bf16 rows halve the arena; the Converts that this pass adds are fused or cheap on every plugin seen so far.
"""

from __future__ import annotations

import openvino as ov
from openvino import opset13 as ops

from staticllm.compiler_passes.graph import StepGraph, named_parameter, redirect
from staticllm.core import RowType

STAGE = "store_kv_as"
ELEMENT_TYPES: dict[RowType, ov.Type] = {"f32": ov.Type.f32, "f16": ov.Type.f16, "bf16": ov.Type.bf16}


def store_kv_as(graph: StepGraph, row_type: RowType) -> None:
    """Make ``past.*`` and ``present.*`` ports hold ``row_type``; convert at the border."""
    wanted = ELEMENT_TYPES[row_type]
    changed = 0
    for row_state in graph.row_states:
        past = graph.parameter(row_state.past_name)
        present = graph.model.output(row_state.present_name).get_node()
        assert past is not None
        if past.get_element_type() != wanted:
            _store_past(graph.model, past, row_state.past_name, wanted)
            changed += 1
        if present.get_element_type() != wanted:
            converted = ops.convert(present.input_value(0), wanted.get_type_name())
            present.input(0).replace_source_output(converted.output(0))
    graph.model.validate_nodes_and_infer_types()
    graph.note(STAGE, f"rows are {row_type}, {changed} inputs converted")


def _store_past(model: ov.Model, past: ov.Node, name: str, wanted: ov.Type) -> None:
    stored = named_parameter(name, past.get_partial_shape(), wanted)
    redirect(past.output(0), ops.convert(stored, past.get_element_type().get_type_name()).output(0))
    model.remove_parameter(past)
    model.add_parameters([stored])
