"""Models whose RoPE factors depend on the length of a call, made of any model that computes its angles with a product."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from staticllm.compiler_passes.graph.step_graph import consumers
from staticllm.devices import get_core

Factor = Callable[[ov.Node, int], ov.Node]
"""Makes the factors ``[dims]`` of the inverse frequencies from the length of the call, a scalar in f32."""
Length = Callable[[ov.Model, ov.Node], ov.Node]
"""Makes the length of the call, a scalar in f32, from the inputs of a model and its positions."""
CARRIES = ("Convert", "Unsqueeze", "Reshape", "Squeeze", "Add")


def stepped(*limits: int) -> Factor:
    """Return factors that change after each of these lengths, as those of LongRoPE do."""

    def factor(length: ov.Node, dims: int) -> ov.Node:
        chosen = ops.constant(np.linspace(1, 1.2, dims, dtype=np.float32))
        for number, limit in enumerate(limits, 2):
            longer = ops.constant(np.linspace(1 / number, 1 / (2 + number), dims, dtype=np.float32))
            chosen = ops.select(ops.greater(length, np.float32(limit)), longer, chosen)
        return chosen

    return factor


def growing(limit: int) -> Factor:
    """Return factors that change with every token above a length, as those of dynamic NTK do."""

    def factor(length: ov.Node, dims: int) -> ov.Node:
        excess = ops.divide(ops.maximum(length, np.float32(limit)), np.float32(limit))
        return ops.power(excess, ops.constant(-np.linspace(0, 1, dims, dtype=np.float32)))

    return factor


def largest_position(model: ov.Model, positions: ov.Node) -> ov.Node:
    """Return the largest position and one, as exports of LongRoPE compute the length."""
    axes = np.arange(len(positions.get_partial_shape()))
    return ops.convert(ops.add(ops.reduce_max(positions, axes, keep_dims=False), np.int64(1)), "f32")


def make_longrope(
    source: Path,
    target: Path,
    factor: Factor,
    scale: Callable[[ov.Node], ov.Node] | None = None,
    length_of: Length = largest_position,
) -> Path:
    """Write a copy of a model directory with other inverse frequencies; ``scale``: what sine and cosine are multiplied with."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("openvino_model.*"))
    model = get_core().read_model(source / "openvino_model.xml")
    positions = next(node for node in model.get_parameters() if "position_ids" in node.output(0).get_names())
    length = length_of(model, positions)
    products = list(_angle_products(positions))
    assert products, "no angles are computed with a product"
    for node in products:
        _replace_frequencies(node, factor, length)
        for wave in _waves(node) if scale is not None else ():
            readers = wave.output(0).get_target_inputs()
            scaled = ops.multiply(wave, scale(length))
            for port in readers:
                port.replace_source_output(scaled.output(0))
    model.validate_nodes_and_infer_types()
    ov.save_model(model, target / "openvino_model.xml", compress_to_fp16=False)
    return target


def _angle_products(positions: ov.Node) -> Iterator[ov.Node]:
    queue, seen = consumers(positions.output(0)), set()
    while queue:
        node = queue.pop()
        if node.get_instance_id() in seen:
            continue
        seen.add(node.get_instance_id())
        if node.get_type_name() in ("MatMul", "Multiply"):
            yield node
        elif node.get_type_name() in CARRIES:
            queue += consumers(node.output(0))


def _replace_frequencies(node: ov.Node, factor: Factor, length: ov.Node) -> None:
    for port in node.inputs():
        shape = port.get_partial_shape()
        sizes = [size.get_length() for size in shape if size.is_static and size.get_length() > 1]
        if len(sizes) == 1 and port.get_source_output().get_element_type() == ov.Type.f32:
            own = [-1 if size.is_static and size.get_length() > 1 else 1 for size in shape]
            factors = ops.reshape(factor(length, sizes[0]), own, False)
            port.replace_source_output(ops.multiply(port.get_source_output(), factors).output(0))
            return
    raise AssertionError(f"{node.get_friendly_name()} has no inverse frequencies")


def _waves(node: ov.Node) -> Iterator[ov.Node]:
    queue, seen = [node], set()
    while queue:
        current = queue.pop()
        if current.get_instance_id() in seen:
            continue
        seen.add(current.get_instance_id())
        if current.get_type_name() in ("Sin", "Cos"):
            yield current
        elif len(seen) < 50:
            queue += consumers(current.output(0))
