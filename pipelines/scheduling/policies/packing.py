"""Packs prompts into the rows of one call."""

from __future__ import annotations

from collections.abc import Iterable

from staticllm.core import Variant
from staticllm.pipelines.scheduling.interface import Plan, RequestView, View


def pack(view: View, backlog: Iterable[RequestView], plan: Plan, variant: Variant) -> list[tuple[int, int]]:
    """Return ``(request, tokens)`` pairs of prompts that fit into a call of ``variant`` with ``plan``, in backlog order.

    A prompt gets rows only if the arena has free KV slots for all of it and for the next token of every running request. A
    variant with a ``kv_len`` of 0 takes only prompts without computed tokens.
    """
    rows, sequences = variant.rows - plan.num_rows, variant.sequences - plan.num_sequences
    brought = {request.id: request.num_computed for request in view.swapped if not request.in_arena}
    free = (
        view.free_slots - plan.num_rows - len(view.running) - sum(brought.get(request, 0) for request in plan.swap_in)
    )
    chosen: list[tuple[int, int]] = []
    for request in backlog:
        if rows <= 0 or len(chosen) >= sequences:
            break
        if request.num_computed and not variant.kv_len:
            continue
        if request.num_left > free:
            break
        count = min(rows, request.num_left)
        chosen.append((request.id, count))
        rows -= count
        free -= request.num_left
    if rows and view.device.index.needs_real_rows:
        return []  # idle rows would change a recurrent state
    return chosen
