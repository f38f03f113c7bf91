"""Turns the keys and values of cross-attention, which an encoder-decoder model computes once per source, into inputs.

An export with state keeps them in states that are assigned what they hold: their initial value is computed from what the encoder
made of the source (a recording, a text), and no token changes it. Here the initial values become a model of their own, which
runs once per source, and each state an input ``[1, heads, frames, head_dim]`` that holds the frames of several sources one after
another. A mask (``expose_mask``) says which of them a row sees, so that rows of different sources share a call.
"""

from __future__ import annotations

import openvino as ov

from staticllm.compiler_passes.graph.attention import find_attentions, place_of, places_of
from staticllm.compiler_passes.graph.step_graph import (
    StepGraph,
    is_live,
    name_port,
    named_parameter,
    named_result,
    redirect,
    upstream,
)
from staticllm.core import KVState
from staticllm.errors import UnsupportedModelError
from staticllm.ports import CROSS

STAGE = "lift_state"  # the pass that this is a part of
FRAMES_AXIS = 2


def lift_cross(graph: StepGraph, source_len: int, num_sources: int) -> None:
    """Make inputs ``cross.<layer>.key|value`` of such states, and ``graph.source`` the model of their initial values.

    ``source_len``: the frames of one source; ``num_sources``: how many the inputs hold. Nothing happens without such states.

    Raises:
        UnsupportedModelError: the model has such states, and no frames are given for them; or one of them is no key or value of
            an attention.
    """
    reads = [node for node in graph.model.get_ordered_ops() if node.get_type_name() == "ReadValue"]
    sinks = {sink.get_attributes()["variable_id"]: sink for sink in graph.model.get_sinks()}
    pairs = [(read, sinks.get(read.get_attributes()["variable_id"])) for read in reads]
    found = [(read, assign) for read, assign in pairs if assign is not None and _keeps_its_source(read, assign)]
    if not found:
        return
    if not source_len or not num_sources:
        raise UnsupportedModelError(
            STAGE,
            "the model has cross-attention to an encoder's output: its encoder belongs to it (speech: StaticWhisperPipeline)",
        )
    graph.source_len = source_len
    graph.num_sources = num_sources
    initials = [read.input_value(0) for read, _ in found]
    inputs = [_lift(graph.model, *pair, index, source_len * num_sources) for index, pair in enumerate(found)]
    graph.model.validate_nodes_and_infer_types()
    _name(graph, inputs, [read.get_attributes()["variable_id"] for read, _ in found])
    names = [node.get_friendly_name() for node in inputs]
    graph.source = _model_of(initials, names)
    for parameter in graph.model.get_parameters():
        if parameter.get_friendly_name() not in names and not is_live(graph.model, parameter):
            graph.model.remove_parameter(parameter)
    graph.note(STAGE, f"{len(found)} states hold keys and values of {num_sources} sources of {source_len} frames")


def _keeps_its_source(read: ov.Node, assign: ov.Node) -> bool:
    """Return whether a state is assigned what it holds, and its initial value depends on an input."""
    is_kept = assign.input_value(0).get_node().get_instance_id() == read.get_instance_id()
    return is_kept and read.get_input_size() > 0 and bool(_parameters([read.input_value(0)]))


def _parameters(outputs: list[ov.Output]) -> list[ov.Node]:
    return [node for node in upstream(output.get_node() for output in outputs) if node.get_type_name() == "Parameter"]


def _lift(model: ov.Model, read: ov.Node, assign: ov.Node, index: int, num_frames: int) -> ov.Node:
    """Replace a state by an input, and return it; ``_name`` gives it its name."""
    shape = read.get_output_partial_shape(0)
    variable_id = read.get_attributes()["variable_id"]
    if len(shape) != 4 or shape[1].is_dynamic or shape[3].is_dynamic:
        raise UnsupportedModelError(
            STAGE,
            f"state {variable_id!r} has shape {shape}: must be [batch, heads, frames, head_dim], heads and head_dim known",
        )
    shape[0] = 1
    shape[FRAMES_AXIS] = num_frames
    parameter = named_parameter(f"{CROSS}{index}", shape, read.get_output_element_type(0))
    redirect(read.output(0), parameter.output(0))
    model.add_parameters([parameter])
    model.remove_sink(assign)
    model.remove_variable(model.get_variable_by_id(variable_id))
    return parameter


def _name(graph: StepGraph, inputs: list[ov.Node], variable_ids: list[str]) -> None:
    """Name the inputs by the layers and roles of the attentions that they reach."""
    places = places_of(each for each in find_attentions(graph.model) if each.is_cross)
    for node, variable_id in zip(inputs, variable_ids, strict=True):
        place = place_of(node, places)
        if place is None:
            raise UnsupportedModelError(STAGE, f"state {variable_id!r} is no key or value of an attention")
        shape = node.get_partial_shape()
        state = KVState(*place, variable_id, shape[1].get_length(), shape[3].get_length(), is_cross=True)
        name_port(node, state.past_name)
        graph.cross_states.append(state)
    graph.cross_states.sort(key=lambda state: (state.layer, state.role))


def _model_of(initials: list[ov.Output], names: list[str]) -> ov.Model:
    """Return a model of the keys and values of one source, with copies of the nodes."""
    results = [named_result(name, value) for name, value in zip(names, initials, strict=True)]
    model = ov.Model(results, _parameters(initials), "source")  # pyright: ignore[reportGeneralTypeIssues] - a slip of OpenVINO's stubs
    return model.clone()
