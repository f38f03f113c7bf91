"""Prompts before tokens."""

from __future__ import annotations

from staticllm.pipelines.scheduling.interface import Plan, View
from staticllm.pipelines.scheduling.policies.common import (
    admissible_prompts,
    chunk_of,
    decode_plan,
    fits,
    prefill_with_preemption,
)


class PrefillFirst:
    """Every prompt runs as soon as it arrives, alone; nobody decodes meanwhile. Who finds no slot is swapped out."""

    def plan(self, view: View) -> Plan:
        """The first prompt that finds rows, else a token for everybody."""
        backlog = admissible_prompts(view)
        for request in backlog[:1]:
            if fits(view, request):
                return Plan(prefill=((request.id, chunk_of(view, request)),))
        return decode_plan(view) or prefill_with_preemption(view, backlog[0])
