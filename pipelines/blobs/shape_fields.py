"""The shape of a model in a manifest: as JSON, and checked field by field, because anybody may have written it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, get_args

from staticllm.core import AdaptedGroup, AdaptedPart, AdapterType, KVState, KVType, MaskKind, ModelShape, RecurrentState
from staticllm.pipelines.blobs.json_values import MAX_SIZE, check_flag, check_one_of, list_of, text_of, whole_of

MAX_LISTED = 1 << 14
MAX_STATE_BYTES = 1 << 34
MAX_ADAPTER_VALUES = 1 << 32
"""Values of the matrices of all adapters: 16 GiB."""


def shape_to_json(shape: ModelShape) -> dict[str, Any]:
    """Return a shape in the form that JSON holds."""
    return asdict(shape)


def shape_from_json(content: Mapping[str, Any]) -> ModelShape:
    """Return the shape that ``shape_to_json`` made ``content`` of."""
    values = dict(content)
    values["kv_states"] = tuple(KVState(**state) for state in values["kv_states"])
    values["masks"] = tuple(MaskKind(**{**kind, "first_seen": tuple(kind["first_seen"])}) for kind in values["masks"])
    values["recurrent_states"] = tuple(
        RecurrentState(**{**state, "shape": tuple(state["shape"])}) for state in values["recurrent_states"]
    )
    values["adapted"] = tuple(
        AdaptedGroup(**{**group, "parts": tuple(AdaptedPart(**part) for part in group["parts"])})
        for group in values["adapted"]
    )
    return ModelShape(**values)


def check_shape(content: Mapping[str, Any]) -> None:
    """Check every field of a shape.

    Raises:
        ValueError, TypeError, KeyError: one is missing, of another type, or impossible.
    """
    for name in ("kv_states", "masks", "recurrent_states", "adapted"):
        list_of(content[name], MAX_LISTED)
    for group in content["adapted"]:
        list_of(group["parts"], MAX_LISTED)
    shape = shape_from_json(content)
    _check_states(shape)
    for kind in shape.masks:
        text_of(kind.table, "table", 256)
        if kind.window is not None:
            whole_of(kind.window, 1)
        for first in kind.first_seen:
            whole_of(first, 0)
    whole_of(shape.vocab_size, 1)
    check_one_of(shape.position_rank, (0, 2, 3), "rank of positions")
    whole_of(shape.position_copies, 0, 64)
    check_flag(shape.is_packable)
    check_flag(shape.has_distances)
    if shape.max_rows is not None:
        whole_of(shape.max_rows, 1)
    _check_adapters(shape)


def _check_states(shape: ModelShape) -> None:
    for state in shape.kv_states:
        whole_of(state.layer, 0)
        whole_of(state.heads, 1)
        whole_of(state.head_dim, 1)
        check_one_of(state.role, ("key", "value"), "role")
        check_one_of(state.kv_type, get_args(KVType), "type of KV slots")
        text_of(state.variable_id, "variable", 4096)
        check_flag(state.is_scale)
    for recurrent in shape.recurrent_states:
        whole_of(recurrent.index, 0)
        text_of(recurrent.variable_id, "variable", 4096)
        check_one_of(recurrent.dtype, ("float32", "float16", "int64", "int32"), "type")
        for size in recurrent.shape:
            whole_of(size, 1)
        if recurrent.num_bytes > MAX_STATE_BYTES:
            raise ValueError("a recurrent state has more than 16 GiB")


def _check_adapters(shape: ModelShape) -> None:
    """Check that the parts of each group fit into its matrices."""
    check_one_of(shape.adapter_type, get_args(AdapterType), "type of adapters")
    whole_of(shape.num_adapters, 1 if shape.adapted else 0, MAX_LISTED)
    num_values = 0
    for index, group in enumerate(shape.adapted):
        whole_of(group.index, index, index)
        whole_of(group.in_size, 1)
        whole_of(group.out_size, 1)
        first_column = 0
        for part in group.parts:
            whole_of(part.adapter, 0, shape.num_adapters - 1)
            text_of(part.path, "path of a module", 4096)
            whole_of(part.rank, 1, MAX_SIZE)
            whole_of(part.first_row, 0, group.out_size - 1)
            whole_of(part.first_column, first_column, first_column)
            first_column += part.rank
        num_values += group.rank * (group.in_size + group.out_size)
    if num_values > MAX_ADAPTER_VALUES:
        raise ValueError("the matrices of adapters have more than 16 GiB")
