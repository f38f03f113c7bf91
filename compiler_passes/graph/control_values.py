"""Finds and evaluates control values: what a model computes from lengths, masks and token ids, not from embeddings.

Masks, positions and biases are control values, whichever way an exporter writes them. A *boundary* is an input through which a
control value enters the data, that is, embeddings and what is computed from them. Evaluated at several sizes, the few boundaries
of a model tell what depends on the place of a token in its sequence.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from staticllm.core import EncoderVariant
from staticllm.devices import get_core
from staticllm.ports import ATTENTION_MASK, INPUT_IDS, EncoderSizes, Port, find_encoder_port

from .step_graph import part_of, redirect, sized, through

SIZE_PORTS = {
    "Reshape": {1}, "Broadcast": {1, 2}, "Tile": {1}, "Slice": {1, 2, 3, 4}, "StridedSlice": {1, 2, 3}, "Split": {1},
    "VariadicSplit": {1, 2}, "Pad": {1, 2}, "Squeeze": {1}, "Unsqueeze": {1}, "OneHot": {1}, "Transpose": {1},
    "ReduceSum": {1}, "ReduceMean": {1}, "ReduceMax": {1}, "TopK": {1}, "CumSum": {1},
}  # fmt: skip
"""Ports that take a size or an axis, not data."""
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
PROBE_BATCH, PROBE_ROWS = 5, (7, 11)
"""Sizes that are no other size of a model, so that an axis tells what it counts."""
_PER_TOKEN = Port(ATTENTION_MASK, ("B", "S"))
"""An input of exported models that programs do not have."""
Value = NDArray[Any]
Key = tuple[int, int]


@dataclass(frozen=True)
class Control:
    """A model divided into constants, control values and data, by the instances of its nodes."""

    model: ov.Model
    constants: frozenset[int]
    data: frozenset[int]

    def is_control(self, output: ov.Output) -> bool:
        """Return whether an output is neither constant nor data."""
        return output.get_node().get_instance_id() not in self.constants | self.data

    @cached_property
    def boundaries(self) -> tuple[ov.Input, ...]:
        """The inputs of data nodes that read a control value other than as a size, in the order of the nodes."""
        return tuple(
            port
            for node in self.model.get_ordered_ops()
            if node.get_instance_id() in self.data
            for port in node.inputs()
            if port.get_index() not in SIZE_PORTS.get(node.get_type_name(), ())
            and self.is_control(port.get_source_output())
        )


def key_of(output: ov.Output) -> Key:
    """Return what identifies an output within its graph."""
    return output.get_node().get_instance_id(), output.get_index()


def divide(model: ov.Model, exposed: Iterable[str] = ()) -> Control:
    """Divide a model into constants, control values and data.

    Args:
        exposed: Inputs that are fed by the host, which are data.
    """
    constants = set[int]()
    from_ids = set[int]()
    data = set[int]()
    for node in model.get_ordered_ops():
        key = node.get_instance_id()
        kind = node.get_type_name()
        producers = [value.get_node().get_instance_id() for value in node.input_values()]
        if kind == "Parameter":
            names = node.output(0).get_names()
            (from_ids if INPUT_IDS in names else data if names & set(exposed) else set()).add(key)
        elif kind == "Constant" or (producers and constants.issuperset(producers)):
            constants.add(key)
        elif kind == "ShapeOf":
            continue
        elif not data.isdisjoint(producers) or (
            kind == "Gather" and producers[0] in constants and producers[1] in from_ids
        ):
            data.add(key)
        elif not from_ids.isdisjoint(producers):
            from_ids.add(key)
    return Control(model, frozenset(constants), frozenset(data))


def vocabulary_of(model: ov.Model) -> int | None:
    """Return the number of rows of the table that ``input_ids`` picks embeddings from; None if there is no such table."""
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Gather":
            ids = through(node.input_value(1), "Convert", "Reshape", "Unsqueeze", "Squeeze").get_node()
            if ids.get_type_name() == "Parameter" and INPUT_IDS in ids.output(0).get_names():
                rows = node.input_value(0).get_partial_shape()[0]
                return rows.get_length() if rows.is_static else None
    return None


def random_ids(model: ov.Model, shape: Sequence[int], seed: int = 0) -> NDArray[np.int64]:
    """Return token ids of this shape. They avoid both ends of the vocabulary, where padding tokens are."""
    vocabulary = vocabulary_of(model) or 64
    return np.random.default_rng(seed).integers(vocabulary // 4, max(vocabulary // 2, 1), shape)


def at_sizes(model: ov.Model, batch: int, rows: int) -> ov.Model:
    """Return a copy of a model whose inputs have these sizes.

    Raises:
        RuntimeError: the shapes of the graph's nodes do not fit together at these sizes.
    """
    copy = model.clone()
    sizes = EncoderSizes.of(EncoderVariant(batch, rows, batch))
    for parameter in copy.get_parameters():
        names = parameter.output(0).get_names()
        ports = (port for name in names if (port := find_encoder_port(name)))
        parameter.set_partial_shape(sized(parameter.get_partial_shape(), next(ports, _PER_TOKEN), sizes))
    copy.validate_nodes_and_infer_types()
    return copy


def evaluate(
    model: ov.Model,
    outputs: Sequence[ov.Output],
    batch: int,
    rows: int,
    seed: int = 0,
    ids: NDArray[np.int64] | None = None,
) -> list[Value]:
    """Return the values of control outputs of ``model`` at these sizes.

    Args:
        seed: The seed of the token ids, unless ``ids`` are given.

    Raises:
        RuntimeError: the shapes of the graph's nodes do not fit together at these sizes.
    """
    if not outputs:
        return []
    places = {node.get_instance_id(): index for index, node in enumerate(model.get_ordered_ops())}
    copy = at_sizes(model, batch, rows)
    nodes = copy.get_ordered_ops()
    for node in nodes:
        if node.get_type_name() == "ShapeOf" and node.input_value(0).get_partial_shape().is_static:
            shape = np.array(node.input_value(0).get_shape(), np.int64)
            redirect(node.output(0), ops.constant(shape, node.get_output_element_type(0)).output(0))
    wanted = [nodes[places[output.get_node().get_instance_id()]].output(output.get_index()) for output in outputs]
    parameters = copy.get_parameters()
    part = part_of(wanted, parameters)
    known = random_ids(model, (batch, rows), seed) if ids is None else ids
    feeds = [_feed(parameter, known) for parameter in parameters]
    found = get_core().compile_model(part, "CPU", EXACT)(feeds)
    return [np.array(value) for value in found.values()]


def run_with(program: ov.CompiledModel, feeds: Mapping[str, Value]) -> Any:
    """Return the outputs of a program for those of ``feeds`` for which it has an input."""
    return program({name: feeds[name] for port in program.inputs for name in port.get_names() & feeds.keys()})


def _feed(parameter: ov.Node, ids: NDArray[np.int64]) -> Value:
    names = parameter.output(0).get_names()
    dtype = parameter.get_element_type().to_dtype()
    if INPUT_IDS in names:
        return ids.astype(dtype)
    sizes = [dim.get_length() if dim.is_static else 1 for dim in parameter.get_partial_shape()]
    return np.full(sizes, ATTENTION_MASK in names, dtype)


def row_axes(small: Value, large: Value) -> tuple[int, ...] | None:
    """Return the axes that count rows, from values at both ``PROBE_ROWS``; None if another size depends on the rows."""
    if small.ndim != large.ndim:
        return None
    pairs = list(zip(small.shape, large.shape, strict=True))
    axes = tuple(axis for axis, pair in enumerate(pairs) if pair == PROBE_ROWS)
    return axes if all(first == second for axis, (first, second) in enumerate(pairs) if axis not in axes) else None


def is_prefix(small: Value, large: Value) -> bool:
    """Return whether a value at fewer rows is the beginning of the value at more rows, where both have elements."""
    common = tuple(map(slice, np.minimum(small.shape, large.shape)))
    return close(small[common], large[common])


def is_uniform(value: Value, axes: tuple[int, ...]) -> bool:
    """Return whether a value is the same at every place along these axes."""
    first = value[tuple(slice(0, 1) if axis in axes else slice(None) for axis in range(value.ndim))]
    return close(np.broadcast_to(first, value.shape), value)


def depends_on_distance(value: Value, axes: tuple[int, ...]) -> bool:
    """Return whether a value along two axes of rows depends only on the difference of the two places."""
    moved = np.moveaxis(value, axes, (-2, -1))
    return close(moved[..., :-1, :-1], moved[..., 1:, 1:])


def close(first: Value, second: Value) -> bool:
    """Return whether two values are equal, but for the last bits of floating-point numbers."""
    if first.dtype.kind in "iub":
        return bool(np.array_equal(first, second))
    return bool(np.allclose(first, second, rtol=1e-5, atol=1e-6))
