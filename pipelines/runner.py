"""Runs steps: fill, run, commit. The only place that calls the device."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as List
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from staticllm.core import Variant
from staticllm.errors import NumericalError
from staticllm.kvcache.cache import KVCache
from staticllm.kvcache.sequence import Sequence
from staticllm.kvcache.step import Segment, Step, StepBuffers
from staticllm.pipelines.costs import CostTable
from staticllm.pipelines.variants import plan_chunks, smallest_for

Logits = NDArray[np.float32]


class Runnable(Protocol):
    """One variant that can run: ``run`` reads and overwrites ``buffers`` and returns the seconds it took."""

    @property
    def buffers(self) -> StepBuffers: ...

    def run(self) -> float: ...


class ModelRunner:
    """A model's programs over one cache. Not thread-safe: one caller at a time.

    ``device_seconds`` lists how long each call took, since ``take_device_seconds`` was called last.
    """

    def __init__(self, cache: KVCache, programs: Mapping[Variant, Runnable], costs: CostTable | None = None) -> None:
        self.cache = cache
        self.programs = dict(programs)
        self.costs = costs or CostTable()
        self._variants = list(self.programs)
        self._device_seconds: list[float] = []

    def prefill(self, sequence: Sequence, tokens: List[int]) -> Logits:
        """Run a prompt in the cheapest chunks. Returns the logits after its last token, ``[vocab]``."""
        ids = np.asarray(tokens, np.int64)
        chunks = plan_chunks(self.cache.rows.high_row, len(ids), self._variants, self.costs)
        start, logits = 0, None
        for variant, count in chunks:
            (logits,) = self._run(variant, [Segment(sequence, ids[start : start + count])])
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
        return self._run(self.variant_for(segments), segments)

    def variant_for(self, segments: List[Segment]) -> Variant:
        """The fewest rows that hold these segments, at the smallest capacity that shows all rows in use."""
        num_rows = sum(len(segment.tokens) for segment in segments)
        is_fresh = not any(len(segment.sequence) for segment in segments)
        for size in sorted({variant.rows for variant in self._variants if variant.rows >= num_rows}):
            without_past = Variant(size, 0)
            if is_fresh and without_past in self.programs:
                return without_past
            if variant := smallest_for(self._variants, size, self.cache.rows.high_row):
                return variant
        raise AssertionError(f"no variant holds {num_rows} rows over {self.cache.rows.high_row}")

    @property
    def vocab_size(self) -> int:
        return next(iter(self.programs.values())).buffers.logits.shape[-1]

    def can_decode(self) -> bool:
        """Whether a row is left for one more token."""
        return self.cache.rows.num_free > 0

    def reset(self) -> Sequence:
        """Forget everything, whatever state an exception left behind. Returns a new, empty sequence."""
        self.cache.reset()
        return self.cache.open()

    def take_device_seconds(self) -> list[float]:
        """Seconds of each device call since the last time this was asked."""
        taken, self._device_seconds = self._device_seconds, []
        return taken

    def _run(self, variant: Variant, segments: List[Segment]) -> list[Logits]:
        program, step = self.programs[variant], Step(variant, tuple(segments))
        self.cache.fill(step, program.buffers)
        seconds = program.run()
        logits: Logits = program.buffers.logits[0, : len(segments)]
        if not np.isfinite(logits.max(axis=-1)).all():
            raise NumericalError(
                f"{variant} answered with logits that are not finite: try INFERENCE_PRECISION_HINT='f32' and "
                "KV_CACHE_PRECISION='f32'"
            )
        self.cache.commit(step, program.buffers)
        self.costs.update(variant, seconds)
        self._device_seconds.append(seconds)
        return list(logits)
