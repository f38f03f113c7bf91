"""What a device should be told, where that is a matter of speed on this machine: measured, not guessed."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from staticllm.compiler_passes.graph import compressed_weights
from staticllm.core import Part, Phase, ProgramLayout

GROUP_SIZE, PRECISION = "DYNAMIC_QUANTIZATION_GROUP_SIZE", "INFERENCE_PRECISION_HINT"
LARGE_GROUP = 128
"""Activations that share a scale when the CPU multiplies them in 8 bits with weights in 8 or 4. The plugin's own choice is 32."""
WORTH_IT = 1.1
"""So much faster a larger group must be: its words are a little further from the model's (docs/design.md)."""
F32_WORTH_IT = 1.15
"""So much faster f32 must be for single rows: a probe of a few matrices varies by a twentieth or more."""
PROBE_ROWS, PROBE_RUNS = 128, 8
LEAST_WEIGHTS = 1_000_000
"""In a layer. Below, the gain is small and would be seen in one start and not in the next: words must not depend on that."""


def calibrated(
    core: ov.Core, device: str, model: ov.Model, phases: Mapping[Phase, Mapping[str, Any]], layout: ProgramLayout
) -> dict[Part, Mapping[str, Any]]:
    """The properties of each part, with what was found to be faster for the weights of ``model``. What the user set stays.

    On the CPU a program of one matrix of each shape in the model is timed: with the plugin's own group size and with
    ``LARGE_GROUP``, about a quarter of a second. Both phases get the same, so that they can share a program. Single rows, where
    they have programs to themselves, are not quantized: beside reading the weights that costs more than it saves. In f32,
    where a probe of one row finds that faster. Other devices are left as they are.
    """
    found: dict[Part, Mapping[str, Any]] = {phase: properties for phase, properties in phases.items()}  # noqa: C416
    if layout == "single_row":
        found["single_row"] = phases["generate"]
    matrices = _matrices(model) if device.split(".", maxsplit=1)[0] == "CPU" else []
    if not matrices:
        return found
    if not any(GROUP_SIZE in properties for properties in phases.values()) and _takes_large_groups(matrices):
        own = dict(phases["prefill"])
        seconds, larger_seconds = _seconds(
            core, device, _probe(matrices, PROBE_ROWS), [own, {**own, GROUP_SIZE: LARGE_GROUP}]
        )
        if seconds >= WORTH_IT * larger_seconds:
            found.update({phase: {**properties, GROUP_SIZE: LARGE_GROUP} for phase, properties in phases.items()})
    if layout in ("single_row", "separate"):
        found["single_row"] = _for_single_rows(core, device, matrices, phases["generate"])
    return found


def _for_single_rows(
    core: ov.Core, device: str, matrices: list[ov.Node], asked: Mapping[str, Any]
) -> Mapping[str, Any]:
    own = {GROUP_SIZE: 0, **asked}
    is_f32 = core.get_property(device, PRECISION).get_type_name() == "f32"
    if is_f32 or PRECISION in asked or GROUP_SIZE in asked:
        return own
    exact = {**own, PRECISION: "f32"}
    seconds, exact_seconds = _seconds(core, device, _probe(matrices, 1), [own, exact])
    return exact if seconds >= F32_WORTH_IT * exact_seconds else own


def _matrices(model: ov.Model) -> list[ov.Node]:
    """One MatMul of each shape of compressed matrices that occurs more than once; none if they are small."""
    nodes = [node for node in model.get_ordered_ops() if compressed_weights(node) is not None]
    shapes = [tuple(node.input_value(1).get_shape()) for node in nodes]
    counts = Counter(shapes)
    found = {shape: node for shape, node in zip(shapes, nodes, strict=True) if counts[shape] > 1}  # not the head
    return list(found.values()) if sum(rows * columns for rows, columns in found) >= LEAST_WEIGHTS else []


def _takes_large_groups(matrices: list[ov.Node]) -> bool:
    return not any(_input_size(node) % LARGE_GROUP for node in matrices)


def _input_size(node: ov.Node) -> int:
    shape, is_transposed = node.input_value(1).get_shape(), node.get_attributes()["transpose_b"]
    return int(shape[1] if is_transposed else shape[0])


def _probe(matrices: list[ov.Node], num_rows: int) -> ov.Model:
    """The matrices side by side."""
    inputs, results = [], []
    for node in matrices:
        rows = ops.parameter([1, num_rows, _input_size(node)], node.input_value(0).get_element_type())
        product = ops.matmul(rows, node.input_value(1), False, bool(node.get_attributes()["transpose_b"]))
        inputs.append(rows)
        results.append(ops.result(product))
    return ov.Model(results, inputs)  # pyright: ignore[reportGeneralTypeIssues] - a slip of OpenVINO's stubs


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
