"""The policy ``shortest_first`` runs the shortest prompts before others and before decode steps."""

from __future__ import annotations

from staticllm.pipelines.scheduling.interface import Plan, View
from staticllm.pipelines.scheduling.plans import (
    admissible_prompts,
    chunk_of,
    decode_plan,
    fits,
    prefill_with_preemption,
)


class ShortestFirst:
    """Runs the prompt with the fewest tokens left, alone, before the next decode step. Long prompts may starve."""

    def plan(self, view: View) -> Plan:
        """Return a chunk of the shortest prompt that fits, else a decode step of all running requests."""
        backlog = sorted(admissible_prompts(view), key=lambda request: request.num_left)
        if backlog and fits(view, backlog[0]):
            return Plan(prefill=((backlog[0].id, chunk_of(view, backlog[0])),))
        return decode_plan(view) or prefill_with_preemption(view, backlog[0])


POLICY = ShortestFirst
