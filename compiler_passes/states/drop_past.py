"""Makes a stateful causal language model stateless: every call begins with empty states, and keeps none.

An embedder or a reranker that was exported with past key values then is an encoder: its texts run whole, several in a sequence.
"""

from __future__ import annotations

import openvino as ov

from staticllm.errors import UnsupportedModelError
from staticllm.ports import BEAM_IDX

from ..graph.encoder_graph import EncoderGraph
from ..graph.step_graph import consumers, redirect

STAGE = "drop_past"
ROW_AXIS = 2


def drop_past(graph: EncoderGraph) -> None:
    """Replace every state by its initial value, and remove ``beam_idx``. A model without states is left alone.

    Raises:
        UnsupportedModelError: a state has no initial value in the graph, or ``beam_idx`` does more than reorder states.
    """
    model = graph.model
    reads = [node for node in model.get_ordered_ops() if node.get_type_name() == "ReadValue"]
    if not reads and not model.get_sinks():
        return
    joins = [_join_of(read) for read in reads]
    graph.joins = [join for join in joins if join is not None] if None not in joins else []
    for read in reads:
        if not read.get_input_size():
            name = read.get_attributes()["variable_id"]
            raise UnsupportedModelError(STAGE, f"state {name!r} has no initial value: export the model without past")
        redirect(read.output(0), read.input_value(0))
    for sink in list(model.get_sinks()):
        model.remove_sink(sink)
    for variable in list(model.get_variables()):
        model.remove_variable(variable)
    _drop_beams(graph)
    model.validate_nodes_and_infer_types()
    graph.original = model.clone()
    graph.note(STAGE, f"{len(reads)} states are empty")


def _join_of(read: ov.Node) -> ov.Node | None:
    """Return the Concat of a state ``[B, heads, past, head_dim]`` with the new rows; None if the state is used otherwise."""
    found = list[ov.Node]()
    left = consumers(read.output(0))
    while left:
        node = left.pop()
        if node.get_type_name() == "Concat":
            found.append(node)
        elif node.get_type_name() == "Gather" and node.input_value(1).get_node().get_type_name() != "Constant":
            left += consumers(node.output(0))  # the order of beams
    if len(found) != 1 or found[0].get_input_size() != 2:
        return None
    shape = found[0].get_output_partial_shape(0)
    is_by_rows = len(shape) == 4 and found[0].get_attributes()["axis"] % 4 == ROW_AXIS
    return found[0] if is_by_rows and shape[1].is_static and shape[3].is_static else None


def _drop_beams(graph: EncoderGraph) -> None:
    beams = graph.parameter(BEAM_IDX)
    if beams is None:
        return
    for reader in consumers(beams.output(0)):
        is_order = reader.get_type_name() == "Gather" and reader.input_value(1).get_node() == beams
        if not is_order:
            raise UnsupportedModelError(
                STAGE, f"{reader.get_type_name()} {reader.get_friendly_name()!r} reads {BEAM_IDX}: only states may"
            )
        redirect(reader.output(0), reader.input_value(0))
    graph.model.remove_parameter(beams)
