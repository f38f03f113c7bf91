"""The products of a model's matrices alone, as plain OpenVINO programs: what the machine's matrix units give for them.

The programs have the matrices of a few layers, more than a cache holds, with weights that are already in the element type of the
products: f32, bf16 where the CPU has it, and int8 (activations in 8 bits with one scale, quantized in the program).
``int8 weights`` has weights in 8 bits and the plugin's own settings, as the model.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

CACHE_WEIGHTS = 64 << 20
"""Least number of weights in the products, so that no cache holds them even with 8 bits each."""
RUNS = 2
SCALE, RANGE = np.float32(0.001), np.float32(4.0)


@dataclass(frozen=True)
class ElementType:
    """How products in one element type are made. ``properties``: those of OpenVINO; ``needs``: the capability of the CPU."""

    name: str
    make: Callable[[ov.Node, np.ndarray], ov.Node]
    properties: dict[str, Any]
    needs: str = "FP32"


class Products:
    """The products of a model with its matrices, for any number of rows, in each element type of this machine."""

    def __init__(self, path: str, properties: dict[str, Any] | None = None) -> None:
        shapes = matrix_shapes(path)
        self.flops = 2 * sum(outputs * inputs for outputs, inputs in shapes)
        self._core = ov.Core()
        capabilities = self._core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        layers = in_layers(shapes)
        self._share = 2 * sum(o * i for layer in layers for o, i in layer) / self.flops
        self._sizes = sorted({inputs for layer in layers for _, inputs in layer})
        types = [each for each in TYPES if each.needs in capabilities]
        self._requests = {
            each.name: [self._compile(layer, each, {**each.properties, **(properties or {})}) for layer in layers]
            for each in types
        }

    def products(self, rows: int) -> dict[str, float]:
        """Return the ms of the products of all layers with ``rows`` rows, by element type: the shortest of ``RUNS``, in turns."""
        random = np.random.default_rng(rows)
        arrays = {size: random.standard_normal((rows, size)).astype(np.float32) for size in self._sizes}
        best: dict[str, float] = {}
        for number in range(RUNS + 1):
            for name, requests in self._requests.items():
                seconds = 0.0
                for request in requests:
                    feeds = {str(size): arrays[size] for size in self._sizes if str(size) in _inputs(request)}
                    start = time.perf_counter()
                    request.infer(feeds, share_inputs=True)
                    seconds += time.perf_counter() - start
                if number:
                    best[name] = min(best.get(name, seconds), seconds)
        return {name: 1e3 * seconds / self._share for name, seconds in best.items()}

    def work(self) -> dict[str, float]:
        """Return the floating-point operations of one row."""
        return {"flops": float(self.flops)}

    def _compile(
        self, layer: list[tuple[int, int]], element_type: ElementType, properties: dict[str, Any]
    ) -> ov.InferRequest:
        random, inputs, results = np.random.default_rng(0), dict[int, ov.Node](), []
        for num_outputs, num_inputs in layer:
            if num_inputs not in inputs:
                inputs[num_inputs] = ops.parameter([-1, num_inputs], np.float32, name=str(num_inputs))
                inputs[num_inputs].output(0).set_names({str(num_inputs)})
            weights = random.integers(-127, 128, (num_outputs, num_inputs)).astype(np.int8)
            results.append(ops.result(element_type.make(inputs[num_inputs], weights)))
        model = ov.Model(results, list(inputs.values()))
        compiled = self._core.compile_model(model, "CPU", {"PERFORMANCE_HINT": "LATENCY", **properties})
        return compiled.create_infer_request()


def _inputs(request: ov.InferRequest) -> set[str]:
    return {name for port in request.get_compiled_model().inputs for name in port.get_names()}


def _plain(rows: ov.Node, weights: np.ndarray) -> ov.Node:
    return ops.matmul(rows, ops.constant(weights.astype(np.float32) * SCALE), False, True)


def _compressed(rows: ov.Node, weights: np.ndarray) -> ov.Node:
    scales = ops.constant(np.full((len(weights), 1), SCALE))
    return ops.matmul(rows, ops.multiply(ops.convert(ops.constant(weights), np.float32), scales), False, True)


def _quantized(rows: ov.Node, weights: np.ndarray) -> ov.Node:
    low, high = ops.constant(-RANGE), ops.constant(RANGE * np.float32(127 / 128))
    return _compressed(ops.fake_quantize(rows, low, high, low, high, 256), weights)


TYPES = (
    ElementType("f32", _plain, {"INFERENCE_PRECISION_HINT": "f32"}),
    ElementType("bf16", _plain, {"INFERENCE_PRECISION_HINT": "bf16"}, needs="BF16"),
    ElementType("int8", _quantized, {}, needs="INT8"),
    ElementType("int8 weights", _compressed, {}),
)


def matrix_shapes(path: str) -> list[tuple[int, int]]:
    """Return outputs and inputs of every matrix that the rows of a prompt are multiplied with, as our programs have them.

    The head is not among them: it is multiplied with one row.
    """
    from staticllm.config import StaticLLMConfig
    from staticllm.pipelines.loading.decoder_kind import prepare

    plan = prepare(path, "CPU", StaticLLMConfig())
    shapes = []
    for node in plan.lowered.graph.model.get_ordered_ops():
        if node.get_type_name() == "MatMul" and len(node.input_value(1).get_partial_shape()) == 2:
            rows, columns = node.input_value(1).get_shape()
            shapes.append((rows, columns) if node.get_attributes()["transpose_b"] else (columns, rows))
    return shapes[:-1]


def in_layers(shapes: list[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Return the first layers of a model, at least ``CACHE_WEIGHTS`` weights in all. A layer ends where the shapes repeat."""
    lengths = range(1, len(shapes) // 2 + 1)
    length = next((count for count in lengths if shapes[:count] == shapes[count : 2 * count]), len(shapes))
    layers, num_weights = [], 0
    for start in range(0, len(shapes), length):
        if num_weights >= CACHE_WEIGHTS:
            break
        layers.append(shapes[start : start + length])
        num_weights += sum(outputs * inputs for outputs, inputs in layers[-1])
    return layers
