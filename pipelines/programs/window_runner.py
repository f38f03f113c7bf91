"""Runs the programs of which a call has one window: its keys and values of cross-attention, and what a text looks at in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.core import AlignmentShape, CrossWindowShape, CrossWindowVariant
from staticllm.ports import ALIGNMENT, INPUT_FEATURES, INPUT_IDS
from staticllm.system.long_calls import attended

from ...compiler_passes.compiling.chain import AnyProgram
from ...compiler_passes.states.store_kv_as import ELEMENT_TYPES
from ...kvcache.finite import is_finite
from ...kvcache.groups import group_states, place_of
from ..costs.model import CostModel
from .bind import BoundRequest

Frames: TypeAlias = list[NDArray[Any]]
"""Keys and values of one window: per group of states ``[n, heads, cross_window_len, head_dim]``."""
S = TypeVar("S", CrossWindowShape, AlignmentShape)


class OneWindowRunner(Generic[S]):
    """Binds one program, with ``frames`` as its keys and values of cross-attention, and ``arrays`` beside them by port.

    It is not thread-safe: only the thread that owns the device calls it.
    """

    def __init__(
        self, shape: S, compiled: Mapping[CrossWindowVariant, AnyProgram], arrays: Mapping[str, NDArray[Any]]
    ) -> None:
        self.shape: S = shape
        self.variant = min(compiled)
        self.costs = CostModel[CrossWindowVariant]()
        groups = group_states(shape.states)
        self.frames: Frames = [np.zeros(group.shape(shape.cross_window_len), group.dtype) for group in groups]
        tensors = {name: ov.Tensor(array, shared_memory=True) for name, array in arrays.items()}
        for index, state in enumerate(shape.states):
            number, line = place_of(groups, index)
            array = self.frames[number][line : line + 1]
            tensors[state.past_name] = ov.Tensor(array, ov.Shape(array.shape), ELEMENT_TYPES[state.kv_type])
        program = BoundRequest(compiled[self.variant], tensors)
        self._program: BoundRequest | None = program
        self._shares = [1 / program.num_blocks] * program.num_blocks  # of the blocks in the seconds of a call

    @property
    def cost(self) -> float:
        return self.costs(self.variant)

    @property
    def num_blocks(self) -> int:
        """The number of blocks of a call, between which the device is free; 1 if it runs in one piece."""
        return len(self._shares)

    @property
    def block_costs(self) -> list[float]:
        """The seconds of each block of a call."""
        return [share * self.cost for share in self._shares]

    def warm_up(self, known: Mapping[CrossWindowVariant, float] | None = None) -> None:
        """Run, so that the costs are known. The first run of a block is slow, so the second one counts.

        ``known``: the seconds of a call, of which only the shares of the blocks are then measured.
        """
        assert self._program is not None, "it is closed"
        kept = known.get(self.variant) if known else None
        seconds = self._seconds_of_blocks(self._program)
        if kept is None or len(seconds) > 1:
            seconds = list(map(min, seconds, self._seconds_of_blocks(self._program)))
        self._shares = [each / sum(seconds) for each in seconds]
        self.costs.set(self.variant, sum(seconds) if kept is None else kept)

    @staticmethod
    def _seconds_of_blocks(program: BoundRequest) -> list[float]:
        blocks = (range(block, block + 1) for block in range(program.num_blocks))
        return [attended(partial(program.run_blocks, block)) for block in blocks]

    def close(self) -> None:
        """Drop the program. Nothing can run afterwards."""
        self._program = None
        self.frames = []

    def _call(self, meanwhile: Callable[[], None] | None) -> None:
        assert self._program is not None, "it is closed"
        self.costs.update(self.variant, self._program.run(meanwhile))


class WindowRunner(OneWindowRunner[CrossWindowShape]):
    """Computes the keys and values of cross-attention of one window per call, at once or in blocks."""

    def __init__(self, shape: CrossWindowShape, compiled: Mapping[CrossWindowVariant, AnyProgram]) -> None:
        self._features = np.zeros((1, shape.bands, shape.columns), np.float32)
        self._seconds = 0.0  # of the blocks of this call that have run
        super().__init__(shape, compiled, {INPUT_FEATURES: self._features})

    def run(self, features: NDArray[np.float32], meanwhile: Callable[[], None] | None = None) -> Frames | None:
        """Return the keys and values of a window, valid until the next call; None if some are not finite.

        ``features [bands, columns]``. ``meanwhile`` is called while the device runs.
        """
        self.run_blocks(features, range(self.num_blocks), meanwhile)
        return self.finite_frames()

    def run_blocks(
        self, features: NDArray[np.float32], blocks: range, meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Run some blocks of a call. They come in their order; from the first one, a new call begins."""
        assert self._program is not None, "it is closed"
        if blocks.start == 0:
            self._features[0] = features
            self._seconds = 0.0
        self._seconds += self._program.run_blocks(blocks, meanwhile)
        if blocks.stop == self.num_blocks:
            self.costs.update(self.variant, self._seconds)

    def finite_frames(self) -> Frames | None:
        """Return the keys and values after the last block of a call, valid until the next one; None if some are not finite."""
        return self.frames if all(map(is_finite, self.frames)) else None


class AlignmentRunner(OneWindowRunner[AlignmentShape]):
    """Finds which frames of a window the tokens of one text per call look at."""

    def __init__(self, shape: AlignmentShape, compiled: Mapping[CrossWindowVariant, AnyProgram]) -> None:
        self._ids = np.zeros((1, shape.rows), np.int64)
        self._weights = np.zeros((1, shape.num_heads, shape.rows, shape.cross_window_len), np.float32)
        super().__init__(shape, compiled, {INPUT_IDS: self._ids, ALIGNMENT: self._weights})

    def run(
        self, tokens: Sequence[int], frames: Sequence[NDArray[Any]], meanwhile: Callable[[], None] | None = None
    ) -> NDArray[np.float32]:
        """Return the weights ``[heads, tokens, cross_window_len]`` of a text about a window.

        ``frames``: the keys and values of the window, as ``WindowRunner`` returns them. ``meanwhile`` is called while the device
        runs.
        """
        assert len(tokens) <= self.shape.rows, "the text is too long"
        self._ids[:] = 0
        self._ids[0, : len(tokens)] = tokens
        for mine, given in zip(self.frames, frames, strict=True):
            mine[:] = given
        self._call(meanwhile)
        return self._weights[0, :, : len(tokens)].copy()
