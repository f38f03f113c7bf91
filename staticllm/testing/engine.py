"""Provides an engine over the fake device, requests whose progress a test can read, and a loop without a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from staticllm.core import MaskKind, Variant
from staticllm.pipelines.engine.engine import Engine
from staticllm.pipelines.engine.options import EngineOptions
from staticllm.pipelines.engine.own_thread import OwnThread
from staticllm.pipelines.engine.request import EngineRequest, EngineText
from staticllm.pipelines.engine.state import AnswerState, RequestState
from staticllm.pipelines.scheduling.interface import Policy
from staticllm.pipelines.scheduling.request_table import Limits
from staticllm.testing.device import CAUSAL, VOCAB_SIZE, fake_runner, fake_shape

FAKE_VARIANTS = (
    *(Variant(rows, kv_len, rows) for rows in (1, 2, 4) for kv_len in (32, 64, 128)),
    *(Variant(rows, kv_len, sequences) for rows in (8, 16) for kv_len in (0, 32, 64, 128) for sequences in (1, 6)),
)


def fake_engine(
    policy: Policy,
    max_num_seqs: int = 4,
    variants: Iterable[Variant] = FAKE_VARIANTS,
    max_seq_len: int = 64,
    host_kv_slots: int = 256,
    max_waiting: int = 128,
    *,
    gap_ms: float | None = None,
    is_packable: bool = True,
    masks: Sequence[MaskKind] = (CAUSAL,),
    is_recurrent: bool = False,
    is_staged: bool = False,
    num_blocks: int = 1,
    rope_limits: Sequence[int] = (),
    starts_thread: bool = True,
    text: EngineText | None = None,
) -> Engine:
    """Return an engine over the fake device.

    Args:
        policy: The scheduling policy.
        max_num_seqs: The largest number of requests that run at the same time.
        variants: The variants of the fake programs.
        max_seq_len: The largest number of KV slots of one sequence.
        host_kv_slots: The size of the host pool in KV slots.
        max_waiting: The largest number of waiting requests.
        gap_ms: The longest time that a swapped request should wait for its next token, ms.
        is_packable: Whether one call can have the rows of several sequences.
        masks: The kinds of mask that the model reads.
        is_recurrent: Whether the model has recurrent states.
        is_staged: Whether only a part of the programs is there at first; ``add_program`` adds the others.
        num_blocks: The number of blocks of each program, between which other calls may run.
        rope_limits: The lengths of a text after which the model has other RoPE factors.
        starts_thread: Whether ``submit`` starts the engine's thread. Without it, the caller serves requests with ``step``
            or ``run_to_end``, and must not call ``run_between_steps``, which would wait forever.
        text: What the engine needs of a tokenizer, for grammars and the stop strings of beams.
    """
    state_slots = fake_shape(masks, is_recurrent=is_recurrent).slots_of_states(max_seq_len)
    limits = Limits(max_num_seqs, gap_ms=gap_ms)
    options = EngineOptions(
        limits, max_seq_len, max_waiting, host_kv_slots, measure_costs=False, state_slots=state_slots
    )
    runner = fake_runner(
        variants, masks, is_packable=is_packable, is_recurrent=is_recurrent, is_staged=is_staged, num_blocks=num_blocks,
        rope_limits=rope_limits,
    )  # fmt: skip
    engine = Engine(runner, policy, options, text)
    if not starts_thread:
        engine.step_host = _CallersThread(engine.steps)
    return engine


class _CallersThread(OwnThread):
    """The thread that calls makes the steps; none is started. ``close`` ends the requests as the engine's thread would."""

    def need(self) -> None:
        """Start nothing."""
        self.check_open()
        self._steps.has_news = True

    def close(self, drain: bool = False) -> None:
        """As ``StepHost.close``."""
        self._is_draining = drain
        self.is_closing = True
        self._run()


class FakeRequest(RequestState):
    """A request with one answer whose progress a test can read."""

    @property
    def state(self) -> AnswerState:
        """The state of the first answer."""
        return self.sequences[0]

    @property
    def tokens(self) -> list[int]:
        """The tokens of the prompt and of the answer so far."""
        return self.state.tokens

    @property
    def num_generated(self) -> int:
        """The number of tokens of the answer so far."""
        return self.state.num_generated

    @property
    def num_cached(self) -> int:
        """The number of prompt tokens that came from the prefix cache."""
        return self.state.kv.num_cached

    @property
    def token_times(self) -> list[float]:
        """The ``time.perf_counter`` moment at which each token was chosen."""
        return self.state.token_times


def fake_request(tokens: Sequence[int], num_new: int | None, **options: Any) -> FakeRequest:
    """Return a greedy request for ``num_new`` tokens; ``options`` are further fields of ``EngineRequest``."""
    return FakeRequest(EngineRequest(tuple(tokens), max_new_tokens=num_new, **options), VOCAB_SIZE)


def run_to_end(engine: Engine, requests: Iterable[RequestState] = (), max_steps: int = 10_000) -> None:
    """Serve requests on this thread until all have ended.

    Raises:
        AssertionError: requests are left after ``max_steps`` steps.
    """
    engine.steps.add(requests)
    for _ in range(max_steps):
        engine.steps.step()
        if engine.is_idle:
            return
    raise AssertionError(f"requests are left after {max_steps} steps")


def run_until(
    engine: Engine, is_reached: Callable[[], object], requests: Iterable[RequestState] = (), max_steps: int = 10_000
) -> None:
    """Serve requests on this thread until ``is_reached`` returns something true; it is asked before each step.

    Raises:
        AssertionError: it does not within ``max_steps`` steps.
    """
    engine.steps.add(requests)
    for _ in range(max_steps):
        if is_reached():
            return
        engine.steps.step()
    raise AssertionError(f"not reached after {max_steps} steps")


def assert_empty(engine: Engine) -> None:
    """Assert that only the cached sequence holds slots, and that it can be evicted."""
    cache = engine.runner.cache
    kv_manager = engine.core.device.kv_manager
    assert engine.is_idle and not kv_manager.states and not kv_manager.host_pool.num_swapped_slots
    assert cache.slots.num_used == kv_manager.prefix.idle_slots
    kv_manager.prefix.offload_for(cache.num_slots + 1)
    assert cache.slots.num_used == 0 and cache.slots.num_shared == 0
