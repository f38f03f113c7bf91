"""Chooses the decode steps between two blocks of a device call, for policies without their own rule."""

from __future__ import annotations

import math

from .interface import CallView, Plan, View

MAX_DELAY_SHARE = 0.2
"""Longest delay of a prompt by decode steps, as a share of the device time that its calls take."""
MAX_TARGET_SHARE = 1.0
"""The same where the user has set ``TPOT_MS``: running requests then get up to half of the device."""
MIN_SECONDS = 1e-9
"""Lower bound of divisors."""
NEARLY_WHOLE = 1 - 1e-9
"""A number of steps that rounding errors keep below a whole number counts as that."""


def due_step(view: View, call: CallView) -> Plan | None:
    """Return a decode step of the running requests if one is due; else None, and the next block runs.

    As many steps are due before the end of the call as keep each time between two tokens within ``view.token_bound``, evenly
    spaced. Each step delays the prompts of the call by its duration. Counted from the first call of the oldest of these
    prompts, other work between blocks and between calls may delay it by ``MAX_DELAY_SHARE`` of the device time of its calls up
    to the end of this call. Its TTFT is therefore at most 1 + ``MAX_DELAY_SHARE`` times the time that its calls take alone.
    Reactive requests may delay proactive prompts by as much as they need.
    """
    running = sorted(view.running, key=lambda request: request.last_token_time or 0.0)
    running = running[: max(0, min(call.max_decoding, view.free_slots))]
    variant = call.step(len(running))
    if not running or variant is None:
        return None
    step_seconds = max(view.device.seconds(variant), MIN_SECONDS)
    waited = view.now - (running[0].last_token_time or 0.0)
    rest = call.block_seconds * (call.num_blocks - call.num_done)
    delay = view.now - call.prompt_start - call.prompt_seconds
    allowed = _delay_share(view) * (call.prompt_seconds + rest) - delay
    if call.is_proactive and not running[0].is_proactive:
        allowed = math.inf
    needed = _num_needed(view, waited + rest, step_seconds, call.block_seconds)
    count = needed if allowed == math.inf else min(needed, math.floor(allowed / step_seconds / NEARLY_WHOLE))
    if count < 1 or waited < (waited + rest) / (count + 1) - call.block_seconds / 2:
        return None
    return Plan(decode=tuple(request.id for request in running))


def inserted_seconds(view: View, call_seconds: float, step_seconds: float) -> float:
    """Return the time that decode steps of ``step_seconds`` between the blocks of a call are expected to take, in seconds."""
    if view.device.num_blocks == 1 or not step_seconds:
        return 0.0
    needed = _num_needed(view, call_seconds, step_seconds, call_seconds / view.device.num_blocks)
    return min(needed * step_seconds, _delay_share(view) * call_seconds)


def _num_needed(view: View, seconds: float, step_seconds: float, block_seconds: float) -> int:
    """Return how many decode steps keep the bound on the time between two tokens, to half a block, while a call runs."""
    longest = view.token_bound.of(step_seconds, view.tpot_ms) - step_seconds
    longest = max(longest, step_seconds / 2, MIN_SECONDS) + block_seconds / 2
    return max(0, math.ceil(seconds / longest * NEARLY_WHOLE) - 1)


def _delay_share(view: View) -> float:
    return MAX_DELAY_SHARE if view.tpot_ms is None else MAX_TARGET_SHARE
