"""How far the requests of an engine are: plain values that other threads may keep."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Status: TypeAlias = Literal["waiting", "prefilling", "running", "swapped"]


@dataclass(frozen=True)
class RequestProgress:
    """One answer that has not ended.

    Moments are those of ``time.perf_counter``: of its arrival, of its first device call, and of its first token; None before.
    Of ``num_prompt`` prompt tokens ``num_cached`` were in the prefix cache. ``num_computed`` tokens have keys
    and values, those of the answer included. ``max_new_tokens`` is None if only the slots limit the answer.
    """

    id: int
    status: Status
    arrival: float
    started: float | None
    first_token: float | None
    num_prompt: int
    num_cached: int
    num_computed: int
    num_generated: int
    max_new_tokens: int | None
    priority: int


@dataclass(frozen=True)
class EngineProgress:
    """The answers that an engine has not ended, in the order of arrival, and the number of KV slots of its arena."""

    requests: tuple[RequestProgress, ...]
    num_slots: int
