"""The ports of step programs and encoder programs: their names, the meaning of their axes, and their element types.

This is the contract between the passes, which make the ports, and the host, which binds memory to them. The sizes of a step are
its rows S, the KV slots that it sees T, the rows that get logits R, and the frames of windows that cross-attention sees, which
only a shared program takes as few as are in use. Those of an encoder's call are its batch B, the rows of each sequence S, the
texts R, and, where a text is continued, the earlier rows P that it sees and the rows K that are kept. All
other sizes are the model's own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from staticllm.core import KEY_POSITIONS, QUERY_POSITIONS, EncoderShape, EncoderVariant, ModelShape, Variant

INPUT_IDS, POSITION_IDS, LOGIT_ROWS, LOGITS = "input_ids", "position_ids", "logit_rows", "logits"
TOKEN_TYPE_IDS, POOL, EMBEDDINGS, SCORES = "token_type_ids", "pool", "embeddings", "scores"
KEPT_ROWS, PAST, PRESENT = "kept_rows", "past.", "present."
CROSS, CROSS_MASK = "cross.", "cross_mask"
ADAPTER_SCALES = "adapter_scales"
ROPE_FACTORS = "rope_factors"
PAST_LENS, SUBSEQUENCE_BEGINS, MAX_CONTEXT_LEN = "past_lens", "subsequence_begins", "max_context_len"
BLOCK_INDICES, BLOCK_INDICES_BEGINS = "block_indices", "block_indices_begins"
PAGE_TABLES = (PAST_LENS, SUBSEQUENCE_BEGINS, BLOCK_INDICES_BEGINS, BLOCK_INDICES, MAX_CONTEXT_LEN)
"""Ports of paged programs: the tokens of each sequence that have run, its first row, and its pages; a block is a page."""
Range = tuple[int, int]
"""Smallest and largest size of an axis; equal if the size is fixed."""

VISIBLE = 0.0
HIDDEN = -65504.0
"""What a mask adds to a score; ``HIDDEN`` is finite in every type of a device, and its exp() is 0 in all."""
HIDDEN_BELOW = -1e4
"""Less than this hides a cell in the masks of exported models."""

ALIGNMENT = "alignment"
"""``[1, heads, rows, frames]``: the weights of attentions that align text and speech."""
INPUT_FEATURES = "input_features"
"""``[1, bands, columns]``: a window as an encoder reads it."""

# inputs of exported models that step programs do not have
ATTENTION_MASK = "attention_mask"
"""``[1, T+S]``: 1 for each token. Masks replace it (``expose_mask``, ``expose_positions``)."""
INPUTS_EMBEDS = "inputs_embeds"
"""``[1, S, hidden]``: embeddings of tokens instead of their ids."""
BEAM_IDX = "beam_idx"
"""``[1]``: the sequence from which each beam continues. A step program has batch 1 (``lift_state``)."""
CACHE_POSITION = "cache_position"
"""``[S]``: places in a state's window (``fix_cache_position``)."""


class Sizes(Protocol):
    """The sizes of one call, or their bounds over several variants."""

    def along(self, axis: str) -> Range | None:
        """Return the range of an axis by its meaning; None if it has the model's own size."""


@dataclass(frozen=True)
class CallSizes:
    """The sizes of one call, or their bounds over several variants."""

    rows: Range
    kv_len: Range
    num_logits: Range
    frames: Range | None = None

    @classmethod
    def of(cls, *variants: Variant) -> CallSizes:
        """Return the sizes of one variant, or the bounds that hold several variants."""
        return cls(
            _range(variant.rows for variant in variants),
            _range(variant.kv_len for variant in variants),
            _range(variant.num_logits for variant in variants),
        )

    def along(self, axis: str) -> Range | None:
        """Return the range of an axis by its meaning; None if it has the model's own size."""
        seen = self.rows[0] + self.kv_len[0], self.rows[1] + self.kv_len[1]
        return {"S": self.rows, "T": self.kv_len, "T+S": seen, "R": self.num_logits, "frames": self.frames}.get(axis)


@dataclass(frozen=True)
class EncoderSizes:
    """The sizes of one call of an encoder, or their bounds over several variants."""

    batch: Range
    rows: Range
    texts: Range
    tokens: Range
    past: Range = (0, 0)
    kept: Range = (0, 0)

    @classmethod
    def of(cls, *variants: EncoderVariant) -> EncoderSizes:
        """Return the sizes of one variant, or the bounds that hold several variants."""
        return cls(
            _range(variant.batch for variant in variants),
            _range(variant.rows for variant in variants),
            _range(variant.texts for variant in variants),
            _range(variant.batch * variant.rows for variant in variants),
            _range(variant.past for variant in variants),
            _range(variant.rows if variant.past else 0 for variant in variants),
        )

    def along(self, axis: str) -> Range | None:
        """Return the range of an axis by its meaning; None if it has the model's own size."""
        seen = self.past[0] + self.rows[0], self.past[1] + self.rows[1]
        own = {"B": self.batch, "S": self.rows, "R": self.texts, "B*S": self.tokens}
        return {**own, "P": self.past, "P+S": seen, "K": self.kept}.get(axis)


def _range(values: Iterable[int]) -> Range:
    found = tuple(values)
    return min(found), max(found)


@dataclass(frozen=True)
class Port:
    """One kind of port."""

    pattern: str
    """A regular expression of its names."""
    axes: tuple[str, ...]
    """The names of the last axes; a port may have more axes before them."""
    dtype: str = ""
    """Numpy's name of the element type; empty if the type of the KV slots, of adapters, or of a recurrent state decides."""

    def ranges(self, rank: int, sizes: Sizes) -> dict[int, Range]:
        """Return axis → range for every axis of a port of ``rank`` whose size depends on the call."""
        first = rank - len(self.axes)
        found = {first + index: sizes.along(axis) for index, axis in enumerate(self.axes)}
        return {axis: size for axis, size in found.items() if size is not None}

    def shape_at(self, own: Sequence[int | None], variant: Variant) -> tuple[int, ...]:
        """Return the shape at one variant.

        Args:
            own: The port's static sizes, which are kept, and None for the others.
        """
        ranges = self.ranges(len(own), CallSizes.of(variant))
        return tuple(ranges[axis][0] if size is None else size for axis, size in enumerate(own))

    def fits(self, shape: Sequence[int], variant: Variant) -> bool:
        """Return whether memory of this shape can be bound to the port at one variant."""
        ranges = self.ranges(len(shape), CallSizes.of(variant))
        return all(shape[axis] == size for axis, (size, _) in ranges.items())


PORTS = (
    Port(INPUT_IDS, ("1", "S"), "int64"),
    Port(POSITION_IDS, ("1", "S"), "int64"),  # [1, S], or [k, 1, S] if a token has k positions
    Port(r"mask\..+", ("1", "1", "S", "T+S"), "float32"),
    Port(KEY_POSITIONS, ("1", "1", "1", "T+S"), "int32"),
    Port(QUERY_POSITIONS, ("1", "1", "S", "1"), "int32"),
    Port(LOGIT_ROWS, ("R",), "int64"),
    Port(ADAPTER_SCALES, ("1", "S", "adapters"), "float32"),
    Port(ROPE_FACTORS, ("1", "S"), "int32"),
    Port(r"adapter\.\d+\.a", ("rank", "in")),
    Port(r"adapter\.\d+\.b", ("out", "rank")),
    Port(LOGITS, ("1", "R", "vocab"), "float32"),
    Port(EMBEDDINGS, ("1", "R", "width"), "float32"),
    Port(r"past\.\d+\.(key|value)(\.scale)?", ("1", "heads", "T", "head_dim")),
    Port(r"present\.\d+\.(key|value)(\.scale)?", ("1", "heads", "S", "head_dim")),
    Port(r"pages\.\d+\.(key|value)", ("pages", "heads", "page_size", "head_dim")),
    Port(PAST_LENS, ("n",), "int32"),
    Port(SUBSEQUENCE_BEGINS, ("n + 1",), "int32"),
    Port(BLOCK_INDICES, ("blocks",), "int32"),
    Port(BLOCK_INDICES_BEGINS, ("n + 1",), "int32"),
    Port(MAX_CONTEXT_LEN, (), "int32"),
    Port(r"state\.\d+(\.next)?", ()),
    Port(r"cross\.\d+\.(key|value)", ("1", "heads", "frames", "head_dim")),
    Port(CROSS_MASK, ("1", "1", "S", "frames"), "float32"),
)
"""The ports of step programs."""
ENCODER_PORTS = (
    Port(INPUT_IDS, ("B", "S"), "int64"),
    Port(POSITION_IDS, ("B", "S"), "int64"),
    Port(TOKEN_TYPE_IDS, ("B", "S"), "int64"),
    Port(r"mask\..+", ("B", "1", "S", "P+S"), "float32"),
    Port(POOL, ("R", "B*S"), "float32"),
    Port(EMBEDDINGS, ("R", "width"), "float32"),
    Port(SCORES, ("R", "width"), "float32"),
    Port(KEPT_ROWS, ("K",), "int64"),
    Port(r"past\.\d+", ("B", "heads", "P", "head_dim"), "float32"),
    Port(r"present\.\d+", ("B", "heads", "K", "head_dim"), "float32"),
)
"""The ports of encoder programs."""


@cache
def find_port(name: str) -> Port | None:
    """Return the contract of the port of this name; None if a step program has no such port."""
    return next((port for port in PORTS if re.fullmatch(port.pattern, name)), None)


def port_of(names: Iterable[str]) -> tuple[str, Port]:
    """Return the name that the contract knows, and its port; plugins add names.

    Raises:
        KeyError: none is known.
    """
    candidates = sorted(names)
    for name in candidates:
        if (port := find_port(name)) is not None:
            return name, port
    raise KeyError(f"no port of a step program has the name {', '.join(candidates)}")


def input_names(shape: ModelShape) -> frozenset[str]:
    """Return the names of all inputs of a model's step programs."""
    names = {INPUT_IDS, LOGIT_ROWS} | {state.past_name for state in shape.recurrent_states}
    if shape.page_size:
        names |= {*PAGE_TABLES, *(state.pages_name for state in shape.kv_states)}
    else:
        names |= {kind.port_name for kind in shape.masks} | {state.past_name for state in shape.kv_states}
    if shape.position_rank:
        names.add(POSITION_IDS)
    if shape.rope_limits:
        names.add(ROPE_FACTORS)
    if shape.cross_states:
        names |= {CROSS_MASK, *(state.past_name for state in shape.cross_states)}
    if shape.has_distances:
        names |= {KEY_POSITIONS, QUERY_POSITIONS}
    if shape.adapted:
        names |= {ADAPTER_SCALES, *(name for group in shape.adapted for name in (group.a_name, group.b_name))}
    return frozenset(names)


@cache
def find_encoder_port(name: str) -> Port | None:
    """Return the contract of the port of this name; None if an encoder program has no such port."""
    return next((port for port in ENCODER_PORTS if re.fullmatch(port.pattern, name)), None)


def encoder_shape_of(name: str, shape: EncoderShape, variant: EncoderVariant) -> tuple[int, ...]:
    """Return the shape of an encoder program's port at one variant.

    Raises:
        KeyError: no such port.
    """
    port = find_encoder_port(name)
    if port is None:
        raise KeyError(f"no port of an encoder program has the name {name}")
    ranges = port.ranges(len(port.axes), EncoderSizes.of(variant))
    own = {"1": 1, "width": shape.width}
    if name.startswith((PAST, PRESENT)):
        own["heads"], own["head_dim"] = shape.past[int(name.rpartition(".")[2])]
    return tuple(ranges[index][0] if index in ranges else own[axis] for index, axis in enumerate(port.axes))


def encoder_input_names(shape: EncoderShape) -> frozenset[str]:
    """Return the names of all inputs of an encoder's programs."""
    names = {INPUT_IDS, POOL, *(kind.port_name for kind in shape.masks)}
    if shape.has_positions:
        names.add(POSITION_IDS)
    if shape.has_token_types:
        names.add(TOKEN_TYPE_IDS)
    if shape.past:
        names |= {KEPT_ROWS, *past_names(shape)}
    return frozenset(names)


def past_names(shape: EncoderShape) -> tuple[str, ...]:
    """Return the names of the inputs that hold the keys and values of earlier tokens of a text."""
    return tuple(f"{PAST}{index}" for index in range(len(shape.past)))


def present_names(shape: EncoderShape) -> tuple[str, ...]:
    """Return the names of the outputs with the keys and values of the rows that a call keeps."""
    return tuple(f"{PRESENT}{index}" for index in range(len(shape.past)))
