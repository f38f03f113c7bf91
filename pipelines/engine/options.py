"""What an engine must know besides its programs."""

from __future__ import annotations

from dataclasses import dataclass

from staticllm.pipelines.scheduling.request_table import Limits


@dataclass(frozen=True)
class EngineOptions:
    """Limits of an engine.

    ``max_seq_len``: slots that one sequence can have. ``max_waiting``: requests that may wait. ``host_kv_slots``: the size of the
    host pool. ``state_slots``: how many slots the recurrent states of one sequence are worth there.
    """

    limits: Limits
    max_seq_len: int
    max_waiting: int = 128
    host_kv_slots: int = 0
    prefix_caching: bool = True
    state_slots: int = 0
