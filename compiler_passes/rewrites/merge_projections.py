"""Merges small projections of the same input into one matrix: query, key and value of a layer, gate and up of a small model.

OpenVINO's CPU plugin spends about 25 microseconds per matrix besides reading its weights, which is most of the time of a small
matrix. With merged matrices a token of a 0.5B model takes 5 % less. Large matrices are left alone: they would gain little, and
the plugin keeps a merged copy in memory, while the matrices in the model's file are only mapped.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from ..graph.step_graph import StepGraph, compressed_weights, consumers, redirect, through

STAGE = "merge_projections"
SMALL_BYTES = 1 << 20
"""Bytes of weights whose reading takes about as long as the plugin's other time per matrix; the most per matrix of a group."""
LOOK_AHEAD = 5
"""Readers of readers that tell projections of one size apart: keys are rotated, values are not."""
JoinConstants = Callable[[Sequence[ov.Node], Sequence[int], int], ov.Node | None]
_STEPS = ("Convert", "Multiply", "Subtract", "Reshape")


def merge_projections(graph: StepGraph) -> None:
    """Merge every group of small compressed matrices that share an input and are compressed alike."""
    total = sum(_is_projection(node) for node in graph.model.get_ordered_ops())
    groups = find_groups(graph.model, _is_projection)
    merged = [len(group) for group in groups if _is_small(group) and merge_group(group, join_constants)]
    graph.model.validate_nodes_and_infer_types()
    graph.note(STAGE, f"{sum(merged)} of {total} compressed matrices became {len(merged)}")


def find_groups(model: ov.Model, is_projection: Callable[[ov.Node], bool]) -> list[list[ov.Node]]:
    """Return the projections of a model that read the same values, where there are several.

    Their order is that of what reads them, so that it is the same in all layers: folding wants them to be alike.
    """
    groups: dict[tuple[int, int], list[ov.Node]] = defaultdict(list)
    for node in model.get_ordered_ops():
        if is_projection(node):
            producer = node.input_value(0)
            groups[producer.get_node().get_instance_id(), producer.get_index()].append(node)
    return [sorted(group, key=_order) for group in groups.values() if len(group) > 1]


def _order(node: ov.Node) -> tuple[int, list[list[str]]]:
    """Return a key by which larger projections come first, and those of one size in the order of what reads them."""
    readers = [node]
    kinds = []
    for _ in range(LOOK_AHEAD):
        readers = [reader for node in readers for output in node.outputs() for reader in consumers(output)]
        kinds.append(sorted({reader.get_type_name() for reader in readers}))
    return -node.get_output_partial_shape(0)[-1].get_length(), kinds


def has_constant_weights(node: ov.Node) -> bool:
    """Return whether a node is ``x · weightsᵀ`` with constant weights ``[N, K]``, compressed or not."""
    if node.get_type_name() != "MatMul" or len(node.input_value(1).get_partial_shape()) != 2:
        return False
    attributes = node.get_attributes()
    weights = through(node.input_value(1), *_STEPS).get_node()
    is_ours = bool(attributes["transpose_b"]) and not bool(attributes["transpose_a"])
    return is_ours and weights.get_type_name() == "Constant"


def _is_projection(node: ov.Node) -> bool:
    return has_constant_weights(node) and compressed_weights(node) is not None


def _is_small(group: list[ov.Node]) -> bool:
    constants = [weights for node in group if (weights := compressed_weights(node)) is not None]
    return bool(sum(weights.get_byte_size() for weights in constants) <= SMALL_BYTES * len(constants))


@dataclass(frozen=True)
class MergedParts:
    """The weights and the bias of a merged product, and the outputs that its parts replace."""

    weights: ov.Node
    bias: ov.Node | None
    outputs: list[ov.Output]
    sizes: list[int]


def merged_parts(group: Sequence[ov.Node], join: JoinConstants) -> MergedParts | None:
    """Return what the products of a group are replaced by; None if they are compressed differently.

    ``join`` joins constants of these sizes along an axis, or returns None.
    """
    sizes = [node.get_output_partial_shape(0)[-1].get_length() for node in group]
    weights = _join([node.input_value(1) for node in group], sizes, 0, join)
    if weights is None:
        return None
    adds = [add for add in map(bias_add, group) if add is not None]
    bias = _join([add.input_value(1) for add in adds], sizes, -1, join) if len(adds) == len(group) else None
    # without a common bias, each part keeps its own
    outputs = [node.output(0) for node in (group if bias is None else adds)]
    return MergedParts(weights, bias, outputs, sizes)


def merge_group(group: Sequence[ov.Node], join: JoinConstants) -> bool:
    """Merge one group, and return whether it was possible."""
    parts = merged_parts(group, join)
    if parts is None:
        return False
    merged = ops.matmul(group[0].input_value(0), parts.weights, transpose_a=False, transpose_b=True)
    if parts.bias is not None:
        merged = ops.add(merged, parts.bias)
    merged.set_friendly_name(f"{group[0].get_friendly_name()}/merged")
    pieces = ops.variadic_split(merged, -1, np.array(parts.sizes))
    for index, output in enumerate(parts.outputs):
        redirect(output, pieces.output(index))
    return True


def bias_add(node: ov.Node) -> ov.Node | None:
    """Return the Add of one constant per column, if it is the only reader of the product."""
    readers = consumers(node.output(0))
    if len(readers) != 1 or readers[0].get_type_name() != "Add":
        return None
    add = readers[0]
    columns = node.get_output_partial_shape(0)[-1]
    bias = add.input_value(1).get_partial_shape()
    is_bias = bias.is_static and bias[len(bias) - 1] == columns and math.prod(bias.to_shape()) == columns.get_length()
    return add if is_bias and add.input_value(0) == node.output(0) else None


def _join(outputs: list[ov.Output], sizes: list[int], axis: int, join: JoinConstants) -> ov.Node | None:
    """Join the same steps on constants along ``axis``; return None if they differ in more than their ``sizes`` there."""
    nodes = [output.get_node() for output in outputs]
    kind = nodes[0].get_type_name()
    target = outputs[0].get_element_type()
    if any(node.get_type_name() != kind for node in nodes) or any(o.get_element_type() != target for o in outputs):
        return None
    if kind == "Constant":
        return join(nodes, sizes, axis)
    data = _join([node.input_value(0) for node in nodes], sizes, axis, join) if kind in _STEPS else None
    if data is None or kind == "Convert":
        return data and ops.convert(data, target)
    if kind == "Reshape":
        shape = list(outputs[0].get_shape())
        shape[axis] = sum(sizes)
        return ops.reshape(data, np.array(shape), special_zero=False)
    other = _join([node.input_value(1) for node in nodes], sizes, axis, join)
    return other and {"Multiply": ops.multiply, "Subtract": ops.subtract}[kind](data, other)


def join_constants(constants: Sequence[ov.Node], sizes: Sequence[int], axis: int) -> ov.Node | None:
    """Join constants along ``axis``, also of types with several numbers per byte. A single number that all share is kept."""
    first = constants[0]
    kind = constants[0].get_element_type()
    shapes = [list(constant.get_output_shape(0)) for constant in constants]
    if any(constant.get_element_type() != kind for constant in constants):
        return None
    bits = [raw_bytes(constant) for constant in constants]
    if all(math.prod(shape) == 1 and np.array_equal(bits[0], own) for shape, own in zip(shapes, bits, strict=True)):
        return first
    if any(not shape or shape[axis] != size for shape, size in zip(shapes, sizes, strict=True)):
        return None
    lead, rest = ([], shapes[0][1:]) if axis == 0 else (shapes[0][:-1], [])
    if math.prod(lead) != 1 or any(shape != [*lead, size, *rest] for shape, size in zip(shapes, sizes, strict=True)):
        return None
    if any(math.prod(shape) * kind.bitwidth % 8 for shape in shapes):
        return None
    joined = ov.Tensor(kind, ov.Shape([*lead, sum(sizes), *rest]))
    np.concatenate(bits, out=joined.data.reshape(-1).view(np.uint8))
    return ops.constant(joined, shared_memory=True)


def raw_bytes(constant: ov.Node) -> NDArray[np.uint8]:
    data: NDArray[Any] = np.asarray(constant.data)
    return data.reshape(-1).view(np.uint8)
