"""The limits with which an engine runs its programs, and the change to other programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from staticllm.config import StaticLLMConfig
from staticllm.core import ModelShape, ProgramMode

from ..programs.model_runner import ModelRunner
from ..scheduling.interface import OWN_BOUND, TokenBound
from ..scheduling.request_table import Limits


@dataclass(frozen=True)
class EngineOptions:
    """Limits of an engine.

    ``max_seq_len``: the largest number of KV slots of one sequence. ``max_waiting``: the largest number of waiting requests.
    ``host_kv_slots``: the size of the host pool in slots. ``state_slots``: the number of these slots that the recurrent states
    of one sequence occupy. ``waits_for_batch``: whether shipped policies wait a moment for a sequence whose client is due.
    """

    limits: Limits
    max_seq_len: int
    max_waiting: int = 128
    host_kv_slots: int = 0
    prefix_caching: bool = True
    measure_costs: bool = True
    state_slots: int = 0
    waits_for_batch: bool = True


def options_of(
    config: StaticLLMConfig, shape: ModelShape, mode: ProgramMode, token_bound: TokenBound = OWN_BOUND
) -> EngineOptions:
    """Return the options of ``config`` for an engine with a model of ``shape``, whose programs are compiled in ``mode``."""
    return EngineOptions(
        limits=Limits(config.num_seqs(mode), config.ttft_ms, config.tpot_ms, config.gap_ms, token_bound),
        max_seq_len=config.max_seq_len,
        max_waiting=config.max_waiting,
        host_kv_slots=config.num_host_slots,
        prefix_caching=config.prefix_caching,
        measure_costs=config.measure_costs,
        state_slots=shape.slots_of_states(config.max_seq_len),
    )


@dataclass(frozen=True)
class Switch:
    """A runner that replaces the current one when no request is left."""

    runner: ModelRunner
    options: EngineOptions
    on_switch: Callable[[], None]
