"""Runs a text in several calls: its progress and KV slots, the cached prefixes for other texts, and the arrays of the calls.

A text runs in chunks if it is longer than any sequence of the programs. A text that arrives alone also runs in chunks if its
prefix is cached, such as the instruction before each query. A prefix that two consecutive texts of this kind share is worth
caching.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staticllm.core import EncoderShape, EncoderVariant, KVState, ModelShape, Pooling
from staticllm.ports import HIDDEN, INPUT_IDS, KEPT_ROWS, POOL, POSITION_IDS, TOKEN_TYPE_IDS, past_names, present_names

from ....kvcache.cache import KVCache
from ....kvcache.groups import place_of
from ....kvcache.host_pool import HostPool
from ....kvcache.sequence import KVSequence
from ....kvcache.stored import StoredSequence
from .encoder_buffers import (
    EncoderBuffers,
    pooling_weights,
    positions_of,
    visibility,
)
from .prefix_groups import LEAST_SHARED, num_common
from .tokenized_text import TokenizedText

Rows = NDArray[np.float32]
MOST_KEPT, MOST_TOKENS = 4, 128
"""The number of beginnings of the largest length that are kept, and this length in tokens."""
_TYPE_BITS = 40
"""The bit of a token's key in the cache from which on its type counts."""


class ContinuedText:
    """The progress of one text: its first ``num_done`` tokens have run, or are kept. Only ``ChunkCache`` changes it.

    ``num_kept``: the tokens at its start that are worth keeping for other texts. ``stored``: its keys and values while another
    text uses the arena.
    """

    def __init__(self, text: TokenizedText, num_done: int, num_kept: int = 0) -> None:
        self.text = text
        self.num_done = num_done
        self.num_kept = num_kept
        self.stored: StoredSequence | None = None

    @property
    def num_left(self) -> int:
        """The number of tokens that have not run."""
        return len(self.text) - self.num_done

    @property
    def keys(self) -> list[int]:
        """What the text's tokens are compared by: their ids and types."""
        ids = self.text.ids
        types = self.text.types
        keys: list[int] = (ids if types is None else ids | (types << _TYPE_BITS)).tolist()
        return keys


class ChunkCache:
    """The KV cache of texts that run in chunks: one of them at a time is in the arena, the others are swapped to the host.

    Runs on the thread that owns the device.
    """

    def __init__(self, shape: EncoderShape, variants: Sequence[EncoderVariant]) -> None:
        self.kv = KVCache(_model_shape(shape), [variant.past for variant in variants])
        self._kept = HostPool(MOST_KEPT * MOST_TOKENS)
        self._sequence: KVSequence | None = None
        self._owner: weakref.ref[ContinuedText] | None = None  # a text that was given up has no owner
        self._previous: TokenizedText | None = None
        self._num_common = 0  # of the previous lone text and the one before it

    @property
    def num_kept_tokens(self) -> int:
        """The number of tokens of all cached prefixes."""
        return self._kept.num_kept_slots

    def continued(self, text: TokenizedText, num_kept: int = 0) -> ContinuedText:
        """Return a text whose kept beginning need not run. The last token always runs: its hidden state is the result."""
        chunk = ContinuedText(text, 0, num_kept)
        _, common = self._kept.longest(chunk.keys[:-1])
        chunk.num_done = common if common >= LEAST_SHARED else 0
        return chunk

    def worth_keeping(self, text: TokenizedText) -> int:
        """Return how many tokens of a lone text are worth keeping: those with which the lone text before it began, too."""
        previous = self._previous
        self._previous = text
        if previous is not text:  # else it is planned once more
            count = 0 if previous is None else min(num_common(text, previous), MOST_TOKENS, len(text) - 1)
            self._num_common = count if count >= LEAST_SHARED else 0
        return self._num_common

    def enter(self, chunk: ContinuedText, variant: EncoderVariant) -> KVSequence:
        """Return the sequence of a text in the arena, which is laid out as ``variant`` sees it."""
        owner = self._owner() if self._owner is not None else None
        if self._sequence is None or owner is not chunk:
            if owner is not None and self._sequence is not None:
                owner.stored = self.kv.copy_out(self._sequence)
            self._leave()
            self._sequence = self._begun(chunk)
            self._owner = weakref.ref(chunk)
        self.kv.arena.set_stride(variant.past, self.kv.slots.high_slot)
        return self._sequence

    def commit(self, chunk: ContinuedText, presents: Sequence[Rows], count: int) -> None:
        """Keep the keys and values of a text's next ``count`` tokens, the first rows of each group's presents."""
        assert self._sequence is not None
        tokens = chunk.keys[chunk.num_done : chunk.num_done + count]
        with self.kv.transaction():
            self.kv.append(self._sequence, tokens, presents, slice(0, count))
        chunk.num_done += count

    def end(self, chunk: ContinuedText, presents: Sequence[Rows], is_finite: bool) -> None:
        """Free the slots of a text after its last call, and cache its prefix if it is useful and all is finite."""
        assert self._sequence is not None
        if chunk.num_kept and is_finite:
            self.commit(chunk, presents, max(0, chunk.num_kept - chunk.num_done))
            self.kv.cut(self._sequence, chunk.num_kept)
            self._kept.keep(self.kv.copy_out(self._sequence))
        self._leave()

    def release(self) -> None:
        """Free the memory. The cache must not be used afterwards."""
        self._kept.clear()
        self.kv.release()

    def _leave(self) -> None:
        if self._sequence is not None:
            self.kv.close(self._sequence)
        self._sequence = None
        self._owner = None

    def _begun(self, chunk: ContinuedText) -> KVSequence:
        """Return the sequence of a text that enters the arena: swapped, from a kept beginning, or empty."""
        stored = chunk.stored
        length = chunk.num_done
        chunk.stored = None
        if stored is None and length:
            stored, common = self._kept.longest(chunk.keys[:length])
            length = min(length, common)
            if stored is not None:
                self._kept.touch(stored)
        chunk.num_done = length if stored is not None else 0
        return self.kv.bring_back(stored, length) if stored is not None else self.kv.open()


def _model_shape(shape: EncoderShape) -> ModelShape:
    """Return what the KV cache knows of an encoder: a state for each past port."""
    states = tuple(KVState(index, "key", f"past.{index}", *sizes) for index, sizes in enumerate(shape.past))
    return ModelShape(states, (), vocab_size=1, position_rank=0)


class ChunkBuffers(EncoderBuffers):
    """The host memory of a variant that continues a text; its past rows are the arena's.

    ``presents``: per group of states ``[n, heads, S, head_dim]``, for the new keys and values; variants of equal rows share it.
    """

    def __init__(
        self, shape: EncoderShape, variant: EncoderVariant, pad_id: int, cache: KVCache, presents: Sequence[Rows]
    ) -> None:
        super().__init__(shape, variant, pad_id)
        self.presents = presents
        for index, (past, present) in enumerate(zip(past_names(shape), present_names(shape), strict=True)):
            group, line = place_of(cache.arena.groups, index)
            self.arrays[past] = cache.arena.state_view(index, variant.past)
            self.arrays[present] = presents[group][line : line + 1]

    def fill_chunk(self, chunk: ContinuedText, sequence: KVSequence, count: int, pooling: Pooling) -> None:
        """Write the next ``count`` tokens of a text, what they see, and the weight of the last token in its vector."""
        text = chunk.text
        start = chunk.num_done
        end = start + count
        for name in {TOKEN_TYPE_IDS, POOL} & self.arrays.keys():
            self.arrays[name].fill(0)
        self.arrays[INPUT_IDS].fill(self.pad_id)
        self.arrays[INPUT_IDS][0, :count] = text.ids[start:end]
        if self.shape.has_positions:
            self.arrays[POSITION_IDS][0, :count] = positions_of(self.shape, text.ids[:end])[start:]
        if self.shape.has_token_types and text.types is not None:
            self.arrays[TOKEN_TYPE_IDS][0, :count] = text.types[start:end]
        self.arrays[KEPT_ROWS][:] = np.arange(self.variant.rows)
        for kind in self.shape.masks:
            mask = self.arrays[kind.port_name][0, 0]
            mask.fill(HIDDEN)
            past = self.variant.past
            own = np.arange(start, end)
            mask[:count, sequence.slots] = visibility(kind, own, np.arange(start))
            mask[:count, past : past + count] = visibility(kind, own, own)
        weights = pooling_weights(pooling, len(text), text.num_prompt)
        self.arrays[POOL][0, :count] = weights[start:end]


def new_presents(cache: KVCache, rows: int) -> list[NDArray[Any]]:
    """Return memory for the new keys and values of ``rows`` tokens: per group ``[n, heads, rows, head_dim]``."""
    return [np.zeros(group.shape(rows), group.dtype) for group in cache.arena.groups]


def chunk_variant(variants: Sequence[EncoderVariant], num_done: int, num_left: int) -> EncoderVariant:
    """Return the variant of the next chunk: the smallest that holds the rest of the text, else the largest.

    Of the same rows, the one that sees the fewest rows that are empty.

    Raises:
        ValueError: no variant sees that many earlier rows.
    """
    fitting = [variant for variant in variants if variant.past >= num_done]
    if not fitting:
        raise ValueError(f"no program continues a text after {num_done} tokens")
    enough = [variant.rows for variant in fitting if variant.rows >= num_left]
    rows = min(enough) if enough else max(variant.rows for variant in fitting)
    return min((variant for variant in fitting if variant.rows == rows), key=lambda variant: variant.past)
