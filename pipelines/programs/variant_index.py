"""Finds the variant that holds a call, and the variants that run a prompt in chunks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

from staticllm.core import Variant

Chunk = tuple[Variant, int]
"""A call of a prompt: its variant and number of tokens."""
SHORT_REST = 32
"""Above this many remaining tokens, only full chunks of at least ``LEAST_SHARE`` of them are tried, to shorten the search."""
LEAST_SHARE = 1 / 16


class VariantIndex:
    """The variants of a pipeline, with look-ups of the one that holds a call.

    ``needs_real_rows``: no row of a call may be idle. All look-ups except ``with_logits`` are for calls with logits after the
    last token of each sequence, and find only variants for these. ``sizes`` are their ``(rows, sequences)``, ascending.
    ``decoding`` are the variants with one row per sequence, ascending. ``chunk_rows`` are the numbers of rows in which a prompt
    may run, ascending. ``widest`` maps a number of rows to the largest number of sequences of its variants. ``rows_with_logits``
    are the numbers of rows of variants with logits after more rows than the last one of each sequence, descending.
    """

    def __init__(self, variants: Iterable[Variant], needs_real_rows: bool = False) -> None:
        self.variants = tuple(variants)
        self.needs_real_rows = needs_real_rows
        buckets: dict[tuple[int, int], tuple[int, ...]] = {}
        self._of_size: dict[tuple[int, int], list[Variant]] = {}
        ordinary = sorted(variant for variant in self.variants if not variant.extra_logits)
        for variant in ordinary:
            size = variant.rows, variant.sequences
            buckets[size] = (*buckets.get(size, ()), variant.kv_len)
            self._of_size.setdefault(size, []).append(variant)
        self.buckets = buckets
        self.rows_with_logits = tuple(sorted({v.rows for v in self.variants if v.extra_logits}, reverse=True))
        self._by_logits = sorted(self.variants, key=lambda found: (found.rows, found.num_logits, found))
        self.sizes = tuple(sorted(buckets))
        widest = {rows: max(s for r, s in self.sizes if r == rows) for rows, _ in self.sizes}
        self.widest: Mapping[int, int] = MappingProxyType(widest)
        self.chunk_rows = tuple(sorted({rows for rows, sequences in self.sizes if sequences == 1 or rows > sequences}))
        reaches = sorted({kv_lens[-1] for kv_lens in buckets.values()})
        self._decoding = [  # (KV length, the largest number of sequences that decode over it), ascending
            (reach, max(min(size) for size, kv_lens in buckets.items() if kv_lens[-1] >= reach)) for reach in reaches
        ]
        self.decoding = tuple(v for v in ordinary if v.rows == v.sequences)
        self._kv_lens = sorted({variant.kv_len for variant in ordinary})
        self.max_kv_len = self._kv_lens[-1]
        self._chunk_variants: dict[tuple[int, bool], tuple[Variant, ...]] = {}

    def reach_of(self, num_past: int) -> int:
        """Return a number that is equal for all ``num_past`` over which every call has the same variants."""
        return bisect_left(self._kv_lens, num_past)

    def max_decoding(self, num_past: int) -> int:
        """Return the largest number of sequences that can decode in one call over ``num_past`` arena slots.

        It may decrease with ``num_past`` while programs are still compiled in the background.
        """
        place = bisect_left(self._decoding, (num_past, 0))
        return self._decoding[place][1] if place < len(self._decoding) else 1

    def smallest(self, num_rows: int, num_sequences: int, num_past: int, is_fresh: bool = False) -> Variant | None:
        """Return the variant with the fewest rows, sequences and KV slots that holds a call over ``num_past`` arena slots.

        Return None if no variant does. ``is_fresh``: no sequence has a past, so that the call need not see the arena.
        """
        for rows, sequences in self.sizes:
            is_held = rows == num_rows if self.needs_real_rows else rows >= num_rows
            if is_held and sequences >= num_sequences:
                variant = self.at(rows, sequences, num_past, is_fresh)
                if variant is not None:
                    return variant
        return None

    def of_rows(self, rows: int, num_sequences: int, num_past: int, is_fresh: bool = False) -> Variant | None:
        """Return the smallest variant of exactly ``rows`` rows that holds the sequences and shows the past, or None."""
        for size, sequences in self.sizes:
            if size == rows and sequences >= num_sequences:
                variant = self.at(rows, sequences, num_past, is_fresh)
                if variant is not None:
                    return variant
        return None

    def chunk_variants(self, num_past: int, is_fresh: bool = False) -> tuple[Variant, ...]:
        """Return the variants that can run a chunk of one sequence over ``num_past`` arena slots, by ascending rows."""
        key = self.reach_of(num_past), is_fresh
        if key not in self._chunk_variants:
            found = (self.of_rows(rows, 1, num_past, is_fresh) for rows in self.chunk_rows)
            self._chunk_variants[key] = tuple(variant for variant in found if variant is not None)
        return self._chunk_variants[key]

    def at(self, rows: int, sequences: int, num_past: int, is_fresh: bool = False) -> Variant | None:
        """Return the variant of exactly this size with the smallest KV length that shows the past, or None."""
        kv_lens = self.buckets.get((rows, sequences), ())
        if kv_lens and not kv_lens[0] and (is_fresh or not num_past):
            return self._of_size[rows, sequences][0]
        place = bisect_left(kv_lens, max(num_past, 1))
        return self._of_size[rows, sequences][place] if place < len(kv_lens) else None

    def with_logits(
        self, num_rows: int, num_sequences: int, num_logits: int, num_past: int, is_fresh: bool = False
    ) -> Variant | None:
        """Return the smallest of all variants that holds a call with logits after ``num_logits`` of its rows, or None."""
        for variant in self._by_logits:
            is_held = variant.rows == num_rows if self.needs_real_rows else variant.rows >= num_rows
            has_room = variant.sequences >= num_sequences and variant.num_logits >= num_logits
            if is_held and has_room and _shows(variant.kv_len, num_past, is_fresh):
                return variant
        return None


def _shows(kv_len: int, num_past: int, is_fresh: bool) -> bool:
    """Return whether a program of this KV length shows every slot that a call must see."""
    return kv_len >= num_past if kv_len else is_fresh or not num_past


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
            variants = index.chunk_variants(past, seen[1])
            options[seen] = ChunkOptions(variants, tuple(map(cost, variants)))
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


def _way_to(done: int, ways: dict[int, tuple[float, int, Chunk | None]]) -> list[Chunk]:
    chunks: list[Chunk] = []
    while (step := ways[done])[2] is not None:
        chunks.append(step[2])
        done = step[1]
    return chunks[::-1]
