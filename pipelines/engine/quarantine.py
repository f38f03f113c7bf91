"""Finds the request that made the logits of a shared call non-finite, by running each of its requests alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


class Quarantine:
    """The requests of a shared call whose logits were not finite. Runs on the engine's thread.

    A masked NaN still makes a weighted sum NaN, so one request with such values spoils the results of all requests in its
    call. None of these results was kept. Each suspect runs once alone: with finite logits it continues, else it ends with an
    error. Between two suspects the other requests have one call, so that they do not wait for all suspects.
    """

    def __init__(self) -> None:
        self._suspects: set[int] = set()
        self._was_apart = False

    def add(self, request: int) -> None:
        """Add a request whose logits in a shared call were not finite."""
        self._suspects.add(request)

    def discard(self, request: int) -> None:
        """Remove a request that ran with finite logits or has ended."""
        self._suspects.discard(request)

    @property
    def has_suspects(self) -> bool:
        """Whether a request still has to run alone."""
        return bool(self._suspects)

    def select(self, parts: Sequence[Item], id_of: Callable[[Item], int]) -> list[Item]:
        """Return the parts that may share the next call: one suspect alone and all parts without suspects, in turns."""
        if not self._suspects:
            return list(parts)
        suspects = [part for part in parts if id_of(part) in self._suspects]
        others = [part for part in parts if id_of(part) not in self._suspects]
        self._was_apart = bool(suspects) and not (others and self._was_apart)
        return suspects[:1] if self._was_apart else others
