"""The policy ``chunked`` fills decode steps with prompts up to a token budget (Sarathi-Serve, arXiv 2403.02310)."""

from __future__ import annotations

from ..interface import Plan, View
from ..plans import (
    admissible_prompts,
    decode_plan,
    pack,
    prefill_with_preemption,
    with_prefill,
)

TOKEN_BUDGET = 64
"""Default number of rows per call."""


class Chunked:
    """Decodes all running requests in every call, and fills the call with prompts up to ``token_budget`` rows.

    If no program can run both in one call, calls with prompts and decode steps alternate.
    """

    def __init__(self, token_budget: int = TOKEN_BUDGET) -> None:
        self._budget = token_budget
        self._has_prefilled = False  # the last call held only prompts

    def plan(self, view: View) -> Plan:
        """Return a decode step of all running requests, with chunks of prompts in the same call."""
        backlog = admissible_prompts(view)
        decode = decode_plan(view) or Plan()
        if not decode.swap_out and not decode.preempt:
            mixed = with_prefill(decode, self._prompts(view, decode))
            if mixed.prefill:
                return mixed
            if not self._has_prefilled or not decode.decode:
                alone = Plan(prefill=tuple(self._prompts(view, Plan())))
                if alone.prefill:
                    self._has_prefilled = True
                    return alone
        self._has_prefilled = False
        return decode if decode.num_rows else prefill_with_preemption(view, backlog[0])

    def _prompts(self, view: View, beside: Plan) -> list[tuple[int, int]]:
        """Return ``(request, tokens)`` pairs for the largest call within the budget that also has room for ``beside``."""
        backlog = admissible_prompts(view)
        sizes = [size for size in view.device.index.sizes if size[0] <= max(self._budget, beside.num_rows + 1)]
        for rows, sequences in reversed(sizes):
            is_fresh = not beside.num_rows and bool(backlog) and not backlog[0].num_computed
            variant = view.device.index.at(rows, sequences, view.device.high_slot, is_fresh)
            if variant is not None and rows > beside.num_rows and sequences > beside.num_sequences:
                return pack(view, backlog, beside, variant)
        return []


POLICY = Chunked
