"""Turns a plan into the batch of the next call, cut to the slots and programs that are available."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from staticllm.core import Variant
from staticllm.kvcache.step import Segment
from staticllm.pipelines.engine.kv_manager import KVCacheManager
from staticllm.pipelines.engine.quarantine import Quarantine
from staticllm.pipelines.engine.request import SequenceState
from staticllm.pipelines.programs.model_runner import ModelRunner
from staticllm.pipelines.scheduling.interface import Plan
from staticllm.pipelines.scheduling.request_table import RequestTable


@dataclass(frozen=True)
class Part:
    """The tokens of one sequence in the next call."""

    state: SequenceState
    segment: Segment
    is_prefill: bool


@dataclass(frozen=True)
class Batch:
    """The parts of the next call, and the ``variant`` that holds them.

    ``preempted`` holds the ids of the requests that lost their slots for it. ``unrunnable`` is a request that cannot run even
    alone; the batch is empty then.
    """

    parts: tuple[Part, ...]
    variant: Variant | None = None
    preempted: tuple[int, ...] = ()
    unrunnable: SequenceState | None = None

    @property
    def is_decoding(self) -> bool:
        """Whether at least one part is a decoding step."""
        return any(not part.is_prefill for part in self.parts)


class BatchBuilder:
    """Builds the batch of a call. Runs on the engine's thread."""

    def __init__(self, runner: ModelRunner, table: RequestTable, kv_manager: KVCacheManager) -> None:
        self._runner, self._table, self._kv_manager = runner, table, kv_manager

    def prepare(self, plan: Plan, quarantine: Quarantine) -> Batch:
        """Preempt, swap out and swap in as planned, then return the parts that fit into one call."""
        states, preempted = self._kv_manager.states, list(plan.preempt)
        for number in plan.preempt:
            self._kv_manager.preempt(states[number])
        for number in plan.swap_out:
            self._kv_manager.swap_out(states[number])
        for number in plan.swap_in:
            self._kv_manager.swap_in(states[number])
        parts = [self._part(states[number], 1, False) for number in plan.decode]
        for number, count in plan.prefill:
            self._kv_manager.allocate(states[number])
            parts.append(self._part(states[number], count, True))
        parts = quarantine.select(parts, lambda part: part.state.id)
        return self._fitting(parts, preempted)

    def _part(self, state: SequenceState, count: int, is_prefill: bool) -> Part:
        assert state.sequence is not None
        start = len(state.sequence)
        tokens = np.asarray(state.tokens[start : start + count], np.int64)
        return Part(state, Segment(state.sequence, tokens), is_prefill)

    def _fitting(self, parts: list[Part], preempted: list[int]) -> Batch:
        """Return the longest head of ``parts`` that has slots and a program; ``unrunnable`` if not even the first can run alone.

        A plan fits when it is made, but shared slots and prefix hits may leave less room. Then other requests are preempted too.
        """
        first = parts[0]
        while True:
            variant = self._variant_for(parts)
            if variant is not None:
                return Batch(tuple(self._to_host(parts)), variant, tuple(preempted))
            if len(parts) > 1:
                parts = parts[:-1]
            elif (shorter := self._shortened(parts[0])) is not None:
                parts = [shorter]
            else:
                others = [state for state in self._kv_manager.states.values() if state is not first.state]
                victims = [state for state in others if state.sequence is not None]
                if not victims:
                    return Batch((), preempted=tuple(preempted), unrunnable=first.state)
                self._kv_manager.preempt(victims[-1])
                preempted.append(victims[-1].id)

    def _variant_for(self, parts: list[Part]) -> Variant | None:
        """Return the variant that holds these parts; None if there is none, or not enough free slots."""
        num_slots = sum(len(part.segment.tokens) for part in parts)
        if not self._kv_manager.make_room(num_slots):
            return None
        return self._runner.variant_for([part.segment for part in parts])

    def _shortened(self, part: Part) -> Part | None:
        """Return the part with fewer tokens, for which there is a program; None without one.

        A prompt with a prefix hit needs programs with a past, and those may be smaller. A model with recurrent states needs a
        program with exactly as many rows as tokens.
        """
        for rows in sorted(self._runner.index.widest, reverse=True):
            if rows < len(part.segment.tokens):
                shorter = self._part(part.state, rows, part.is_prefill)
                if self._runner.variant_for([shorter.segment]):
                    return shorter
        return None

    def _to_host(self, parts: list[Part]) -> list[Part]:
        """Mark whole prompts that cannot decode yet: their keys and values bypass the arena and go to the host pool."""
        if self._table.has_free_seq:
            return parts
        placed, room = list[Part](), self._kv_manager.host_pool.free_slots
        for part in parts:
            count = len(part.segment.tokens)
            is_whole = part.is_prefill and count == len(part.state.tokens) and not len(part.segment.sequence)
            if is_whole and count <= room and part.state.request.num_sequences == 1:
                room -= count
                segment = Segment(part.segment.sequence, part.segment.tokens, to_host=True)
                part = Part(part.state, segment, part.is_prefill)  # noqa: PLW2901
            placed.append(part)
        return placed
