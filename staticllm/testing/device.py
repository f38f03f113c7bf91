"""Provides fake programs, which are fast, answer predictably, and detect every mistake in slots, masks and positions.

The fake model's next token is a checksum over all (position, token) pairs that the mask lets the last row see. Slots in the
arena hold exactly these pairs, so a wrong slot, a wrong mask cell, or a lost or doubled commit changes the answer. A token
that was computed with other adapters or other RoPE factors is another token (``adapted_tokens``). A recurrent fake model folds
all tokens of a call, including those of idle rows, into a state in their order.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from staticllm.compiler_passes.compiling.variants import first_to_serve
from staticllm.core import KVState, MaskKind, ModelShape, RecurrentState, Variant
from staticllm.kvcache.cache import KVCache
from staticllm.kvcache.step import BufferPool, StepBuffers
from staticllm.pipelines.programs.model_runner import ModelRunner

CAUSAL = MaskKind()
VOCAB_SIZE = 997  # a prime, so that every pair changes the checksum
POISON = VOCAB_SIZE
"""A prompt token that makes the logits NaN in every call that reads it or whose arena holds it; it is never an answer."""
CERTAIN = 100.0
"""The logit of a token that ``NextToken`` chose; all others have its negative, so that sampling at 1.0 chooses it too."""

ADAPTED, MAX_ADAPTER_CODES = 1000, 1000
"""What is added to a token for each eighth of an adapter's factor, and the number of different sums."""
OTHER_FACTORS = ADAPTED * MAX_ADAPTER_CODES
"""What is added to a token for each RoPE limit that its text exceeds."""
NextToken = Callable[[Sequence[int]], int | None]
"""Returns the token that follows these tokens of one sequence; None leaves the choice to the checksum."""


def fake_shape(
    masks: Sequence[MaskKind] = (CAUSAL,),
    vocab_size: int = VOCAB_SIZE,
    is_packable: bool = True,
    is_recurrent: bool = False,
    num_adapters: int = 2,
    rope_limits: Sequence[int] = (),
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
        num_adapters=num_adapters,
        rope_limits=tuple(rope_limits),
    )


def fake_runner(
    variants: Iterable[Variant],
    masks: Sequence[MaskKind] = (CAUSAL,),
    vocab_size: int = VOCAB_SIZE,
    is_packable: bool = True,
    is_recurrent: bool = False,
    is_staged: bool = False,
    next_token: NextToken | None = None,
    num_adapters: int = 2,
    *,
    num_blocks: int = 1,
    rope_limits: Sequence[int] = (),
) -> ModelRunner:
    """Return a runner over fake programs. ``runner.programs[variant].num_runs`` counts the calls.

    With ``is_staged`` it begins with the fewest programs that can serve; ``add_program`` adds those of ``runner.programs.late``.
    ``next_token`` replaces the checksum; the slots are checked all the same. With ``num_blocks`` above 1, the programs are chains
    of that many blocks, and other calls may run between two of them.

    Args:
        rope_limits: The lengths of a text after which the model has other RoPE factors.
    """
    shape = fake_shape(masks, vocab_size, is_packable, is_recurrent, num_adapters, rope_limits)
    variants = list(variants)
    cache = KVCache(shape, [variant.kv_len for variant in variants])

    def programs_of(pool: BufferPool, variants: Iterable[Variant]) -> FakePrograms:
        buffers = [StepBuffers(variant, pool) for variant in variants]
        return FakePrograms((each.variant, FakeProgram(cache, shape, each, next_token, num_blocks)) for each in buffers)

    pool = BufferPool(variants, shape)
    programs = programs_of(pool, variants)
    decoding = [variant for variant in variants if variant.phase == "generate"]
    inserted = programs_of(BufferPool(decoding, shape, pool.adapters), decoding) if num_blocks > 1 else None
    if is_staged:
        programs.withhold(set(variants) - set(first_to_serve(variants)))
    return ModelRunner(cache, programs, planned=variants, inserted=inserted)


def add_program(runner: ModelRunner, variant: Variant) -> None:
    """Add a withheld fake program, as if it had just been compiled."""
    assert isinstance(runner.programs, FakePrograms)
    runner.programs[variant] = runner.programs.late.pop(variant)
    runner.refresh_variants()


class FakeProgram:
    """One variant of the fake model, bound to a KV cache like a compiled program, in ``num_blocks`` blocks.

    Each block reads all inputs and slots. Blocks that do not find the same ones raise.
    """

    def __init__(
        self,
        cache: KVCache,
        shape: ModelShape,
        buffers: StepBuffers,
        next_token: NextToken | None = None,
        num_blocks: int = 1,
    ) -> None:
        self.buffers = buffers
        self.num_blocks = num_blocks
        self._next_token = next_token
        self.num_runs = 0
        self._shape = shape
        self._states = cache.states
        self._past = [cache.arena.state_view(i, buffers.variant.kv_len) for i in range(len(shape.kv_states))]

    def run(self, meanwhile: Callable[[], None] | None = None, between: Callable[[], None] | None = None) -> float:
        """Fill presents and logits from the buffers and the arena. Return a made-up duration: 8 ms and 1 ms per row, in s."""
        self.num_runs += 1
        if meanwhile is not None:
            meanwhile()
        paused = 0.0 if between is None else sum(self._pause(between) for _ in range(self.num_blocks - 1))
        self._compute()
        return (8 + self.buffers.variant.rows) * 1e-3 + paused

    def _pause(self, between: Callable[[], None]) -> float:
        """Compute a block, call ``between``, and return the seconds that it took; what the block has read must not change."""
        self._compute()
        logits = self.buffers.logits.copy()
        begin = time.perf_counter()
        between()
        seconds = time.perf_counter() - begin
        assert np.array_equal(self.buffers.logits, logits, equal_nan=True), "another call has written this one's logits"
        self._compute()
        assert np.array_equal(self.buffers.logits, logits, equal_nan=True), "this block reads other slots or inputs"
        return seconds

    def _compute(self) -> None:
        buffers = self.buffers
        ids = adapted_tokens(buffers.input_ids[0], buffers.adapter_scales[0])
        if buffers.rope_factors is not None:
            ids = ids + OTHER_FACTORS * buffers.rope_factors[0]
        own = np.stack([ids, buffers.position_ids.reshape(-1, buffers.variant.rows)[0]], axis=-1)
        for present in buffers.presents:
            present[:] = own
        for index, row in enumerate(buffers.logit_rows):
            seen = [self._seen(layer, int(row), own) for layer in range(len(self._shape.masks))]
            checksum = sum(checksum_of(pairs[:, 0], pairs[:, 1]) for pairs in seen) + self._recur(ids)
            chosen = self._chosen(seen[0])
            buffers.logits[0, index] = -1.0 if chosen is None else -CERTAIN
            token = checksum % self._shape.vocab_size if chosen is None else chosen
            buffers.logits[0, index, token] = 1.0 if chosen is None else CERTAIN
        if any((rows[..., 0] % ADAPTED == self._shape.vocab_size).any() for rows in (own, *self._past)):
            buffers.logits[:] = np.nan  # even if it is masked: 0 x NaN is NaN

    def _chosen(self, pairs: NDArray[np.int64]) -> int | None:
        """Return what ``next_token`` says after these (token, position) ``pairs [n, 2]``."""
        return None if self._next_token is None else self._next_token(pairs[np.argsort(pairs[:, 1]), 0].tolist())

    def _recur(self, ids: NDArray[np.int64]) -> int:
        """Fold every row of the call into the recurrent state, and return the state."""
        if not self._states:
            return 0
        value = fold(ids, int(self._states.past[0][0, 0]))
        self._states.present[0][:] = value
        return value

    def _seen(self, layer: int, row: int, own: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the (token, position) pairs ``[n, 2]`` that the mask of ``layer`` lets ``row`` see, after checking them."""
        seen = self.buffers.masks[self._shape.masks[layer]][0, 0, row] == 0
        past = self._past[2 * layer][0][:, seen[: self.buffers.variant.kv_len]]
        assert (past == past[:1]).all(), "heads of one row differ: a re-stride mixed them up"
        pairs = np.concatenate([past[0].astype(np.int64), own[seen[self.buffers.variant.kv_len :]]])
        keys = self.buffers.key_positions
        queries = self.buffers.query_positions
        assert keys is not None and queries is not None
        assert np.array_equal(keys[0, 0, 0, seen], pairs[:, 1]), "the positions of keys are not those of their slots"
        assert queries[0, 0, row, 0] == own[row, 1], "the position of a query is not that of its row"
        return pairs


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


def adapted_tokens(tokens: NDArray[np.int64], scales: NDArray[np.float32]) -> NDArray[np.int64]:
    """Return the tokens ``[n]`` that the fake model reads with the factors ``scales [n, adapters]``; the same without any."""
    weights = np.arange(1, scales.shape[-1] + 1)
    codes = np.rint(8 * scales @ weights).astype(np.int64) % MAX_ADAPTER_CODES
    return tokens + ADAPTED * codes


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
    adapters: Sequence[float] = (),
    rope_limits: Sequence[int] = (),
) -> int:
    """Return the token that the fake model must choose after ``tokens``, computed without a cache."""
    ids = adapted_tokens(np.asarray(tokens, np.int64), np.asarray([adapters], np.float32))
    ids = ids + OTHER_FACTORS * bisect_left(rope_limits, len(tokens))
    positions = np.arange(len(tokens))
    firsts = [kind.first(len(tokens) - 1) for kind in masks]
    seen = sum(checksum_of(ids[first:], positions[first:]) for first in firsts)
    return (seen + (fold(ids) if is_recurrent else 0)) % vocab_size


def fake_answer(
    tokens: Sequence[int],
    num_new: int,
    masks: Sequence[MaskKind] = (CAUSAL,),
    is_recurrent: bool = False,
    vocab_size: int = VOCAB_SIZE,
    adapters: Sequence[float] = (),
    rope_limits: Sequence[int] = (),
) -> list[int]:
    """Return the prompt and the expected answer of ``num_new`` tokens, computed without a cache."""
    answer = list(tokens)
    for _ in range(num_new):
        answer.append(fake_next_token(answer, masks, vocab_size, is_recurrent, adapters, rope_limits))
    return answer
