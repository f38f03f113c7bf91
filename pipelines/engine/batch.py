"""From a plan to the next call: moves are carried out, and the call is cut to the rows and programs that there are."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from staticllm.kvcache.step import Segment
from staticllm.pipelines.engine.kv_manager import KVCacheManager
from staticllm.pipelines.engine.quarantine import Quarantine
from staticllm.pipelines.engine.request import Request
from staticllm.pipelines.programs.model_runner import ModelRunner
from staticllm.pipelines.scheduling.interface import Plan
from staticllm.pipelines.scheduling.planner import NoPlanError
from staticllm.pipelines.scheduling.request_table import RequestTable


@dataclass(frozen=True)
class Part:
    """What one request has in the next call."""

    request: Request
    segment: Segment
    is_prefill: bool


class BatchBuilder:
    """Makes the parts of a call. ``preempted`` are requests that lost their rows since the last call."""

    def __init__(self, runner: ModelRunner, table: RequestTable, kv_manager: KVCacheManager) -> None:
        self._runner, self._table, self._kv_manager = runner, table, kv_manager
        self.preempted: list[int] = []

    def prepare(self, plan: Plan, quarantine: Quarantine) -> list[Part]:
        """Park, preempt and resume; then say what goes into the call.

        Raises:
            NoPlanError: a request that no program or not enough rows can run, even alone.
        """
        requests = self._kv_manager.requests
        for request in plan.preempt:
            self._preempt(requests[request])
        for request in plan.swap_out:
            self._table.swap_out(request)
            self._kv_manager.swap_out(requests[request])
        for request in plan.swap_in:
            self._kv_manager.swap_in(requests[request])
        parts = [self._part(requests[request], 1, False) for request in plan.decode]
        for request, count in plan.prefill:
            self._kv_manager.allocate(requests[request])
            parts.append(self._part(requests[request], count, True))
        return self._fitting(quarantine.select(parts, lambda part: part.request.id))

    def _part(self, request: Request, count: int, is_prefill: bool) -> Part:
        assert request.sequence is not None
        start = len(request.sequence)
        tokens = np.asarray(request.tokens[start : start + count], np.int64)
        return Part(request, Segment(request.sequence, tokens), is_prefill)

    def _fitting(self, parts: list[Part]) -> list[Part]:
        """As many as there are rows and a program for. Plans fit; shared rows and found prefixes may leave less room."""
        while parts:
            num_rows = sum(len(part.segment.tokens) for part in parts)
            if self._kv_manager.make_room(num_rows) and self._runner.variant_for([part.segment for part in parts]):
                return parts
            if len(parts) == 1:
                break
            parts.pop()
        if parts and (shorter := self._shortened(parts[0])) is not None:
            return self._fitting([shorter])
        victims = [
            r
            for r in self._kv_manager.requests.values()
            if r.sequence is not None and r not in [p.request for p in parts]
        ]
        if not victims:
            raise NoPlanError(parts[0].request.id)
        self._preempt(victims[-1])
        return self._fitting(parts)

    def _shortened(self, part: Part) -> Part | None:
        """A prompt whose prefix was found needs programs with a past, and there may be only small ones.

        So does one whose tokens no program holds exactly, where no row may be idle.
        """
        for rows in sorted(self._runner.index.widest, reverse=True):
            if rows < len(part.segment.tokens):
                shorter = self._part(part.request, rows, part.is_prefill)
                if self._runner.variant_for([shorter.segment]):
                    return shorter
        return None

    def aside(self, parts: list[Part]) -> set[int]:
        """Whole prompts that find no slot: their rows go from the call to the host pool, past the arena."""
        if self._table.has_free_seq:
            return set()
        chosen, room = set(), self._kv_manager.host_pool.free_slots
        for index, part in enumerate(parts):
            count = len(part.segment.tokens)
            is_whole = part.is_prefill and count == len(part.request.tokens)
            if is_whole and not len(part.segment.sequence) and count <= room:
                chosen.add(index)
                room -= count
        return chosen

    def _preempt(self, request: Request) -> None:
        self._kv_manager.preempt(request)
        self.preempted.append(request.id)
