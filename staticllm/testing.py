"""Provides a fake device for tests that is fast, answers predictably, and detects every mistake in slots, masks and positions.

The fake model's next token is a checksum over all (position, token) pairs that the mask lets the last row see. Slots in the
arena hold exactly these pairs, so a wrong slot, a wrong mask cell, or a lost or doubled commit changes the answer. A recurrent
fake model folds all tokens of a call, including those of idle rows, into a state in their order.

    runner = fake_runner([Variant(16, 0), Variant(1, 64), Variant(1, 128)])
    sequence = runner.cache.open()
    logits = runner.prefill(sequence, [5, 6, 7])
    assert int(logits.argmax()) == fake_next_token([5, 6, 7])

Your own policy runs in an engine over the fake device, without a thread:

    engine = fake_engine(MyPolicy(), max_num_seqs=2)
    requests = [fake_request([5, 6, 7], 4), fake_request([8, 9], 4)]
    run_to_end(engine, requests)
    assert requests[0].tokens == fake_answer([5, 6, 7], 4)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staticllm.core import KVState, MaskKind, ModelShape, RecurrentState, Variant
from staticllm.kvcache.cache import KVCache
from staticllm.kvcache.step import BufferPool, StepBuffers
from staticllm.pipelines.engine.engine import Engine
from staticllm.pipelines.engine.options import EngineOptions
from staticllm.pipelines.engine.request import EngineRequest, RequestState, SequenceState
from staticllm.pipelines.programs.model_runner import ModelRunner
from staticllm.pipelines.programs.variants import first_to_serve
from staticllm.pipelines.scheduling.interface import Policy
from staticllm.pipelines.scheduling.request_table import Limits

CAUSAL = MaskKind()
VOCAB_SIZE = 997  # a prime, so that every pair changes the checksum
POISON = VOCAB_SIZE
"""A prompt token that makes the logits NaN in every call that reads it or whose arena holds it; it is never an answer."""


def fake_shape(
    masks: Sequence[MaskKind] = (CAUSAL,),
    vocab_size: int = VOCAB_SIZE,
    is_packable: bool = True,
    is_recurrent: bool = False,
) -> ModelShape:
    """Return a shape with one layer per mask kind; each head holds ``[token, position]`` in each slot."""
    states = [
        KVState(layer, role, f"fake.{layer}.{role}", 2, 2) for layer in range(len(masks)) for role in ("key", "value")
    ]
    return ModelShape(
        tuple(states),
        tuple(masks),
        vocab_size,
        position_rank=2,
        is_packable=is_packable and not is_recurrent,
        has_distances=True,
        recurrent_states=(RecurrentState(0, "fake.recurrent", (1, 1), "int64"),) if is_recurrent else (),
    )


def fake_runner(
    variants: Iterable[Variant],
    masks: Sequence[MaskKind] = (CAUSAL,),
    vocab_size: int = VOCAB_SIZE,
    is_packable: bool = True,
    is_recurrent: bool = False,
    is_staged: bool = False,
) -> ModelRunner:
    """Return a runner over fake programs. ``runner.programs[variant].num_runs`` counts the calls.

    With ``is_staged`` it begins with the fewest programs that can serve; ``add_program`` adds those of ``runner.programs.late``.
    """
    shape, variants = fake_shape(masks, vocab_size, is_packable, is_recurrent), list(variants)
    cache = KVCache(shape, [variant.kv_len for variant in variants])
    pool = BufferPool(variants, shape)
    programs = FakePrograms((variant, FakeProgram(cache, shape, StepBuffers(variant, pool))) for variant in variants)
    if is_staged:
        programs.withhold(set(variants) - set(first_to_serve(variants)))
    return ModelRunner(cache, programs, planned=variants)


def add_program(runner: ModelRunner, variant: Variant) -> None:
    """Add a withheld fake program, as if it had just been compiled."""
    assert isinstance(runner.programs, FakePrograms)
    runner.programs[variant] = runner.programs.late.pop(variant)
    runner.refresh_variants()


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
    is_packable: bool = True,
    masks: Sequence[MaskKind] = (CAUSAL,),
    is_recurrent: bool = False,
    is_staged: bool = False,
) -> Engine:
    """Return an engine over the fake device. ``max_seq_len`` is the most slots of one sequence."""
    state_slots = fake_shape(masks, is_recurrent=is_recurrent).slots_of_states(max_seq_len)
    options = EngineOptions(Limits(max_num_seqs), max_seq_len, max_waiting, host_kv_slots, state_slots=state_slots)
    runner = fake_runner(variants, masks, is_packable=is_packable, is_recurrent=is_recurrent, is_staged=is_staged)
    return Engine(runner, policy, options)


class FakeRequest(RequestState):
    """A request with one answer whose progress a test can read."""

    @property
    def state(self) -> SequenceState:
        """The state of the first answer."""
        return self.sequences[0]

    @property
    def id(self) -> int:
        """The request's number."""
        return self.request.id

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
        return self.state.num_cached

    @property
    def token_times(self) -> list[float]:
        """The ``time.perf_counter`` moment at which each token was chosen."""
        return self.state.token_times


def fake_request(tokens: Sequence[int], num_new: int | None, **options: Any) -> FakeRequest:
    """Return a greedy request for ``num_new`` tokens; ``options`` are further fields of ``EngineRequest``."""
    return FakeRequest(EngineRequest(tuple(tokens), max_new_tokens=num_new, **options), VOCAB_SIZE)


def fake_answer(
    tokens: Sequence[int], num_new: int, masks: Sequence[MaskKind] = (CAUSAL,), is_recurrent: bool = False
) -> list[int]:
    """Return the prompt and the expected answer of ``num_new`` tokens, computed without a cache."""
    answer = list(tokens)
    for _ in range(num_new):
        answer.append(fake_next_token(answer, masks, is_recurrent=is_recurrent))
    return answer


def run_to_end(engine: Engine, requests: Iterable[RequestState], max_steps: int = 10_000) -> None:
    """Serve requests on this thread until all have ended.

    Raises:
        AssertionError: requests are left after ``max_steps`` steps.
    """
    engine.enqueue(requests)
    for _ in range(max_steps):
        engine.step()
        if engine.is_idle:
            return
    raise AssertionError(f"requests are left after {max_steps} steps")


def assert_empty(engine: Engine) -> None:
    """Assert that only the cached sequence holds slots, and that it can be evicted."""
    cache, kv_manager = engine.runner.cache, engine.kv_manager
    assert engine.is_idle and not kv_manager.states and not kv_manager.host_pool.num_swapped_slots
    assert cache.slots.num_used == kv_manager.prefix.idle_slots
    kv_manager.prefix.offload_for(cache.num_slots + 1)
    assert cache.slots.num_used == 0 and cache.slots.num_shared == 0


class FakeProgram:
    """One variant of the fake model, bound to a KV cache like a compiled program."""

    def __init__(self, cache: KVCache, shape: ModelShape, buffers: StepBuffers) -> None:
        self.buffers = buffers
        self.num_runs = 0
        self._shape = shape
        self._states = cache.states
        self._past = [cache.arena.state_view(i, buffers.variant.kv_len) for i in range(len(shape.kv_states))]

    def run(self, meanwhile: Callable[[], None] | None = None) -> float:
        """Fill presents and logits from the buffers and the arena. Return a made-up duration: 8 ms and 1 ms per row, in s."""
        self.num_runs += 1
        if meanwhile is not None:
            meanwhile()
        buffers = self.buffers
        own = np.stack([buffers.input_ids[0], buffers.position_ids.reshape(-1, buffers.variant.rows)[0]], axis=-1)
        for present in buffers.presents:
            present[:] = own
        for index, row in enumerate(buffers.logit_rows):
            checksum = sum(self._checksum(layer, int(row), own) for layer in range(len(self._shape.masks)))
            checksum += self._recur()
            buffers.logits[0, index] = -1.0
            buffers.logits[0, index, checksum % self._shape.vocab_size] = 1.0
        if any((rows[..., 0] == POISON).any() for rows in (own, *self._past)):
            buffers.logits[:] = np.nan  # even if it is masked: 0 x NaN is NaN
        return (8 + buffers.variant.rows) * 1e-3

    def time_unless(self, is_needed: Callable[[], bool]) -> float | None:
        """Return the duration that ``run`` makes up; None if ``is_needed`` is true. Nothing is computed."""
        return None if is_needed() else (8 + self.buffers.variant.rows) * 1e-3

    def _recur(self) -> int:
        """Fold every row of the call into the recurrent state, and return the state."""
        if not self._states:
            return 0
        value = fold(self.buffers.input_ids[0], int(self._states.past[0][0, 0]))
        self._states.present[0][:] = value
        return value

    def _checksum(self, layer: int, row: int, own: NDArray[np.int64]) -> int:
        seen = self.buffers.masks[self._shape.masks[layer]][0, 0, row] == 0
        past = self._past[2 * layer][0][:, seen[: self.buffers.variant.kv_len]]
        assert (past == past[:1]).all(), "heads of one row differ: a re-stride mixed them up"
        pairs = np.concatenate([past[0].astype(np.int64), own[seen[self.buffers.variant.kv_len :]]])
        keys, queries = self.buffers.key_positions, self.buffers.query_positions
        assert keys is not None and queries is not None
        assert np.array_equal(keys[0, 0, 0, seen], pairs[:, 1]), "the positions of keys are not those of their slots"
        assert queries[0, 0, row, 0] == own[row, 1], "the position of a query is not that of its row"
        return checksum_of(pairs[:, 0], pairs[:, 1])


class FakePrograms(dict[Variant, FakeProgram]):
    """Fake programs by variant; ``late`` holds those that are withheld, as if they were still being compiled."""

    def __init__(self, programs: Iterable[tuple[Variant, FakeProgram]]) -> None:
        super().__init__(programs)
        self.late: dict[Variant, FakeProgram] = {}

    def withhold(self, variants: Iterable[Variant]) -> None:
        """Move the programs of these variants to ``late``."""
        self.late |= {variant: self.pop(variant) for variant in variants}


def checksum_of(tokens: NDArray[np.int64], positions: NDArray[np.int64]) -> int:
    """Return the checksum of ``tokens [n]`` at ``positions [n]``; their order does not matter, as in attention."""
    return int(((tokens + 1) * (positions * 7919 + 13)).sum())


def fold(tokens: Iterable[int], value: int = 0) -> int:
    """Return the fake model's recurrent state after ``tokens``; their order matters."""
    for token in tokens:
        value = (value * 31 + int(token) + 1) % 1_000_003
    return value


def fake_next_token(
    tokens: Sequence[int],
    masks: Sequence[MaskKind] = (CAUSAL,),
    vocab_size: int = VOCAB_SIZE,
    is_recurrent: bool = False,
) -> int:
    """Return the token that the fake model must choose after ``tokens``, computed without a cache."""
    ids, positions = np.asarray(tokens, np.int64), np.arange(len(tokens))
    firsts = [kind.first(len(tokens) - 1) for kind in masks]
    seen = sum(checksum_of(ids[first:], positions[first:]) for first in firsts)
    return (seen + (fold(tokens) if is_recurrent else 0)) % vocab_size
