"""Makes the profiler's records of a device call and of a request that has ended, and tells how far the others are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from staticllm.core import FinishReason
from staticllm.pipelines.engine.batch import Batch
from staticllm.pipelines.engine.request import RequestState, SequenceState
from staticllm.pipelines.profiling.records import EngineProgress, HostTimes, RequestProgress, RequestRecord, StepRecord
from staticllm.pipelines.programs.model_runner import ModelRunner
from staticllm.pipelines.scheduling.interface import RequestStatus
from staticllm.pipelines.scheduling.request_table import RequestTable


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
    waiting, swapped, num_running = list[int](), list[int](), 0
    for info in table:  # once, because the device idles meanwhile
        if info.status is RequestStatus.RUNNING:
            num_running += 1
        elif info.status is RequestStatus.WAITING:
            waiting.append(info.id)
        elif info.status is RequestStatus.SWAPPED:
            swapped.append(info.id)
    return CallContext(tuple(waiting), tuple(swapped), num_running, slots_in_use, tuple(preempted))


def step_record(
    batch: Batch, start: float, seconds: float, context: CallContext, host: HostTimes | None = None
) -> StepRecord:
    """Return the record of one device call; without ``host`` of one that failed.

    ``start`` is a moment of the engine's clock and ``seconds`` the duration of the call.
    """
    prefill = tuple((entry.state.id, len(entry.segment.tokens)) for entry in batch.entries if entry.is_prefill)
    prompts = {request for request, _ in prefill}
    return StepRecord(
        start=start,
        seconds=seconds,
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
    )


def request_record(state: SequenceState, reason: FinishReason) -> RequestRecord:
    """Return the record of one answer that ends now."""
    request = state.request
    return RequestRecord(
        state.id, request.arrival, state.started, tuple(state.token_times),
        0 if state.index else len(request.prompt), state.num_cached, reason, state.clock(),
    )  # fmt: skip


def progress_of(requests: Iterable[RequestState], runner: ModelRunner) -> EngineProgress:
    """Return how far requests are, without those whose tokens a client feeds. Any thread may call.

    The engine's thread may change a request meanwhile, so that the counts of one may be those before and after a call.
    """
    found = {
        state.id: _sequence_progress(state)
        for request in requests
        if not request.sequences[0].info.is_fed
        for state in request.unfinished
    }
    return EngineProgress(tuple(found.values()), runner.cache.num_slots)


def _sequence_progress(state: SequenceState) -> RequestProgress:
    request, info, times = state.request, state.info, state.token_times
    is_search = request.beams is not None and state.started is not None  # its beams are sequences of their own
    return RequestProgress(
        state.id, "running" if is_search else info.status.value, request.arrival, state.started,
        times[0] if times else None, len(request.prompt), state.num_cached, info.num_computed, state.num_generated,
        request.max_new_tokens, request.priority,
    )  # fmt: skip
