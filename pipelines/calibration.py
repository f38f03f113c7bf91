"""What a device should be told, where that is a matter of speed on this machine: measured, not guessed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from staticllm.compiler_passes.graph import through
from staticllm.core import Phase

GROUP_SIZE = "DYNAMIC_QUANTIZATION_GROUP_SIZE"
LARGE_GROUP = 128
"""Activations that share a scale when the CPU multiplies them in 8 bits with weights in 8 or 4. The plugin's own choice is 32."""
WORTH_IT = 1.1
"""So much faster a larger group must be: its words are a little further from the model's (docs/design.md)."""
PROBE_ROWS, PROBE_RUNS = 128, 12
LEAST_WEIGHTS = 1_000_000
"""In a layer. Below, the gain is small and would be seen in one start and not in the next: words must not depend on that."""
_COMPRESSED = ("u8", "i8", "u4", "i4")
_DECOMPRESSION = ("Convert", "Multiply", "Subtract", "Reshape")


def calibrated(
    core: ov.Core, device: str, model: ov.Model, phases: Mapping[Phase, Mapping[str, Any]]
) -> dict[Phase, Mapping[str, Any]]:
    """The properties of each phase, and what was found to be faster for the weights of ``model``. What the user set stays.

    On the CPU a program of one matrix of each shape in the model is timed with the plugin's own group size and with
    ``LARGE_GROUP``: about a quarter of a second. Both phases get the same, so that they can share a program. Other devices
    are left as they are.
    """
    if device.split(".", maxsplit=1)[0] != "CPU" or any(GROUP_SIZE in properties for properties in phases.values()):
        return dict(phases)
    probe = _probe(model)
    if probe is None:
        return dict(phases)
    own = dict(phases["prefill"])
    seconds, larger_seconds = _seconds(core, device, probe, [own, {**own, GROUP_SIZE: LARGE_GROUP}])
    if seconds < WORTH_IT * larger_seconds:
        return dict(phases)
    return {phase: {**properties, GROUP_SIZE: LARGE_GROUP} for phase, properties in phases.items()}


def _probe(model: ov.Model) -> ov.Model | None:
    """One compressed matrix of each shape that occurs more than once, side by side; None if nothing is to be tried."""
    found = [node for node in model.get_ordered_ops() if _is_compressed(node)]
    counts = Counter(tuple(node.input_value(1).get_shape()) for node in found)
    matrices = {tuple(node.input_value(1).get_shape()): node for node in found}
    repeated = [shape for shape in matrices if counts[shape] > 1]  # not the head
    if sum(rows * columns for rows, columns in repeated) < LEAST_WEIGHTS:
        return None
    inputs, results = [], []
    for shape in repeated:
        node = matrices[shape]
        is_transposed = node.get_attributes()["transpose_b"]
        size = shape[1] if is_transposed else shape[0]
        if size % LARGE_GROUP:
            return None
        rows = ops.parameter([1, PROBE_ROWS, size], node.input_value(0).get_element_type())
        inputs.append(rows)
        results.append(ops.result(ops.matmul(rows, node.input_value(1), False, is_transposed)))
    return ov.Model(results, inputs)  # pyright: ignore[reportGeneralTypeIssues] - a slip of OpenVINO's stubs


def _is_compressed(node: ov.Node) -> bool:
    if node.get_type_name() != "MatMul" or len(node.input_value(1).get_partial_shape()) != 2:
        return False
    weights = through(node.input_value(1), *_DECOMPRESSION).get_node()
    return weights.get_type_name() == "Constant" and weights.get_element_type().get_type_name() in _COMPRESSED


def _seconds(core: ov.Core, device: str, probe: ov.Model, candidates: list[dict[str, Any]]) -> list[float]:
    """The shortest run of each, in turns."""
    random = np.random.default_rng(0)
    feeds = [random.standard_normal(tuple(port.shape)).astype(np.float32) for port in probe.inputs]
    requests = [core.compile_model(probe, device, properties).create_infer_request() for properties in candidates]
    times: list[list[float]] = [[] for _ in candidates]
    for request in requests:
        request.infer(feeds)
    for _ in range(PROBE_RUNS):
        for request, taken in zip(requests, times, strict=True):
            start = time.perf_counter()
            request.infer()
            taken.append(time.perf_counter() - start)
    return [min(taken) for taken in times]
