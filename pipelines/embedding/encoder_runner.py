"""Runs packed texts through the programs of an encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.core import EncoderMask, EncoderShape, EncoderVariant, Pooling
from staticllm.pipelines.programs.bind import BoundRequest
from staticllm.ports import (
    EMBEDDINGS,
    INPUT_IDS,
    POOL,
    POSITION_IDS,
    SCORES,
    TOKEN_TYPE_IDS,
    encoder_input_names,
    encoder_shape_of,
)

HIDDEN = -65504.0
"""The value of a mask where a token does not see another, as in step programs."""
SLOW_RUN = 0.1
"""A call of more seconds is measured once at loading: noise is small beside it, and loading should not take minutes."""
NEW_SHARE = 0.1
"""The weight of a new measurement in the cost of a variant."""

Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class TokenizedText:
    """The token ids of one text, and the type of each token for models that know several; None: all 0.

    ``num_prompt``: the tokens at its start that are seen by the others but do not count in its vector.
    """

    ids: NDArray[np.int64]
    types: NDArray[np.int64] | None = None
    num_prompt: int = 0

    def __len__(self) -> int:
        return len(self.ids)


class EncoderBuffers:
    """The host memory of one variant's ports, which ``fill`` overwrites before each call."""

    def __init__(self, shape: EncoderShape, variant: EncoderVariant, pad_id: int) -> None:
        self.shape, self.variant, self._pad_id = shape, variant, pad_id
        self.arrays: dict[str, NDArray[Any]] = {}
        for name in encoder_input_names(shape):
            dtype = np.int64 if name in (INPUT_IDS, POSITION_IDS, TOKEN_TYPE_IDS) else np.float32
            self.arrays[name] = np.zeros(encoder_shape_of(name, shape, variant), dtype)
        output = EMBEDDINGS if shape.output == "embeddings" else SCORES
        self.output: Vectors = np.zeros(encoder_shape_of(output, shape, variant), np.float32)
        self.arrays[output] = self.output

    @cached_property
    def _patterns(self) -> list[tuple[NDArray[np.float32], NDArray[np.float32]]]:
        """The array of each mask, and the block of it that a text of all rows would have."""
        return [(self.arrays[kind.port_name], _pattern(kind, self.variant.rows)) for kind in self.shape.masks]

    def fill(self, sequences: Sequence[Sequence[TokenizedText]], pooling: Pooling) -> None:
        """Write the ids, positions, masks and pooling weights of the texts in each sequence."""
        self.arrays[INPUT_IDS].fill(self._pad_id)
        for name in {TOKEN_TYPE_IDS, POOL} & self.arrays.keys():
            self.arrays[name].fill(0)
        for mask, _ in self._patterns:
            mask.fill(HIDDEN)
        number = 0
        for line, texts in enumerate(sequences):
            start = 0
            for text in texts:
                self._place(line, start, text)
                self._pool(number, line, start, text, pooling)
                start, number = start + len(text), number + 1

    def _place(self, line: int, start: int, text: TokenizedText) -> None:
        length = len(text)
        rows = slice(start, start + length)
        self.arrays[INPUT_IDS][line, rows] = text.ids
        if self.shape.has_positions:
            first = self.shape.first_position
            self.arrays[POSITION_IDS][line, rows] = np.arange(first, first + length)
        if self.shape.has_token_types and text.types is not None:
            self.arrays[TOKEN_TYPE_IDS][line, rows] = text.types
        for mask, pattern in self._patterns:
            mask[line, 0, rows, rows] = pattern[:length, :length]

    def _pool(self, number: int, line: int, start: int, text: TokenizedText, pooling: Pooling) -> None:
        begin, length = line * self.variant.rows + start, len(text)
        self.arrays[POOL][number, begin : begin + length] = pooling_weights(pooling, length, text.num_prompt)


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


def _pattern(kind: EncoderMask, rows: int) -> NDArray[np.float32]:
    """Return what the tokens of one text see of each other, ``[rows, rows]``: 0, or ``HIDDEN``."""
    sees = np.array([kind.sees(distance) for distance in range(-rows + 1, rows)])
    places = np.arange(rows)
    return np.where(sees[places[None] - places[:, None] + rows - 1], np.float32(0), np.float32(HIDDEN))


class EncoderProgram(BoundRequest):
    """One variant, ready to run: its ports are bound to its buffers."""

    def __init__(self, compiled: ov.CompiledModel, buffers: EncoderBuffers) -> None:
        super().__init__(
            compiled, {name: ov.Tensor(array, shared_memory=True) for name, array in buffers.arrays.items()}
        )
        self.buffers = buffers


class EncoderRunner:
    """Runs an encoder's programs. It is not thread-safe: only the thread that owns the device calls it.

    ``compiled``: the compiled program of each variant; several variants may share one. ``pooling``: how the vectors of a text's
    tokens become one.
    """

    def __init__(
        self,
        shape: EncoderShape,
        compiled: Mapping[EncoderVariant, ov.CompiledModel],
        pooling: Pooling,
        pad_id: int = 0,
    ) -> None:
        self.shape = shape
        self.pooling: Pooling = shape.pooling or pooling
        self._compiled, self._pad_id = dict(compiled), pad_id
        self._bound: dict[EncoderVariant, EncoderProgram] = {}
        self._seconds: dict[EncoderVariant, float] = {}

    @property
    def variants(self) -> tuple[EncoderVariant, ...]:
        """The variants, the smallest first."""
        return tuple(sorted(self._compiled))

    @property
    def max_rows(self) -> int:
        """The most tokens of one text."""
        return max(variant.rows for variant in self._compiled)

    def cost(self, variant: EncoderVariant) -> float:
        """Return the seconds of a call of this variant: measured, or on a line through its neighbours that were measured."""
        if variant in self._seconds:
            return self._seconds[variant]
        size = _size(variant)
        if not self._seconds:
            return 1e-3 + 1e-4 * size
        below = max((known for known in self._seconds if _size(known) <= size), key=_size, default=None)
        above = min((known for known in self._seconds if _size(known) >= size), key=_size, default=None)
        if below is None or above is None or _size(below) == _size(above):
            near = below or above
            assert near is not None
            return self._seconds[near] * size / _size(near)
        share = (size - _size(below)) / (_size(above) - _size(below))
        return self._seconds[below] + share * (self._seconds[above] - self._seconds[below])

    def warm_up(self, num_runs: int = 3, known: Mapping[EncoderVariant, float] | None = None) -> None:
        """Run every variant, so that its cost is known; the least of ``num_runs`` runs counts.

        ``known``: seconds per call that need not be measured again.
        """
        for variant in self.variants:
            program = self._program(variant)
            slowest = program.run()  # the first run prepares
            seconds = (known or {}).get(variant)
            count = num_runs if slowest < SLOW_RUN else 1
            self._seconds[variant] = min(program.run() for _ in range(count)) if seconds is None else seconds

    @property
    def costs(self) -> dict[EncoderVariant, float]:
        """The seconds per call of each variant that was measured."""
        return dict(self._seconds)

    def run(
        self,
        variant: EncoderVariant,
        sequences: Sequence[Sequence[TokenizedText]],
        meanwhile: Callable[[], None] | None = None,
    ) -> Vectors:
        """Return the vectors ``[n, width]`` of all texts, in their order. A vector may hold numbers that are not finite."""
        program = self._program(variant)
        program.buffers.fill(sequences, self.pooling)
        seconds = program.run(meanwhile)
        known = self._seconds.get(variant, seconds)
        self._seconds[variant] = known + NEW_SHARE * (seconds - known)
        return program.buffers.output[: sum(map(len, sequences))].copy()

    def _program(self, variant: EncoderVariant) -> EncoderProgram:
        if variant not in self._bound:
            buffers = EncoderBuffers(self.shape, variant, self._pad_id)
            self._bound[variant] = EncoderProgram(self._compiled[variant], buffers)
        return self._bound[variant]


def _size(variant: EncoderVariant) -> int:
    """Return the rows of all sequences of a call."""
    return variant.batch * variant.rows
