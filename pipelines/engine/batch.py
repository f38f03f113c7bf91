"""Turns a plan into the batch of the next call, cut to the slots and programs that are available."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

import numpy as np

from staticllm.core import Variant

from ...kvcache.step import Segment
from ..profiling.records import HostTimes, StepRecord
from ..programs.model_runner import Accept, Logits, ModelRunner
from ..scheduling.interface import Plan, RequestStatus
from ..scheduling.request_table import RequestTable
from .kv_manager import KVCacheManager
from .sequence import SequenceState
from .speculation.draft_check import DraftCheck
from .speculation.draft_planner import DraftPlan, DraftPlanner, PlainCall
from .state import AnswerState

Item = TypeVar("Item")


class Quarantine:
    """The requests of a shared call whose logits were not finite. Runs on the engine's thread.

    A masked NaN still makes a weighted sum NaN, so one request with such values spoils the results of all requests in its
    call. None of these results was kept. Each suspect runs once alone: with finite logits it continues, else it ends with an
    error. Between two suspects the other requests have one call, so that they do not wait for all suspects.
    """

    def __init__(self) -> None:
        self._suspects: set[int] = set()
        self._was_apart = False

    def add(self, request: int) -> None:
        """Add a request whose logits in a shared call were not finite."""
        self._suspects.add(request)

    def discard(self, request: int) -> None:
        """Remove a request that ran with finite logits or has ended."""
        self._suspects.discard(request)

    @property
    def has_suspects(self) -> bool:
        """Whether a request still has to run alone."""
        return bool(self._suspects)

    def select(self, parts: Sequence[Item], id_of: Callable[[Item], int]) -> list[Item]:
        """Return the parts that may share the next call: one suspect alone and all parts without suspects, in turns."""
        if not self._suspects:
            return list(parts)
        suspects = [part for part in parts if id_of(part) in self._suspects]
        others = [part for part in parts if id_of(part) not in self._suspects]
        self._was_apart = bool(suspects) and not (others and self._was_apart)
        return suspects[:1] if self._was_apart else others


@dataclass(frozen=True)
class BatchEntry:
    """The tokens of one answer in the next call."""

    state: SequenceState
    segment: Segment
    is_prefill: bool
    check: DraftCheck | None = None  # of a draft, the last tokens of the segment

    @property
    def is_followed(self) -> bool:
        """Whether it is a chunk of a prompt, and another chunk follows."""
        return self.is_prefill and len(self.segment.sequence) + len(self.segment.tokens) < len(self.state.tokens)


@dataclass(frozen=True)
class Batch:
    """The next call: its entries, in the order of the rows, and the variant that holds them.

    ``preempted`` holds the ids of the answers that lost their slots for it. ``drafting`` is the plan of its drafts; None if no
    answer in it drafts.
    """

    entries: tuple[BatchEntry, ...]
    variant: Variant
    preempted: tuple[int, ...]
    drafting: DraftPlan | None = None

    @property
    def is_decoding(self) -> bool:
        """Whether at least one entry is a decoding step."""
        return any(not entry.is_prefill for entry in self.entries)

    @property
    def has_prompts(self) -> bool:
        """Whether at least one entry is a chunk of a prompt."""
        return any(entry.is_prefill for entry in self.entries)

    @property
    def draft_seconds(self) -> float:
        """The time that the draft model took for the drafts of the call."""
        return 0.0 if self.drafting is None else self.drafting.spent_seconds

    @property
    def checks(self) -> list[DraftCheck]:
        """The checks of all drafts of the call."""
        return [entry.check for entry in self.entries if entry.check is not None]

    @property
    def accept(self) -> Accept | None:
        """The function that checks the drafts while the call is committed; None without drafts."""
        checks = {id(entry.segment): entry.check for entry in self.entries if entry.check is not None}
        return partial(_accept, checks) if checks else None


@dataclass(frozen=True)
class Unrunnable:
    """An answer that no call can hold, not even alone with all slots. ``preempted`` is as in ``Batch``."""

    state: SequenceState
    preempted: tuple[int, ...] = ()


class BatchBuilder:
    """Builds the batch of a call from a plan. Runs on the engine's thread."""

    def __init__(
        self,
        runner: ModelRunner,
        table: RequestTable,
        kv_manager: KVCacheManager,
        quarantine: Quarantine,
        draft_planner: DraftPlanner,
    ) -> None:
        self._runner = runner
        self._table = table
        self._kv_manager = kv_manager
        self._quarantine = quarantine
        self._draft_planner = draft_planner

    def prepare(self, plan: Plan) -> Batch | Unrunnable:
        """Preempt, swap out and swap in as planned, then return the entries that fit into one call, and its variant."""
        states = self._kv_manager.states
        preempted = list(plan.preempt)
        for request in plan.preempt:
            self._kv_manager.preempt(states[request])
        for request in plan.swap_out:
            self._kv_manager.swap_out(states[request])
        for request in plan.swap_in:
            self._kv_manager.swap_in(states[request])
        entries = [self._entry(states[request], 1, False) for request in plan.decode]
        for request, count in plan.prefill:
            self._kv_manager.allocate(states[request])
            entries.append(self._entry(states[request], count, True))
        entries = self._quarantine.select(entries, lambda entry: entry.state.id)
        first = entries[0].state
        fitting = self._longest_fitting(entries)
        while fitting is None and (victim := self._preempt_last(first)) is not None:
            preempted.append(victim)
            fitting = self._longest_fitting(entries[:1])
        if fitting is None:
            return Unrunnable(first, tuple(preempted))
        entries, variant = fitting
        if not self._kv_manager.prefix.is_offloading and self._runner.cache.compact():  # else slots become free soon
            variant = self._runner.variant_for([entry.segment for entry in entries]) or variant
        return self._with_drafts(Batch(tuple(self._to_host(entries)), variant, tuple(preempted)))

    def inserted(self, plan: Plan) -> Batch | None:
        """Return the decode step of a plan between two blocks of the call in flight; None if no program holds it there."""
        variants = [found for found in self._runner.insertable() if found.rows >= len(plan.decode)]
        entries = tuple(self._entry(self._kv_manager.states[request], 1, False) for request in plan.decode)
        return Batch(entries, variants[0], ()) if variants else None

    def _with_drafts(self, batch: Batch) -> Batch:
        """Append draft tokens to decoding entries where they are expected to save time."""
        if not self._draft_planner.is_possible or self._quarantine.has_suspects:
            return batch
        decoding = [entry for entry in batch.entries if not entry.is_prefill]
        states = [entry.state for entry in decoding]
        answers = [state for state in states if isinstance(state, AnswerState) and state.drafts is not None]
        if not answers:
            return batch
        drafting = [answer.drafts for answer in answers if answer.drafts is not None]
        due = [drafts.count_step() for drafts in drafting]  # a step of each is counted, whichever is due
        if not any(due):
            self._draft_planner.skip()
            return batch
        num_rows = sum(len(entry.segment.tokens) for entry in batch.entries)
        num_logits = sum(entry.segment.num_logits for entry in batch.entries)
        call = PlainCall(batch.variant, num_rows, len(batch.entries), num_logits, len(decoding))
        plan = self._draft_planner.plan(answers, call)
        checks = {a.id: DraftCheck(a, draft) for a, draft in zip(answers, plan.drafts, strict=False) if draft.tokens}
        entries = tuple(_with_draft(entry, checks.get(entry.state.id)) for entry in batch.entries)
        return replace(batch, entries=entries, variant=plan.variant, drafting=plan)

    def observe(self, batch: Batch, host: HostTimes, device_seconds: float) -> None:
        """Learn from the drafts of a call, which took ``device_seconds``, and ``host`` around it."""
        if batch.drafting is not None:
            num_accepted = sum(check.num_accepted for check in batch.checks)
            self._draft_planner.observe(batch.drafting, num_accepted, device_seconds + host.total)

    def _entry(self, state: SequenceState, count: int, is_prefill: bool) -> BatchEntry:
        assert state.kv.sequence is not None
        start = len(state.kv.sequence)
        if state.is_exact and self._runner.cache.least_exact > 1:
            count = _without_single_rows(count, len(state.tokens) - start)
        tokens = np.asarray(state.tokens[start : start + count], np.int64)
        num_logits = state.num_logits(start, len(tokens))
        segment = Segment(state.kv.sequence, tokens, num_logits, is_exact=state.is_exact)
        return BatchEntry(state, segment, is_prefill)

    def _longest_fitting(self, entries: list[BatchEntry]) -> tuple[list[BatchEntry], Variant] | None:
        """Return the longest head of ``entries`` that has slots and a variant, and the variant; None if not even one can run.

        A plan fits when it is made, but shared slots and prefix hits may leave less room.
        """
        while (variant := self._variant_for(entries)) is None:
            if (fewer := self._with_fewer_logits(entries)) is not None:
                entries = fewer
            elif len(entries) > 1:
                entries = entries[:-1]
            elif (shorter := self._shortened(entries[0])) is not None:
                entries = [shorter]
            else:
                return None
        return entries, variant

    def _preempt_last(self, kept: SequenceState) -> int | None:
        """Preempt the last answer other than ``kept`` that has slots, and return its id; None if no other has any."""
        others = [state for state in self._kv_manager.states.values() if state is not kept]
        victims = [state for state in others if state.kv.sequence is not None]
        if not victims:
            return None
        self._kv_manager.preempt(victims[-1])
        return victims[-1].id

    def _variant_for(self, entries: list[BatchEntry]) -> Variant | None:
        """Return the variant that holds these entries; None if there is none, or not enough free slots."""
        num_slots = sum(len(entry.segment.tokens) for entry in entries)
        num_followed = sum(len(entry.segment.tokens) for entry in entries if entry.is_followed)
        if not self._kv_manager.make_room(num_slots, num_followed):
            return None
        return self._runner.variant_for([entry.segment for entry in entries])

    def _shortened(self, entry: BatchEntry) -> BatchEntry | None:
        """Return the entry with fewer tokens, for which there is a program; None without one.

        A prompt with a prefix hit needs programs with a past, and those may be smaller. A model with recurrent states needs a
        program with exactly as many rows as tokens.
        """
        for rows in sorted(self._runner.index.widest, reverse=True):
            if rows < len(entry.segment.tokens):
                shorter = self._entry(entry.state, rows, entry.is_prefill)
                is_shorter = len(shorter.segment.tokens) < len(
                    entry.segment.tokens
                )  # an exact feed has no chunk of one row
                if is_shorter and self._runner.variant_for([shorter.segment]):
                    return shorter
        return None

    def _with_fewer_logits(self, entries: list[BatchEntry]) -> list[BatchEntry] | None:
        """Return the entries with fewer tokens in the last one, so that a program has all of their logits; None without one."""
        *others, last = entries
        if last.segment.num_logits == 1:
            return None
        num_others = sum(len(entry.segment.tokens) for entry in others)
        for rows in self._runner.index.rows_with_logits:
            if 0 < rows - num_others < len(last.segment.tokens):
                fewer = self._entry(last.state, rows - num_others, last.is_prefill)
                is_shorter = len(fewer.segment.tokens) < len(last.segment.tokens)
                if is_shorter and self._variant_for([*others, fewer]) is not None:
                    return [*others, fewer]
        return None

    def _to_host(self, entries: list[BatchEntry]) -> list[BatchEntry]:
        """Mark whole prompts that cannot decode yet: their keys and values bypass the arena and go to the host pool."""
        prompts = [entry for entry in entries if entry.is_prefill]
        if not prompts or self._table.has_free_seq:
            return entries
        if self._table.has_reactive_seq and not all(entry.state.info.is_proactive for entry in prompts):
            return entries  # a proactive request gives its place up for them
        marked = list[BatchEntry]()
        room = self._kv_manager.host_pool.free_slots
        for entry in entries:
            segment = entry.segment
            count = len(entry.segment.tokens)
            is_whole = entry.is_prefill and count == len(entry.state.tokens) and not len(segment.sequence)
            if is_whole and count <= room and entry.state.can_bypass_arena:
                room -= count
                marked.append(replace(entry, segment=replace(segment, to_host=True)))
            else:
                marked.append(entry)
        return marked


def _without_single_rows(count: int, left: int) -> int:
    """Return about ``count`` of the ``left`` tokens of a feed, so that no chunk has one row, unless the feed has one token.

    The attention of a row alone adds in another order than that of several.
    """
    count = min(max(count, 2), left)
    return count if left - count != 1 else count + 1 if count == 2 else count - 1


def _with_draft(entry: BatchEntry, check: DraftCheck | None) -> BatchEntry:
    """Return a decoding entry with a draft after its token, and with logits after each of these tokens; None for no draft."""
    if check is None:
        return entry
    tokens = np.concatenate([entry.segment.tokens, np.asarray(check.draft.tokens, np.int64)])
    segment = replace(entry.segment, tokens=tokens, num_logits=len(tokens))
    return replace(entry, segment=segment, check=check)


def _accept(checks: Mapping[int, DraftCheck], segment: Segment, logits: Logits) -> int:
    """Return how many tokens of a segment are kept: all of them, or those of a draft that its check accepts."""
    check = checks.get(id(segment))
    return len(segment.tokens) if check is None else check.accept(logits)


@dataclass(frozen=True)
class CallContext:
    """What else was in the engine while a call ran: ids by status, slots in use, and requests that were preempted before it."""

    waiting: tuple[int, ...]
    swapped: tuple[int, ...]
    num_running: int
    slots_in_use: int
    preempted: tuple[int, ...]


def call_context(table: RequestTable, slots_in_use: int, preempted: list[int]) -> CallContext:
    """Return the context of a call; to be taken before its tokens are chosen."""
    waiting = list[int]()
    swapped = list[int]()
    num_running = 0
    for info in table:  # once, because the device idles meanwhile
        if info.status is RequestStatus.RUNNING:
            num_running += 1
        elif info.status is RequestStatus.WAITING:
            waiting.append(info.id)
        elif info.status is RequestStatus.SWAPPED:
            swapped.append(info.id)
    return CallContext(tuple(waiting), tuple(swapped), num_running, slots_in_use, tuple(preempted))


@dataclass(frozen=True)
class CallTimes:
    """When a call ran: its start, a moment of the engine's clock, its seconds, and those of ``num_inserted`` calls within it."""

    start: float
    seconds: float
    paused_seconds: float = 0.0
    num_inserted: int = 0
    is_inserted: bool = False


def step_record(batch: Batch, times: CallTimes, context: CallContext, host: HostTimes | None = None) -> StepRecord:
    """Return the record of one device call; without ``host`` of one that failed."""
    prefill = tuple((entry.state.id, len(entry.segment.tokens)) for entry in batch.entries if entry.is_prefill)
    prompts = {request for request, _ in prefill}
    return StepRecord(
        start=times.start,
        seconds=times.seconds,
        variant=batch.variant,
        decode=tuple(entry.state.id for entry in batch.entries if not entry.is_prefill),
        prefill=prefill,
        slots_in_use=context.slots_in_use,
        num_waiting=sum(request not in prompts for request in context.waiting),
        num_swapped=len(context.swapped),
        num_running=context.num_running,
        swapped=context.swapped,
        preempted=context.preempted,
        has_failed=host is None,
        host=host,
        drafts=tuple((check.state.id, len(check.draft.tokens), check.num_accepted) for check in batch.checks),
        draft_seconds=batch.draft_seconds,
        paused_seconds=times.paused_seconds,
        num_inserted=times.num_inserted,
        is_inserted=times.is_inserted,
        proactive_rows=sum(len(each.segment.tokens) for each in batch.entries if each.state.info.is_proactive),
    )
