"""Stores the weights of projections with the same input side by side, for NPUs, so that they can be read as one matrix.

Merged projections are faster for few rows and slower for many, but a model's programs share one copy of its weights. This pass
moves each kind of constant of a group (weights, scales, biases) into one block of memory. The graph stays as it is: its constants
are views of their parts. ``merge_joined`` makes one constant of a whole block, which is a view too.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import openvino as ov

from staticllm.devices import get_core

from ..graph.step_graph import StepGraph, redirect
from .merge_projections import (
    find_groups,
    has_constant_weights,
    join_constants,
    merged_parts,
    raw_bytes,
)

STAGE = "join_weights"
RESULTS = 1 << 16
"""The first number of a result; constants are numbered from 0."""
_LAYER = (
    '<layer id="{id}" name="{id}" type="Const" version="opset1">'
    '<data element_type="{kind}" shape="{shape}" offset="{offset}" size="{size}"/><output>{port}</output></layer>'
    '<layer id="{result}" name="{result}" type="Result" version="opset1"><input>{port}</input></layer>'
)
_PORT = '<port id="0" precision="{precision}">{dims}</port>'
_PRECISIONS = {"f16": "FP16", "f32": "FP32"}
_EDGE = '<edge from-layer="{id}" from-port="0" to-layer="{result}" to-port="0"/>'


def join_weights(graph: StepGraph) -> None:
    """Move the constants of each group of projections into blocks."""
    joined = 0
    groups = find_groups(graph.model, has_constant_weights)
    for group in groups:
        before = len(graph.blocks)
        merged_parts(group, lambda constants, sizes, axis: _move(graph, constants, sizes, axis))
        joined += len(graph.blocks) > before
    graph.model.validate_nodes_and_infer_types()
    graph.note(STAGE, f"{joined} of {len(groups)} groups of projections have their weights side by side")


def _move(graph: StepGraph, constants: Sequence[ov.Node], sizes: Sequence[int], axis: int) -> ov.Node | None:
    """Move constants into one block, and return the constant of the whole block; None if they cannot be side by side."""
    joined = join_constants(constants, sizes, axis)
    if joined is None or joined.get_instance_id() == constants[0].get_instance_id():
        return joined
    shapes = [list(constant.get_output_shape(0)) for constant in constants]
    block = ov.Tensor(ov.Type.u8, ov.Shape([joined.get_byte_size()]))
    block.data[:] = raw_bytes(joined)
    whole, *parts = _views(block, joined.get_element_type(), [list(joined.get_output_shape(0)), *shapes])
    for constant, part in zip(constants, parts, strict=True):
        part.set_friendly_name(constant.get_friendly_name())
        redirect(constant.output(0), part.output(0))
    graph.blocks[address_of(parts[0])] = whole
    return whole


def _views(block: ov.Tensor, kind: ov.Type, shapes: list[list[int]]) -> list[ov.Node]:
    """Return a constant of the whole block (the first shape), and constants of its parts in their order.

    They share the block's memory and keep it alive, also in copies of a model. Only a model that is read from a buffer has such
    constants for types of 4 bits: a tensor made of a part of an array does not keep the array alive.
    """
    sizes = [int(np.prod(shape)) * kind.bitwidth // 8 for shape in shapes]
    offsets = [0, *np.cumsum([0, *sizes[1:-1]])]
    layers = [_layer(index, kind, *part) for index, part in enumerate(zip(shapes, offsets, sizes, strict=True))]
    edges = "".join(_EDGE.format(id=index, result=index + RESULTS) for index in range(len(shapes)))
    text = f'<net name="block" version="11"><layers>{"".join(layers)}</layers><edges>{edges}</edges></net>'
    model = get_core().read_model(text.encode(), block)
    return [result.input_value(0).get_node() for result in model.get_results()]


def _layer(index: int, kind: ov.Type, shape: list[int], offset: int, size: int) -> str:
    """Return a constant of these bytes of a block as XML, and its result."""
    name = kind.get_type_name()
    dims = "".join(f"<dim>{length}</dim>" for length in shape)
    port = _PORT.format(precision=_PRECISIONS.get(name, name), dims=dims)
    sizes = ",".join(map(str, shape))
    return _LAYER.format(id=index, result=index + RESULTS, kind=name, shape=sizes, offset=offset, size=size, port=port)


def address_of(constant: ov.Node) -> int:
    """Return the address of the memory of a constant."""
    return raw_bytes(constant).ctypes.data
