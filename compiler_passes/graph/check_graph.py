"""Checks what must hold after each stage; a violation is a bug of a pass, or a graph that a pass misread."""

from __future__ import annotations

from collections.abc import Container

import openvino as ov

from staticllm.errors import UnsupportedModelError
from staticllm.ports import ADAPTER_SCALES

from .step_graph import StepGraph


def check_graph(graph: StepGraph, stage: str) -> int:
    """Check the graph after a pass: no sinks, no variables, unique port names, ports for every state, inputs for adapters.

    Return the number of its nodes, since listing them takes most of the time of a check.

    Raises:
        UnsupportedModelError: one of these conditions does not hold.
    """
    model = graph.model
    nodes = model.get_ops()
    leftovers = [node.get_friendly_name() for node in nodes if node.get_type_name() in ("ReadValue", "Assign")]
    _require(not model.get_sinks() and not leftovers, stage, f"state is left: {leftovers[:3]}")
    inputs = [port.get_any_name() for port in model.inputs]
    outputs = [port.get_any_name() for port in model.outputs]
    _require(len({*inputs, *outputs}) == len(inputs) + len(outputs), stage, "two ports share a name")
    for group in graph.adapted:
        _require({group.a_name, group.b_name, ADAPTER_SCALES} <= set(inputs), stage, f"{group.a_name} has no input")
    if graph.page_size:
        for pages in (state.pages_name for state in graph.kv_states):
            _require(pages in inputs, stage, f"{pages} has no input")
        return len(nodes)
    for state in graph.ports:
        _require(state.past_name in inputs, stage, f"{state.past_name} has no input")
        _require(state.present_name in outputs, stage, f"{state.present_name} has no output")
    for state in graph.cross_states:
        _require(state.past_name in inputs, stage, f"{state.past_name} has no input")
    if graph.kv_states or graph.recurrent_states:
        known = sum(not state.is_scale for state in graph.kv_states) + len(graph.recurrent_states)
        _require(known == len(graph.states), stage, "a lifted state is neither a KV state nor recurrent")
    return len(nodes)


def check_inputs(model: ov.Model, known: Container[str], stage: str) -> None:
    """Check that the host fills every input, whose names are ``known``.

    Raises:
        UnsupportedModelError: an input is unknown.
    """
    for port in model.inputs:
        name = port.get_any_name()
        _require(name in known, stage, f"the input {name!r} is unknown: nothing can be fed to it")


_REMEDY = "export the model without such sizes, or run it on a CPU or GPU with PROGRAMS=shared"


def check_static(model: ov.Model, stage: str, program: str) -> None:
    """Check after ``fix_shapes`` that every port of every node has a static shape. ``program`` is what errors call the model.

    Raises:
        UnsupportedModelError: a port has a dynamic shape; the message names the node.
    """
    for node in model.get_ordered_ops():
        for output in node.outputs():
            if output.get_partial_shape().is_dynamic:
                what = f"{node.get_type_name()} {node.get_friendly_name()!r}"
                found = f"{what} still has the shape {output.get_partial_shape()} in {program}"
                raise UnsupportedModelError(stage, f"{found}: its size depends on values; {_REMEDY}")


def _require(condition: bool, stage: str, message: str) -> None:
    if not condition:
        raise UnsupportedModelError(stage, message)
