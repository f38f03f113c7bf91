"""Compresses the weights of a tiny model to integers in the test, as exporters do, with scales in f32 or f16."""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from staticllm.compiler_passes.graph.step_graph import through


def packed(values, bits):
    """Return integers as bytes; those of 4 bits in pairs, with the first in the low half."""
    flat = values.astype(np.int16).reshape(-1)
    if bits == 8:
        return (flat & 255).astype(np.uint8)
    even = np.append(flat, np.zeros(flat.size % 2, np.int16))
    return ((even[::2] & 15) | (even[1::2] & 15) << 4).astype(np.uint8)


def integers(values, kind):
    """Return a constant of integers of a type: u8, i8, u4 or i4."""
    tensor = ov.Tensor(getattr(ov.Type, kind), ov.Shape(values.shape))
    tensor.data.reshape(-1).view(np.uint8)[:] = packed(values, int(kind[1]))
    return ops.constant(tensor)


def compressed(weights, kind, group=0, scale_type="f32", seed=0):
    """Return weights ``[..., N, K]`` as ``(integers - zero point) * scale``, with random zero points for unsigned types."""
    bits = int(kind[1])
    shape = weights.shape
    rows = weights.reshape([*shape[:-1], shape[-1] // group, group]) if group else weights
    lowest = 0 if kind.startswith("u") else -(1 << bits - 1)
    step = np.maximum(np.abs(rows).max(axis=-1, keepdims=True), 1e-6) / (1 << bits - 1) * 1.5
    scale = step.astype(np.float16 if scale_type == "f16" else np.float32)
    middle = lowest + (1 << bits - 1)
    zero = np.full(scale.shape, middle, np.int64)
    if kind.startswith("u"):
        zero += np.random.default_rng(seed).integers(-middle, middle, scale.shape)
        zero.reshape(-1)[:2] = (0, 2 * middle - 1)[: zero.size]  # both ends
    levels = np.clip(np.round(rows / scale.astype(np.float32)) + zero, lowest, lowest + (1 << bits) - 1)
    value = ops.convert(integers(levels, kind), scale_type)
    if kind.startswith("u"):
        value = ops.subtract(value, ops.convert(integers(zero, kind), scale_type))
    value = ops.multiply(value, ops.constant(scale))
    return ops.reshape(value, np.array(shape), special_zero=False) if group else value


def compress(model, kind, group=0, scale_type="f32"):
    """Compress every weight of a product ``x · weightsᵀ`` of a model, in place; return how many were compressed."""
    count = 0
    for node in model.get_ordered_ops():
        if node.get_type_name() != "MatMul" or node.get_attributes()["transpose_a"]:
            continue
        weights = node.input_value(1)
        constant = through(weights, "Convert").get_node()
        if constant.get_type_name() != "Constant" or not node.get_attributes()["transpose_b"]:
            continue
        shape = list(constant.get_output_shape(0))
        if len(shape) < 2 or shape[-1] % (group or 2):
            continue
        values = np.asarray(constant.get_data(dtype=np.float32)).reshape(shape)
        new = compressed(values, kind, group, scale_type, seed=count)
        node.input(1).replace_source_output((new if scale_type == "f32" else ops.convert(new, "f32")).output(0))
        count += 1
    model.validate_nodes_and_infer_types()
    return count
