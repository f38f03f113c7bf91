"""Computes an engine's statistics from the records that its loop appends, when statistics are requested."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from staticllm.system.table import table

from .records import KEPT_RECORDS, JobRecord, Record, RecordRing, RequestRecord, StepRecord

KEPT_REQUESTS = 4096
"""The number of last requests over which means, maxima and percentiles are taken."""


class Recorder(Protocol):
    """Receives records one by one on the engine's thread: a list, or a ``Trace``."""

    def append(self, record: Record, /) -> object: ...


@dataclass(frozen=True)
class Stats:
    """The statistics of an engine since it was created, or since they were reset.

    Fields ``*_ms`` are milliseconds over the last 4096 requests; they are means unless they say something else.
    """

    num_requests: int
    """Requests that ended."""
    num_tokens: int
    """Tokens that these requests generated."""
    num_steps: int
    """Device calls."""
    num_failed_steps: int
    """Device calls whose results were not kept."""
    num_preemptions: int
    """Times that a request lost its KV slots."""
    ttft_ms: float
    """Time to first token."""
    ttft_p95_ms: float
    """The 95th percentile of the times to first token."""
    tpot_ms: float
    """Time per token after the first."""
    longest_gap_ms: float
    """The longest time between two tokens of one request."""
    queueing_ms: float
    """From arrival to the first device call."""
    device_seconds: float
    """Time of device calls; a failed call is not counted."""
    prefill_share: float
    """The share of ``device_seconds`` of prefill; a mixed call is divided by its rows."""
    decode_share: float
    """The share of ``device_seconds`` of decode."""
    prefill_rows_per_second: float
    """Prompt tokens per second of prefill."""
    decode_rows_per_second: float
    """Tokens per second of decode."""
    padding: float
    """The share of computed rows that processed no token."""
    prefix_hit_tokens: int
    """Prompt tokens that were found in the prefix cache."""
    prompt_tokens: int
    """Prompt tokens of the requests that ended, those in the prefix cache included."""
    slots_in_use: int
    """KV slots of the arena in use after the last call."""
    peak_slots_in_use: int
    """The most that were in use."""
    finish_reasons: dict[str, int]
    """Requests by reason."""
    num_jobs: int = 0
    """Calls of other models, such as embeddings."""
    job_seconds: float = 0.0
    """Device time of these calls; not in ``device_seconds``."""
    drafted_tokens: int = 0
    """Drafted tokens, which were checked beside tokens that decoded."""
    accepted_tokens: int = 0
    """Drafted tokens that were accepted."""
    draft_seconds: float = 0.0
    """Time that a draft model took for them."""
    num_inserted: int = 0
    """Device calls that ran between the blocks of another one."""
    proactive_seconds: float = 0.0
    """The part of ``device_seconds`` of proactive requests; a call with both classes is divided by its rows."""


@dataclass
class _Totals:
    steps: int = 0
    inserted: int = 0
    failed_steps: int = 0
    preemptions: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    proactive_seconds: float = 0.0
    prefill_rows: int = 0
    decode_rows: int = 0
    drafted: int = 0
    accepted: int = 0
    draft_seconds: float = 0.0
    computed_rows: int = 0
    slots_in_use: int = 0
    peak_slots: int = 0
    jobs: int = 0
    job_seconds: float = 0.0
    requests: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    ttft: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_REQUESTS))
    tpot: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_REQUESTS))
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_REQUESTS))
    queueing: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_REQUESTS))


class Profiler:
    """Keeps the last records of an engine, and adds them up on request. ``trace``, if set, receives every record as well."""

    def __init__(self) -> None:
        self.ring = RecordRing()
        self._num_added = 0
        self._totals = _Totals()
        self._lock = threading.Lock()
        self.trace: Recorder | None = None

    def record(self, record: Record) -> None:
        """Keep a record. Runs on the engine's thread, so it only appends."""
        self.ring.append(record)
        trace = self.trace  # read once: another thread may set it to None
        if trace is not None:
            trace.append(record)
        if self.ring.end - self._num_added >= KEPT_RECORDS:  # the next one would drop a record that is not counted
            self._add_up()

    def stats(self) -> Stats:
        """Return the statistics up to now; any thread may call."""
        self._add_up()
        with self._lock:
            return _stats_of(self._totals)

    def reset(self) -> None:
        """Set all statistics back to zero; any thread may call."""
        self._add_up()
        with self._lock:
            self._totals = _Totals()

    def _add_up(self) -> None:
        with self._lock:
            new = self.ring.after(self._num_added)
            self._num_added = new.end
            for record in new.records:
                if isinstance(record, StepRecord):
                    _add_step(self._totals, record)
                elif isinstance(record, JobRecord):
                    self._totals.jobs += 1
                    self._totals.job_seconds += record.seconds
                else:
                    _add_request(self._totals, record)


def _add_step(totals: _Totals, step: StepRecord) -> None:
    prefill = step.prefill_rows
    decode = step.decode_rows
    totals.steps += 1
    totals.inserted += step.is_inserted
    totals.preemptions += len(step.preempted)
    if step.has_failed:
        totals.failed_steps += 1
        return
    totals.seconds += step.seconds
    totals.prefill_seconds += step.seconds * prefill / (prefill + decode)
    totals.proactive_seconds += step.seconds * step.proactive_rows / (prefill + decode)
    totals.prefill_rows += prefill
    totals.decode_rows += decode
    totals.drafted += sum(count for _, count, _ in step.drafts)
    totals.accepted += sum(accepted for _, _, accepted in step.drafts)
    totals.draft_seconds += step.draft_seconds
    totals.computed_rows += step.variant.rows
    totals.slots_in_use = step.slots_in_use
    totals.peak_slots = max(totals.peak_slots, step.slots_in_use)


def _add_request(totals: _Totals, request: RequestRecord) -> None:
    totals.requests += 1
    totals.tokens += len(request.token_times)
    totals.prompt_tokens += request.num_prompt
    totals.hit_tokens += request.num_cached
    totals.reasons[str(request.reason)] = totals.reasons.get(str(request.reason), 0) + 1
    for kept, seconds in (
        (totals.queueing, request.queueing),
        (totals.ttft, request.ttft),
        (totals.tpot, request.tpot),
        (totals.gaps, request.longest_gap),
    ):
        if seconds is not None:
            kept.append(seconds)


def _stats_of(totals: _Totals) -> Stats:
    decode_seconds = totals.seconds - totals.prefill_seconds
    return Stats(
        num_requests=totals.requests,
        num_tokens=totals.tokens,
        num_steps=totals.steps,
        num_failed_steps=totals.failed_steps,
        num_preemptions=totals.preemptions,
        ttft_ms=_mean(totals.ttft),
        ttft_p95_ms=percentile(totals.ttft, 0.95) * 1e3,
        tpot_ms=_mean(totals.tpot),
        longest_gap_ms=max(totals.gaps, default=0.0) * 1e3,
        queueing_ms=_mean(totals.queueing),
        device_seconds=totals.seconds,
        prefill_share=totals.prefill_seconds / totals.seconds if totals.seconds else 0.0,
        decode_share=decode_seconds / totals.seconds if totals.seconds else 0.0,
        prefill_rows_per_second=totals.prefill_rows / totals.prefill_seconds if totals.prefill_seconds else 0.0,
        decode_rows_per_second=totals.decode_rows / decode_seconds if decode_seconds else 0.0,
        padding=1 - (totals.prefill_rows + totals.decode_rows) / totals.computed_rows if totals.computed_rows else 0.0,
        prefix_hit_tokens=totals.hit_tokens,
        prompt_tokens=totals.prompt_tokens,
        slots_in_use=totals.slots_in_use,
        peak_slots_in_use=totals.peak_slots,
        finish_reasons=dict(totals.reasons),
        num_jobs=totals.jobs,
        job_seconds=totals.job_seconds,
        drafted_tokens=totals.drafted,
        accepted_tokens=totals.accepted,
        draft_seconds=totals.draft_seconds,
        num_inserted=totals.inserted,
        proactive_seconds=totals.proactive_seconds,
    )


def _mean(seconds: deque[float]) -> float:
    """Return the mean in ms; 0 without values."""
    return sum(seconds) / len(seconds) * 1e3 if seconds else 0.0


def percentile(values: Iterable[float], share: float) -> float:
    """Return the value below which a ``share`` (0 to 1) of ``values`` lies; 0.0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


PARTS = ("device", "plan", "prepare", "commit", "sampling", "other")


@dataclass(frozen=True)
class Breakdown:
    """The mean times of the calls of one kind.

    The part "other" is the time between two calls that no other part measures: waking up, admitting requests, keeping records.
    """

    kind: str
    """"prefill" or "decode"."""
    num_calls: int
    ms: dict[str, float]
    """Per call, by the names in ``PARTS``."""

    @property
    def total_ms(self) -> float:
        """The sum of all parts, in ms per call."""
        return sum(self.ms.values())


def breakdowns_of(steps: Sequence[StepRecord]) -> list[Breakdown]:
    """Return a breakdown of the calls with prompts and one of the calls that only decode, if there are such calls."""
    others = [0.0, *(max(0.0, _between(before, after)) for before, after in pairwise(steps))]
    kinds: dict[str, list[tuple[StepRecord, float]]] = {"prefill": [], "decode": []}
    for step, other in zip(steps, others, strict=False):
        if step.host is not None:
            kinds["prefill" if step.prefill else "decode"].append((step, other))
    return [Breakdown(kind, len(found), _means(found)) for kind, found in kinds.items() if found]


def _between(before: StepRecord, after: StepRecord) -> float:
    """Return the seconds between two calls that no part measures; 0.0 if the second call decodes nothing, or is inside another.

    In the first case the engine may have been idle before it, in the second the device ran blocks of the other call.
    """
    if before.host is None or after.host is None or not after.decode or after.is_inserted:
        return 0.0
    known = before.host.commit + before.host.sampling + after.host.plan + after.host.prepare
    return after.start - before.end - known


def _means(found: list[tuple[StepRecord, float]]) -> dict[str, float]:
    sums = dict.fromkeys(PARTS, 0.0)
    for step, other in found:
        assert step.host is not None
        host = step.host
        parts = (step.seconds, host.plan, host.prepare, host.commit, host.sampling, other)
        for name, seconds in zip(PARTS, parts, strict=True):
            sums[name] += seconds
    return {name: 1e3 * seconds / len(found) for name, seconds in sums.items()}


def breakdown_table(breakdowns: Sequence[Breakdown]) -> str:
    """Return a table for the terminal with two columns per kind of call, ms and their share, and one line per part.

    Detokenization is not a part: it runs on the readers' threads, while the device runs.
    """
    head = ["ms/call", *(text for each in breakdowns for text in (f"{each.kind} ({each.num_calls})", ""))]
    rows = [
        [part, *(text for each in breakdowns for text in (f"{each.ms[part]:.3f}", _share(each, part)))]
        for part in PARTS
    ]
    total = ["together", *(text for each in breakdowns for text in (f"{each.total_ms:.3f}", ""))]
    return table(head, [*rows, total])


def _share(breakdown: Breakdown, part: str) -> str:
    return f"{breakdown.ms[part] / breakdown.total_ms:.1%}" if breakdown.total_ms else "-"
