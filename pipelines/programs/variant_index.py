"""Look-ups among the variants of a pipeline: which one holds a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from staticllm.core import Variant


class VariantIndex:
    """The variants of a pipeline, ready to be asked which of them holds a call; ``needs_real_rows``: without an idle row.

    ``sizes`` are all ``(rows, sequences)``, ascending; ``widest`` maps rows to the most sequences of that many rows.
    """

    def __init__(self, variants: Iterable[Variant], needs_real_rows: bool = False) -> None:
        self.variants, self.needs_real_rows = tuple(variants), needs_real_rows
        buckets: dict[tuple[int, int], tuple[int, ...]] = {}
        for variant in sorted(self.variants):
            size = variant.rows, variant.sequences
            buckets[size] = (*buckets.get(size, ()), variant.kv_len)
        self._buckets = buckets
        self.sizes = tuple(sorted(buckets))
        widest = {rows: max(s for r, s in self.sizes if r == rows) for rows, _ in self.sizes}
        self.widest: Mapping[int, int] = MappingProxyType(widest)
        self.max_kv_len = max(variant.kv_len for variant in self.variants)

    def max_decoding(self, num_past: int) -> int:
        """The most sequences that can decode in one call over ``num_past`` arena slots. Programs that are still compiled
        in the background may leave the larger calls with the smaller KV lengths."""
        return max((min(size) for size, buckets in self._buckets.items() if buckets[-1] >= num_past), default=1)

    def smallest(self, num_rows: int, num_sequences: int, num_past: int, is_fresh: bool = False) -> Variant | None:
        """The fewest rows, then sequences, then KV length that hold a call over ``num_past`` arena slots; None if nothing does.

        ``is_fresh``: none of the sequences has a past, so that the arena need not be seen at all.
        """
        for rows, sequences in self.sizes:
            is_held = rows == num_rows if self.needs_real_rows else rows >= num_rows
            if is_held and sequences >= num_sequences:
                variant = self.at(rows, sequences, num_past, is_fresh)
                if variant is not None:
                    return variant
        return None

    def of_rows(self, rows: int, num_sequences: int, num_past: int, is_fresh: bool = False) -> Variant | None:
        """Among variants of exactly so many rows, the smallest that holds the sequences and shows the past."""
        for size, sequences in self.sizes:
            if size == rows and sequences >= num_sequences:
                variant = self.at(rows, sequences, num_past, is_fresh)
                if variant is not None:
                    return variant
        return None

    def at(self, rows: int, sequences: int, num_past: int, is_fresh: bool = False) -> Variant | None:
        """The variant of exactly this size with the smallest KV length that will do."""
        for kv_len in self._buckets.get((rows, sequences), ()):
            is_enough = kv_len >= num_past if kv_len else is_fresh or not num_past
            if is_enough:
                return Variant(rows, kv_len, sequences)
        return None
