"""Turns the implicit state of a model into explicit inputs and outputs (lambda lifting).

Every ReadValue/Assign pair, of any content and any initial value, becomes a parameter and a result. ``beam_idx`` is removed,
because a step program serves batch 1. npu_compiler's ``ConvertAssignReadValueToReturnsAndInputs`` is the same transformation.
"""

from __future__ import annotations

import openvino as ov
from openvino import opset13 as ops

from staticllm.errors import UnsupportedModelError
from staticllm.ports import BEAM_IDX

from ..graph.step_graph import (
    LiftedState,
    StepGraph,
    consumers,
    name_port,
    named_parameter,
    named_result,
    redirect,
)
from .lift_cross import lift_cross

STAGE = "lift_state"
KV_RANK = 4


def lift_state(graph: StepGraph, cross_window_len: int = 0, num_cross_windows: int = 0) -> None:
    """Replace every state by a parameter ``state.<i>`` and a result ``state.<i>.next``, and set the batch to 1.

    ``keep_new_rows`` gives the ports the names that they have in a step program. States of cross-attention are only inputs
    (``lift_cross``, which takes ``cross_window_len`` and ``num_cross_windows``).

    Raises:
        UnsupportedModelError: the model has no state, or a state is not both read and assigned, or has no known rank.
    """
    lift_cross(graph, cross_window_len, num_cross_windows)
    reads = [node for node in graph.model.get_ordered_ops() if node.get_type_name() == "ReadValue"]
    _fix_batch(graph.model)
    if not reads and graph.cross_states:
        _adopt_past(graph)
    elif not reads:
        raise UnsupportedModelError(
            STAGE, "the model has no ReadValue/Assign pair: export it with state (optimum-cli export openvino does)"
        )
    sinks = {sink.get_attributes()["variable_id"]: sink for sink in graph.model.get_sinks()}
    for index, read in enumerate(reads):
        variable_id = read.get_attributes()["variable_id"]
        if variable_id not in sinks:
            raise UnsupportedModelError(STAGE, f"state {variable_id!r} is read by {_name(read)} and never assigned")
        graph.states.append(_lift(graph.model, index, variable_id, read, sinks.pop(variable_id)))
    if sinks:
        raise UnsupportedModelError(STAGE, f"state {sorted(sinks)[0]!r} is assigned and never read")
    _drop_beams(graph)
    graph.model.validate_nodes_and_infer_types()
    graph.note(STAGE, f"{len(graph.states)} states lifted")


def _fix_batch(model: ov.Model) -> None:
    """Set the batch to 1 in token inputs, ``[..., batch, tokens]``, in ``beam_idx [batch]``, and in keys and values."""
    for parameter in model.get_parameters():
        shape = parameter.get_partial_shape()
        if shape.rank.is_static and shape.rank.get_length() > 0:
            rank = shape.rank.get_length()
            shape[0 if rank == KV_RANK else max(rank - 2, 0)] = 1
            parameter.set_partial_shape(shape)
    model.validate_nodes_and_infer_types()  # a third of the time of Model.reshape


def _adopt_past(graph: StepGraph) -> None:
    """Take the inputs and outputs of a decoder that was exported without state, for later tokens, for lifted states."""
    results = {result.input_value(0).get_node().get_instance_id(): result for result in graph.model.get_results()}
    for parameter in graph.model.get_parameters():
        grown = [each for each in consumers(parameter.output(0)) if each.get_type_name() == "Concat"]
        if len(parameter.get_partial_shape()) != KV_RANK or not grown:
            continue
        name = min(parameter.output(0).get_names())
        present = results.get(grown[0].get_instance_id())
        if present is None:
            raise UnsupportedModelError(
                STAGE, f"input {name!r} grows, and no output returns it: export the model with state"
            )
        index = len(graph.states)
        name_port(parameter, f"state.{index}")
        name_port(present, f"state.{index}.next")
        graph.states.append(LiftedState(name, parameter, present, None))


def _lift(model: ov.Model, index: int, variable_id: str, read: ov.Node, assign: ov.Node) -> LiftedState:
    shape = read.get_output_partial_shape(0)
    if shape.rank.is_dynamic:
        raise UnsupportedModelError(STAGE, f"state {variable_id!r} has no known rank")
    if shape.rank.get_length() and shape[0].is_dynamic:  # the batch
        shape[0] = 1
    initial = read.input_value(0) if read.get_input_size() else None
    past = named_parameter(f"state.{index}", shape, read.get_output_element_type(0))
    present = named_result(f"state.{index}.next", assign.input_value(0))
    redirect(read.output(0), past.output(0))
    model.add_parameters([past])
    model.add_results([present])
    model.remove_sink(assign)
    model.remove_variable(model.get_variable_by_id(variable_id))
    return LiftedState(variable_id, past, present, initial)


def _drop_beams(graph: StepGraph) -> None:
    """Remove gathers by ``beam_idx``, which are the identity with batch 1; any other reader gets the constant [0]."""
    beam_idx = graph.parameter(BEAM_IDX)
    if beam_idx is None:
        return
    for reader in consumers(beam_idx.output(0)):
        if reader.get_type_name() == "Gather" and reader.input_value(1).get_node() == beam_idx:
            redirect(reader.output(0), reader.input_value(0))
    redirect(beam_idx.output(0), ops.constant([0], beam_idx.get_element_type()).output(0))
    graph.model.remove_parameter(beam_idx)


def _name(node: ov.Node) -> str:
    return repr(node.get_friendly_name())
