"""Runs steps: fill, run, commit. The only place that calls the device."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from collections.abc import Sequence as List
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from staticllm.core import Variant
from staticllm.errors import NumericalError
from staticllm.kvcache.cache import KVCache, StoredSequence
from staticllm.kvcache.sequence import Sequence
from staticllm.kvcache.step import Segment, Step, StepBuffers
from staticllm.pipelines.programs.cost_model import CostModel
from staticllm.pipelines.programs.variants import VariantIndex, plan_chunks

Logits = NDArray[np.float32]


class Runnable(Protocol):
    """One variant that can run: ``run`` reads and overwrites ``buffers`` and returns the seconds it took.

    ``meanwhile`` is called while it runs, and may touch nothing of it.
    """

    @property
    def buffers(self) -> StepBuffers: ...

    def run(self, meanwhile: Callable[[], None] | None = None) -> float: ...


class ModelRunner:
    """A model's programs over one cache. Not thread-safe: one caller at a time.

    Of the last call: ``started`` is when (``time.perf_counter``), ``seconds`` what it took on the device, ``prepare_seconds`` and
    ``commit_seconds`` what the host did before and after; ``best`` the most likely token after each segment, None where the
    logits or the new rows are not finite. ``planned`` are variants that come later, without those that are there.
    """

    def __init__(
        self,
        cache: KVCache,
        programs: Mapping[Variant, Runnable],
        costs: CostModel | None = None,
        planned: Iterable[Variant] = (),
    ) -> None:
        self.cache = cache
        self.programs = programs
        self._planned = frozenset(planned)
        self.costs = costs or CostModel()
        self.refresh_variants()
        self.started = self.seconds = self.prepare_seconds = self.commit_seconds = 0.0
        self.best: list[int | None] = []
        self.set_aside: dict[int, StoredSequence] = {}

    def refresh_variants(self) -> None:
        """Look again which programs there are: some were added."""
        self.index = VariantIndex(self.programs)
        self._calls = VariantIndex(self.programs, needs_real_rows=bool(self.cache.states))
        self.is_complete = self._planned <= set(self.programs)

    def prefill(self, sequence: Sequence, tokens: List[int]) -> Logits:
        """Run a prompt in the cheapest chunks. Returns the logits after its last token, ``[vocab]``."""
        ids = np.asarray(tokens, np.int64)
        chunks = plan_chunks(self._calls, self.costs, len(ids), self.cache.slots.high_slot, not len(sequence))
        start, logits = 0, None
        for variant, count in chunks:
            (logits,) = self._checked(variant, [Segment(sequence, ids[start : start + count])])
            start += count
        assert logits is not None, "an empty prompt"
        return logits

    def decode(self, sequence: Sequence, token: int) -> Logits:
        """Run one token in the smallest variant that sees all rows. Returns the logits after it, ``[vocab]``."""
        return self.step([Segment(sequence, np.array([token], np.int64))])[0]

    def step(self, segments: List[Segment]) -> list[Logits]:
        """Run the next tokens of several sequences in one call, the smallest that holds them.

        Returns the logits after the last token of each segment; views, valid until the next call.
        """
        variant = self.variant_for(segments)
        assert variant is not None, f"no variant holds {len(segments)} segments"
        return self._checked(variant, segments)

    def variant_for(self, segments: List[Segment]) -> Variant | None:
        """The fewest rows that hold these segments, at the smallest KV length that shows all rows in use.

        Where the model has recurrent states, which must not run through idle rows, exactly as many rows; None if nothing is so.
        """
        num_rows = sum(len(segment.tokens) for segment in segments)
        is_fresh = not any(len(segment.sequence) for segment in segments)
        return self._calls.smallest(num_rows, len(segments), self.cache.slots.high_slot, is_fresh)

    def run(
        self,
        variant: Variant,
        segments: List[Segment],
        aside: Collection[int] = (),
        meanwhile: Callable[[], None] | None = None,
    ) -> list[Logits]:
        """Run one variant and keep the rows of every segment whose logits are finite; ``best`` tells of the others.

        The rows of segments in ``aside``, fresh ones, go to ``set_aside`` instead of the arena. ``meanwhile`` is called while
        the device runs.
        """
        begin = time.perf_counter()
        program, step = self.programs[variant], Step(variant, tuple(segments))
        self.cache.fill(step, program.buffers)
        self.started = time.perf_counter()
        self.prepare_seconds = self.started - begin
        self.seconds = program.run(meanwhile)
        end = time.perf_counter()
        logits: Logits = program.buffers.logits[0, : len(segments)]
        are_finite = self.cache.are_finite(step, program.buffers)
        self.best = [_most_likely(line) if is_kept else None for line, is_kept in zip(logits, are_finite, strict=True)]
        is_finite = [best is not None for best in self.best]
        self.set_aside = self.cache.commit(step, program.buffers, is_finite, aside)
        self.costs.update(variant, self.seconds)
        self.commit_seconds = time.perf_counter() - end
        return list(logits)

    def _checked(self, variant: Variant, segments: List[Segment]) -> list[Logits]:
        """
        Raises:
            NumericalError: logits that are not finite.
        """
        outputs = self.run(variant, segments)
        if None in self.best:
            raise not_finite(variant)
        return outputs

    def reset(self) -> Sequence:
        """Forget everything, whatever state an exception left behind. Returns a new, empty sequence."""
        self.cache.reset()
        return self.cache.open()


def _most_likely(logits: Logits) -> int | None:
    """One pass over a vocabulary of 150 k: a NaN is its maximum to numpy, and so is an infinity."""
    best = int(logits.argmax())
    return best if np.isfinite(logits[best]) else None


def not_finite(variant: Variant) -> NumericalError:
    return NumericalError(
        f"{variant} answered with logits that are not finite: try INFERENCE_PRECISION_HINT='f32' and "
        "KV_CACHE_PRECISION='f32'"
    )
