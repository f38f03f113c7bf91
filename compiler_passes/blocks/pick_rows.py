"""Lets the host pick the rows of tables that token ids or positions choose.

An NPU reads a whole table of embeddings for one row. In place of ``Gather(table, ids)``, where the table is a constant or what
decompresses constants, the program gets the picked rows of each constant as inputs, and decompresses them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from ..graph.step_graph import named_parameter, redirect, through
from .dataflow import port_name

_ELEMENTWISE = {"Multiply": ops.multiply, "Subtract": ops.subtract, "Add": ops.add}
_AROUND_IDS = ("Convert", "Reshape", "Unsqueeze", "Squeeze")


@dataclass(frozen=True)
class PickedRows:
    """An input that holds rows of a constant ``table``, one for each value of the input ``port``."""

    parameter: ov.Node
    table: ov.Node
    port: str


def pick_rows(nodes: Iterable[ov.Node]) -> list[PickedRows]:
    """Replace every lookup in a constant table among these nodes by picked rows, which are not yet inputs of a model."""
    return [picked for node in nodes if node.get_type_name() == "Gather" for picked in _pick(node)]


def _pick(gather: ov.Node) -> list[PickedRows]:
    table, indices, axis = gather.input_values()
    ids = through(indices, *_AROUND_IDS).get_node()
    is_by_row = axis.get_node().get_type_name() == "Constant" and int(np.ravel(axis.get_node().data)[0]) == 0
    if ids.get_type_name() != "Parameter" or not is_by_row or not gather.get_element_type().is_real():
        return []
    count = math.prod(indices.get_shape())
    picked: list[PickedRows] = []
    rows = _rows(table, table.get_shape()[0], count, port_name(ids), picked)
    if rows is None or not picked:
        return []
    redirect(gather.output(0), ops.reshape(rows, np.array(list(gather.get_output_shape(0))), False).output(0))
    return picked


def _rows(table: ov.Output, size: int, count: int, port: str, picked: list[PickedRows]) -> ov.Output | None:
    """Return what decompresses the picked rows as ``table`` decompresses all; None if it does something else."""
    node = table.get_node()
    kind = node.get_type_name()
    if kind == "Constant":
        return _picked_constant(table, size, count, port, picked)
    if kind not in ("Convert", "Reshape", *_ELEMENTWISE):
        return None
    if kind == "Reshape":
        return _reshaped(table, size, count, port, picked)
    rank = len(table.get_shape())
    inputs = node.input_values()[: 2 if kind in _ELEMENTWISE else 1]
    # what has fewer axes than the table has no axis of rows
    data = [_rows(each, size, count, port, picked) if len(each.get_shape()) == rank else each for each in inputs]
    if any(value is None for value in data):
        return None
    if kind == "Convert":
        return ops.convert(data[0], table.get_element_type().get_type_name()).output(0)
    return _ELEMENTWISE[kind](*data).output(0)


def _reshaped(table: ov.Output, size: int, count: int, port: str, picked: list[PickedRows]) -> ov.Output | None:
    """Return the picked rows of a Reshape that leaves each row in its place; None if it is another."""
    producer = table.get_node().input_value(0)
    if not table.get_shape() or table.get_shape()[0] != size or producer.get_shape()[:1] != table.get_shape()[:1]:
        return None
    data = _rows(producer, size, count, port, picked)
    shape = np.array([count, *list(table.get_shape())[1:]])
    return data and ops.reshape(data, shape, False).output(0)


def _picked_constant(table: ov.Output, size: int, count: int, port: str, picked: list[PickedRows]) -> ov.Output | None:
    """Return an input for the picked rows of a constant, or the constant if it has none; None if rows are no whole bytes."""
    shape = list(table.get_shape())
    if not shape or shape[0] != size:
        return table
    if math.prod(shape[1:]) * table.get_element_type().bitwidth % 8:
        return None
    sizes = ov.PartialShape([count, *shape[1:]])
    parameter = named_parameter(f"rows{len(picked)}.{port}", sizes, table.get_element_type())
    picked.append(PickedRows(parameter, table.get_node(), port))
    return parameter.output(0)
