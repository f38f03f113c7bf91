"""A KV cache in pages, with a program that checks what it reads."""

import numpy as np

from staticllm.core import KVState, ModelShape, Variant
from staticllm.kvcache.paged import kv_cache
from staticllm.kvcache.step import BufferPool, Segment, Step, StepBuffers

PAGE = 4
HEADS = 2
STATES = tuple(KVState(layer, role, "v", HEADS, 3) for layer in range(2) for role in ("key", "value"))
SHAPE = ModelShape(STATES, (), 8, 2, page_size=PAGE)
VARIANT = Variant(64, 256, 6)


class Paged:
    """A cache, and a program that writes each token's number to its page and checks all that its sequence has there."""

    def __init__(self, num_slots=256, variant=VARIANT):
        self.variant = variant
        self.cache = kv_cache(SHAPE, [num_slots], num_sequences=variant.sequences)
        self.pool = BufferPool([variant], SHAPE)
        self.buffers = StepBuffers(variant, self.pool)

    def run(self, parts, accepted=None, to_host=False):
        """Run ``(sequence, tokens)`` pairs in one call."""
        segments = tuple(Segment(sequence, np.array(tokens, np.int64), to_host=to_host) for sequence, tokens in parts)
        step = Step(self.variant, segments)
        self.cache.fill(step, self.buffers)
        self.play(parts)
        return self.cache.commit(step, self.buffers, accepted)

    def play(self, parts):
        tables = self.pool.pages.arrays()
        views = [self.cache.arena.state_view(index) for index in range(len(STATES))]
        assert tables["max_context_len"] == max(len(sequence) + len(tokens) for sequence, tokens in parts)
        for place, (sequence, tokens) in enumerate(parts):
            past = tables["past_lens"][place]
            begin, end = tables["subsequence_begins"][place : place + 2]
            first, last = tables["block_indices_begins"][place : place + 2]
            pages = tables["block_indices"][first:last]
            assert (past, end - begin) == (len(sequence), len(tokens))
            assert len(pages) == -(-(past + len(tokens)) // PAGE)
            np.testing.assert_array_equal(self.buffers.input_ids[0, begin:end], tokens)
            np.testing.assert_array_equal(self.buffers.position_ids[0, begin:end], np.arange(past, past + len(tokens)))
            for view in views:
                for position, token in enumerate(tokens, past):
                    view[pages[position // PAGE], :, position % PAGE] = token
                rows = view[pages].transpose(1, 0, 2, 3).reshape(HEADS, -1, 3)[:, : past + len(tokens)]
                assert (rows == np.array([*sequence.tokens, *tokens])[None, :, None]).all()

    def check(self, sequences):
        """Check that each sequence's slots hold its tokens, and that the allocator knows how many are in use."""
        for sequence in sequences:
            stored = self.cache.copy_out(sequence)
            for array in stored.kv:
                assert (array == np.array(sequence.tokens)[None, None, :, None]).all()
        used = {int(slot) for sequence in sequences for slot in sequence.slots}
        assert self.cache.slots.num_used == len(used)
        for sequence in sequences:
            places = np.arange(len(sequence)) % PAGE
            assert (sequence.slots % PAGE == places).all(), "a token lies in another place of its page"
