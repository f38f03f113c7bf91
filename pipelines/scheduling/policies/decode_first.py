"""The policy ``decode_first`` never delays a decode step for a prompt."""

from __future__ import annotations

from ..interface import Plan, View
from ..plans import (
    admissible_prompts,
    chunk_of,
    decode_plan,
    fits,
    pack,
    prefill_with_preemption,
    with_prefill,
)


class DecodeFirst:
    """Never delays a decode step: prompts run in rows that would be padding, and while no request decodes."""

    def plan(self, view: View) -> Plan:
        """Return a decode step of all running requests, filled with prompts, or a chunk of the first prompt if none runs."""
        backlog = admissible_prompts(view)
        plan = decode_plan(view)
        if plan is None:
            head = backlog[0]
            return (
                Plan(prefill=((head.id, chunk_of(view, head)),))
                if fits(view, head)
                else prefill_with_preemption(view, head)
            )
        variant = view.device.call(plan.num_rows, plan.num_sequences)
        if variant is None or plan.swap_out or plan.preempt:
            return plan
        return with_prefill(plan, pack(view, backlog, plan, variant))


POLICY = DecodeFirst
