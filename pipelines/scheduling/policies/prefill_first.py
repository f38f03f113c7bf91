"""The policy ``prefill_first`` runs prompts before decode steps."""

from __future__ import annotations

from ..interface import Plan, View
from ..plans import (
    admissible_prompts,
    chunk_of,
    decode_plan,
    fits,
    prefill_with_preemption,
)


class PrefillFirst:
    """Runs every prompt as soon as it arrives, alone, before the next decode step.

    If ``max_num_seqs`` requests are running when a prompt ends, its request is swapped.
    """

    def plan(self, view: View) -> Plan:
        """Return a chunk of the first prompt if KV slots are free for it, else a decode step of all running requests."""
        backlog = admissible_prompts(view)
        for request in backlog[:1]:
            if fits(view, request):
                return Plan(prefill=((request.id, chunk_of(view, request)),))
        return decode_plan(view) or prefill_with_preemption(view, backlog[0])


POLICY = PrefillFirst
