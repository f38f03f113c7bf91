"""Prompts before tokens."""

from __future__ import annotations

from staticllm.pipelines.scheduling.interface import Plan, View
from staticllm.pipelines.scheduling.policies.common import begun_first, chunk_of, decode_plan, fits, prefill_by_force


class PrefillFirst:
    """Every prompt runs as soon as it arrives, alone; nobody decodes meanwhile. Who finds no slot is parked."""

    def plan(self, view: View) -> Plan:
        """The first prompt that finds rows, else a token for everybody."""
        backlog = begun_first(view)
        for request in backlog[:1]:
            if fits(view, request):
                return Plan(prefill=((request.id, chunk_of(view, request)),))
        return decode_plan(view) or prefill_by_force(view, backlog[0])
