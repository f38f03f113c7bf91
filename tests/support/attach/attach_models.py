"""The models of ``attach_calls.py``."""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13 as ops


def dynamic_model():
    x = ops.parameter([-1, 3], np.float32, name="x")
    y = ops.parameter([-1, 3], np.int64, name="y")
    total = ops.add(x, ops.convert(y, "f32"))
    total.output(0).tensor.set_names({"total", "sum"})
    flag = ops.greater(x, ops.constant(np.float32(0)))
    flag.output(0).tensor.set_names({"flag"})
    model = ov.Model([ops.result(total, name="r0"), ops.result(flag, name="r1")], [x, y], "dynamic")
    for node, name in ((x, "x"), (y, "y")):
        node.output(0).tensor.set_names({name})
    return model


def static_model(size=4):
    x = ops.parameter([1, size], np.float32, name="x")
    x.output(0).tensor.set_names({"x"})
    out = ops.multiply(x, ops.constant(np.float32(2)))
    out.output(0).tensor.set_names({"twice"})
    return ov.Model([out], [x], "static")


def slow_model():
    x = ops.parameter([-1, 1500], np.float32, name="x")
    x.output(0).tensor.set_names({"x"})
    weights = ops.constant(np.ones((1500, 1500), np.float32) / 1500)
    out = x
    for _ in range(8):
        out = ops.matmul(out, weights, False, False)
    out.output(0).tensor.set_names({"y"})
    return ov.Model([out], [x], "slow")


def counting_model():
    x = ops.parameter([1, 2], np.float32, name="x")
    x.output(0).tensor.set_names({"x"})
    state = ops.read_value(ops.constant(np.zeros((1, 2), np.float32)), "count", ov.Type.f32, [1, 2])
    total = ops.add(state, x)
    total.output(0).tensor.set_names({"total"})
    return ov.Model([ops.result(total)], [ops.assign(total, "count")], [x], "counting")


def half_model():
    x = ops.parameter([1, 4], ov.Type.bf16, name="x")
    return ov.Model([ops.relu(x)], [x], "half")
