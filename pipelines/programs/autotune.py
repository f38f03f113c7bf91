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
"""So much faster a larger group must be: its words are a little further from the model's (docs/decisions.md)."""
CLEARLY = 1.15
"""So much faster something else than the usual must be for a single row: a probe of one row varies by a twentieth or more."""
MANY_ROWS, LEAST_RUNS, SECONDS = 128, 3, 0.03
"""Rows of a prompt in a probe; runs of each candidate at least, and seconds for each where these have taken less."""
LEAST_WEIGHTS = 1_000_000
"""In a layer. Below, the gain is small and would be seen in one start and not in the next: words must not depend on that."""
CACHE_BYTES = 64 << 20
"""Read before a single row is timed, so that its weights come from memory, as in a model they do."""

Properties = Mapping[str, Any]


def calibrated(
    core: ov.Core, device: str, model: ov.Model, phases: Mapping[Phase, Properties], layout: ProgramLayout
) -> dict[Part, Properties]:
    """The properties of each part, with what was found to be faster for the weights of ``model``. What the user set stays.

    On the CPU a program of one matrix of each shape in the model is timed: with the plugin's own group size and with
    ``LARGE_GROUP`` for prompts and steps of several rows. Both phases get the same, so that they can share a program. Single
    rows, where they may have programs to themselves, are not quantized unless a probe finds that clearly slower: it costs
    more than it saves where the weights are not worth decompressing, as in 8 bits. Likewise f32. Other devices are left as
    they are.
    """
    found: dict[Part, Properties] = {phase: properties for phase, properties in phases.items()}  # noqa: C416
    matrices = _matrices(model) if device.split(".", maxsplit=1)[0] == "CPU" else []
    if matrices:
        probe = Probe(core, device, matrices)
        if not any(GROUP_SIZE in properties for properties in phases.values()) and probe.takes_large_groups:
            own = phases["prefill"]
            seconds, larger_seconds = probe.seconds(MANY_ROWS, [own, {**own, GROUP_SIZE: LARGE_GROUP}])
            if seconds >= WORTH_IT * larger_seconds:
                found.update({phase: {**properties, GROUP_SIZE: LARGE_GROUP} for phase, properties in phases.items()})
        if layout in ("single_row", "separate"):
            found["single_row"] = _for_single_rows(probe, found["generate"], phases["generate"])
    return found


def _for_single_rows(probe: Probe, usual: Properties, asked: Properties) -> Properties:
    """Without quantization, in f32, or as ``usual``; the user ``asked`` for some of it."""
    if GROUP_SIZE in asked:
        return usual
    plain, exact = {**usual, GROUP_SIZE: 0}, {**usual, GROUP_SIZE: 0, PRECISION: "f32"}
    candidates = [plain, usual, *([exact] if PRECISION not in asked and not probe.is_f32 else [])]
    seconds = probe.seconds(1, candidates, is_cold=True)
    best = min(range(len(candidates)), key=seconds.__getitem__)
    return candidates[best] if seconds[0] >= CLEARLY * seconds[best] else plain


def _matrices(model: ov.Model) -> list[ov.Node]:
    """One MatMul of each shape of compressed matrices that occurs more than once; none if they are small."""
    nodes = [node for node in model.get_ordered_ops() if compressed_weights(node) is not None]
    shapes = [tuple(node.input_value(1).get_shape()) for node in nodes]
    counts = Counter(shapes)
    found = {shape: node for shape, node in zip(shapes, nodes, strict=True) if counts[shape] > 1}  # not the head
    return list(found.values()) if sum(rows * columns for rows, columns in found) >= LEAST_WEIGHTS else []


class Probe:
    """Some matrices of a model side by side, compiled with each set of properties that is asked for."""

    def __init__(self, core: ov.Core, device: str, matrices: list[ov.Node]) -> None:
        self._core, self._device = core, device
        self._sizes = [_input_size(node) for node in matrices]
        self._model = _side_by_side(matrices, self._sizes)
        self._requests: dict[str, ov.InferRequest] = {}

    @property
    def is_f32(self) -> bool:
        """Whether the device computes in f32 anyway."""
        return bool(self._core.get_property(self._device, PRECISION).get_type_name() == "f32")

    @property
    def takes_large_groups(self) -> bool:
        return not any(size % LARGE_GROUP for size in self._sizes)

    def seconds(self, num_rows: int, candidates: list[Properties], is_cold: bool = False) -> list[float]:
        """The shortest run of each, in turns. ``is_cold``: with caches full of something else."""
        random, scratch = np.random.default_rng(0), np.ones(CACHE_BYTES // 8 if is_cold else 0, np.int64)
        feeds = [random.standard_normal((1, num_rows, size)).astype(np.float32) for size in self._sizes]
        requests = [self._request(properties) for properties in candidates]
        for request in requests:
            request.infer(feeds)
        times: list[list[float]] = [[] for _ in requests]
        until = time.perf_counter() + SECONDS * len(requests)
        while len(times[0]) < LEAST_RUNS or time.perf_counter() < until:
            for request, taken in zip(requests, times, strict=True):
                np.bitwise_or.reduce(scratch)
                start = time.perf_counter()
                request.infer()
                taken.append(time.perf_counter() - start)
        return [min(taken) for taken in times]

    def _request(self, properties: Properties) -> ov.InferRequest:
        key = repr(sorted(properties.items()))
        if key not in self._requests:
            compiled = self._core.compile_model(self._model, self._device, dict(properties))
            self._requests[key] = compiled.create_infer_request()
        return self._requests[key]


def _input_size(node: ov.Node) -> int:
    shape, is_transposed = node.input_value(1).get_shape(), node.get_attributes()["transpose_b"]
    return int(shape[1] if is_transposed else shape[0])


def _side_by_side(matrices: list[ov.Node], sizes: list[int]) -> ov.Model:
    inputs, results = [], []
    for node, size in zip(matrices, sizes, strict=True):
        rows = ops.parameter([1, -1, size], node.input_value(0).get_element_type())
        product = ops.matmul(rows, node.input_value(1), False, bool(node.get_attributes()["transpose_b"]))
        inputs.append(rows)
        results.append(ops.result(product))
    return ov.Model(results, inputs)  # pyright: ignore[reportGeneralTypeIssues] - a slip of OpenVINO's stubs
