"""Lets positions rotate the two halves of a head instead of neighbouring pairs.

Most GGUF files store the rows of queries and keys so that the two numbers that rotate together are neighbours. That needs a
split, a product with -1 and a join of single numbers for each layer. If queries and keys are reordered alike, their products are
the same, so the rows of the weights are stored in the order in which the halves rotate.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from ..graph.step_graph import consumers, redirect, through
from .join_halves import is_constant, rotated_halves

Order = NDArray[np.intp]
_MOVES = ("Reshape", "Transpose", "Unsqueeze", "Broadcast", "Convert", "Concat", "Gather")
"""Between a rotation and the attention that reads it: they repeat heads, join the past and choose its rows."""
_PAIR = 2
_BITS_OF_BYTE = 8


@dataclass(frozen=True)
class _Rotation:
    """Heads ``[1, tokens, heads, size]`` before and after a rotation."""

    result: ov.Node
    unrotated: ov.Output
    cosine: ov.Output
    """``[1, tokens, 1, size / 2]``, as ``sine``."""
    sine: ov.Output
    weights: tuple[ov.Node, ...]
    """Constants whose first axis has a row for each number of the heads."""
    biases: tuple[ov.Node, ...]
    """Constants whose last axis has one."""

    @property
    def order(self) -> Order:
        """The row that each row becomes: of each head, first those at even places, then the others."""
        return order_of_halves(*(self.unrotated.get_partial_shape()[axis].get_length() for axis in (2, 3)))


def order_of_halves(heads: int, size: int) -> Order:
    """Return the row that each row of heads becomes: of each head, first those at even places, then the others."""
    return np.arange(heads * size).reshape(heads, size // _PAIR, _PAIR).swapaxes(1, 2).reshape(-1)


def has_pairs(model: ov.Model) -> bool:
    return any(
        _unturned(value) is not None
        for node in model.get_ordered_ops()
        if node.get_type_name() == "Multiply"
        for value in node.input_values()[:1]
    )


def reorder_rows(products: Mapping[ov.Node, Order]) -> bool:
    """Reorder the rows of the weights of products in place: all, or none (False) if one has biases or shares its weights."""
    found = [(_constants(product.input_value(1), len(order)), order) for product, order in products.items()]
    for product, (weights, _) in zip(products, found, strict=True):
        is_known = weights is not None and _are_bytes(weights) and all(map(_is_unshared, weights))
        readers = [reader.get_type_name() for reader in consumers(product.output(0))]
        if not is_known or not product.get_attributes()["transpose_b"] or "Add" in readers:
            return False
    for weights, order in found:
        for constant in weights or ():
            _reorder(constant, order)
    return True


def rotate_halves(model: ov.Model) -> int:
    """Change a decoder in place, and return the number of rotations that changed: all, or none if one cannot be understood."""
    found = {node.get_instance_id(): rotation for node in model.get_ordered_ops() if (rotation := _rotation(node))}
    sides = [
        [_rotation_of(node.input_value(side), found) for side in (0, 1)]
        for node in model.get_ordered_ops()
        if node.get_type_name() == "ScaledDotProductAttention"
    ]
    changed = [rotation for pair in sides if None not in pair for rotation in pair if rotation is not None]
    names = {rotation.result.get_instance_id() for rotation in changed}
    if any((query is None) != (key is None) for query, key in sides) or names != set(found):
        return 0
    if any(not _is_only_attended(rotation.result) for rotation in found.values()):
        return 0
    for rotation in found.values():
        _change(rotation)
    model.validate_nodes_and_infer_types()
    return len(found)


def _rotation(node: ov.Node) -> _Rotation | None:
    """Return the rotation of pairs that ends with an Add, with weights that can be reordered."""
    if node.get_type_name() != "Add":
        return None
    products = [value.get_node() for value in node.input_values()]
    if any(product.get_type_name() != "Multiply" for product in products):
        return None
    plain, turned = products
    unrotated = plain.input_value(0)
    shape = unrotated.get_partial_shape()
    if len(shape) != 4 or shape[2].is_dynamic or shape[3].is_dynamic or _unturned(turned.input_value(0)) != unrotated:
        return None
    cosine, sine = (_doubled(product.input_value(1)) for product in products)
    readers = {reader.get_instance_id() for reader in consumers(unrotated)}
    rows = _rows(unrotated)
    if cosine is None or sine is None or rows is None or len(readers) != 2:
        return None
    return _Rotation(node, unrotated, cosine, sine, *rows)


def _unturned(value: ov.Output) -> ov.Output | None:
    """Return the heads of which ``value`` has the pairs turned by a quarter: ``(a, b)`` is ``(-b, a)``."""
    join = through(value, "Reshape").get_node()
    if join.get_type_name() != "Concat" or join.get_input_size() != _PAIR:
        return None
    negated = join.input_value(0).get_node()
    first = join.input_value(1)
    split = first.get_node()
    if negated.get_type_name() != "Multiply" or not is_constant(negated.input_value(1), -1.0):
        return None
    if split.get_type_name() != "Split" or split.get_output_size() != _PAIR:
        return None
    if first != split.output(0) or negated.input_value(0) != split.output(1):
        return None
    pairs = split.input_value(0).get_node()
    shape = pairs.get_output_partial_shape(0)
    if pairs.get_type_name() != "Reshape" or len(shape) != 5 or shape[4] != _PAIR or not _is_last(split, len(shape)):
        return None
    return pairs.input_value(0)


def _is_last(split: ov.Node, rank: int) -> bool:
    axis = split.input_value(1).get_node()
    return axis.get_type_name() == "Constant" and int(axis.data.reshape(-1)[0]) in (-1, rank - 1)


def _doubled(value: ov.Output) -> ov.Output | None:
    """Return the numbers ``[1, tokens, 1, n]`` of which ``value`` has each twice, one after the other."""
    repeat = through(value, "Reshape").get_node()
    if repeat.get_type_name() != "Broadcast" or repeat.get_output_partial_shape(0)[-1] != _PAIR:
        return None
    widened = repeat.input_value(0).get_node()
    shape = widened.get_output_partial_shape(0)
    if widened.get_type_name() != "Unsqueeze" or len(shape) != 5 or shape[4] != 1:
        return None
    return widened.input_value(0)


def _rows(heads: ov.Output) -> tuple[tuple[ov.Node, ...], tuple[ov.Node, ...]] | None:
    """Return the constants of weights and biases that only the product before ``heads`` reads; None if it is not one product."""
    biases = list[ov.Node]()
    value = through(heads, "Reshape", "Convert")
    while value.get_node().get_type_name() == "Add" and len(consumers(value)) == 1:
        left, right = value.get_node().input_values()
        bias = through(right, "Convert", "Reshape").get_node()
        if bias.get_type_name() != "Constant":
            return None
        biases.append(bias)
        value = left
    product = value.get_node()
    shape = heads.get_partial_shape()
    count = shape[2].get_length() * shape[3].get_length()
    if product.get_type_name() != "MatMul" or len(consumers(value)) != 1 or not product.get_attributes()["transpose_b"]:
        return None
    weights = _constants(product.input_value(1), count)
    if weights is None or any(int(np.prod(list(bias.get_output_shape(0)))) != count for bias in biases):
        return None
    is_own = all(_is_unshared(node) for node in (*weights, *biases))
    return (weights, tuple(biases)) if is_own and _are_bytes(weights) else None


def _constants(value: ov.Output, count: int) -> tuple[ov.Node, ...] | None:
    """Return the constants with ``count`` rows of which weights are computed; None if something else is in them."""
    node = value.get_node()
    if node.get_type_name() == "Constant":
        shape = list(node.get_output_shape(0))
        return (node,) if shape and shape[0] == count else None if int(np.prod(shape)) > 1 else ()
    if node.get_type_name() not in ("Convert", "Multiply", "Subtract", "Reshape") or len(consumers(value)) != 1:
        return None
    inputs = node.input_values()[: 1 if node.get_type_name() == "Reshape" else None]
    found = [_constants(each, count) for each in inputs]
    return None if None in found else tuple(constant for each in found if each is not None for constant in each)


def _are_bytes(constants: Iterable[ov.Node]) -> bool:
    """Return whether the rows of constants are whole bytes."""
    return all(
        each.get_element_type().bitwidth * int(np.prod(list(each.get_output_shape(0))[1:])) % _BITS_OF_BYTE == 0
        for each in constants
    )


def _is_unshared(constant: ov.Node) -> bool:
    return len(constant.output(0).get_target_inputs()) == 1


def _rotation_of(value: ov.Output, found: dict[int, _Rotation]) -> _Rotation | None:
    """Return the rotation that attention reads, through what only moves numbers; None if there is none."""
    while (node := value.get_node()).get_instance_id() not in found:
        if node.get_type_name() not in _MOVES:
            return None
        value = node.input_value(node.get_input_size() - 1 if node.get_type_name() == "Concat" else 0)
    return found[node.get_instance_id()]


def _is_only_attended(rotation: ov.Node) -> bool:
    """Return whether only attention reads what a rotation gives, as queries or keys, through what only moves numbers."""
    size = _last(rotation.output(0))
    waiting = [rotation.output(0)]
    seen = set[int]()
    while waiting:
        for port in waiting.pop().get_target_inputs():
            node = port.get_node()
            kind = node.get_type_name()
            if (
                kind == "ScaledDotProductAttention"
                and port.get_index() <= 1
                and _last(port.get_source_output()) == size
            ):
                continue
            if kind not in (*_MOVES, "Assign"):
                return False
            if node.get_instance_id() not in seen and kind != "Assign":
                seen.add(node.get_instance_id())
                waiting.append(node.output(0))
    return True


def _last(value: ov.Output) -> ov.Dimension:
    return value.get_partial_shape()[-1]


def _change(rotation: _Rotation) -> None:
    """Reorder the rows, and rotate the halves of the heads."""
    for constant in rotation.weights:
        _reorder(constant, rotation.order)
    for bias in rotation.biases:
        values = np.asarray(bias.get_data(dtype=np.float32)).reshape(-1)[rotation.order]
        values = values.reshape(list(bias.get_output_shape(0)))
        redirect(bias.output(0), ops.constant(values, bias.get_element_type()).output(0))
    turn = ops.constant([0, 2, 1, 3])
    cosine, sine = (ops.transpose(ops.concat([each, each], -1), turn) for each in (rotation.cosine, rotation.sine))
    rotated = rotated_halves(ops.transpose(rotation.unrotated, turn).output(0), cosine.output(0), sine.output(0))
    redirect(rotation.result.output(0), ops.transpose(rotated, turn).output(0))


def _reorder(constant: ov.Node, order: Order) -> None:
    """Replace a constant by one with its rows in another order; rows of numbers of four bits are whole bytes."""
    shape = list(constant.get_output_shape(0))
    rows = np.ascontiguousarray(constant.data).reshape(-1).view(np.uint8).reshape(shape[0], -1)
    tensor = ov.Tensor(constant.get_element_type(), ov.Shape(shape))
    tensor.data.reshape(-1).view(np.uint8)[:] = rows[order].reshape(-1)
    redirect(constant.output(0), ops.constant(tensor).output(0))
