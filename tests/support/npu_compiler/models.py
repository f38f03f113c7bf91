"""Small models for the NPU compiler."""

import numpy as np
import openvino as ov
from openvino import opset13 as ops


def a_layer(rows=16, width=128, kind="f16"):
    """Return a layer with a normalisation: rows of ``width``, and weights of a type as inputs."""
    value = ops.parameter([1, rows, width], ov.Type.f16, name="value")
    weights = ops.parameter([width, width], getattr(ov.Type, kind), name="weights")
    inputs = [value, weights]
    matrix = weights
    if kind != "f16":
        scale = ops.parameter([width, 1], ov.Type.f16, name="scale")
        inputs.append(scale)
        matrix = ops.multiply(ops.convert(weights, "f16"), scale)
    product = ops.matmul(value, matrix, False, True)
    return ov.Model([ops.softmax(product, -1)], inputs, f"a layer of {rows} rows")


def a_refused_model():
    """Return a model that the compiler refuses (2026.4): 4-bit weights with zero points as inputs."""
    value = ops.parameter([1, 16, 128], ov.Type.f16)
    weights = ops.parameter([256, 128], ov.Type.u4)
    zeros = ops.parameter([256, 1], ov.Type.u4)
    scale = ops.parameter([256, 1], ov.Type.f16)
    matrix = ops.multiply(ops.subtract(ops.convert(weights, "f16"), ops.convert(zeros, "f16")), scale)
    return ov.Model([ops.matmul(value, matrix, False, True)], [value, weights, zeros, scale], "4 bits with zero points")


def a_weighted_model(seed=0):
    """Return a model with its weights inside."""
    value = ops.parameter([1, 16, 128], ov.Type.f16)
    weights = ops.constant(np.random.default_rng(seed).standard_normal((128, 256)).astype(np.float16))
    return ov.Model([ops.matmul(value, weights, False, False)], [value], "with weights")
