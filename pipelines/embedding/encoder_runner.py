"""Runs packed texts through the programs of an encoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import openvino as ov

from staticllm.core import EncoderShape, EncoderVariant, Pooling
from staticllm.pipelines.embedding.packing.encoder_buffers import EncoderBuffers, Vectors
from staticllm.pipelines.embedding.packing.tokenized_text import TokenizedText
from staticllm.pipelines.programs.bind import BoundRequest

SLOW_RUN = 0.1
"""A call of more seconds is measured once at loading: noise is small beside it, and loading should not take minutes."""
NEW_SHARE = 0.1
"""The weight of a new measurement in the cost of a variant."""


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
