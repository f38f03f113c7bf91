"""Stores weights that are compressed in groups with the groups first, for NPUs.

Intel's NPU compiler multiplies ``[groups, N, size]`` with their scales, transposes them back and multiplies faster than ``[N,
groups, size]``: for one row and 4-bit weights of 4864 inputs, 184 microseconds against 313. The values are the same.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from ..graph.compressed_matrix import CompressedMatrix, decompress, find_compressed_matrices
from ..graph.step_graph import StepGraph, through

STAGE = "lead_groups"


def lead_groups(graph: StepGraph) -> None:
    """Put the groups of compressed weights first. Weights with zero points, or that others read too, are left alone."""
    matrices = [matrix for matrix in find_compressed_matrices(graph.model) if matrix.is_grouped]
    done = 0
    for matrix in matrices:
        is_whole = matrix.weights.get_output_shape(0)[-1] * matrix.bits % 8 == 0
        if matrix.zero_point is None and not matrix.is_shared and is_whole:
            _lead(matrix)
            done += 1
    graph.model.validate_nodes_and_infer_types()
    graph.note(STAGE, f"{done} of {len(matrices)} matrices in groups have their groups first")


def _lead(matrix: CompressedMatrix) -> None:
    weights = _swapped(matrix.weights)
    scale: ov.Node = _swapped(through(matrix.scale, "Convert").get_node())
    if scale.get_element_type() != matrix.scale.get_element_type():
        scale = ops.convert(scale, matrix.scale.get_element_type().get_type_name())
    rank = len(weights.get_output_shape(0))
    order = np.array([*range(rank - 3), rank - 2, rank - 3, rank - 1])
    back = ops.transpose(decompress(weights, scale.output(0)), order)
    matrix.replace(ops.reshape(back, np.array(matrix.shape), special_zero=False).output(0))


def _swapped(constant: ov.Node) -> ov.Node:
    """Return a constant ``[..., N, groups, size]`` as ``[..., groups, N, size]``."""
    shape = list(constant.get_output_shape(0))
    own = np.asarray(constant.data).reshape(-1).view(np.uint8).reshape([*shape[:-1], -1])
    swapped = ov.Tensor(constant.get_output_element_type(0), ov.Shape([*shape[:-3], shape[-2], shape[-3], shape[-1]]))
    target = swapped.data.reshape(-1).view(np.uint8)
    moved = np.swapaxes(own, -3, -2)
    target.reshape(moved.shape)[:] = moved
    result = ops.constant(swapped, shared_memory=True)
    result.set_friendly_name(constant.get_friendly_name())
    return result
