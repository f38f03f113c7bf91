"""Turns the keys and values of cross-attention, which an encoder-decoder model computes once per window, into inputs.

An export with state keeps them in states that are assigned what they hold: their initial value is computed from what the encoder
made of the window (30 s of a recording), and no token changes it. Here the initial values become a model of their own, which
runs once per window, and each state an input ``[1, heads, frames, head_dim]`` that holds the frames of several windows one after
another. A mask (``expose_mask``) says which of them a row sees, so that rows of different windows share a call.
"""

from __future__ import annotations

import openvino as ov
from openvino import opset13 as ops

from staticllm.core import KVState
from staticllm.errors import UnsupportedModelError
from staticllm.ports import CROSS, INPUT_IDS

from ..graph.attention import Role, find_attentions, place_of, places_of
from ..graph.step_graph import (
    StepGraph,
    consumers,
    is_live,
    name_port,
    named_parameter,
    named_result,
    redirect,
    upstream,
)

STAGE = "lift_state"  # the pass that this is a part of
FRAMES_AXIS = 2


def lift_cross(graph: StepGraph, cross_window_len: int, num_cross_windows: int) -> None:
    """Make inputs ``cross.<layer>.key|value`` of such states, and ``graph.cross_model`` the model of their initial values.

    An export without state has such inputs already: those of four axes that no step extends. Nothing happens without either.

    Args:
        cross_window_len: The frames of one window.
        num_cross_windows: How many windows the inputs hold.

    Raises:
        UnsupportedModelError: the model has cross-attention, and no frames are given for it; or a state, or an input, is no key
            or value of an attention.
    """
    found = _kept_states(graph.model)
    initials = [read.input_value(0) for read, _ in found]
    names = {id(read): read.get_attributes()["variable_id"] for read, _ in found}
    inputs = [] if found else _kept_inputs(graph.model)
    if not found and not inputs:
        return
    if not cross_window_len or not num_cross_windows:
        raise UnsupportedModelError(
            STAGE,
            "the model has cross-attention to an encoder's output: its encoder belongs to it (speech: StaticWhisperPipeline)",
        )
    graph.cross_window_len = cross_window_len
    graph.num_cross_windows = num_cross_windows
    ids = [names[id(read)] for read, _ in found] or [min(node.output(0).get_names()) for node in inputs]
    for index, (read, assign) in enumerate(found):
        inputs.append(_lift(graph.model, read, assign, index))
    for node, variable_id in zip(inputs, ids, strict=True):
        _set_frames(node, cross_window_len * num_cross_windows, variable_id)
    graph.model.validate_nodes_and_infer_types()
    _name(graph, inputs, ids)
    ports = [node.get_friendly_name() for node in inputs]
    graph.cross_model = _model_of(initials, ports) if initials else None
    for parameter in graph.model.get_parameters():
        if parameter.get_friendly_name() not in ports and not is_live(graph.model, parameter):
            graph.model.remove_parameter(parameter)
    what = "states hold" if found else "inputs are"
    graph.note(
        STAGE, f"{len(ports)} {what} keys and values of {num_cross_windows} windows of {cross_window_len} frames"
    )


def cross_model_of_outputs(decoder: ov.Model) -> tuple[ov.Model, list[KVState]] | None:
    """Return the model of the keys and values of one window, and their states, of an export without state.

    Its decoder for first tokens has them among its outputs: those of four axes that do not depend on tokens. The states are
    numbered as those that ``lift_cross`` makes of the decoder for later tokens. None if there are none.
    """
    tokens = next((node for node in decoder.get_parameters() if INPUT_IDS in node.output(0).get_names()), None)
    if tokens is None:
        return None
    _fix_sizes(decoder, tokens)
    values = [result.input_value(0) for result in decoder.get_results() if len(result.get_output_partial_shape(0)) == 4]
    values = [
        value for value in values if tokens.get_instance_id() not in {n.get_instance_id() for n in _parameters([value])}
    ]
    places = places_of(find_attentions(decoder))
    found = [(place_of(value.get_node(), places), value) for value in values]
    layers = sorted({place[0] for place, _ in found if place is not None})
    states = [_state(layers.index(place[0]), place[1], value) for place, value in found if place is not None]
    if not states:
        return None
    model = _model_of([value for place, value in found if place is not None], [state.past_name for state in states])
    return model, sorted(states, key=lambda state: (state.layer, state.role))


def _fix_sizes(decoder: ov.Model, tokens: ov.Node) -> None:
    """Fix the sizes for one token, and replace what is computed from them by constants."""
    tokens.set_partial_shape(ov.PartialShape([1, 1]))
    for parameter in decoder.get_parameters():
        shape = parameter.get_partial_shape()
        if parameter.get_instance_id() != tokens.get_instance_id() and len(shape):
            shape[0] = 1
            parameter.set_partial_shape(shape)
    decoder.validate_nodes_and_infer_types()
    for node in decoder.get_ordered_ops():
        if node.get_type_name() == "ShapeOf" and node.get_input_partial_shape(0).is_static:
            sizes = ops.constant(list(node.get_input_shape(0)), node.get_output_element_type(0))
            redirect(node.output(0), sizes.output(0))


def _state(layer: int, role: Role, value: ov.Output) -> KVState:
    shape = value.get_partial_shape()
    return KVState(layer, role, f"{layer}.{role}", shape[1].get_length(), shape[3].get_length(), is_cross=True)


def _kept_states(model: ov.Model) -> list[tuple[ov.Node, ov.Node]]:
    """Return ReadValue and Assign of each state that is assigned what it holds, and whose initial value depends on an input."""
    reads = [node for node in model.get_ordered_ops() if node.get_type_name() == "ReadValue"]
    sinks = {sink.get_attributes()["variable_id"]: sink for sink in model.get_sinks()}
    pairs = [(read, sinks.get(read.get_attributes()["variable_id"])) for read in reads]
    return [(read, assign) for read, assign in pairs if assign is not None and _keeps_its_window(read, assign)]


def _kept_inputs(model: ov.Model) -> list[ov.Node]:
    """Return the inputs of four axes to which no step appends rows."""

    def is_kept(node: ov.Node) -> bool:
        readers = {reader.get_type_name() for reader in consumers(node.output(0))}
        return (
            len(node.get_partial_shape()) == 4 and bool(readers) and "Concat" not in readers and "Gather" not in readers
        )

    return [] if model.get_sinks() else [node for node in model.get_parameters() if is_kept(node)]


def _keeps_its_window(read: ov.Node, assign: ov.Node) -> bool:
    """Return whether a state is assigned what it holds, and its initial value depends on an input."""
    is_kept = assign.input_value(0).get_node().get_instance_id() == read.get_instance_id()
    return is_kept and read.get_input_size() > 0 and bool(_parameters([read.input_value(0)]))


def _parameters(outputs: list[ov.Output]) -> list[ov.Node]:
    return [node for node in upstream(output.get_node() for output in outputs) if node.get_type_name() == "Parameter"]


def _lift(model: ov.Model, read: ov.Node, assign: ov.Node, index: int) -> ov.Node:
    """Replace a state by an input, and return it; ``_name`` gives it its name."""
    parameter = named_parameter(f"{CROSS}{index}", read.get_output_partial_shape(0), read.get_output_element_type(0))
    redirect(read.output(0), parameter.output(0))
    model.add_parameters([parameter])
    model.remove_sink(assign)
    model.remove_variable(model.get_variable_by_id(read.get_attributes()["variable_id"]))
    return parameter


def _set_frames(node: ov.Node, num_frames: int, variable_id: str) -> None:
    shape = node.get_partial_shape()
    if len(shape) != 4 or shape[1].is_dynamic or shape[3].is_dynamic:
        raise UnsupportedModelError(
            STAGE,
            f"state {variable_id!r} has shape {shape}: must be [batch, heads, frames, head_dim], heads and head_dim known",
        )
    shape[0] = 1
    shape[FRAMES_AXIS] = num_frames
    node.set_partial_shape(shape)
    name_port(node, f"{CROSS}{variable_id}")


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
    """Return a model of the keys and values of one window, with copies of the nodes."""
    results = [named_result(name, value) for name, value in zip(names, initials, strict=True)]
    model = ov.Model(results, _parameters(initials), "cross_window")  # pyright: ignore[reportGeneralTypeIssues] - a slip of OpenVINO's stubs
    return model.clone()
