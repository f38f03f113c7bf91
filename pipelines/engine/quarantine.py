"""After a call whose numbers were not finite: its requests run again, each apart from the others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")


class Quarantine:
    """Finds the request that spoils a packed call.

    A hidden NaN still poisons a weighted sum, so one request with such numbers spoils the results of all that share its call.
    Nothing of them was kept. Each suspect runs once alone: one that is clean goes on, one that is not is at fault. Between two
    suspects the other requests have a call, so that they need not wait for all of them.
    """

    def __init__(self) -> None:
        self._suspects: set[int] = set()
        self._was_apart = False

    def add(self, request: int) -> None:
        """A request whose numbers in a shared call were not finite."""
        self._suspects.add(request)

    def discard(self, request: int) -> None:
        """A request that ran cleanly, or has ended."""
        self._suspects.discard(request)

    def select(self, parts: Sequence[Item], id_of: Callable[[Item], int]) -> list[Item]:
        """What may share the next call: one suspect alone, or everything but suspects, in turns."""
        if not self._suspects:
            return list(parts)
        suspects = [part for part in parts if id_of(part) in self._suspects]
        others = [part for part in parts if id_of(part) not in self._suspects]
        self._was_apart = bool(suspects) and not (others and self._was_apart)
        return suspects[:1] if self._was_apart else others
