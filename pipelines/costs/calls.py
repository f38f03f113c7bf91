"""Expects what the calls of a model take on a device, from those before."""

from __future__ import annotations

SMOOTHING = 0.2
"""The weight of the newest call in the expected duration of the next one of the same shapes."""
MAX_SHAPES = 256
"""The most shapes of a model whose durations are remembered."""


class CallCosts:
    """The expected duration of the calls of one model, by the shapes of their inputs. Any thread may call the methods."""

    def __init__(self) -> None:
        self._seconds: dict[object, float] = {}
        self._last = 0.0

    def expected(self, shapes: object) -> float:
        """Return the expected seconds of a call; that of the last call for new shapes."""
        return self._seconds.get(shapes, self._last)

    def add(self, shapes: object, seconds: float) -> None:
        """Learn from a call that took ``seconds``."""
        known = self._seconds.get(shapes)
        if known is None and len(self._seconds) >= MAX_SHAPES:
            self._seconds.clear()
        self._last = seconds if known is None else known + SMOOTHING * (seconds - known)
        self._seconds[shapes] = self._last
