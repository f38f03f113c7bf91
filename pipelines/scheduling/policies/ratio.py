"""The policy ``ratio`` gives prompts a fixed share of the device time, as a time slice ratio in FlexNPU's figures does."""

from __future__ import annotations

from staticllm.errors import ConfigError

from ..interface import Plan, View
from ..plans import (
    admissible_prompts,
    chunk_of,
    decode_plan,
    fits,
    prefill_with_preemption,
)

PREFILL_SHARE = 0.5
"""Default share of the device time for prompts while requests decode."""


class Ratio:
    """Gives prompts ``prefill_share`` of the device time while requests decode, and the other phase the rest.

    Prompts run alone, one chunk per call, and a phase without work leaves its time to the other one. The share is kept to within
    one call. If ``max_num_seqs`` requests are running when a prompt ends, its request is swapped. ``dynamic`` has no such share:
    this policy shows what a fixed one costs when the lengths of prompts and answers change.

    Raises:
        ConfigError: ``prefill_share`` is not above 0 and below 1.
    """

    def __init__(self, prefill_share: float = PREFILL_SHARE) -> None:
        if not 0 < prefill_share < 1:
            raise ConfigError(f"prefill_share={prefill_share}: must be above 0 and below 1")
        self._share = prefill_share
        self._owed = 0.0  # device seconds that prompts have had less than their share; negative if they had more

    def plan(self, view: View) -> Plan:
        """Return a chunk of the first prompt if prompts have had less than their share, else a decode step of all requests."""
        backlog = admissible_prompts(view)
        decode = decode_plan(view)
        can_prefill = bool(backlog) and fits(view, backlog[0])
        if decode is None:
            return self._alone(view, can_prefill)
        if not can_prefill or decode.swap_out or decode.preempt:
            return decode
        prompt = Plan(prefill=((backlog[0].id, chunk_of(view, backlog[0])),))
        if self._owed < 0:
            self._owed += self._share * self._seconds(view, decode)
            return decode
        is_fresh = not backlog[0].num_computed
        self._owed -= (1 - self._share) * self._seconds(view, prompt, is_fresh=is_fresh)
        return prompt

    def _alone(self, view: View, can_prefill: bool) -> Plan:
        """Return a chunk of the first prompt if no request decodes."""
        first = admissible_prompts(view)[0]
        if can_prefill:
            return Plan(prefill=((first.id, chunk_of(view, first)),))
        return prefill_with_preemption(view, first)

    def _seconds(self, view: View, plan: Plan, is_fresh: bool = False) -> float:
        """Return the expected duration of a call, in seconds."""
        variant = view.device.call(plan.num_rows, plan.num_sequences, is_fresh)
        return view.device.seconds(variant) if variant else 0.0


POLICY = Ratio
