"""Makes the profiler's records of a device call and of a request that has ended."""

from __future__ import annotations

import time

from staticllm.core import FinishReason, Variant
from staticllm.pipelines.engine.batch import Batch
from staticllm.pipelines.engine.request import SequenceState
from staticllm.pipelines.profiling.records import RequestRecord, StepRecord
from staticllm.pipelines.scheduling.interface import RequestStatus
from staticllm.pipelines.scheduling.request_table import RequestTable


def step_record(batch: Batch, variant: Variant, start: float, seconds: float, table: RequestTable) -> StepRecord:
    """Return the record of one device call: its parts, and the numbers of waiting, running and swapped requests.

    ``start`` is a ``time.perf_counter`` moment and ``seconds`` the duration of the call.
    """
    swapped, waiting = table.ids(RequestStatus.SWAPPED), set(table.ids(RequestStatus.WAITING))
    prompts = [part for part in batch.parts if part.is_prefill]
    return StepRecord(
        start=start,
        seconds=seconds,
        variant=variant,
        decode=tuple(part.state.id for part in batch.parts if not part.is_prefill),
        prefill=tuple((part.state.id, len(part.segment.tokens)) for part in prompts),
        slots_in_use=0,
        num_waiting=len(waiting.difference(part.state.id for part in prompts)),
        num_swapped=len(swapped),
        num_running=table.count(RequestStatus.RUNNING),
        swapped=swapped,
    )


def request_record(sequence: SequenceState, reason: FinishReason) -> RequestRecord:
    """Return the record of one answer that ends now."""
    request = sequence.request
    return RequestRecord(
        sequence.id, request.arrival, sequence.started, tuple(sequence.token_times),
        0 if sequence.index else len(request.prompt), sequence.num_cached, reason, time.perf_counter(),
    )  # fmt: skip
