"""Runs the program that says which frames of a source the tokens of a text look at."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.compiler_passes.states.store_kv_as import ELEMENT_TYPES
from staticllm.core import AlignmentShape, SourceVariant
from staticllm.kvcache.groups import group_states, place_of
from staticllm.pipelines.costs.model import CostModel
from staticllm.pipelines.programs.bind import BoundRequest
from staticllm.pipelines.programs.chain import AnyProgram
from staticllm.ports import ALIGNMENT, INPUT_IDS


class AlignmentRunner:
    """Runs one text per call. It is not thread-safe: only the thread that owns the device calls it."""

    def __init__(self, shape: AlignmentShape, compiled: Mapping[SourceVariant, AnyProgram]) -> None:
        self.shape = shape
        self.variant = min(compiled)
        self.costs = CostModel[SourceVariant]()
        self._ids = np.zeros((1, shape.rows), np.int64)
        self._weights = np.zeros((1, shape.num_heads, shape.rows, shape.source_len), np.float32)
        groups = group_states(shape.states)
        self._frames = [np.zeros(group.shape(shape.source_len), group.dtype) for group in groups]
        tensors = {
            INPUT_IDS: ov.Tensor(self._ids, shared_memory=True),
            ALIGNMENT: ov.Tensor(self._weights, shared_memory=True),
        }
        for index, state in enumerate(shape.states):
            number, line = place_of(groups, index)
            array = self._frames[number][line : line + 1]
            tensors[state.past_name] = ov.Tensor(array, ov.Shape(array.shape), ELEMENT_TYPES[state.kv_type])
        self._program: BoundRequest | None = BoundRequest(compiled[self.variant], tensors)

    @property
    def cost(self) -> float:
        """The seconds of a call."""
        return self.costs(self.variant)

    def run(
        self, tokens: Sequence[int], frames: Sequence[NDArray[Any]], meanwhile: Callable[[], None] | None = None
    ) -> NDArray[np.float32]:
        """Return the weights ``[heads, tokens, source_len]`` of a text about a source.

        ``frames``: the keys and values of the source, per group of states ``[n, heads, source_len, head_dim]``. ``meanwhile`` is
        called while the device runs.
        """
        assert self._program is not None, "it is closed"
        assert len(tokens) <= self.shape.rows, "the text is too long"
        self._ids[:] = 0
        self._ids[0, : len(tokens)] = tokens
        for mine, given in zip(self._frames, frames, strict=True):
            mine[:] = given
        self.costs.update(self.variant, self._program.run(meanwhile))
        return self._weights[0, :, : len(tokens)].copy()

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
