"""Runs the encoder on audio windows, and the alignment model, as jobs of the decoder's engine."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from staticllm.errors import ClosedError, NumericalError

from ..programs.window_runner import AlignmentRunner, WindowRunner
from .jobs import job_priority
from .queued_calls import Meanwhile, QueuedCalls

if TYPE_CHECKING:
    from ...kvcache.cross_bank import CrossBank
    from .engine import Engine


class WindowJobs(QueuedCalls):
    """The windows of an engine: one call for each, perhaps in blocks, as long as the engine's bank has room for it."""

    def __init__(self, runner: WindowRunner, engine: Engine) -> None:
        super().__init__(engine, lambda: runner.block_costs, lambda: self._bank.num_free > 0)
        self.runner = runner
        self._engine = engine

    def encode(
        self, features: NDArray[np.float32], priority: int = 0, deadline: float | None = None, owner: int = 0
    ) -> Future[int]:
        """Return the future number of a window, for ``EngineRequest.cross_window``; ``remove`` must follow once it is there.

        ``features [bands, columns]``; ``priority`` and ``owner`` are those of its requests. Cancelling the future gives the
        window up. It raises ``NumericalError`` (keys or values are not finite), ``DeviceError`` (the device failed) and
        ``ClosedError``.

        Raises:
            ClosedError: the engine was closed.
        """
        return self.submit(partial(self._encode, features), job_priority(priority), deadline, owner)

    def remove(self, window: int) -> None:
        """Give the place of a window to the next one, once the requests that see it have ended."""
        with suppress(ClosedError):
            self._engine.call_soon(lambda: self._engine.core.remove_window(window))

    @property
    def seconds(self) -> float:
        """The seconds of device time that a window takes."""
        return self.runner.cost

    def release(self) -> None:
        """Drop the program."""
        self.runner.close()

    @property
    def _bank(self) -> CrossBank:
        return self._engine.runner.cache.cross

    def _encode(self, features: NDArray[np.float32], blocks: range, meanwhile: Meanwhile) -> int:
        """Return the number of a window, if the last block is among these; else 0."""
        self.runner.run_blocks(features, blocks, meanwhile)
        if blocks.stop < self.runner.num_blocks:
            return 0
        frames = self.runner.finite_frames()
        if frames is None:
            raise NumericalError(
                "the encoder computed values that are not finite: check the sound, or try INFERENCE_PRECISION_HINT='f32'"
            )
        return self._bank.add(frames)


class AlignmentJobs(QueuedCalls):
    """The texts whose frames are wanted: one call for each."""

    def __init__(self, runner: AlignmentRunner, engine: Engine) -> None:
        super().__init__(engine, lambda: [runner.cost])
        self.runner = runner
        self._engine = engine

    def align(
        self, window: int, tokens: Sequence[int], priority: int = 0, owner: int = 0
    ) -> Future[NDArray[np.float32]]:
        """Return the future weights ``[heads, tokens, cross_window_len]`` of a text about a window that is in the bank."""
        return self.submit(partial(self._align, window, tuple(tokens)), job_priority(priority), None, owner)

    def release(self) -> None:
        """Drop the program."""
        self.runner.close()

    def _align(self, window: int, tokens: Sequence[int], blocks: range, meanwhile: Meanwhile) -> NDArray[np.float32]:
        del blocks  # there is one
        return self.runner.run(tokens, self._engine.runner.cache.cross.frames(window), meanwhile)
