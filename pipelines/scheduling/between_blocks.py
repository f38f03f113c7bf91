"""What runs between two blocks of a device call: the rule for policies that have none of their own."""

from __future__ import annotations

from staticllm.pipelines.scheduling.interface import CallView, Plan, View

MAX_DELAY_SHARE = 0.2
"""Longest delay of a prompt by decode steps, as a share of the device time that its calls have taken."""
MAX_TARGET_SHARE = 1.0
"""The same where the user has set ``TPOT_MS``: running requests then get up to half of the device."""


def due_step(view: View, call: CallView) -> Plan | None:
    """Return a decode step of the running requests if one of them would else wait too long for its next token; else None.

    A step is due if at the next boundary it would end after the bound on the time between two tokens (``view.token_bound``). It
    delays the prompts of the call by its own time. All that has run since the first call of the oldest of these prompts, between
    blocks and between calls, may delay it by ``MAX_DELAY_SHARE`` of the device time of its calls up to now, so that its first
    token comes after at most 1 + ``MAX_DELAY_SHARE`` of the time that it would take alone.
    """
    running = sorted(view.running, key=lambda request: request.last_token_time or 0.0)
    running = running[: max(0, min(call.max_decoding, view.free_slots))]
    variant = call.step(len(running))
    if not running or variant is None:
        return None
    step_seconds = view.device.seconds(variant)
    oldest = running[0].last_token_time or 0.0
    bound = view.token_bound.of(step_seconds, view.tpot_ms)
    if view.now + call.block_seconds + step_seconds <= oldest + bound:
        return None
    share = MAX_DELAY_SHARE if view.tpot_ms is None else MAX_TARGET_SHARE
    delay = view.now - call.prompt_start - call.prompt_seconds
    if delay + step_seconds > share * call.prompt_seconds:
        return None
    return Plan(decode=tuple(request.id for request in running))
