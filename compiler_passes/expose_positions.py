"""Positions that the graph computes itself become the input ``position_ids``.

Exports without that input count the past rows and add the new ones, or sum up ``attention_mask``. Arena rows are not the
length of a conversation, so every value that *evaluates* to ``past .. past + new`` on probe shapes is replaced by the input.
What else reads ``attention_mask`` then reads ones: whoever runs is a real token, or a row that nobody sees.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from staticllm.compiler_passes.graph import StepGraph, consumers, is_live, redirect
from staticllm.core import KEY_POSITIONS, QUERY_POSITIONS
from staticllm.devices import get_core
from staticllm.errors import UnsupportedModelError

STAGE = "expose_positions"
PROBES = ((5, 7), (3, 11), (0, 13))
"""``(past, new)``: primes, so that no other size is taken for the number of new tokens."""
SAME_NEW = ((5, 7), (9, 7))
"""What feeds data must not tell these apart."""
Values = dict[int, NDArray[np.generic]]


def expose_positions(graph: StepGraph) -> None:
    """Feed positions from outside; refuse what else depends on how many rows there are."""
    found = _computed_positions(graph.model)
    if found:
        position_ids = graph.parameter("position_ids") or graph.add_parameter(
            "position_ids", ov.PartialShape([1, -1]), ov.Type.i64
        )
        for output in found:
            redirect(output, _like(output, position_ids))
            graph.note(STAGE, f"{output.get_node().get_friendly_name()!r} is position_ids")
        graph.model.validate_nodes_and_infer_types()
    _drop_attention_mask(graph)
    _check_lengths(graph.model)
    graph.note(STAGE, f"{len(found)} values computed from lengths were positions")


def _like(output: ov.Output, position_ids: ov.Node) -> ov.Output:
    """``position_ids [1, S]`` with the rank and type of what it replaces; one dimension of that is not 1."""
    rank = position_ids.get_partial_shape().rank.get_length()
    if rank != 2:
        name = output.get_node().get_friendly_name()
        raise UnsupportedModelError(STAGE, f"{name!r} counts positions beside position_ids of rank {rank}")
    dims = list(output.get_partial_shape())
    target = [1 if dim.is_static and dim.get_length() == 1 else -1 for dim in dims]
    if target.count(-1) != 1:
        raise UnsupportedModelError(STAGE, f"the positions {output.get_node().get_friendly_name()!r} have shape {dims}")
    shaped = ops.reshape(position_ids, ops.constant(np.array(target, np.int64)), special_zero=False)
    return ops.convert(shaped, output.get_element_type().get_type_name()).output(0)


def _computed_positions(model: ov.Model) -> list[ov.Output]:
    """Outputs that equal the positions on every probe, and are not computed from others that do."""
    nodes = model.get_ordered_ops()
    probes = [(past, new, _evaluate(model, past, new)) for past, new in PROBES]
    matching: set[int] = set()
    first: list[ov.Output] = []
    for index, node in enumerate(nodes):
        values = [(past, new, known.get(index)) for past, new, known in probes]
        if not all(value is not None and _are_positions(value, past, new) for past, new, value in values):
            continue
        matching.add(node.get_instance_id())
        if not any(value.get_node().get_instance_id() in matching for value in node.input_values()):
            first.append(node.output(0))
    return first


def _are_positions(value: NDArray[np.generic], past: int, new: int) -> bool:
    is_number = value.dtype.kind in "iuf" and value.size == new and value.ndim > 0
    return is_number and max(value.shape) == new and np.array_equal(value.ravel(), np.arange(past, past + new))


def _evaluate(model: ov.Model, past: int, new: int) -> Values:
    """Every value that depends on lengths alone, when ``past`` rows are cached and ``new`` tokens arrive.

    By index into ``get_ordered_ops``. A copy is given these sizes, so that whoever asks data for its shape gets a constant.
    """
    copy = model.clone()
    copy.reshape({port: _probe_shape(port, past, new) for port in copy.inputs})
    nodes = copy.get_ordered_ops()
    constant, lengths = set[int](), set[int]()  # instances
    wanted: list[int] = []
    for index, node in enumerate(nodes):
        kind, key = node.get_type_name(), node.get_instance_id()
        sources = {value.get_node().get_instance_id() for value in node.input_values()}
        if kind == "Constant" or (sources and sources <= constant):
            constant.add(key)
        elif kind == "Parameter" and "attention_mask" in node.output(0).get_names():
            ones = np.ones((1, past + new), node.get_element_type().to_dtype())
            lengths.add(_feed(node, ops.constant(ones)))
        elif kind == "ShapeOf" and not sources <= lengths and node.input_value(0).get_partial_shape().is_static:
            shape = np.array(node.input_value(0).get_partial_shape().to_shape())
            lengths.add(_feed(node, ops.constant(shape, node.get_output_element_type(0))))
        elif sources and sources <= lengths | constant:
            lengths.add(key)
            if node.get_output_size() == 1 and kind != "Result":
                wanted.append(index)
    return _values(nodes, wanted)


def _feed(node: ov.Node, constant: ov.Node) -> int:
    redirect(node.output(0), constant.output(0))
    return constant.get_instance_id()


def _values(nodes: list[ov.Node], wanted: list[int]) -> Values:
    if not wanted:
        return {}
    results = [ops.result(nodes[index].output(0)) for index in wanted]
    model = ov.Model(results, [])  # pyright: ignore[reportGeneralTypeIssues] - a slip of OpenVINO's stubs
    values = get_core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})()
    return dict(zip(wanted, values.values(), strict=True))


def _probe_shape(port: ov.Output, past: int, new: int) -> ov.PartialShape:
    """By the names that the passes before gave: rows of the past, cells of masks, tokens everywhere else."""
    name, shape = port.get_any_name(), port.get_partial_shape()
    last = shape.rank.get_length() - 1
    if name.startswith("past."):
        shape[2] = past
    elif name.startswith("mask."):
        shape[2], shape[3] = new, past + new
    elif name == KEY_POSITIONS or "attention_mask" in port.get_names():
        shape[last] = past + new
    elif name == QUERY_POSITIONS:
        shape[2] = new
    elif not name.startswith("state."):
        shape[last] = new
    return shape


def _drop_attention_mask(graph: StepGraph) -> None:
    """Whatever still reads ``attention_mask`` gets ones, as many as there are rows and tokens."""
    parameter = graph.parameter("attention_mask")
    if parameter is None:
        return
    if is_live(graph.model, parameter):
        length = _num_tokens(graph)
        if graph.row_states:
            past = graph.parameter(graph.row_states[0].past_name)
            length = ops.add(length, ops.gather(ops.shape_of(past), ops.constant([2]), ops.constant(0)))
        shape = ops.concat([ops.constant(np.array([1], np.int64)), length], 0)
        one = ops.constant(np.ones((), parameter.get_element_type().to_dtype()))
        redirect(parameter.output(0), ops.broadcast(one, shape).output(0))
        graph.note(STAGE, "attention_mask is read beside the masks: it reads ones")
    graph.model.remove_parameter(parameter)
    graph.model.validate_nodes_and_infer_types()


def _num_tokens(graph: StepGraph) -> ov.Node:
    tokens = graph.parameter("input_ids")
    if tokens is None:
        raise UnsupportedModelError(STAGE, "the model has no input 'input_ids'")
    return ops.gather(ops.shape_of(tokens), ops.constant([1]), ops.constant(0))


def _check_lengths(model: ov.Model) -> None:
    """Data must not be computed with how many past rows there are: an arena has more than a conversation."""
    nodes = model.get_ordered_ops()
    few, many = (_evaluate(model, past, new) for past, new in SAME_NEW)
    for index in few.keys() & many.keys():
        before, after = few[index], many[index]
        is_size = before.dtype.kind in "iu" and before.ndim <= 1
        if (
            not is_size
            and before.shape == after.shape
            and not np.array_equal(before, after)
            and _feeds_data(nodes, index, few)
        ):
            name = f"{nodes[index].get_type_name()} {nodes[index].get_friendly_name()!r}"
            raise UnsupportedModelError(
                STAGE, f"{name} computes with the number of past rows, other than as a position"
            )


def _feeds_data(nodes: list[ov.Node], index: int, known: Values) -> bool:
    """Whether somebody reads this value who depends on more than lengths."""
    lengths = {nodes[other].get_instance_id() for other in known}
    return any(reader.get_instance_id() not in lengths for reader in consumers(nodes[index].output(0)))
