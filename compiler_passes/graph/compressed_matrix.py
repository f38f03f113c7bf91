"""Finds the products with compressed weights, reads the parts of those weights, and puts new parts together.

Compressed weights are ``(weights - zero point) * scale``. ``weights`` is a constant of integers, ``[..., N, K]`` with a scale for
each of the N rows, or ``[..., N, groups, size]`` with a scale for each group of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from .step_graph import through

INTEGERS = ("u8", "i8", "u4", "i4")
_PRODUCT_AXES = 2


@dataclass(frozen=True)
class CompressedMatrix:
    """A product ``x · weightsᵀ`` with compressed weights.

    ``readers``: the inputs of other nodes that read the same weights.
    """

    product: ov.Node
    weights: ov.Node
    zero_point: ov.Node | None
    scale: ov.Output
    scaled: ov.Node
    """The Multiply by the scale."""

    @property
    def producer(self) -> ov.Output:
        """The values that are multiplied with the matrix, ``[..., K]``."""
        return self.product.input_value(0)

    @property
    def is_grouped(self) -> bool:
        """Whether a row has several scales."""
        return len(self.weights.get_output_shape(0)) > len(self.product.input_value(1).get_partial_shape())

    @property
    def shape(self) -> list[int]:
        """The shape of the weights as they are multiplied, ``[..., N, K]``."""
        return list(self.product.input_value(1).get_shape())

    @property
    def bits(self) -> int:
        return int(self.weights.get_element_type().bitwidth)

    @property
    def is_shared(self) -> bool:
        """Whether other nodes read these weights too, as an embedding does if it is tied to the head."""
        output = self.product.input_value(1)
        while output.get_node().get_instance_id() != self.weights.get_instance_id():
            if len(output.get_target_inputs()) > 1:
                return True
            output = output.get_node().input_value(0)
        return len(output.get_target_inputs()) > 1

    def replace(self, weights: ov.Output, producer: ov.Output | None = None) -> None:
        """Multiply with other weights, ``[..., N, K]`` in any type, and with other values if a ``producer`` is given."""
        wanted = self.product.get_input_element_type(1)
        if weights.get_element_type() != wanted:
            weights = ops.convert(weights, wanted.get_type_name()).output(0)
        self.product.input(1).replace_source_output(weights)
        if producer is not None:
            self.product.input(0).replace_source_output(producer)


def find_compressed_matrices(model: ov.Model) -> list[CompressedMatrix]:
    """Return the products with compressed weights in the order of the model."""
    found = (_compressed_matrix(node) for node in model.get_ordered_ops() if node.get_type_name() == "MatMul")
    return [matrix for matrix in found if matrix is not None]


def decompress(weights: ov.Node, scale: ov.Output) -> ov.Node:
    """Return ``weights * scale`` in the type of the scale."""
    return ops.multiply(ops.convert(weights, scale.get_element_type().get_type_name()), scale)


def _compressed_matrix(product: ov.Node) -> CompressedMatrix | None:
    attributes = product.get_attributes()
    output = product.input_value(1)
    if attributes["transpose_a"] or not attributes["transpose_b"] or output.get_partial_shape().is_dynamic:
        return None
    shape = list(output.get_shape())
    scaled = through(output, "Convert", "Reshape").get_node()
    if len(shape) < _PRODUCT_AXES or scaled.get_type_name() != "Multiply":
        return None
    value, scale = scaled.input_values()
    zero_point = None
    if value.get_node().get_type_name() == "Subtract":
        value, subtracted = value.get_node().input_values()
        zero_point = through(subtracted, "Convert").get_node()
        if zero_point.get_type_name() != "Constant":
            return None
    weights = through(value, "Convert").get_node()
    is_known = weights.get_type_name() == "Constant" and weights.get_element_type().get_type_name() in INTEGERS
    if not is_known or through(scale, "Convert").get_node().get_type_name() != "Constant":
        return None
    own = list(weights.get_output_shape(0))
    scales = list(scale.get_shape())
    is_plain = own == shape and scales == [*own[:-1], 1]
    is_grouped = len(own) == len(shape) + 1 and scales == [*own[:-1], 1] and own[:-2] == shape[:-1]
    if not is_plain and not is_grouped:
        return None
    return CompressedMatrix(product, weights, zero_point, scale, scaled)


def is_symmetric(matrix: CompressedMatrix) -> bool:
    """Return whether the weights are signed, or are if half of their range is subtracted: no zero point is another number."""
    zero_points = zero_points_of(matrix)
    is_unsigned = matrix.weights.get_element_type().get_type_name().startswith("u")
    middle = 1 << matrix.bits - 1 if is_unsigned else 0
    return zero_points is not None and bool(np.all(zero_points == middle))


def fractions_of(matrix: CompressedMatrix) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None:
    """Return the zero point of each scale as any finite number, in the shape of the scales; None if there is not one for each."""
    shape = list(matrix.scale.get_shape())
    if matrix.zero_point is None:
        return np.zeros(shape, np.float32)
    values = np.asarray(matrix.zero_point.get_data(dtype=np.float32))
    if values.size not in (1, np.prod(shape)) or not np.isfinite(values).all():
        return None
    return np.broadcast_to(values.reshape(-1 if values.size == 1 else shape), shape)


def zero_points_of(matrix: CompressedMatrix) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]] | None:
    """Return the zero point of each scale, in the shape of the scales; None if one is no integer of the weights' type."""
    values = fractions_of(matrix)
    if matrix.zero_point is None or values is None:
        return None if values is None else values.astype(np.int64)
    lowest = -(1 << matrix.bits - 1) if matrix.weights.get_element_type().get_type_name().startswith("i") else 0
    is_known = np.array_equal(values, np.round(values)) and values.min() >= lowest
    if not is_known or values.max() > lowest + (1 << matrix.bits) - 1:
        return None
    return values.astype(np.int64)
