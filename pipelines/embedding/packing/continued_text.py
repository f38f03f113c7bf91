"""A text that runs in chunks, because it is longer than any sequence of the other programs, and the arrays of such a call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staticllm.core import EncoderMask, EncoderShape, EncoderVariant, Pooling
from staticllm.pipelines.embedding.packing.encoder_buffers import HIDDEN, EncoderBuffers, pooling_weights, positions_of
from staticllm.pipelines.embedding.packing.tokenized_text import TokenizedText
from staticllm.ports import INPUT_IDS, KEPT_ROWS, POOL, POSITION_IDS, TOKEN_TYPE_IDS, present_names

Rows = NDArray[np.float32]


class ContinuedText:
    """One text in progress. Its first ``num_done`` tokens have run; ``past`` has their keys and values.

    ``past``: an array ``[1, heads, P, head_dim]`` for each past port, with a P of ``reserve``. ``num_kept``: the tokens at its
    start that are worth keeping for other texts. ``start``: so many tokens, and their rows, come from an earlier text; they are
    not changed.
    """

    def __init__(
        self,
        shape: EncoderShape,
        text: TokenizedText,
        num_kept: int = 0,
        start: tuple[int, Sequence[Rows]] | None = None,
    ) -> None:
        self.text, self.num_kept = text, num_kept
        self.num_done = 0
        self.past: list[Rows] = [np.zeros((1, heads, 0, size), np.float32) for heads, size in shape.past]
        self._is_borrowed = start is not None
        if start is not None:
            self.num_done, self.past = start[0], list(start[1])

    @property
    def num_left(self) -> int:
        """The number of tokens that have not run."""
        return len(self.text) - self.num_done

    def reserve(self, num_rows: int) -> None:
        """Make place for exactly so many earlier rows; those that are there keep theirs."""
        for index, rows in enumerate(self.past):
            if rows.shape[2] != num_rows:
                grown = np.zeros((*rows.shape[:2], num_rows, rows.shape[3]), np.float32)
                grown[:, :, : self.num_done] = rows[:, :, : self.num_done]
                self.past[index] = grown
                self._is_borrowed = False

    def append(self, present: Sequence[Rows], count: int) -> None:
        """Take the keys and values of the next ``count`` tokens, which are the first rows of ``present``."""
        end, size = self.num_done + count, self.past[0].shape[2]
        if end > size or self._is_borrowed:
            self.reserve(max(end, 2 * size))
        for rows, new in zip(self.past, present, strict=True):
            rows[:, :, self.num_done : end] = new[:, :, :count]
        self.num_done = end


class ChunkBuffers(EncoderBuffers):
    """The host memory of a variant that continues a text, except its past rows, which belong to the text.

    ``present``: a place for the new keys and values in each port, which variants of the same rows share.
    """

    def __init__(self, shape: EncoderShape, variant: EncoderVariant, pad_id: int, present: Sequence[Rows]) -> None:
        super().__init__(shape, variant, pad_id)
        self.present = present
        self.arrays.update(zip(present_names(shape), present, strict=True))

    def fill_chunk(self, chunk: ContinuedText, count: int, pooling: Pooling) -> None:
        """Write the next ``count`` tokens of a text, what they see, and the weight of the last token in its vector."""
        text, start = chunk.text, chunk.num_done
        end = start + count
        for name in {TOKEN_TYPE_IDS, POOL} & self.arrays.keys():
            self.arrays[name].fill(0)
        self.arrays[INPUT_IDS].fill(self.pad_id)
        self.arrays[INPUT_IDS][0, :count] = text.ids[start:end]
        if self.shape.has_positions:
            self.arrays[POSITION_IDS][0, :count] = positions_of(self.shape, text.ids[:end])[start:]
        if self.shape.has_token_types and text.types is not None:
            self.arrays[TOKEN_TYPE_IDS][0, :count] = text.types[start:end]
        self.arrays[KEPT_ROWS][:] = np.arange(self.variant.rows)
        for kind in self.shape.masks:
            mask = self.arrays[kind.port_name][0, 0]
            mask.fill(HIDDEN)
            past = self.variant.past
            mask[:count, :start] = _seen(kind, start, count, np.arange(start))
            mask[:count, past : past + count] = _seen(kind, start, count, np.arange(start, end))
        weights = pooling_weights(pooling, len(text), text.num_prompt)
        self.arrays[POOL][0, :count] = weights[start:end]


def _seen(kind: EncoderMask, start: int, count: int, columns: NDArray[Any]) -> Rows:
    """Return what ``count`` tokens from ``start`` on see of those in ``columns``: 0, or ``HIDDEN``."""
    distance = columns[None] - np.arange(start, start + count)[:, None]
    is_seen = np.ones(distance.shape, np.bool_)
    if kind.before is not None:
        is_seen &= -distance <= kind.before
    if kind.after is not None:
        is_seen &= distance <= kind.after
    return np.where(is_seen, np.float32(0), np.float32(HIDDEN))


def chunk_variant(variants: Sequence[EncoderVariant], num_done: int, num_left: int) -> EncoderVariant:
    """Return the variant of the next chunk: the smallest that holds the rest of the text, else the largest.

    Of the same rows, the one that sees the fewest rows that are empty.

    Raises:
        ValueError: no variant sees so many earlier rows.
    """
    fitting = [variant for variant in variants if variant.past >= num_done]
    if not fitting:
        raise ValueError(f"no program continues a text after {num_done} tokens")
    enough = [variant.rows for variant in fitting if variant.rows >= num_left]
    rows = min(enough) if enough else max(variant.rows for variant in fitting)
    return min((variant for variant in fitting if variant.rows == rows), key=lambda variant: variant.past)
