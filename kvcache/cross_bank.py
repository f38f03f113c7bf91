"""Holds the keys and values of cross-attention: those of each window of a recording are written once.

They are slots of their own kind, in an arena of their own. Window after window lies behind each other, and a mask shows each row
of a call the frames of its own window. A call need only see the first places, if they hold all windows. A window has a number
that no other window of the process ever has, so that keys and values of tokens, which depend on it, are never taken for those
of another one (``Conditions``).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

from numpy.typing import NDArray

from staticllm.core import ModelShape

from .arena import Allocate, Arena

_numbers = count(1)


class CrossBank:
    """The frames of at most ``num_cross_windows`` windows. Runs on the engine's thread."""

    def __init__(self, shape: ModelShape, allocate: Allocate | None = None) -> None:
        self.num_cross_windows = shape.num_cross_windows
        self._window_len = shape.cross_window_len
        self._arena = Arena(shape.cross_states, shape.cross_len, allocate)
        self._arena.set_stride(min(shape.cross_window_len, shape.cross_len), 0)
        self._places: dict[int, int] = {}
        self._free = list(range(shape.num_cross_windows))

    @property
    def num_free(self) -> int:
        """How many more windows it can hold."""
        return len(self._free)

    def add(self, frames: Sequence[NDArray[Any]]) -> int:
        """Write a window, per group of states ``[n, heads, cross_window_len, head_dim]``; return its number. One must be free."""
        place = min(self._free)
        self._free.remove(place)
        self.show(max(place + 1, self.num_shown))
        begin = place * self._window_len
        self._arena.write(slice(begin, begin + self._window_len), frames, slice(0, self._window_len))
        number = next(_numbers)
        self._places[number] = place
        return number

    @property
    def num_shown(self) -> int:
        """How many places lie behind each other for each head."""
        return self._arena.stride // self._window_len if self._window_len else 0

    @property
    def num_seen(self) -> int:
        """The first places that hold all windows, at least one."""
        return 1 + max(self._places.values(), default=0)

    def show(self, num_places: int) -> None:
        """Lay the first ``num_places`` places, which hold all windows, behind each other, and move the windows that are there."""
        self._arena.set_stride(num_places * self._window_len, min(self.num_seen, num_places) * self._window_len)

    def remove(self, window: int) -> None:
        """Forget a window, which no request uses any more; an unknown one is ignored."""
        place = self._places.pop(window, None)
        if place is not None:
            self._free.append(place)

    def __contains__(self, window: int) -> bool:
        return window in self._places

    def frames_of(self, window: int) -> slice:
        """Return the place of a window along the frames.

        Raises:
            KeyError: it was removed.
        """
        begin = self._places[window] * self._window_len
        return slice(begin, begin + self._window_len)

    def frames(self, window: int) -> list[NDArray[Any]]:
        """Return the keys and values of a window, views per group of states: ``[n, heads, cross_window_len, head_dim]``."""
        place = self.frames_of(window)
        return [view[:, :, place] for view in self._arena.views]

    def state_view(self, index: int, num_places: int) -> NDArray[Any]:
        """Return state ``index`` as programs see it while so many places are shown: ``[1, heads, frames, head_dim]``."""
        return self._arena.state_view(index, num_places * self._window_len)

    def release(self) -> None:
        """Give the memory back. The bank must not be used any more."""
        self._places.clear()
        self._arena.release()
