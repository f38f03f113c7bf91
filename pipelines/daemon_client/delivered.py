"""What an answer has given to its reader, while others make it once more from its beginning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

Part = TypeVar("Part", bound=Sequence[Any])


class DivergedError(Exception):
    """The answer that is made again is not the one that was given."""


class Delivered(Generic[Part]):
    """The tokens (a list) or the text (a str) of one answer, over all runs that make it. One thread at a time may call."""

    def __init__(self, nothing: Part) -> None:
        """Take an empty part."""
        self._given: Any = nothing
        self._num_seen = 0  # of the current run

    def __len__(self) -> int:
        """Return the size of what was given."""
        return len(self._given)

    @property
    def is_behind(self) -> bool:
        """Whether the current run has not made all that was given."""
        return self._num_seen < len(self._given)

    def restart(self) -> None:
        """Expect the answer from its beginning."""
        self._num_seen = 0

    def take(self, part: Part) -> Part:
        """Return what of the next part of the current run is new.

        Raises:
            DivergedError: the rest is not what was given.
        """
        known = self._given[self._num_seen : self._num_seen + len(part)]
        if part[: len(known)] != known:
            raise DivergedError
        new: Any = part[len(known) :]
        self._num_seen += len(part)
        self._given += new
        return new  # type: ignore[no-any-return]
