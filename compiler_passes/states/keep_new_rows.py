"""Cuts each KV state that a step returns down to the new rows.

A lifted key/value state is returned as ``Concat(past, new)``: T + S rows, of which the host has T already. This pass moves the
result up to ``new``, so that a step returns ``[1, heads, S, head_dim]``, which the host writes into KV slots. The Concat remains,
because attention reads it. A state of fixed size is recurrent: each step replaces it as a whole.
"""

from __future__ import annotations

import openvino as ov

from staticllm.core import KVState, RecurrentState
from staticllm.errors import UnsupportedModelError

from ..graph.attention import find_attentions, place_of, places_of
from ..graph.step_graph import LiftedState, StepGraph, consumers, is_zero, name_port

STAGE = "keep_new_rows"
ROW_AXIS = 2


def keep_new_rows(graph: StepGraph) -> None:
    """Name the ports of KV states ``past.<layer>.key|value`` and cut their results down to the new rows.

    Raises:
        UnsupportedModelError: a state neither grows by the new rows nor has a fixed size; the message names it.
    """
    attentions = [attention for attention in find_attentions(graph.model) if not attention.is_cross]
    places = places_of(attentions)
    for index, state in enumerate(graph.states):
        if state.past.get_partial_shape().is_static:
            recurrent = _recurrent(index, state)
            _name_ports(state, recurrent)
            graph.recurrent_states.append(recurrent)
            continue
        concat = _growing_concat(state)
        _check_starts_empty(state)
        place = place_of(concat, places)
        if place is None:
            readers = sorted({node.get_type_name() for node in consumers(concat.output(0))})
            raise UnsupportedModelError(
                STAGE,
                f"state {state.variable_id!r} never reaches the key or value port of an attention; {readers} read it",
            )
        layer, role = place
        shape = state.past.get_partial_shape()
        if shape[1].is_dynamic or shape[3].is_dynamic:
            raise UnsupportedModelError(STAGE, f"state {state.variable_id!r} has shape {shape}: heads must be known")
        kv_state = KVState(layer, role, state.variable_id, shape[1].get_length(), shape[3].get_length())
        state.present.input(0).replace_source_output(concat.input_value(1))
        _name_ports(state, kv_state)
        graph.kv_states.append(kv_state)
    graph.kv_states.sort(key=lambda kv_state: (kv_state.layer, kv_state.role))
    graph.model.validate_nodes_and_infer_types()
    graph.note(STAGE, f"{len(graph.kv_states)} results cut to their new rows, {len(attentions)} layers")
    if graph.recurrent_states:
        graph.note(STAGE, f"{len(graph.recurrent_states)} recurrent states")


def _recurrent(index: int, state: LiftedState) -> RecurrentState:
    shape = state.past.get_partial_shape()
    element_type = state.past.get_element_type()
    if not state.present.input_value(0).get_partial_shape().compatible(shape):
        found = state.present.input_value(0).get_partial_shape()
        raise UnsupportedModelError(STAGE, f"state {state.variable_id!r} has shape {shape} and is assigned {found}")
    if state.initial is not None and not is_zero(state.initial):
        raise UnsupportedModelError(STAGE, f"recurrent state {state.variable_id!r} does not start from zeros")
    sizes = tuple(dimension.get_length() for dimension in shape)
    return RecurrentState(index, state.variable_id, sizes, element_type.to_dtype().name)


def _growing_concat(state: LiftedState) -> ov.Node:
    node = state.present.input_value(0).get_node()
    if node.get_type_name() == "Concat" and node.get_input_size() == 2:
        rank = node.get_output_partial_shape(0).rank.get_length()
        if (
            node.input_value(0).get_node() == state.past
            and node.get_attributes()["axis"] % rank == ROW_AXIS
            and rank == 4
        ):
            return node
    raise UnsupportedModelError(
        STAGE,
        f"state {state.variable_id!r} is assigned from {node.get_type_name()} {node.get_friendly_name()!r}, not from a "
        f"Concat of its past and new rows on axis {ROW_AXIS}, and its size is not fixed either",
    )


def _check_starts_empty(state: LiftedState) -> None:
    if state.initial is None:
        return
    shape = state.initial.get_partial_shape()
    if shape.rank.is_dynamic or shape[ROW_AXIS].is_dynamic or shape[ROW_AXIS].get_length():
        raise UnsupportedModelError(STAGE, f"state {state.variable_id!r} starts with rows ({shape}): it must be empty")


def _name_ports(state: LiftedState, found: KVState | RecurrentState) -> None:
    for node, name in ((state.past, found.past_name), (state.present, found.present_name)):
        name_port(node, name)
