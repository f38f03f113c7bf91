"""Runs the program that computes the keys and values of cross-attention of a source."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.compiler_passes.states.store_kv_as import ELEMENT_TYPES
from staticllm.core import SourceShape, SourceVariant
from staticllm.kvcache.finite import is_finite
from staticllm.kvcache.groups import group_states, place_of
from staticllm.pipelines.costs.model import CostModel
from staticllm.pipelines.programs.bind import BoundRequest
from staticllm.pipelines.programs.chain import AnyProgram
from staticllm.ports import INPUT_FEATURES

Frames: TypeAlias = list[NDArray[Any]]
"""Keys and values of one source: per group of states ``[n, heads, source_len, head_dim]``."""


class SourceRunner:
    """Runs one source per call. It is not thread-safe: only the thread that owns the device calls it."""

    def __init__(self, shape: SourceShape, compiled: Mapping[SourceVariant, AnyProgram]) -> None:
        self.shape = shape
        self.variant = min(compiled)
        self.costs = CostModel[SourceVariant]()
        self._features = np.zeros((1, shape.bands, shape.columns), np.float32)
        groups = group_states(shape.states)
        self.frames: Frames = [np.zeros(group.shape(shape.source_len), group.dtype) for group in groups]
        tensors = {INPUT_FEATURES: ov.Tensor(self._features, shared_memory=True)}
        for index, state in enumerate(shape.states):
            number, line = place_of(groups, index)
            array = self.frames[number][line : line + 1]
            tensors[state.past_name] = ov.Tensor(array, ov.Shape(array.shape), ELEMENT_TYPES[state.kv_type])
        self._program: BoundRequest | None = BoundRequest(compiled[self.variant], tensors)

    @property
    def cost(self) -> float:
        """The seconds of a call."""
        return self.costs(self.variant)

    def run(self, features: NDArray[np.float32], meanwhile: Callable[[], None] | None = None) -> Frames | None:
        """Return the keys and values of a source, valid until the next call; None if some are not finite.

        ``features [bands, columns]``. ``meanwhile`` is called while the device runs.
        """
        assert self._program is not None, "it is closed"
        self._features[0] = features
        seconds = self._program.run(meanwhile)
        self.costs.update(self.variant, seconds)
        return self.frames if all(map(is_finite, self.frames)) else None

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
