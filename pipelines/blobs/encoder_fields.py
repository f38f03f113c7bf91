"""The fields that only the manifest of an encoder's set has: what was chosen for its programs, and their shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from staticllm.core import EncoderMask, EncoderShape
from staticllm.pipelines.blobs.json_values import (
    check_flag,
    check_one_of,
    list_of,
    object_of,
    whole_of,
)

CHOICES = ("max_length", "sizes")
"""The choices behind a set: the most tokens of a text that were asked for, and the batches and rows that were (None for the usual
ones)."""
MAX_SIZES = 64
MAX_MASKS = 64
MAX_PORTS, MAX_WIDTH = 1024, 1 << 16
"""The most ports of keys and values, and the most heads or values of a head."""


def encoder_shape_to_json(shape: EncoderShape) -> dict[str, Any]:
    """Return a shape in the form that JSON holds."""
    return asdict(shape)


def encoder_shape_from_json(content: Mapping[str, Any]) -> EncoderShape:
    """Return the shape that ``encoder_shape_to_json`` made ``content`` of."""
    values = dict(content)
    values["masks"] = tuple(EncoderMask(**mask) for mask in values["masks"])
    values["unsafe_rows"] = tuple(values["unsafe_rows"])
    values["past"] = tuple((heads, size) for heads, size in values["past"])
    return EncoderShape(**values)


def check_encoder_choices(content: Mapping[str, Any]) -> None:
    """Check the ``config`` of an encoder's manifest.

    Raises:
        ValueError, TypeError: a field is unknown, missing or impossible.
    """
    if different := set(content) ^ set(CHOICES):
        raise ValueError(f"config has, or lacks, {sorted(different)[0]!r}")
    whole_of(content["max_length"], 1)
    for size in list_of(content["sizes"], MAX_SIZES) if content["sizes"] is not None else ():
        batch, rows = list_of(size, 2)
        whole_of(batch, 1)
        whole_of(rows, 1)


def check_encoder_shape(content: Mapping[str, Any]) -> None:
    """Check the ``shape`` of an encoder's manifest.

    Raises:
        ValueError, TypeError, KeyError: a field is unknown, missing or impossible.
    """
    for name in ("masks", "unsafe_rows"):
        list_of(content[name], MAX_MASKS)
    for mask in content["masks"]:
        for value in object_of(mask, 2).values():
            if value is not None:
                whole_of(value, 0)
    shape = encoder_shape_from_json(content)
    check_one_of(shape.output, ("embeddings", "scores"), "output")
    check_one_of(shape.head, ("none", "cut", "tokens"), "head")
    check_one_of(shape.pooling, (None, "first", "last", "mean"), "pooling")
    whole_of(shape.width, 1)
    whole_of(shape.max_rows, 1)
    whole_of(shape.first_position, 0)
    whole_of(shape.longest, 1)
    if shape.vocab_size is not None:
        whole_of(shape.vocab_size, 1, 1 << 32)
    if shape.skipped_id is not None:
        whole_of(shape.skipped_id, 0)
    for flag in (shape.has_positions, shape.has_token_types, shape.is_packable, shape.shares_prefixes):
        check_flag(flag)
    for rows in shape.unsafe_rows:
        whole_of(rows, 1)
    for size in (size for sizes in list_of(content["past"], MAX_PORTS) for size in list_of(sizes, 2)):
        whole_of(size, 1, MAX_WIDTH)
