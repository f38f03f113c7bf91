"""Which tokens the pairs of a vocabulary build of single letters.

OpenVINO's tokenizer begins with the longest tokens that no pair builds, wherever they are in a text. The libraries that made the
vocabulary begin with letters. So a token is only given to it with its text if pairs build it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

Pair = tuple[str, str]


def live_pairs(pairs: Iterable[Pair], letters: Collection[str], excluded: Collection[str] = ()) -> list[Pair]:
    """Return the pairs whose parts can be there, in their order and each once.

    Args:
        excluded: What no pair may build.
    """
    waiting = [pair for pair in dict.fromkeys(pairs) if "".join(pair) not in excluded]
    built = set(letters)
    live = set[Pair]()
    while found := [pair for pair in waiting if pair not in live and pair[0] in built and pair[1] in built]:
        live.update(found)
        built.update(map("".join, found))
    return [pair for pair in waiting if pair in live]


def merged(word: str, ranks: Mapping[Pair, int]) -> list[str]:
    """Return what is left of a word's letters when all pairs are merged: the least rank first, and the leftmost of those."""
    parts = list(word)
    none = len(ranks)
    while len(parts) > 1:
        rank, place = min((ranks.get(pair, none), place) for place, pair in enumerate(pairwise(parts)))
        if rank == none:
            break
        parts[place : place + 2] = ["".join(parts[place : place + 2])]
    return parts


def pairs_by_score(tokens: Sequence[str], scores: np.ndarray[Any, Any]) -> list[Pair]:
    """Return the pairs of tokens that are tokens together, in the order in which SentencePiece merges them: by score."""
    places = {token: place for place, token in enumerate(tokens)}
    found: list[tuple[float, int, int, Pair]] = []
    for token, place in places.items():
        for cut in range(1, len(token)):
            left = places.get(token[:cut])
            right = places.get(token[cut:])
            if left is not None and right is not None:
                found.append((-scores[place], left, right, (token[:cut], token[cut:])))
    return [pair for *_, pair in sorted(found)]


def impossible(place: int) -> bytes:
    """Return a text that is in no text, for it is no UTF-8, and that no other token has."""
    return b"\xff%d" % place
