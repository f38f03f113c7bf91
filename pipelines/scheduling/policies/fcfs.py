"""The policy ``fcfs`` serves requests in the order of arrival, with a fixed number of admitted requests."""

from __future__ import annotations

from ..interface import Plan, View
from ..plans import (
    admissible_prompts,
    chunk_of,
    decode_plan,
    fits,
    in_order,
    prefill_with_preemption,
)


class Fcfs:
    """Serves requests in the order of arrival, as we read static co-location in FlexNPU's paper (4.4).

    A request counts against ``max_num_seqs`` from its first prompt token on, unless a client drives it. A prompt runs alone,
    before any decode step.
    """

    def plan(self, view: View) -> Plan:
        """Return a chunk of the first admitted prompt if KV slots are free for it, else a decode step of all running requests."""
        has_place = view.free_places > 0
        startable = [request for request in in_order(view.waiting) if request.is_client_driven or has_place]
        admitted = [*in_order(view.prefilling), *startable]
        if admitted and fits(view, admitted[0]):
            return Plan(prefill=((admitted[0].id, chunk_of(view, admitted[0])),))
        return decode_plan(view) or prefill_with_preemption(view, (admitted or admissible_prompts(view))[0])


POLICY = Fcfs
