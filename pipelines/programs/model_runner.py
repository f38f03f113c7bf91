"""Runs steps: fill, run, commit. No other module runs them on the device."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from staticllm.core import Clock, Variant
from staticllm.errors import NumericalError

from ...kvcache.cache import KVCache
from ...kvcache.rotation import KeyRotations, find_rotations
from ...kvcache.sequence import KVSequence
from ...kvcache.step import Segment, Step, StepBuffers
from ...kvcache.stored import StoredSequence
from ..costs.model import CostModel
from ..costs.probe import CostProbe
from .in_flight import Between, CallInFlight, Chain
from .variant_index import VariantIndex, plan_chunks

Logits = NDArray[np.float32]
Accept = Callable[[Segment, Logits], int]
"""Takes a segment and its logits ``[num_logits, vocab]``; returns how many of its tokens are kept."""
LEAST_SECONDS = 1e-6
"""The least time of a call that others interrupted: clocks differ by less, and costs must be above 0."""


class Runnable(Protocol):
    """One variant that can run: ``run`` reads and overwrites ``buffers`` and returns the seconds it took.

    ``meanwhile`` is called while the device runs, and must not touch ``buffers``. One that runs in blocks is a ``Chain``.
    """

    @property
    def buffers(self) -> StepBuffers: ...

    def run(self, meanwhile: Callable[[], None] | None = None) -> float: ...


@dataclass(frozen=True)
class SegmentResult:
    """What a call computed for one segment.

    ``logits [num_logits, vocab]`` f32 after its last tokens: a view, valid until the next call. ``argmax`` is the most likely
    token after the last one, None where logits, new keys and values or states are not finite; such a segment is not kept.
    ``num_accepted`` of its first tokens were kept: all, none, or a part of a draft. ``stored`` is the sequence of a segment
    that went to the host.
    """

    logits: Logits
    argmax: int | None
    num_accepted: int
    stored: StoredSequence | None = None


@dataclass(frozen=True)
class StepResult:
    """What one call computed, and what it took.

    ``start`` is when the device began (a moment of the runner's clock). Seconds: ``prepare`` for ids, positions and masks,
    ``device`` for the call itself, ``commit`` for the checks and copies after it, and ``paused`` for other calls between its
    blocks, which are not in ``device``. ``num_inserted`` counts these calls.
    """

    variant: Variant
    segments: tuple[SegmentResult, ...]
    start: float
    prepare_seconds: float
    device_seconds: float
    commit_seconds: float
    paused_seconds: float = 0.0
    num_inserted: int = 0


class ModelRunner:
    """Runs a model's programs over one KV cache. It is not thread-safe: in an engine, only the engine's thread calls it.

    ``index`` has the variants whose programs are compiled. ``planned`` are all variants of the model, including those that are
    still being compiled in the background; ``is_complete`` says whether the programs of all of them are there. ``clock`` is what
    calls are timed with. ``inserted`` are the programs of decode steps (one row per sequence) once more, over buffers of a second
    ``BufferPool``: they run between the blocks of a call. Without any, no call runs there.
    """

    def __init__(
        self,
        cache: KVCache,
        programs: Mapping[Variant, Runnable],
        costs: CostModel[Variant] | None = None,
        planned: Iterable[Variant] = (),
        clock: Clock = time.perf_counter,
        inserted: Mapping[Variant, Runnable] | None = None,
    ) -> None:
        self.cache = cache
        self.clock = clock
        self.programs = programs
        self.inserted: Mapping[Variant, Runnable] = inserted or {}
        self.in_flight: CallInFlight | None = None
        self.costs = costs or CostModel[Variant]()
        self.probe = CostProbe(programs, self.costs)
        self._planned = frozenset(planned)
        self.refresh_variants()

    def refresh_variants(self) -> None:
        """Rebuild ``index`` after programs were added."""
        self.index = VariantIndex(self.programs, needs_real_rows=bool(self.cache.states))
        self.is_complete = self._planned <= set(self.programs)
        self.probe.choose(self.programs)

    def prefill(self, sequence: KVSequence, tokens: Sequence[int]) -> Logits:
        """Run a prompt in the cheapest chunks, and return the logits ``[vocab]`` after its last token.

        Earlier tokens of the sequence run again if the model takes other RoPE factors for a text as long as both.

        Raises:
            NumericalError: the logits are not finite.
        """
        length = len(sequence) + len(tokens)
        if self.cache.has_outgrown(sequence.conditions, length):
            tokens = [*sequence.tokens, *tokens]
            self.cache.renew(sequence, length)
        ids = np.asarray(tokens, np.int64)
        chunks = plan_chunks(self.index, self.costs, len(ids), self.cache.num_past, not len(sequence))
        start = 0
        logits = None
        for variant, count in chunks:
            (logits,) = self._checked(variant, [Segment(sequence, ids[start : start + count])])
            start += count
        assert logits is not None, "an empty prompt"
        return logits

    def decode(self, sequence: KVSequence, token: int) -> Logits:
        """Run one token in the smallest variant that sees all slots, and return the logits ``[vocab]`` after it.

        Raises:
            NumericalError: the logits are not finite.
        """
        return self.step([Segment(sequence, np.array([token], np.int64))])[0]

    def step(self, segments: Sequence[Segment]) -> list[Logits]:
        """Run the next tokens of several sequences in one call of the smallest variant that holds them.

        Return the logits ``[vocab]`` after the last token of each segment: views, valid until the next call. Sequences for which
        the model takes other RoPE factors from these tokens on run alone, as in ``prefill``.

        Raises:
            NumericalError: logits that are not finite.
        """
        if any(self._outgrows(segment) for segment in segments):
            return [self.prefill(segment.sequence, segment.tokens.tolist()).copy() for segment in segments]
        variant = self.variant_for(segments)
        assert variant is not None, f"no variant holds {len(segments)} segments"
        return self._checked(variant, segments)

    def _outgrows(self, segment: Segment) -> bool:
        length = len(segment.sequence) + len(segment.tokens)
        return self.cache.has_outgrown(segment.sequence.conditions, length)

    def variant_for(self, segments: Sequence[Segment]) -> Variant | None:
        """Return the variant with the fewest rows that hold these segments, and the smallest KV length with all used slots.

        Return None if there is no such variant. A model with recurrent states needs exactly as many rows as tokens, because
        idle rows would change its states. Segments with logits after several tokens need a variant that returns as many.
        """
        num_rows = 0
        num_logits = 0
        is_fresh = True
        num_past = self.cache.num_past
        for segment in segments:
            num_rows += len(segment.tokens)
            num_logits += segment.num_logits
            is_fresh = is_fresh and not len(segment.sequence)
        if any(segment.is_exact for segment in segments):
            least = self.cache.least_exact
            padded = max(num_rows, least), max(len(segments), least if num_rows < least else 1), max(num_logits, least)
            if (found := self.index.with_logits(*padded, num_past, is_fresh)) is not None:
                return found
        if num_logits > len(segments):
            return self.index.with_logits(num_rows, len(segments), num_logits, num_past, is_fresh)
        return self.index.smallest(num_rows, len(segments), num_past, is_fresh)

    def run(
        self,
        variant: Variant,
        segments: Sequence[Segment],
        meanwhile: Callable[[], None] | None = None,
        accept: Accept | None = None,
        between: Between | None = None,
    ) -> StepResult:
        """Run one variant, and keep the tokens of every segment whose numbers are finite.

        ``meanwhile`` is called while the device runs. ``accept`` returns how many of a segment's first tokens are kept, since
        the model may accept only a part of a draft. Without it, all tokens are kept. ``between`` is called between two blocks of
        a program that has several, if another call can run there; it may call ``insert``.
        """
        return self.run_step(self.programs[variant], Step(variant, tuple(segments)), meanwhile, accept, between)

    def insert(
        self, variant: Variant, segments: Sequence[Segment], meanwhile: Callable[[], None] | None = None
    ) -> StepResult:
        """Run one of the variants that ``insertable`` returned, between two blocks of the call in flight, like ``run``."""
        assert self.in_flight is not None and variant in self.insertable(), "it cannot run there"
        assert len(segments) <= self.insertable_slots, "its slots would lie where the call in flight does not let them"
        self.in_flight.num_inserted += 1
        return self.run_step(self.inserted[variant], Step(variant, tuple(segments)), meanwhile)

    def insertable(self) -> tuple[Variant, ...]:
        """Return the variants of decode steps that can run between two blocks of the call in flight, by ascending rows.

        The call in flight reads the slots of the arena at its KV length, so that only variants of the same one leave them where
        they are. A call of KV length 0 reads none. Of each number of rows only the smallest variant is returned.
        """
        flight = self.in_flight
        if flight is None or self.insertable_slots < 1:
            return ()
        kv_len = flight.variant.kv_len
        least = kv_len or self.cache.num_past
        seeing = [v for v in self.index.decoding if (v.kv_len == least if kv_len else v.kv_len >= least)]
        smallest = {variant.rows: variant for variant in reversed(seeing) if variant in self.inserted}
        return tuple(smallest[rows] for rows in sorted(smallest))

    @property
    def insertable_slots(self) -> int:
        """The number of KV slots that a step between two blocks may take: those of the call in flight stay free.

        If that call reads slots, the new ones must lie below its KV length, or the others would have to move.
        """
        flight = self.in_flight
        if flight is None:
            return 0
        slots = self.cache.slots
        free = slots.num_free - flight.num_tokens
        return min(free, flight.variant.kv_len - slots.num_used) if flight.variant.kv_len else free

    def run_step(
        self,
        program: Runnable,
        step: Step,
        meanwhile: Callable[[], None] | None = None,
        accept: Accept | None = None,
        between: Between | None = None,
    ) -> StepResult:
        """Run one program for a step, as ``run`` says."""
        begin = self.clock()
        variant = step.variant
        segments = step.segments
        buffers = program.buffers
        self.cache.fill(step, buffers)
        start = self.clock()
        flight = None
        if between is not None and self.num_blocks > 1 and isinstance(program, Chain):
            num_tokens = sum(len(segment.tokens) for segment in segments)
            flight = CallInFlight(variant, program.num_blocks, num_tokens, self.clock, between)
            seconds = self._run_in_blocks(program, flight, meanwhile)
        else:
            seconds = program.run(meanwhile)
        end = self.clock()
        logits = [buffers.logits[0, place] for place in step.logits()]
        are_finite = self.cache.are_finite(step, buffers)
        best = [_most_likely(lines) if is_kept else None for lines, is_kept in zip(logits, are_finite, strict=True)]
        accepted = [0 if token is None else len(s.tokens) for s, token in zip(segments, best, strict=True)]
        if accept is not None:
            accepted = [
                accept(segment, lines) if count else 0
                for segment, lines, count in zip(segments, logits, accepted, strict=True)
            ]
        stored = self.cache.commit(step, buffers, accepted)
        self.costs.update(variant, seconds, buffers.work)
        self.probe.note_call(variant)
        results = tuple(map(SegmentResult, logits, best, accepted, stored))
        paused = (0.0, 0) if flight is None else (flight.paused_seconds, flight.num_inserted)
        return StepResult(variant, results, start, start - begin, seconds, self.clock() - end, *paused)

    @cached_property
    def num_blocks(self) -> int:
        """The number of blocks of a call between which another one may run; 1 if calls run in one piece.

        No call runs between blocks of a model with recurrent states, because these exist once, in memory that both would use.
        """
        program = next(iter(self.inserted.values()), None)
        return program.num_blocks if isinstance(program, Chain) and not self.cache.states else 1

    def _run_in_blocks(self, program: Chain, flight: CallInFlight, meanwhile: Callable[[], None] | None) -> float:
        """Run a program that others may interrupt, and return the seconds that it took itself."""
        self.in_flight = flight
        self.cache.arena.is_read = bool(flight.variant.kv_len)
        try:
            seconds = program.run(meanwhile, flight.pause)
        finally:
            self.in_flight = None
            self.cache.arena.is_read = False
        return max(seconds - flight.paused_seconds, LEAST_SECONDS)

    @cached_property
    def rotations(self) -> KeyRotations | None:
        """How keys are moved to other positions, found with a few calls; None if this model's cannot be."""
        last = self.cache.num_slots - 1
        vocab_size = self.cache.layout.vocab_size
        tokens = sorted(
            {vocab_size // 7, vocab_size // 3}
        )  # calls take as long as decode steps, and requests wait meanwhile
        return None if self.cache.states else find_rotations(self.cache.kv_states, self.rows_at, tokens, last)

    def rows_at(self, token: int, position: int) -> list[NDArray[Any]]:
        """Return the keys and values of a token that sees only itself: per group of states ``[n, heads, 1, head_dim]``."""
        segment = Segment(self.cache.open(), np.array([token], np.int64))
        variant = self.variant_for([segment])
        assert variant is not None, "no variant holds one token"
        program = self.programs[variant]
        step = Step(variant, (segment,))
        self.cache.fill(step, program.buffers)
        program.buffers.position_ids[..., 0] = position
        if program.buffers.key_positions is not None and program.buffers.query_positions is not None:
            program.buffers.key_positions[..., variant.kv_len] = position
            program.buffers.query_positions[..., 0, 0] = position
        program.run()
        return self.cache.new_rows(step, program.buffers)

    def _checked(self, variant: Variant, segments: Sequence[Segment]) -> list[Logits]:
        """Run one variant, and return the logits ``[vocab]`` after the last token of each segment.

        Raises:
            NumericalError: logits that are not finite.
        """
        result = self.run(variant, segments)
        if any(segment.argmax is None for segment in result.segments):
            raise not_finite(variant)
        return [segment.logits[-1] for segment in result.segments]

    def reset(self) -> KVSequence:
        """Forget everything, whatever state an exception left behind, and return a new, empty sequence."""
        self.cache.reset()
        return self.cache.open()

    def close(self) -> None:
        """Drop the programs with their inference requests, and give the KV slots back at once. Nothing can run afterwards."""
        self.programs = {}
        self.inserted = {}
        self.probe = CostProbe(self.programs, self.costs)
        self.cache.release()


def _most_likely(logits: Logits) -> int | None:
    """Return the most likely token after the last row of ``logits [n, vocab]``; None if a number is not finite.

    The logits, 150 k per row, are read only once: numpy's ``argmax`` finds a NaN or a positive infinity if there is one.
    """
    best = None
    for line in logits:
        best = int(line.argmax())
        if not math.isfinite(line[best]):
            return None
    return best


def not_finite(variant: Variant) -> NumericalError:
    """Return the error of a request whose numbers are not finite."""
    return NumericalError(
        f"{variant} computed logits that are not finite: try INFERENCE_PRECISION_HINT='f32' and KV_CACHE_PRECISION='f32'"
    )
