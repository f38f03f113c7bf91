"""Plans encoder calls: packs texts into the sequences of as few and as cheap calls as possible."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from staticllm.core import EncoderVariant

from .prefix_groups import CommonPrefixes, PrefixGroup

Cost = Callable[[EncoderVariant], float]
"""Returns the seconds that one call of a variant takes."""
FEW_TEXTS = 16
"""For up to this many texts, every size of sequences is tried."""
BULK_SIZES = 3
"""The number of sizes that are tried for more texts: those with the cheapest tokens."""


@dataclass(frozen=True)
class PackedCall:
    """One call: for each sequence of its variant that is used, the indices of the texts in it, in their order."""

    variant: EncoderVariant
    sequences: tuple[tuple[int, ...], ...]

    @property
    def texts(self) -> tuple[int, ...]:
        """The indices of all texts, in the order of the program's output."""
        return tuple(index for sequence in self.sequences for index in sequence)


@dataclass(eq=False)
class _Bin:
    """The texts of one sequence of at most ``rows`` tokens."""

    rows: int
    used: int
    texts: list[int]


def plan_calls(
    lengths: Sequence[int],
    variants: Sequence[EncoderVariant],
    cost: Cost,
    is_packable: bool = True,
    prefixes: CommonPrefixes | None = None,
) -> list[PackedCall]:
    """Return calls that hold texts of ``lengths`` tokens, each once; the calls with the longest texts come first.

    Texts are put into sequences by best fit decreasing (Johnson: Near-optimal bin packing algorithms, 1973), of a given size or
    the smallest that holds the text. Then the sequences, by their used rows, are divided among calls so that the sum of costs is
    least. This is done for each size in question, and the cheapest calls are taken. Without ``is_packable``, each sequence holds
    one text.

    Args:
        prefixes: The texts that begin alike, whose beginning takes rows of a sequence only once; its texts are in their
            ``order`` then.

    Raises:
        ValueError: a text has no tokens, or more than any variant has rows.
    """
    if not lengths:
        return []
    sizes = sorted({variant.rows for variant in variants})
    if min(lengths) < 1 or max(lengths) > sizes[-1]:
        raise ValueError(f"texts of {min(lengths)} to {max(lengths)} tokens, programs of 1 to {sizes[-1]}")
    costs = [(variant, cost(variant)) for variant in variants]
    most = {size: min(_most_texts(v) for v in variants if v.rows == size) for size in sizes} if is_packable else {}
    found = [
        _divide(_fill(lengths, sizes, size, most, prefixes), costs, is_packable)
        for size in _sizes_to_try(lengths, sizes, costs, prefixes is not None)
    ]
    return min(found, key=lambda plan: plan[0])[1]


def _sizes_to_try(
    lengths: Sequence[int], sizes: Sequence[int], costs: Sequence[tuple[EncoderVariant, float]], are_alike: bool
) -> Sequence[int]:
    """Return the sizes of sequences that can make a difference, of many texts those with the cheapest tokens.

    Smaller ones than that of the shortest text, and larger ones than that of all texts together, give the same sequences. If
    texts ``are_alike``, the largest sequences have the fewest tokens, though not the cheapest.
    """
    first, last = (bisect_left(sizes, tokens) for tokens in (min(lengths), sum(lengths)))
    useful = sizes[first : last + 1]
    if len(lengths) <= FEW_TEXTS:
        return useful
    per_token: dict[int, float] = {}
    for variant, seconds in costs:
        mean = seconds / (variant.batch * variant.rows)
        per_token[variant.rows] = min(mean, per_token.get(variant.rows, mean))
    cheapest = sorted(useful, key=lambda size: (per_token[size], size))[:BULK_SIZES]
    return cheapest if not are_alike or useful[-1] in cheapest else [*cheapest, useful[-1]]


def _most_texts(variant: EncoderVariant) -> int:
    return variant.texts // variant.batch


def _fill(
    lengths: Sequence[int],
    sizes: Sequence[int],
    best: int,
    most: dict[int, int],
    prefixes: CommonPrefixes | None,
) -> list[_Bin]:
    """Return sequences with all texts. ``most``: the most texts of a sequence of each size; one if it is empty."""
    bins: list[_Bin] = []
    open_bins: dict[int, _OpenBins] = {}
    of_group: dict[tuple[PrefixGroup, int], list[_Bin]] = {}
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        num_new = lengths[index]
        size = max(best, sizes[bisect_left(sizes, num_new)])
        opened = open_bins.setdefault(size, _OpenBins(size))
        group = prefixes.groups[index] if prefixes is not None and most else None
        alike = of_group.setdefault((group, size), []) if group is not None else []
        found = None if group is None else opened.take_from(alike, num_new - group.num_tokens)
        if found is not None and group is not None:
            num_new -= group.num_tokens
        else:
            found = opened.take(num_new) if most else None
            alike.append(found := found or _Bin(size, 0, []))
            if not found.texts:
                bins.append(found)
        found.used += num_new
        found.texts.append(index)
        if len(found.texts) < most.get(size, 1):
            opened.put(found)
    if prefixes is not None:
        for found in bins:
            found.texts.sort(key=prefixes.order.__getitem__)
    return bins


class _OpenBins:
    """The sequences of one size that take more texts, by their free rows."""

    def __init__(self, size: int) -> None:
        self._by_room: list[list[_Bin]] = [[] for _ in range(size + 1)]

    def put(self, found: _Bin) -> None:
        self._by_room[found.rows - found.used].append(found)

    def take(self, num_rows: int) -> _Bin | None:
        """Remove and return the one with the least room for that many rows."""
        return next((room.pop() for room in self._by_room[num_rows:] if room), None)

    def take_from(self, bins: Sequence[_Bin], num_rows: int) -> _Bin | None:
        """Remove and return the one of ``bins`` with the least room for that many rows."""
        fitting = [found for found in bins if found.rows - found.used >= num_rows and self._has(found)]
        found = min(fitting, key=lambda each: each.rows - each.used, default=None)
        if found is not None:
            self._by_room[found.rows - found.used].remove(found)
        return found

    def _has(self, found: _Bin) -> bool:
        return any(each is found for each in self._by_room[found.rows - found.used])


def _divide(
    bins: list[_Bin], costs: Sequence[tuple[EncoderVariant, float]], is_packable: bool
) -> tuple[float, list[PackedCall]]:
    """Divide the sequences, in descending order of their used rows, among calls with the least sum of costs.

    Return this sum in seconds, and the calls.
    """
    bins.sort(key=lambda found: -found.used)
    num_texts = [0, *accumulate(len(found.texts) for found in bins)]
    least: list[tuple[float, EncoderVariant | None]] = [(0.0, None)]  # from the i-th last sequence on: cost, first call
    for start in range(len(bins) - 1, -1, -1):
        used = bins[start].used
        left = len(bins) - start

        def holds(variant: EncoderVariant, start: int = start, left: int = left) -> bool:
            return not is_packable or num_texts[start + min(left, variant.batch)] - num_texts[start] <= variant.texts

        options = [
            (seconds + least[max(0, left - variant.batch)][0], variant)
            for variant, seconds in costs
            if variant.rows >= used and holds(variant)
        ]
        least.append(min(options, key=lambda option: option[0]))
    calls: list[PackedCall] = []
    start = 0
    while start < len(bins):
        variant = least[len(bins) - start][1]
        assert variant is not None
        taken = bins[start : start + variant.batch]
        calls.append(PackedCall(variant, tuple(tuple(found.texts) for found in taken)))
        start += variant.batch
    return least[-1][0], calls
