"""Replaces the positions that the graph computes itself by the input ``position_ids``.

Exports without that input count the past KV slots and add the new tokens, or sum up ``attention_mask``. The number of KV slots
that a call sees is not the length of a conversation, so every value that *evaluates* to ``past .. past + new`` on probe shapes is
replaced by the input. Nodes that still read ``attention_mask`` then read ones: every row of a call is a real token, or idle and
seen by no other row.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from staticllm.errors import UnsupportedModelError
from staticllm.ports import ATTENTION_MASK, INPUT_IDS, POSITION_IDS, CallSizes, Port, find_port

from ..graph.step_graph import StepGraph, consumers, evaluated, is_live, part_of, redirect, sized, upstream

STAGE = "expose_positions"
NEWS = (7, 11, 13)
"""Numbers of new tokens in the probes. They are primes, so that no other size is mistaken for them."""
SAME_NEW = ((5, 7), (9, 7))
"""Probes ``(past, new)``; data must not differ between them, nor between them and the longest sequence."""
_SIZE_PORTS = {
    "Reshape": {1}, "Broadcast": {1, 2}, "Tile": {1}, "Slice": {2, 3, 4}, "StridedSlice": {2, 3}, "Split": {1},
    "VariadicSplit": {1, 2}, "Pad": {1, 2}, "Squeeze": {1}, "Unsqueeze": {1}, "OneHot": {1},
}  # fmt: skip
"""Ports that take a size, not data. The beginning of a slice is data."""
_TABLES = ("Gather",)  # a longer table has the same value at every place
_PICKS = frozenset({"Slice", "StridedSlice", "Split", "VariadicSplit", "ReduceMin", "ReduceSum", "ReduceMean", "TopK"})
KEEPS_POSITIONS = frozenset(
    {
        "Convert",
        "Reshape",
        "Unsqueeze",
        "Squeeze",
        "Transpose",
        "Add",
        "Subtract",
        "Multiply",
        "Divide",
        "Minimum",
        "Maximum",
        "Clamp",
    }
)
_MASK_PORT, _PER_TOKEN = Port(ATTENTION_MASK, ("1", "T+S"), "int64"), Port(".*", ("S",))
"""Inputs of exported models that step programs do not have."""
Values = dict[int, NDArray[np.generic]]


def expose_positions(graph: StepGraph, max_len: int) -> None:
    """Replace computed positions by an input; refuse other data that depends on the number of past KV slots.

    Positions of which only the number matters, such as the length of a table, are kept.

    Raises:
        UnsupportedModelError: data depends on the number of past KV slots, or positions cannot be replaced; the message names
            the node.
    """
    count = 0
    if not graph.kv_states:
        _refuse_lengths(graph)
    elif varying := _varying(graph.model, max_len):
        count = _redirect_positions(graph, varying, max_len)
        _refuse(_varying(graph.model, max_len))
    _drop_attention_mask(graph)
    graph.note(STAGE, f"{count} values computed from lengths were positions")
    _refuse_picks(graph)


def _redirect_positions(graph: StepGraph, nodes: list[ov.Node], max_len: int) -> int:
    """Replace the positions that ``nodes`` are computed from by the input, and return the number of replaced values."""
    varying = {node.get_instance_id() for node in nodes}
    leading = {node.get_instance_id() for node in upstream(nodes)}
    found = [
        output for output in _computed_positions(graph.model, max_len) if output.get_node().get_instance_id() in leading
    ]
    for output in found:
        position_ids = graph.parameter(POSITION_IDS) or graph.add_parameter(
            POSITION_IDS, ov.PartialShape([1, -1]), ov.Type.i64
        )
        positions = _like(output, position_ids)
        is_last = output.get_node().get_instance_id() in varying
        for target in output.get_target_inputs():
            if is_last or target.get_node().get_instance_id() in leading:
                target.replace_source_output(positions)
        graph.note(STAGE, f"{output.get_node().get_friendly_name()!r} is position_ids")
    graph.model.validate_nodes_and_infer_types()
    return len(found)


def _refuse_picks(graph: StepGraph) -> None:
    """Refuse a position that is picked by its place in the call. The largest one may decide something (``expose_factors``).

    Raises:
        UnsupportedModelError: a position is picked; the message names the node.
    """
    parameter = graph.parameter(POSITION_IDS)
    if parameter is None:
        return
    queue = consumers(parameter.output(0))
    reached = {parameter.get_instance_id()}
    while queue:
        node = queue.pop()
        kind = node.get_type_name()
        picks = kind == "Gather" and node.input_value(0).get_node().get_instance_id() in reached
        if picks or kind in _PICKS:
            what = f"{kind} {node.get_friendly_name()!r}"
            raise UnsupportedModelError(
                STAGE, f"{what} picks a position of the call: its last row may be idle, or of another sequence"
            )
        if kind in KEEPS_POSITIONS:
            reached.add(node.get_instance_id())
            queue += consumers(node.output(0))


def _like(output: ov.Output, position_ids: ov.Node) -> ov.Output:
    """Return ``position_ids [1, S]`` with the rank and type of ``output``, of which exactly one dimension is not 1."""
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


def _computed_positions(model: ov.Model, max_len: int) -> list[ov.Output]:
    """Return the outputs that equal the positions on every probe and are not computed from others that do."""
    nodes = model.get_ordered_ops()
    pasts = (3, 0, max(5, max_len - NEWS[-1]))  # the longest sequence as well, to detect a clamp
    probes = [(past, new, _evaluate(model, past, new)) for past, new in zip(pasts, NEWS, strict=True)]
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
    """Return every value that depends on lengths alone, for ``past`` KV slots and ``new`` tokens, by index into
    ``get_ordered_ops``.

    A copy of the model gets these sizes, so that a ShapeOf of data is a constant.
    """
    copy = model.clone()
    for parameter in copy.get_parameters():  # not reshape(), which rewrites the graph
        parameter.set_partial_shape(probe_shape(parameter.output(0), past, new))
    copy.validate_nodes_and_infer_types()
    nodes = copy.get_ordered_ops()
    constant = set[int]()
    lengths = set[int]()  # instances
    wanted: list[int] = []
    for index, node in enumerate(nodes):
        kind = node.get_type_name()
        key = node.get_instance_id()
        producers = {value.get_node().get_instance_id() for value in node.input_values()}
        if kind == "Constant" or (producers and producers <= constant):
            constant.add(key)
        elif kind == "Parameter" and ATTENTION_MASK in node.output(0).get_names():
            ones = np.ones((1, past + new), node.get_element_type().to_dtype())
            lengths.add(_feed(node, ops.constant(ones)))
        elif kind == "ShapeOf" and not producers <= lengths and node.input_value(0).get_partial_shape().is_static:
            shape = np.array(node.input_value(0).get_partial_shape().to_shape())
            lengths.add(_feed(node, ops.constant(shape, node.get_output_element_type(0))))
        elif producers and producers <= lengths | constant:
            lengths.add(key)
            wanted.append(index)
    return _values(nodes, wanted)


def _feed(node: ov.Node, constant: ov.Node) -> int:
    redirect(node.output(0), constant.output(0))
    key: int = constant.get_instance_id()
    return key


def _values(nodes: list[ov.Node], wanted: list[int]) -> Values:
    if not wanted:
        return {}
    values = evaluated(part_of((nodes[index].output(0) for index in wanted), ()))
    return dict(zip(wanted, values, strict=True))


def probe_shape(port: ov.Output, past: int, new: int) -> ov.PartialShape:
    """Return the shape of an input in a call of ``new`` tokens over ``past`` KV slots; an unknown one has a value per token."""
    sizes = CallSizes((new, new), (past, past), (new, new))
    contracts = [_MASK_PORT if name == ATTENTION_MASK else find_port(name) for name in port.get_names()]
    contract = next((found for found in contracts if found is not None), _PER_TOKEN)
    return sized(port.get_partial_shape(), contract, sizes)


def _drop_attention_mask(graph: StepGraph) -> None:
    """Feed ones to the nodes that still read ``attention_mask``, one per KV slot and token."""
    parameter = graph.parameter(ATTENTION_MASK)
    if parameter is None:
        return
    if is_live(graph.model, parameter):
        length = _num_tokens(graph)
        if graph.kv_states:
            past = graph.parameter(graph.kv_states[0].past_name)
            length = ops.add(length, ops.gather(ops.shape_of(past), ops.constant([2]), ops.constant(0)))
        shape = ops.concat([ops.constant(np.array([1], np.int64)), length], 0)
        one = ops.constant(np.ones((), parameter.get_element_type().to_dtype()))
        redirect(parameter.output(0), ops.broadcast(one, shape).output(0))
        graph.note(STAGE, f"{ATTENTION_MASK} is read beside the masks: it reads ones")
    graph.model.remove_parameter(parameter)
    graph.model.validate_nodes_and_infer_types()


def _refuse_lengths(graph: StepGraph) -> None:
    """Refuse nodes that count the tokens of a conversation in ``attention_mask``.

    A model without KV slots has no other producer of that length, and the host does not feed it.

    Raises:
        UnsupportedModelError: a node counts them; the message names it.
    """
    parameter = graph.parameter(ATTENTION_MASK)
    queue = consumers(parameter.output(0)) if parameter is not None else []
    while queue:
        node = queue.pop()
        if node.get_type_name() in ("ShapeOf", "CumSum", "ReduceSum"):
            what = f"{node.get_type_name()} {node.get_friendly_name()!r}"
            raise UnsupportedModelError(STAGE, f"{what} counts the tokens of a conversation in {ATTENTION_MASK}")
        if node.get_type_name() in ("Convert", "Unsqueeze", "Squeeze", "Reshape"):
            queue += consumers(node.output(0))


def _num_tokens(graph: StepGraph) -> ov.Node:
    tokens = graph.parameter(INPUT_IDS)
    if tokens is None:
        raise UnsupportedModelError(STAGE, f"the model has no input {INPUT_IDS!r}")
    return ops.gather(ops.shape_of(tokens), ops.constant([1]), ops.constant(0))


def _varying(model: ov.Model, max_len: int) -> list[ov.Node]:
    """Return the nodes that feed data and whose values change with the number of past KV slots."""
    nodes = model.get_ordered_ops()
    if not _may_vary(nodes):
        return []
    few, *longer = (_evaluate(model, past, new) for past, new in (*SAME_NEW, _longest(max_len)))
    lengths = {nodes[index].get_instance_id() for index in few}
    found = []
    for index in sorted(few.keys()):
        node = nodes[index]
        before = few[index]
        others = [values[index] for values in longer if index in values]
        is_longer = any(before.shape != after.shape for after in others) and not _is_uniform(before)
        tables = () if any(_differ(before, after) for after in others) else _TABLES
        if (is_longer or not tables) and _feeds_data(node, lengths, tables):
            found.append(node)
    return found


def _longest(max_len: int) -> tuple[int, int]:
    """Return the probe of the longest sequence. A value may change above a length only, as factors of long texts do."""
    num_new = SAME_NEW[0][1]
    return max(SAME_NEW[-1][0], max_len - num_new), num_new


def _differ(before: NDArray[np.generic], after: NDArray[np.generic]) -> bool:
    """Return whether two values differ where both have elements."""
    if before.ndim != after.ndim:
        return True
    common = tuple(slice(min(sizes)) for sizes in zip(before.shape, after.shape, strict=True))
    return not np.array_equal(before[common], after[common])


def _is_uniform(value: NDArray[np.generic]) -> bool:
    """Return whether all elements are equal, as in an attention mask of real tokens; then their number changes nothing."""
    return bool(value.size == 0 or (value == value.flat[0]).all())


def _may_vary(nodes: list[ov.Node]) -> bool:
    """Return whether data is computed from any length other than as a size. In most models it is not: nothing is evaluated."""
    constant = set[int]()
    lengths = set[int]()
    candidates = []
    for node in nodes:
        key = node.get_instance_id()
        producers = {value.get_node().get_instance_id() for value in node.input_values()}
        if node.get_type_name() == "Constant" or (producers and producers <= constant):
            constant.add(key)
        elif node.get_type_name() == "ShapeOf" or (producers and producers <= lengths | constant):
            lengths.add(key)
            candidates.append(node)
    return any(_feeds_data(node, lengths) for node in candidates)


def _refuse(varying: list[ov.Node]) -> None:
    """Refuse values that depend on the number of past KV slots.

    Raises:
        UnsupportedModelError: there is such a value; the message names the first one.
    """
    if varying:
        first = varying[0]
        name = f"{first.get_type_name()} {first.get_friendly_name()!r}"
        raise UnsupportedModelError(
            STAGE, f"{name} computes with the number of past KV slots, other than as a position"
        )


def _feeds_data(node: ov.Node, lengths: set[int], tables: Collection[str] = ()) -> bool:
    """Return whether a node that depends on more than ``lengths`` reads this, other than as a size or as one of ``tables``."""
    for target in node.output(0).get_target_inputs():
        reader = target.get_node()
        is_size = target.get_index() in _SIZE_PORTS.get(reader.get_type_name(), ())
        is_table = target.get_index() == 0 and reader.get_type_name() in tables
        is_data = reader.get_instance_id() not in lengths and reader.get_type_name() != "ShapeOf"
        if is_data and not is_size and not is_table:
            return True
    return False
