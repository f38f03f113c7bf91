"""Stores scales of compressed weights in f16, for NPUs, which compute in f16 in any case.

Scales in f32 are read in full by every call, and a product of weights with them is one in f32. Files whose scales are products of
two numbers have them (``Q6_K``, for example).
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from ..graph.compressed_matrix import CompressedMatrix, decompress, find_compressed_matrices
from ..graph.step_graph import StepGraph

STAGE = "narrow_scales"
LARGEST = float(np.finfo(np.float16).max)


def narrow_scales(graph: StepGraph) -> None:
    """Multiply weights without zero points with scales in f16, if f16 can hold these."""
    matrices = [each for each in find_compressed_matrices(graph.model) if each.scale.get_element_type() == ov.Type.f32]
    narrowed = sum(_narrow(matrix) for matrix in matrices if matrix.zero_point is None)
    if narrowed:
        graph.model.validate_nodes_and_infer_types()
    graph.note(STAGE, f"{narrowed} of {len(matrices)} matrices with scales in f32 have them in f16")


def _narrow(matrix: CompressedMatrix) -> bool:
    node = matrix.scale.get_node()
    while node.get_type_name() != "Constant":
        node = node.input_value(0).get_node()
    values = np.asarray(node.get_data(dtype=np.float32)).reshape(list(matrix.scale.get_shape()))
    if np.abs(values).max() > LARGEST:
        return False
    weights: ov.Node = decompress(matrix.weights, ops.constant(values.astype(np.float16)).output(0))
    if matrix.is_grouped:
        weights = ops.reshape(weights, np.array(matrix.shape), special_zero=False)
    matrix.replace(weights.output(0))
    return True
