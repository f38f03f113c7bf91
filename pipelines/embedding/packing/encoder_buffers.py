"""The arrays of a call that holds packed texts: ids, positions, masks and pooling weights."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staticllm.core import EncoderMask, EncoderShape, EncoderVariant, Pooling
from staticllm.ports import (
    EMBEDDINGS,
    HIDDEN,
    INPUT_IDS,
    KEPT_ROWS,
    POOL,
    POSITION_IDS,
    SCORES,
    TOKEN_TYPE_IDS,
    encoder_input_names,
    encoder_shape_of,
    past_names,
    present_names,
)

from .prefix_groups import shared_with_previous
from .tokenized_text import TokenizedText

Vectors = NDArray[np.float32]
Rows = NDArray[np.intp]
NO_ROWS: Rows = np.zeros(0, np.intp)


class EncoderBuffers:
    """The host memory of one variant's ports, which ``fill`` overwrites before each call."""

    def __init__(self, shape: EncoderShape, variant: EncoderVariant, pad_id: int) -> None:
        self.shape = shape
        self.variant = variant
        self.pad_id = pad_id
        self.arrays: dict[str, NDArray[Any]] = {}
        names = encoder_input_names(shape)
        if variant.past:  # the keys and values of a continued text have other owners
            names -= set(past_names(shape))
        else:
            names |= set(present_names(shape))  # of no rows
        for name in names:
            dtype = np.int64 if name in (INPUT_IDS, POSITION_IDS, TOKEN_TYPE_IDS, KEPT_ROWS) else np.float32
            self.arrays[name] = np.zeros(encoder_shape_of(name, shape, variant), dtype)
        output = EMBEDDINGS if shape.output == "embeddings" else SCORES
        self.output: Vectors = np.zeros(encoder_shape_of(output, shape, variant), np.float32)
        self.arrays[output] = self.output

    @cached_property
    def _patterns(self) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        """The array of each mask, and the block of it that a text of all rows would have."""
        rows = np.arange(self.variant.rows)
        return [(self.arrays[kind.port_name], visibility(kind, rows, rows)) for kind in self.shape.masks]

    def fill(self, sequences: Sequence[Sequence[TokenizedText]], pooling: Pooling) -> None:
        """Write the ids, positions, masks and pooling weights of the texts in each sequence.

        If the model allows it, a text that begins like the one before it shares the rows of this beginning.
        """
        self.arrays[INPUT_IDS].fill(self.pad_id)
        for name in {TOKEN_TYPE_IDS, POOL} & self.arrays.keys():
            self.arrays[name].fill(0)
        if self.shape.has_positions:  # also of idle rows: a model may choose its factors by the largest position
            self.arrays[POSITION_IDS].fill(self.shape.first_position)
        for mask, _ in self._patterns:
            mask.fill(HIDDEN)
        number = 0
        for line, texts in enumerate(sequences):
            start = 0
            before = NO_ROWS
            for text, num_shared in zip(texts, self._num_shared(texts), strict=True):
                end = start + len(text) - num_shared
                rows = np.concatenate((before[:num_shared], np.arange(start, end)))
                self._place(line, rows, num_shared, text)
                self._pool(number, line, rows, text, pooling)
                start = end
                before = rows
                number = number + 1

    def _num_shared(self, texts: Sequence[TokenizedText]) -> list[int]:
        """Return how many tokens at its start each text has from the rows of the one before it."""
        return shared_with_previous(texts) if self.shape.shares_prefixes else [0] * len(texts)

    def _place(self, line: int, rows: Rows, num_shared: int, text: TokenizedText) -> None:
        """Write a text into its rows of a sequence; the first ``num_shared`` hold its tokens already."""
        own = rows[num_shared:]
        length = len(text)
        self.arrays[INPUT_IDS][line, own] = text.ids[num_shared:]
        if self.shape.has_positions:
            self.arrays[POSITION_IDS][line, own] = positions_of(self.shape, text.ids)[num_shared:]
        if self.shape.has_token_types and text.types is not None:
            self.arrays[TOKEN_TYPE_IDS][line, own] = text.types[num_shared:]
        for mask, pattern in self._patterns:
            if num_shared:
                mask[line, 0][np.ix_(own, rows)] = pattern[num_shared:length, :length]
            else:  # the rows follow each other, and slices are faster
                block = slice(int(own[0]), int(own[0]) + length)
                mask[line, 0, block, block] = pattern[:length, :length]

    def _pool(self, number: int, line: int, rows: Rows, text: TokenizedText, pooling: Pooling) -> None:
        weights = pooling_weights(pooling, len(text), text.num_prompt)
        self.arrays[POOL][number, line * self.variant.rows + rows] = weights


def positions_of(shape: EncoderShape, ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the position of each token of a text, ``[n]``."""
    if shape.skipped_id is None or shape.skipped_id not in ids:
        return np.arange(shape.first_position, shape.first_position + len(ids))
    is_counted = ids != shape.skipped_id
    return np.where(is_counted, np.cumsum(is_counted), 0) + (shape.first_position - 1)


def pooling_weights(pooling: Pooling, length: int, num_prompt: int = 0) -> NDArray[np.float32]:
    """Return the weights ``[length]`` of a text's tokens, of which the first ``num_prompt`` have none.

    They are those of sentence-transformers' Pooling module. If there is nothing beside the prompt, it counts.
    """
    first = num_prompt if num_prompt < length else 0
    weights = np.zeros(length, np.float32)
    if pooling in ("first", "last"):
        weights[first if pooling == "first" else -1] = 1
    elif pooling == "weighted_mean":
        places = np.arange(first + 1, length + 1, dtype=np.float64)
        weights[first:] = places / places.sum()
    else:
        count = length - first
        weights[first:] = 1 / (count if pooling == "mean" else count**0.5)
    return weights


def visibility(kind: EncoderMask, queries: NDArray[Any], keys: NDArray[Any]) -> NDArray[np.float32]:
    """Return what tokens at the positions ``queries [n]`` see of those at ``keys [m]``, ``[n, m]``: 0, or ``HIDDEN``."""
    return np.where(kind.sees(keys - queries[:, None]), np.float32(0), np.float32(HIDDEN))
