"""What an engine must know to serve: limits, lengths and the size of the host pool."""

from __future__ import annotations

from dataclasses import dataclass

from staticllm.config import StaticLLMConfig
from staticllm.core import ModelShape, ProgramMode
from staticllm.pipelines.scheduling.request_table import Limits


@dataclass(frozen=True)
class EngineOptions:
    """What an engine is told about requests and KV slots.

    ``max_seq_len``: slots that one sequence can have. ``max_waiting``: requests that may wait. ``host_kv_slots``: slots of the
    host pool. ``state_slots``: how many slots the recurrent states of one sequence are worth there.
    """

    limits: Limits
    max_seq_len: int
    max_waiting: int = 128
    host_kv_slots: int = 0
    prefix_caching: bool = True
    state_slots: int = 0


def options_of(config: StaticLLMConfig, shape: ModelShape, mode: ProgramMode) -> EngineOptions:
    """The options of an engine for a model of ``shape``, whose programs are compiled in ``mode``, served as ``config`` says."""
    return EngineOptions(
        limits=Limits(config.num_seqs(mode), config.ttft_ms, config.tpot_ms),
        max_seq_len=config.max_seq_len,
        max_waiting=config.max_waiting,
        host_kv_slots=config.num_host_slots,
        prefix_caching=config.prefix_caching,
        state_slots=shape.slots_of_states(config.max_seq_len),
    )
