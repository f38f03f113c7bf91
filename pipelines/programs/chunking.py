"""Plans the chunks of a prompt: which variants run it, and how many tokens each of them processes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from staticllm.core import Variant
from staticllm.pipelines.programs.variant_index import VariantIndex

Chunk = tuple[Variant, int]
"""A call of a prompt: its variant and number of tokens."""
SHORT_REST = 32
"""Above this many remaining tokens, only full chunks of at least ``LEAST_SHARE`` of them are tried, to shorten the search."""
LEAST_SHARE = 1 / 16


@dataclass(frozen=True)
class ChunkOptions:
    """The variants that can run the next chunk, by ascending rows, and the seconds that each takes."""

    variants: tuple[Variant, ...]
    seconds: tuple[float, ...]

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """The rows of each variant, ascending."""
        return tuple(variant.rows for variant in self.variants)

    @cached_property
    def cheapest_from(self) -> tuple[int, ...]:
        """For each variant, the index of the cheapest variant with at least as many rows."""
        best = len(self.seconds) - 1
        places = list[int]()
        for place in reversed(range(len(self.seconds))):
            best = place if self.seconds[place] <= self.seconds[best] else best
            places.append(best)
        return tuple(reversed(places))

    def next_chunks(self, rest: int, needs_real_rows: bool) -> list[tuple[float, Variant, int]]:
        """Return the calls that may run next if ``rest`` tokens are left: seconds, variant and number of tokens of each.

        They are full chunks, and the cheapest variant that holds the whole rest.
        """
        end = bisect_left(self.rows, rest + 1)
        least = 1.0 if rest <= SHORT_REST or not end else min(rest * LEAST_SHARE, self.rows[end - 1])
        start = bisect_left(self.rows, least)
        chunks = [(self.seconds[i], self.variants[i], self.rows[i]) for i in range(start, end)]
        if end < len(self.rows) and not needs_real_rows:
            place = self.cheapest_from[end]
            chunks.append((self.seconds[place], self.variants[place], rest))
        return chunks


def plan_chunks(
    index: VariantIndex,
    cost: Callable[[Variant], float],
    num_tokens: int,
    num_past: int,
    is_fresh: bool = False,
    num_leaving: int = 0,
) -> list[Chunk]:
    """Return the cheapest way to run ``num_tokens`` of one sequence over ``num_past`` arena slots, in order.

    ``num_leaving`` of these slots are free after the first chunk.

    All chunks are full, except that the last one may have idle rows: 20 tokens run in 64 rows, or in 16 and 16, or in 16 and
    four single rows. The search visits each number of processed tokens once, in ascending order, with the cheapest way to it.
    """
    options: dict[tuple[int, bool], ChunkOptions] = {}  # by KV length and ``is_fresh``
    ways: dict[int, tuple[float, int, Chunk | None]] = {
        0: (0.0, 0, None)
    }  # by tokens done: seconds, tokens before, chunk
    todo = [0]
    while todo[0] < num_tokens:
        done = todo.pop(0)
        num_others = num_past - num_leaving if done else num_past
        past = min(num_others + done, index.max_kv_len)  # free slots below the highest used slot are filled first
        seen = index.reach_of(past), is_fresh and not done
        if seen not in options:
            options[seen] = _options(index, cost, past, seen[1])
        for seconds, variant, count in options[seen].next_chunks(num_tokens - done, index.needs_real_rows):
            after = done + count
            total = ways[done][0] + seconds
            if after not in ways:
                todo.insert(bisect_left(todo, after), after)
            elif total >= ways[after][0]:
                continue
            ways[after] = total, done, (variant, count)
        assert todo, "no variant holds the prompt"
    return _way_to(num_tokens, ways)


def _options(index: VariantIndex, cost: Callable[[Variant], float], past: int, is_fresh: bool) -> ChunkOptions:
    found = (index.at(rows, 1, past, is_fresh) for rows, sequences in index.sizes if sequences == 1)
    variants = tuple(variant for variant in found if variant is not None)
    return ChunkOptions(variants, tuple(map(cost, variants)))


def _way_to(done: int, ways: dict[int, tuple[float, int, Chunk | None]]) -> list[Chunk]:
    chunks: list[Chunk] = []
    while (step := ways[done])[2] is not None:
        chunks.append(step[2])
        done = step[1]
    return chunks[::-1]
