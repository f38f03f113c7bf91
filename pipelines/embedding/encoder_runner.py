"""Runs packed texts through the programs of an encoder."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import openvino as ov

from staticllm.core import EncoderShape, EncoderVariant, OnProgress, Pooling, ProgressEvent
from staticllm.system.long_calls import attended, told

from ...compiler_passes.compiling.chain import AnyProgram
from ..costs.model import STABLE_CALLS, CostModel
from ..programs.bind import BoundRequest
from .packing.chunks import (
    MOST_TOKENS,
    ChunkBuffers,
    ChunkCache,
    ContinuedText,
    Rows,
    chunk_variant,
    new_presents,
)
from .packing.encoder_buffers import EncoderBuffers, Vectors
from .packing.plan_calls import PackedCall, plan_calls
from .packing.prefix_groups import LEAST_SHARED, find_groups
from .packing.tokenized_text import TokenizedText

SLOW_RUN, VERY_SLOW_RUN = 0.02, 0.2
"""Calls above these times, in seconds, are measured once at loading, and by their first run: noise and preparation are small."""


class EncoderProgram(BoundRequest):
    """One variant, ready to run: its ports are bound to its buffers."""

    def __init__(self, compiled: AnyProgram, buffers: EncoderBuffers) -> None:
        super().__init__(
            compiled, {name: ov.Tensor(array, shared_memory=True) for name, array in buffers.arrays.items()}
        )
        self.buffers = buffers


class ChunkProgram(EncoderProgram):
    """A variant that continues a text: its past rows are those of the arena."""

    def __init__(self, compiled: AnyProgram, buffers: ChunkBuffers) -> None:
        super().__init__(compiled, buffers)
        self.chunk_buffers = buffers


class TextCalls(NamedTuple):
    """Calls that run some texts: packed ones, and the texts that run in chunks, by their indices."""

    packed: list[PackedCall]
    chunks: dict[int, ContinuedText]


class EncoderRunner:
    """Runs an encoder's programs. It is not thread-safe: only the thread that owns the device calls it.

    ``compiled``: the compiled program of each variant; several variants may share one. ``pooling``: how the vectors of a text's
    tokens become one.
    """

    def __init__(
        self,
        shape: EncoderShape,
        compiled: Mapping[EncoderVariant, AnyProgram],
        pooling: Pooling,
        pad_id: int = 0,
    ) -> None:
        self.shape = shape
        self.pooling: Pooling = shape.pooling or pooling
        self._compiled = dict(compiled)
        self._pad_id = pad_id
        self._bound: dict[EncoderVariant, EncoderProgram] = {}
        self._chunk_programs: dict[EncoderVariant, ChunkProgram] = {}
        self._presents: dict[int, list[Rows]] = {}  # by the rows of the variant
        self.costs = CostModel[EncoderVariant]()
        self._num_to_learn: dict[EncoderVariant, int] = {}  # calls that replace a cost if they are faster
        self.variants = tuple(sorted(variant for variant in self._compiled if not variant.past))
        """The variants that run whole texts, the smallest first."""
        self.continuing = tuple(sorted(variant for variant in self._compiled if variant.past))
        """The variants that continue a text."""
        self.chunks = ChunkCache(shape, self.continuing) if self.continuing else None
        """The keys and values of texts that run in chunks; None if none does."""
        self.max_tokens = shape.longest or max(variant.rows + variant.past for variant in self._compiled)
        """The most tokens of one text."""

    @property
    def max_rows(self) -> int:
        """The maximum number of tokens of a text that runs in one call."""
        return max(variant.rows for variant in self.variants)

    def cost(self, variant: EncoderVariant) -> float:
        """Return the seconds of a call of this variant, measured or estimated."""
        return self.costs(variant)

    def cost_of_text(self, num_tokens: int) -> float:
        """Return the seconds of all chunks of a text that runs in chunks."""
        seconds = 0.0
        num_done = 0
        while num_done < num_tokens:
            variant = chunk_variant(self.continuing, num_done, num_tokens - num_done)
            seconds += self.cost(variant)
            num_done += variant.rows
        return seconds

    def warm_up(
        self,
        num_runs: int = 3,
        known: Mapping[EncoderVariant, float] | None = None,
        on_progress: OnProgress = lambda event: None,
    ) -> None:
        """Run every program, so that costs are known; the least of ``num_runs`` runs counts.

        Of the variants that share a program, those run whose rows double; the costs of the others follow from theirs until they
        run. ``on_progress`` gets an event after each variant.

        Args:
            known: Seconds per call that need not be measured again.
        """
        for variant, seconds in (known or {}).items():
            if variant in self._compiled:
                self.costs.set(variant, seconds)
        variants = (*self._whole_to_measure(), *self._continuing_to_measure())
        for index, variant in enumerate(variants, 1):
            event = ProgressEvent("warm-up", index, len(variants), 0.0, variant)
            begin = time.perf_counter()
            with told(on_progress, event):
                self._measure_first_runs(variant, num_runs)
            on_progress(replace(event, seconds=time.perf_counter() - begin))

    def _measure_first_runs(self, variant: EncoderVariant, num_runs: int) -> None:
        program = self.program_of(variant)
        seconds = attended(program.run)  # the first run prepares, and that of a program packs its weights
        if variant in self.costs.measured:
            return
        if seconds < VERY_SLOW_RUN or not self.costs.measured:
            seconds = min(attended(program.run) for _ in range(num_runs if seconds < SLOW_RUN else 1))
        self.costs.set(variant, seconds)

    def run(
        self,
        variant: EncoderVariant,
        sequences: Sequence[Sequence[TokenizedText]],
        meanwhile: Callable[[], None] | None = None,
    ) -> Vectors:
        """Return the vectors ``[n, width]`` of all texts, in their order. A vector may hold numbers that are not finite."""
        program = self.program_of(variant)
        program.buffers.fill(sequences, self.pooling)
        self.measure(variant, program.run(meanwhile))
        return program.buffers.output[: sum(map(len, sequences))].copy()

    def continued(self, text: TokenizedText) -> ContinuedText:
        """Return a text that ``run_chunk`` runs, after the tokens that are kept of an earlier text, if it begins like one."""
        return self._chunks.continued(text)

    def resumed(self, text: TokenizedText) -> ContinuedText | None:
        """Return a text that comes alone for ``run_chunk`` if its beginning is kept or worth keeping; None if it runs whole."""
        if not any(variant.past <= MOST_TOKENS for variant in self.continuing):
            return None
        num_kept = self._chunks.worth_keeping(text)
        chunk = self._chunks.continued(text)
        is_learning = num_kept >= chunk.num_done + LEAST_SHARED
        if not chunk.num_done and not is_learning:
            return None
        chunk.num_kept = num_kept if is_learning else 0
        variant = self.next_chunk(chunk)
        whole = [self.cost(each) for each in self.variants if each.rows >= len(text)]
        is_dear = bool(whole) and not is_learning and self.cost(variant) >= min(whole)
        return None if is_dear or variant.rows < chunk.num_left else chunk

    def next_chunk(self, chunk: ContinuedText, max_seconds: float | None = None) -> EncoderVariant:
        """Return the variant of a text's next call: one within ``max_seconds`` if there is one, else the shortest call."""
        found = chunk_variant(self.continuing, chunk.num_done, chunk.num_left)
        if max_seconds is None or self.cost(found) <= max_seconds:
            return found
        fitting = [variant for variant in self.continuing if chunk.num_done <= variant.past <= found.past]
        short = [variant for variant in fitting if self.cost(variant) <= max_seconds]
        if short:
            return max(short, key=lambda variant: (variant.rows, -variant.past))
        return min(fitting, key=self.cost)

    def run_chunk(
        self, chunk: ContinuedText, variant: EncoderVariant, meanwhile: Callable[[], None] | None = None
    ) -> Vectors | None:
        """Run the next tokens of a text, and return its vector ``[width]`` after the last ones, else None."""
        sequence = self._chunks.enter(chunk, variant)
        count = min(variant.rows, chunk.num_left)
        is_last = count == chunk.num_left
        program = self._chunk_program(variant)
        buffers = program.chunk_buffers
        buffers.fill_chunk(chunk, sequence, count, self.pooling)
        self.measure(variant, program.run(meanwhile))
        if not is_last:
            self._chunks.commit(chunk, buffers.presents, count)
            return None
        vector: Vectors = buffers.output[0].copy()
        self._chunks.end(chunk, buffers.presents, bool(np.isfinite(vector).all()))
        return vector

    def close(self) -> None:
        """Drop the programs, their inference requests and the cached prefixes. Nothing can run afterwards."""
        self._compiled = {}
        self._bound = {}
        self._chunk_programs = {}
        self._presents = {}
        if self.chunks is not None:
            self.chunks.release()

    @property
    def _chunks(self) -> ChunkCache:
        assert self.chunks is not None, "no variant continues a text"
        return self.chunks

    def measure(self, variant: EncoderVariant, seconds: float) -> None:
        """Learn from a call. All costs are stable, so that also a short process keeps what it has measured."""
        if (
            variant not in self.costs.measured
        ):  # the first run prepares, so it says only that the variant takes no longer
            self._num_to_learn[variant] = STABLE_CALLS - 1
            self.costs.set(variant, min(seconds, self.cost(variant)))
            return
        num_left = self._num_to_learn.get(variant, 0)
        if num_left:
            self._num_to_learn[variant] = num_left - 1
        if num_left and seconds < self.cost(variant):
            self.costs.set(variant, seconds)
        else:
            self.costs.update(variant, seconds)

    def _whole_to_measure(self) -> list[EncoderVariant]:
        """Return the variants of which each is the only one of its program, or has twice the rows of the one before, or the most.

        Of several sequences, the fewest are enough.
        """
        last: dict[int, int] = {}
        found = list[EncoderVariant]()
        num_alike = Counter(id(self._compiled[variant]) for variant in self.variants)
        for variant in self.variants:
            program = id(self._compiled[variant])
            size = variant.batch * variant.rows
            is_large = variant.batch == 1 and variant.rows == self.max_rows
            if num_alike[program] == 1 or is_large or (variant.batch <= 2 and size >= 2 * last.get(program, 0)):
                found.append(variant)
                last[program] = size
        return found

    def _continuing_to_measure(self) -> list[EncoderVariant]:
        """Return a variant with few rows after few tokens, one with the most rows after them, and one of a second chunk."""
        if not self.continuing:
            return []
        few = self.continuing[0].past
        many = [each.past for each in self.continuing if each.past >= self.max_rows]
        ends = [max(each for each in self.continuing if each.past == past) for past in {few, min(many, default=few)}]
        return sorted({self.continuing[0], *ends})

    def _chunk_program(self, variant: EncoderVariant) -> ChunkProgram:
        if variant not in self._chunk_programs:
            cache = self._chunks.kv
            rows = variant.rows
            if rows not in self._presents:
                self._presents[rows] = new_presents(cache, rows)
            buffers = ChunkBuffers(self.shape, variant, self._pad_id, cache, self._presents[rows])
            self._chunk_programs[variant] = ChunkProgram(self._compiled[variant], buffers)
        return self._chunk_programs[variant]

    def program_of(self, variant: EncoderVariant) -> EncoderProgram:
        if variant.past:
            return self._chunk_program(variant)
        if variant not in self._bound:
            buffers = EncoderBuffers(self.shape, variant, self._pad_id)
            self._bound[variant] = EncoderProgram(self._compiled[variant], buffers)
        return self._bound[variant]


def calls_of(
    runner: EncoderRunner,
    texts: Sequence[TokenizedText],
    variants: Sequence[EncoderVariant] | None = None,
    cost: Callable[[EncoderVariant], float] | None = None,
) -> TextCalls:
    """Return calls that run all texts; those that are too long for packed calls run in chunks.

    ``variants`` and ``cost``: those to choose from, and their seconds; None for the runner's.

    Raises:
        PromptError: no program holds a text.
    """
    if len(texts) == 1 and (chunk := runner.resumed(texts[0])) is not None:
        return TextCalls([], {0: chunk})
    long = [index for index, text in enumerate(texts) if runner.max_rows < len(text) <= runner.max_tokens]
    places = [index for index in range(len(texts)) if index not in long] if long else range(len(texts))
    prefixes = find_groups([texts[index] for index in places]) if runner.shape.shares_prefixes else None
    lengths = [len(texts[index]) for index in places]
    calls = plan_calls(lengths, variants or runner.variants, cost or runner.cost, runner.shape.is_packable, prefixes)
    packed = [
        PackedCall(call.variant, tuple(tuple(places[index] for index in each) for each in call.sequences))
        for call in calls
    ]
    return TextCalls(packed, {index: runner.continued(texts[index]) for index in long})
