"""Runs the programs of which a call has one source: its keys and values of cross-attention, and what a text looks at in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.compiler_passes.states.store_kv_as import ELEMENT_TYPES
from staticllm.core import AlignmentShape, SourceShape, SourceVariant
from staticllm.kvcache.finite import is_finite
from staticllm.kvcache.groups import group_states, place_of
from staticllm.pipelines.costs.model import CostModel
from staticllm.pipelines.programs.bind import BoundRequest
from staticllm.pipelines.programs.chain import AnyProgram
from staticllm.ports import ALIGNMENT, INPUT_FEATURES, INPUT_IDS

Frames: TypeAlias = list[NDArray[Any]]
"""Keys and values of one source: per group of states ``[n, heads, source_len, head_dim]``."""
S = TypeVar("S", SourceShape, AlignmentShape)


class OneSourceRunner(Generic[S]):
    """Binds one program, with ``frames`` as its keys and values of cross-attention, and ``arrays`` beside them by port.

    It is not thread-safe: only the thread that owns the device calls it.
    """

    def __init__(
        self, shape: S, compiled: Mapping[SourceVariant, AnyProgram], arrays: Mapping[str, NDArray[Any]]
    ) -> None:
        self.shape: S = shape
        self.variant = min(compiled)
        self.costs = CostModel[SourceVariant]()
        groups = group_states(shape.states)
        self.frames: Frames = [np.zeros(group.shape(shape.source_len), group.dtype) for group in groups]
        tensors = {name: ov.Tensor(array, shared_memory=True) for name, array in arrays.items()}
        for index, state in enumerate(shape.states):
            number, line = place_of(groups, index)
            array = self.frames[number][line : line + 1]
            tensors[state.past_name] = ov.Tensor(array, ov.Shape(array.shape), ELEMENT_TYPES[state.kv_type])
        self._program: BoundRequest | None = BoundRequest(compiled[self.variant], tensors)

    @property
    def cost(self) -> float:
        """The seconds of a call."""
        return self.costs(self.variant)

    def warm_up(self, known: Mapping[SourceVariant, float] | None = None) -> None:
        """Run once, so that the cost is known; the second run counts, unless ``known`` has the seconds of a call."""
        assert self._program is not None, "it is closed"
        seconds = self._program.run()
        if known and self.variant in known:
            self.costs.set(self.variant, known[self.variant])
        else:
            self.costs.set(self.variant, min(seconds, self._program.run()))

    def close(self) -> None:
        """Drop the program. Nothing can run afterwards."""
        self._program = None
        self.frames = []

    def _call(self, meanwhile: Callable[[], None] | None) -> None:
        assert self._program is not None, "it is closed"
        self.costs.update(self.variant, self._program.run(meanwhile))


class SourceRunner(OneSourceRunner[SourceShape]):
    """Computes the keys and values of cross-attention of one source per call."""

    def __init__(self, shape: SourceShape, compiled: Mapping[SourceVariant, AnyProgram]) -> None:
        self._features = np.zeros((1, shape.bands, shape.columns), np.float32)
        super().__init__(shape, compiled, {INPUT_FEATURES: self._features})

    def run(self, features: NDArray[np.float32], meanwhile: Callable[[], None] | None = None) -> Frames | None:
        """Return the keys and values of a source, valid until the next call; None if some are not finite.

        ``features [bands, columns]``. ``meanwhile`` is called while the device runs.
        """
        self._features[0] = features
        self._call(meanwhile)
        return self.frames if all(map(is_finite, self.frames)) else None


class AlignmentRunner(OneSourceRunner[AlignmentShape]):
    """Finds which frames of a source the tokens of one text per call look at."""

    def __init__(self, shape: AlignmentShape, compiled: Mapping[SourceVariant, AnyProgram]) -> None:
        self._ids = np.zeros((1, shape.rows), np.int64)
        self._weights = np.zeros((1, shape.num_heads, shape.rows, shape.source_len), np.float32)
        super().__init__(shape, compiled, {INPUT_IDS: self._ids, ALIGNMENT: self._weights})

    def run(
        self, tokens: Sequence[int], frames: Sequence[NDArray[Any]], meanwhile: Callable[[], None] | None = None
    ) -> NDArray[np.float32]:
        """Return the weights ``[heads, tokens, source_len]`` of a text about a source.

        ``frames``: the keys and values of the source, as ``SourceRunner`` returns them. ``meanwhile`` is called while the device
        runs.
        """
        assert len(tokens) <= self.shape.rows, "the text is too long"
        self._ids[:] = 0
        self._ids[0, : len(tokens)] = tokens
        for mine, given in zip(self.frames, frames, strict=True):
            mine[:] = given
        self._call(meanwhile)
        return self._weights[0, :, : len(tokens)].copy()
