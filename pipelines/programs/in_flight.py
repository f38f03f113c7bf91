"""A call whose blocks run one by one, while others may use the device between two of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from staticllm.core import Clock, Variant

from ...kvcache.step import StepBuffers


@runtime_checkable
class Chain(Protocol):
    """A program of ``num_blocks`` compiled parts that run one after another.

    ``run`` calls ``meanwhile`` once while the device runs, and ``between`` after each block but the last, on the caller's thread,
    while the device is free; there another program may run to its end. It returns the seconds that it took, with those of
    ``between``. If ``between`` raises, no further block runs, and ``run`` raises the same; the outputs are undefined.
    """

    @property
    def buffers(self) -> StepBuffers: ...

    @property
    def num_blocks(self) -> int: ...

    def run(self, meanwhile: Callable[[], None] | None = None, between: Callable[[], None] | None = None) -> float: ...


class CallInFlight:
    """What is known about a call between two of its blocks: ``num_done`` of ``num_blocks`` have run.

    Its blocks took ``seconds``. ``num_tokens`` KV slots are reserved for its commit. ``paused_seconds`` were spent between its
    blocks, on ``num_inserted`` calls. Runs on the engine's thread.
    """

    def __init__(
        self, variant: Variant, num_blocks: int, num_tokens: int, clock: Clock, between: Callable[[CallInFlight], None]
    ) -> None:
        self.variant = variant
        self.num_blocks = num_blocks
        self.num_tokens = num_tokens
        self.num_done = 0
        self.num_inserted = 0
        self.seconds = 0.0
        self.paused_seconds = 0.0
        self._clock = clock
        self._between = between
        self._start = clock()

    def pause(self) -> None:
        """Count a block that has run, and let others use the device."""
        self.num_done += 1
        begin = self._clock()
        self.seconds = begin - self._start - self.paused_seconds
        try:
            self._between(self)
        finally:
            self.paused_seconds += self._clock() - begin


Between = Callable[[CallInFlight], None]
"""Is called between two blocks of a call; it may run others with ``ModelRunner.insert``."""
