"""A request in a simulation, and its rows in a call."""

from __future__ import annotations

from dataclasses import dataclass, field

from staticllm.core import FinishReason
from staticllm.pipelines.profiling.records import RequestRecord
from staticllm.pipelines.simulator.sibling_groups import SiblingGroup
from staticllm.pipelines.simulator.workload import Arrival


@dataclass
class SimulatedRequest:
    """A request that passes through one device or two.

    ``limit`` is the number of tokens that it has when it leaves the current device. ``has_slots`` means that its prompt ran on
    another device and that its KV slots were transferred.
    """

    arrival: Arrival
    limit: int
    has_slots: bool = False
    started: float | None = None
    token_times: list[float] = field(default_factory=list)
    reason: FinishReason = FinishReason.LENGTH
    group: SiblingGroup | None = None

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the prompt and of the answer so far."""
        return self.arrival.num_prompt + len(self.token_times)

    @property
    def is_over(self) -> bool:
        """Whether the request leaves the current device."""
        return len(self.token_times) >= self.limit

    def record(self) -> RequestRecord:
        """Return the record of the ended request."""
        a = self.arrival
        return RequestRecord(a.id, a.time, self.started, tuple(self.token_times), a.num_prompt, 0, self.reason)


@dataclass(frozen=True)
class ScheduledRows:
    """The rows of one request in the call."""

    request_id: int
    num_rows: int
    is_prefill: bool
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def num_kept(self) -> int:
        """The rows whose keys and values are kept."""
        return self.num_rows - self.num_drafted + self.num_accepted
