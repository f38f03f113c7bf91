"""Finds the variant that holds a call among the variants of a pipeline."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from staticllm.core import Variant


class VariantIndex:
    """The variants of a pipeline, with look-ups of the one that holds a call.

    ``needs_real_rows``: no row of a call may be idle. All look-ups except ``with_logits`` are for calls with logits after the
    last token of each sequence, and find only variants for these. ``sizes`` are their ``(rows, sequences)``, ascending.
    ``widest`` maps a number of rows to the largest number of sequences of its variants. ``rows_with_logits`` are the numbers of
    rows of variants with logits after more rows than the last one of each sequence, descending.
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
        self._buckets = buckets
        self.rows_with_logits = tuple(sorted({v.rows for v in self.variants if v.extra_logits}, reverse=True))
        self._by_logits = sorted(self.variants, key=lambda found: (found.rows, found.num_logits, found))
        self.sizes = tuple(sorted(buckets))
        widest = {rows: max(s for r, s in self.sizes if r == rows) for rows, _ in self.sizes}
        self.widest: Mapping[int, int] = MappingProxyType(widest)
        reaches = sorted({kv_lens[-1] for kv_lens in buckets.values()})
        self._decoding = [  # (KV length, the largest number of sequences that decode over it), ascending
            (reach, max(min(size) for size, kv_lens in buckets.items() if kv_lens[-1] >= reach)) for reach in reaches
        ]
        self._kv_lens = sorted({variant.kv_len for variant in ordinary})
        self.max_kv_len = self._kv_lens[-1]

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

    def at(self, rows: int, sequences: int, num_past: int, is_fresh: bool = False) -> Variant | None:
        """Return the variant of exactly this size with the smallest KV length that shows the past, or None."""
        kv_lens = self._buckets.get((rows, sequences), ())
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
