"""Groups the segments of a program so that few different groups make it up: usually one per kind of layer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

Group = tuple[int, ...]
"""Signatures of consecutive segments."""


def group_segments(signatures: Sequence[int]) -> list[Group]:
    """Return the segments in groups, of which as few as possible differ, and then as few as possible follow each other.

    Segments are joined only if that leaves fewer different groups: ``1 2 3 2 1 2 3 2`` becomes ``12 32 12 32``, since 2 is
    always the second of two; ``1 1 1 2`` stays as it is. So does ``1 9 2 9 3``, of which nothing would repeat any more.
    """
    groups: list[Group] = [(signature,) for signature in signatures]
    while True:
        joined = [_joined(groups, group, is_second) for group in dict.fromkeys(groups) for is_second in (True, False)]
        kept = [found for found in joined if _repeats(found) or not _repeats(groups)]
        best = min(kept, key=lambda found: (len(set(found)), len(found)), default=groups)
        if len(set(best)) >= len(set(groups)):
            return groups
        groups = best


def _repeats(groups: Sequence[Group]) -> bool:
    return len(set(groups)) < len(groups)


def _joined(groups: Sequence[Group], wanted: Group, is_second: bool) -> list[Group]:
    """Return the groups after every ``wanted`` one was joined to the one before it, or to the one after it."""
    is_doubled = any(first == second == wanted for first, second in pairwise(groups))
    if is_doubled:
        return list(groups)
    found: list[Group] = []
    is_open = False
    for group in groups:
        is_joined = bool(found) and (group == wanted if is_second else is_open)
        if is_joined:
            found[-1] = (*found[-1], *group)
        else:
            found.append(group)
        is_open = group == wanted
    return found
