"""Takes the zero points of compressed weights out of the graph, for NPUs.

Intel's NPU compiler expands 8-bit weights with zero points to f16 in every step if they are inputs of a program, and refuses
4-bit ones. Here ``q - zero point`` becomes ``i + d``: ``i = q - middle`` is a signed integer (one bit differs), and
``d = middle - zero point`` a small integer of a row, or of a group of a row.

- Rows with one scale: ``x · (i + d)`` is ``[x, sums, sums] · [i, d // 2, d - d // 2]``, where ``sums`` are those of 8 or 16 parts
  of x. So the matrix gets 16 bytes of columns of its own type and scale: exact, and cheaper than adding a product to the result.
- Rows with groups: the sums of groups are multiplied with ``d * scale``, and the product is added. Here zero points may be any
  numbers, as those of blocks that have a scale and a minimum; their products are in f16, in which NPUs compute.
- Weights that others read too, as an embedding that is tied to the head: like groups; the others get shifted zero points.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from ..graph.compressed_matrix import (
    CompressedMatrix,
    decompress,
    find_compressed_matrices,
    fractions_of,
    zero_points_of,
)
from ..graph.step_graph import StepGraph

LARGEST = float(np.finfo(np.float16).max)
STAGE = "shift_zero_points"
ROW_BYTES = 16
"""A matrix gets columns of as many bytes as this. The compiler is slow with rows of other lengths, or refuses them (5010)."""
_SIGNED = {8: ov.Type.i8, 4: ov.Type.i4}
Key = tuple[int, int, int]
Numbers = NDArray[np.int64] | NDArray[np.float32]


@dataclass
class _Sums:
    """What products with the same producer share: their sums, and their producer with these sums."""

    values: dict[Key, ov.Output] = field(default_factory=dict)

    def of(self, matrix: CompressedMatrix, parts: int) -> ov.Output:
        """Return the sums of this number of parts of a matrix's producer."""
        producer = matrix.producer
        key = (producer.get_node().get_instance_id(), producer.get_index(), parts)
        if key not in self.values:
            self.values[key] = _sums(producer, parts, matrix.shape[-1] // parts)
        return self.values[key]

    def beside(self, matrix: CompressedMatrix, parts: int) -> ov.Output:
        """Return ``[producer, sums, sums]``."""
        producer = matrix.producer
        key = (producer.get_node().get_instance_id(), producer.get_index(), -parts)
        if key not in self.values:
            sums = self.of(matrix, parts)
            self.values[key] = ops.concat([producer, sums, sums], axis=-1).output(0)
        return self.values[key]


def shift_zero_points(graph: StepGraph) -> None:
    """Make compressed weights signed and without zero points. What cannot be shifted is left alone and noted."""
    sums = _Sums()
    shifted: dict[int, ov.Node] = {}
    done = 0
    matrices = find_compressed_matrices(graph.model)
    for matrix in matrices:
        if matrix.zero_point is None and matrix.weights.get_element_type().get_type_name().startswith("i"):
            continue
        reason = _shift(matrix, sums, shifted)
        if reason:
            graph.note(STAGE, f"{matrix.product.get_friendly_name()!r} left alone: {reason}")
        done += not reason
    graph.model.validate_nodes_and_infer_types()
    graph.note(STAGE, f"{done} of {len(matrices)} compressed matrices lost their zero points")


def _shift(matrix: CompressedMatrix, sums: _Sums, shifted: dict[int, ov.Node]) -> str:
    """Shift one matrix, and return the reason why not, which is empty if it was possible."""
    zero_points: Numbers | None = zero_points_of(matrix)
    if zero_points is None and matrix.is_grouped:
        zero_points = fractions_of(matrix)
    if zero_points is None:
        return "its zero points are no integers of the type of its weights"
    if matrix.producer.get_partial_shape().rank.is_dynamic:
        return "the rank of its input is not known"
    if matrix.shape[-1] % 2 and matrix.bits < 8:
        return "a row is no whole number of bytes"
    is_unsigned = matrix.weights.get_element_type().get_type_name().startswith("u")
    offsets = (1 << matrix.bits - 1 if is_unsigned else 0) - zero_points
    if matrix.is_shared or matrix.weights.get_instance_id() in shifted:
        _shift_shared(matrix, offsets, sums, shifted)
    elif matrix.is_grouped:
        _add_correction(matrix, _signed(matrix), offsets, sums)
    elif not np.any(offsets):
        matrix.replace(decompress(_signed(matrix), matrix.scale).output(0))
    else:
        most = ROW_BYTES * 8 // matrix.bits // 2
        parts = next(parts for parts in (most, 8, 4, 2, 1) if matrix.shape[-1] % parts == 0)
        columns = np.repeat(np.concatenate([offsets // 2, offsets - offsets // 2], axis=-1), parts, axis=-1)
        weights = decompress(_signed(matrix, columns.astype(np.int8)), matrix.scale)
        matrix.replace(weights.output(0), sums.beside(matrix, parts))
    return ""


def _shift_shared(matrix: CompressedMatrix, offsets: Numbers, sums: _Sums, shifted: dict[int, ov.Node]) -> None:
    """Give the product its own reading of the shifted weights, and all other readers a shifted zero point."""
    key = matrix.weights.get_instance_id()
    if key not in shifted:
        signed = _signed(matrix)
        shifted[key] = signed
        kind = matrix.scale.get_element_type().get_type_name()
        value: ov.Node = ops.convert(signed, kind)
        if np.any(offsets):
            narrow = np.float32 if offsets.dtype == np.float32 else np.int8
            value = ops.subtract(value, ops.convert(ops.constant((-offsets).astype(narrow)), kind))
        matrix.scaled.input(0).replace_source_output(value.output(0))
    _add_correction(matrix, shifted[key], offsets, sums)


def _add_correction(matrix: CompressedMatrix, weights: ov.Node, offsets: Numbers, sums: _Sums) -> None:
    """Multiply with ``weights``, and add the product of the sums of groups with ``offsets * scale``."""
    product = matrix.product
    readers = product.output(0).get_target_inputs()
    groups = list(matrix.scale.get_shape())[-2] if matrix.is_grouped else 1
    value: ov.Node = decompress(weights, matrix.scale)
    if matrix.is_grouped:
        value = ops.reshape(value, np.array(matrix.shape), special_zero=False)
    matrix.replace(value.output(0))
    if not np.any(offsets):
        return
    scale = _numbers(matrix.scale)
    factors = (offsets.reshape(scale.shape) * scale).reshape([*matrix.shape[:-1], groups])
    fits = offsets.dtype == np.float32 and np.abs(factors).max() <= LARGEST
    kind = np.float16 if fits else matrix.scale.get_element_type().to_dtype()
    change = _outer(sums.of(matrix, groups), factors.astype(kind), matrix.producer)
    total = ops.add(product, change)
    total.set_friendly_name(f"{product.get_friendly_name()}/shifted")
    for reader in readers:
        reader.replace_source_output(total.output(0))


def _outer(sums: ov.Output, factors: NDArray[Any], like: ov.Output) -> ov.Node:
    """Return ``sums [..., S, groups] · factors [..., N, groups]ᵀ`` in the type of ``like``, as a Multiply if that is enough."""
    if factors.shape[-1] == 1:
        row = ops.constant(np.ascontiguousarray(np.swapaxes(factors, -1, -2)))
        return ops.multiply(sums, ops.convert_like(row, like))
    return ops.matmul(sums, ops.convert_like(ops.constant(factors), like), transpose_a=False, transpose_b=True)


def _numbers(output: ov.Output) -> NDArray[np.float32]:
    """Return the values of a constant, which may be converted."""
    node = output.get_node()
    while node.get_type_name() != "Constant":
        node = node.input_value(0).get_node()
    return np.asarray(node.get_data(dtype=np.float32)).reshape(list(output.get_shape()))


def _sums(producer: ov.Output, parts: int, size: int) -> ov.Output:
    """Return the sums of ``parts`` parts of this ``size`` of the last axis: ``[..., parts]``."""
    kept = [0] * (len(producer.get_partial_shape()) - 1)
    cut = ops.reshape(producer, np.array([*kept, parts, size]), special_zero=True)
    return ops.reduce_sum(cut, ops.constant(np.array([-1])), keep_dims=False).output(0)


def _signed(matrix: CompressedMatrix, columns: NDArray[np.int8] | None = None) -> ov.Node:
    """Return the weights as signed integers, with more ``columns [..., N, count]`` if there are any."""
    shape = list(matrix.weights.get_output_shape(0))
    rows = int(np.prod(shape[:-1]))
    own = np.asarray(matrix.weights.data).reshape(-1).view(np.uint8).reshape(rows, -1)
    added = _packed(columns.reshape(rows, -1), matrix.bits) if columns is not None else np.zeros((rows, 0), np.uint8)
    shape[-1] += columns.shape[-1] if columns is not None else 0
    is_unsigned = matrix.weights.get_element_type().get_type_name().startswith("u")
    flipped = {8: 0x80, 4: 0x88}[matrix.bits] if is_unsigned else 0
    tensor = ov.Tensor(_SIGNED[matrix.bits], ov.Shape(shape))
    target: NDArray[Any] = tensor.data.reshape(-1).view(np.uint8).reshape(rows, -1)
    np.bitwise_xor(own, np.uint8(flipped), out=target[:, : own.shape[1]])
    target[:, own.shape[1] :] = added
    constant = ops.constant(tensor, shared_memory=True)
    constant.set_friendly_name(f"{matrix.weights.get_friendly_name()}/signed")
    return constant


def _packed(values: NDArray[np.int8], bits: int) -> NDArray[np.uint8]:
    """Return integers ``[rows, count]`` as bytes, two of 4 bits per byte with the first in the low half."""
    if bits == 8:
        return values.view(np.uint8)
    low = values[:, ::2].view(np.uint8)
    high = values[:, 1::2].view(np.uint8)
    return ((low & 15) | (high << 4)).astype(np.uint8)
