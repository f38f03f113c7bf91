"""The policy ``dynamic`` co-locates prefill and decode by measured costs.

The idea comes from FlexNPU (sections 3.3 and 3.4: measured phases share one device without a fixed split). Our copy of that
paper ends section 3.4 after its first paragraph, before any rule, so every rule here is an inference or our own.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..between_blocks import inserted_seconds
from ..interface import Plan, RequestView, View
from ..plans import (
    admissible_prompts,
    chunk_of,
    decode_plan,
    fits,
    in_order,
    pack,
    prefill_with_preemption,
    to_swap_in,
    with_prefill,
)
from ..time_slices import TimeSlices, by_wait

CROWDED_GAP = 2
"""Factor on the token bound while at least two prompts wait, and at least as many as requests decode."""
COMPANY_GAP = 0.5
"""Least token bound in seconds while several prompts wait: calls with more of their tokens cost less for each. Readers take as
long for two words, 238 a minute (Brysbaert 2019, doi:10.1016/j.jml.2019.104047), and see about so many ahead (Rayner 1998,
doi:10.1037/0033-2909.124.3.372)."""
URGENT_GAP = 4
"""Factor on the token bound once the first prompt has waited for ``URGENT_TTFT_SHARE`` of the TTFT target."""
URGENT_TTFT_SHARE = 0.5
SLACK_USED = 0.8
"""Share of the time left until the bound that a call may take; costs are estimates."""
MIN_PREFILL_SHARE = 0.2
"""Least share of device time for prompts, even if no call with prompts keeps the bound."""
FULL_ENOUGH = 0.8
"""With ``max_num_seqs`` requests running, prompts are batched until a call reaches this share of the best possible ``rate``."""
BATCHING_DELAY_STEPS, BATCHING_DELAY_TTFT_SHARE = 16, 0.25
"""Longest batching delay of prompts (Triton's ``max_queue_delay``) in decode steps, or as a share of the TTFT target."""
ABOUT_AS_FAST = 1.25
"""Candidates within this factor of the shortest time to finish the prompts compete by ``rate``."""
MIN_SECONDS = 1e-9
"""Lower bound of divisors."""


@dataclass(frozen=True)
class CandidateCall:
    """A call with prompts in it, alone or mixed with decoding. Candidates are compared by their ``rate``:

        rate = (num_tokens + rest_tokens) / (call_seconds - saved_seconds + rest_seconds)

    in prompt tokens per second of device time. The call runs ``num_tokens`` prompt tokens in ``call_seconds``. ``rest_tokens`` of
    the same prompts remain for later calls, which take ``rest_seconds``. Unlike the first call of a new prompt, these read the
    arena. A mixed call also decodes, which is worth ``saved_seconds``. The running requests can have their next tokens after
    ``delay_seconds``, in a call in blocks after one of these. ``total_seconds`` later, with the decode steps between its blocks
    and after it, the next call begins. A call of this size could hold at most ``max_tokens`` tokens of prompts like those that
    wait.
    """

    plan: Plan
    call_seconds: float
    saved_seconds: float
    delay_seconds: float
    total_seconds: float
    num_tokens: int
    max_tokens: int
    rest_tokens: int
    rest_seconds: float

    @property
    def added_seconds(self) -> float:
        """The device time that the prompts add to the decode step, in seconds."""
        return self.call_seconds - self.saved_seconds

    @property
    def rate(self) -> float:
        """The score: prompt tokens per second of device time, until the prompts in the call are finished."""
        return (self.num_tokens + self.rest_tokens) / max(self.added_seconds + self.rest_seconds, MIN_SECONDS)

    @property
    def full_rate(self) -> float:
        """The rate that a full call of this size would have."""
        return self.max_tokens / max(self.added_seconds, MIN_SECONDS)


class Candidates:
    """The calls that could run prompts of ``backlog`` now, and the criteria to choose among them.

    ``decode`` is the decode step that could run instead, or ``Plan()`` if no request decodes. It takes ``step_seconds``.
    """

    def __init__(self, view: View, backlog: list[RequestView], decode: Plan) -> None:
        self._view = view
        self._backlog = backlog
        self._decode = decode
        variant = view.device.call(decode.num_rows, decode.num_sequences) if decode.num_rows else None
        self.step_seconds = view.device.seconds(variant) if variant else 0.0

    def calls(self) -> list[CandidateCall]:
        """Return a call filled with prompts for every number of rows: one without decoding, and one mixed with it."""
        found: list[CandidateCall | None] = []
        for rows in self._view.device.index.widest:
            if rows > 1:
                found.append(self._prompts_only(rows))
            if rows > self._decode.num_rows > 0:
                found.append(self._mixed(rows))
        calls = [call for call in found if call is not None]
        if not calls:  # the only programs are those of single rows
            call = self._call(1, Plan(), is_fresh=False, saved_seconds=0.0)
            calls = [call] if call else []
        return calls

    def soon_enough(self, calls: list[CandidateCall]) -> list[CandidateCall]:
        """Return the calls that, if repeated, finish all prompts before the batching delay ends, or almost as fast as possible.

        A few prompt tokens in every decode step have the best rate, but would delay the first token without limit.
        """
        left = sum(request.num_left for request in self._backlog)
        times = [max(left / call.num_tokens, 1.0) * call.total_seconds for call in calls]
        remaining_delay = self.batching_delay - (self._view.now - self._backlog[0].arrival)
        bound = max(ABOUT_AS_FAST * min(times), remaining_delay)
        return [call for call, time in zip(calls, times, strict=True) if time <= bound]

    def is_batch_due(self, calls: list[CandidateCall]) -> bool:
        """Return whether batched prompts should run, because the delay is over or a call is nearly as good as a full one."""
        if self.is_delay_over:
            return True
        return max(call.rate for call in calls) >= FULL_ENOUGH * max(call.full_rate for call in calls)

    @property
    def batching_delay(self) -> float:
        """The seconds for which a prompt may wait to share a call with others."""
        ttft_ms = self._view.ttft_ms
        if ttft_ms is None:
            return BATCHING_DELAY_STEPS * self.step_seconds
        return BATCHING_DELAY_TTFT_SHARE * ttft_ms / 1e3

    @property
    def is_delay_over(self) -> bool:
        """Whether the oldest prompt has waited for the whole batching delay."""
        return self._view.now - min(request.arrival for request in self._backlog) >= self.batching_delay

    def _prompts_only(self, rows: int) -> CandidateCall | None:
        return self._call(rows, Plan(), is_fresh=not self._backlog[0].num_computed, saved_seconds=0.0)

    def _mixed(self, rows: int) -> CandidateCall | None:
        return self._call(rows, self._decode, is_fresh=False, saved_seconds=self._saved_seconds)

    def _call(self, rows: int, beside: Plan, *, is_fresh: bool, saved_seconds: float) -> CandidateCall | None:
        """Return a call of exactly ``rows`` with prompts and the decode rows of ``beside``; None if nothing fits."""
        view = self._view
        device = self._view.device
        widest = device.index.at(rows, device.index.widest[rows], device.high_slot, is_fresh)
        prompts = pack(view, self._backlog, beside, widest) if widest else []
        num_sequences = beside.num_sequences + len(prompts)
        variant = device.index.of_rows(rows, num_sequences, device.high_slot, is_fresh) if prompts else None
        if variant is None or widest is None:
            return None
        seconds = device.seconds(variant)
        inserted = 0.0 if beside.decode else inserted_seconds(view, seconds, self.step_seconds)
        left = {request.id: request.num_left for request in self._backlog}
        rest = sum(left[request] - count for request, count in prompts)
        return CandidateCall(
            with_prefill(beside, prompts),
            call_seconds=seconds,
            saved_seconds=saved_seconds,
            delay_seconds=seconds if beside.decode else seconds / device.num_blocks + self.step_seconds,
            total_seconds=seconds if beside.decode else seconds + inserted + self.step_seconds,
            num_tokens=sum(count for _, count in prompts),
            max_tokens=min(rows - beside.num_rows, (widest.sequences - beside.num_sequences) * max(left.values())),
            rest_tokens=rest,
            rest_seconds=rest * self._seconds_per_token,
        )

    @cached_property
    def _saved_seconds(self) -> float:
        """The value of the decoding in a mixed call in seconds: the time of the decode step that it replaces.

        It is lower if further prompts could finish now, because their requests will need a decode step as well.
        """
        num_decoding = self._decode.num_rows
        return self.step_seconds * num_decoding / max(num_decoding + self._num_startable, 1)

    @property
    def _num_startable(self) -> int:
        """The number of prompts that a single call could finish and whose requests could be running afterwards."""
        rows = max(self._view.device.index.widest)
        count = 0
        for request in self._backlog[: self._view.free_seqs]:
            rows -= request.num_left
            count += rows >= 0
        return count

    @cached_property
    def _seconds_per_token(self) -> float:
        """The lowest cost of a prompt token in a call that reads the arena, in seconds."""
        device = self._view.device
        variants = [(rows, device.index.of_rows(rows, 1, device.high_slot)) for rows in device.index.widest]
        return min((device.seconds(variant) / rows for rows, variant in variants if variant), default=0.0)


class Dynamic:
    """Lets prefill and decode share one device without a fixed split.

    A prompt runs when it arrives, even while ``max_num_seqs`` requests are running; its request is then swapped until one of
    them ends. The calls that can run prompts now, alone or mixed with decoding, are compared by measured costs, and the one with
    the highest ``CandidateCall.rate`` runs. No running request waits longer than ``token_bound`` for its next token. Prompts run
    at once while fewer than ``max_num_seqs`` requests are running. Otherwise they are batched, with a delay that ``ttft_ms``
    bounds. With ``gap_ms``, swapped requests get the places of running ones in time slices, and prompts wait if there are too
    many.
    """

    def __init__(self) -> None:
        self.prefill_end = float("-inf")  # expected end of the last call with prompts, on the clock of the view
        self.prefill_seconds = 0.0  # device time that the prompts added to this call
        self._delayed: tuple[int, ...] = ()  # ids of the prompts that wait for a fuller batch since the last comparison
        self._slices = TimeSlices()

    def plan(self, view: View) -> Plan:
        """Return the best call for the device now: a decode step, prompts, or both."""
        backlog = self._startable(view)
        decode = self._decode(view)
        if decode is None:
            return self._prefill_only(view, backlog)
        if not backlog or decode.swap_out or decode.preempt:
            return decode
        candidates = Candidates(view, backlog, decode)
        calls = [] if self._is_still_delayed(view, backlog, candidates) else candidates.calls()
        if not calls:
            return decode
        slack = self._slack(view, decode, backlog, candidates.step_seconds)
        fitting = [call for call in calls if call.delay_seconds <= slack * SLACK_USED]
        if not fitting:
            return self._least(view, calls, decode)
        best = max(candidates.soon_enough(fitting), key=lambda call: call.rate)
        if not view.free_seqs and not candidates.is_batch_due(fitting):
            self._delayed = tuple(request.id for request in backlog)
            return decode
        return self._begin(view, best)

    def _startable(self, view: View) -> list[RequestView]:
        """Return the prompts that may run: those that have begun, and as many others as can soon have a place."""
        limit = self._slices.num_startable(view)
        if not limit and not view.prefilling:
            return []
        backlog = admissible_prompts(view)
        if limit >= len(view.waiting):
            return backlog
        begun = {request.id for request in view.prefilling}
        startable = begun | {request.id for request in in_order(view.waiting)[: int(limit)]}
        return [request for request in backlog if request.id in startable]

    def _decode(self, view: View) -> Plan | None:
        """Return the next decode step, in which places may change hands."""
        if view.gap_ms is None:
            return decode_plan(view)
        gone, come = self._slices.exchange(view)
        return decode_plan(view, come or to_swap_in(view, by_wait), gone)

    def _is_still_delayed(self, view: View, backlog: list[RequestView], candidates: Candidates) -> bool:
        """Return whether the prompts of the last comparison still wait to be batched, so that no call is compared again."""
        if view.free_seqs or tuple(request.id for request in backlog) != self._delayed:
            return False
        return not candidates.is_delay_over

    def _prefill_only(self, view: View, backlog: list[RequestView]) -> Plan:
        """Return the call with the highest rate if no request decodes."""
        if len(backlog) == 1 and fits(view, backlog[0]):
            return Plan(prefill=((backlog[0].id, chunk_of(view, backlog[0])),))
        calls = Candidates(view, backlog, Plan()).calls()
        if not calls:
            return prefill_with_preemption(view, backlog[0])
        return self._begin(view, max(calls, key=lambda call: call.rate))

    def _slack(self, view: View, decode: Plan, backlog: list[RequestView], step_seconds: float) -> float:
        """Return the seconds until a running request has waited too long for its next token; negative if it is late."""
        times = [r.last_token_time for r in view.running if r.last_token_time is not None]
        waited = view.now - min(times) if times else 0.0
        gap = view.token_bound.of(step_seconds, view.tpot_ms)
        if view.tpot_ms is not None:
            return gap - waited
        if len(backlog) >= max(2, decode.num_rows):
            gap *= CROWDED_GAP
        if len(backlog) > 1:
            gap = max(gap, COMPANY_GAP)
        if view.ttft_ms is not None and view.now - backlog[0].arrival > URGENT_TTFT_SHARE * view.ttft_ms / 1e3:
            gap *= URGENT_GAP
        return min(gap, self._slices.slice_seconds(view)) - waited

    def _least(self, view: View, calls: list[CandidateCall], decode: Plan) -> Plan:
        """Return the plan if no call with prompts keeps the bound: decode, unless prompts are below their share."""
        least = min(calls, key=lambda call: (call.delay_seconds, -call.num_tokens))
        since = view.now - self.prefill_end
        times = [r.last_token_time for r in view.running if r.last_token_time is not None]
        has_just_decoded = not times or min(times) >= self.prefill_end
        share = self.prefill_seconds / (self.prefill_seconds + since) if since > 0 else 1.0
        if has_just_decoded and share < MIN_PREFILL_SHARE:
            return self._begin(view, least)
        return decode

    def _begin(self, view: View, call: CandidateCall) -> Plan:
        """Return the plan of a call with prompts, and keep its expected end and the time that its prompts add."""
        self.prefill_seconds = call.added_seconds
        self.prefill_end = view.now + call.total_seconds
        return call.plan


POLICY = Dynamic
