"""How a caller follows a transcription while it runs, and ends it from another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from .segments import SpeechSegment

OnTokens: TypeAlias = Callable[[Sequence[int]], bool]
"""Receives tokens of the text as they are certain, and returns whether to go on."""


@dataclass(frozen=True)
class WindowHeard:
    """One window of a recording whose tokens are known."""

    seconds: float
    """The seconds of the recording that are transcribed now."""
    start: float
    """The second at which the window begins."""
    segments: tuple[SpeechSegment, ...]
    """Its segments; none if nothing asked for times."""
    avg_logprob: float
    """The mean log-probability of its tokens; 0 if it has none."""
    temperature: float = 0.0
    """The temperature at which they were chosen."""
    no_speech_prob: float | None = None
    """The probability that it has no speech; None if no threshold asked for it."""

    def later(self, seconds: float) -> WindowHeard:
        """Return the window with times that count from ``seconds`` before the recording; none is less than 0."""

        def moved(moment: float) -> float:
            return max(0.0, moment + seconds)

        segments = tuple(
            replace(each, start=moved(each.start), end=None if each.end is None else moved(each.end))
            for each in self.segments
        )
        return replace(self, seconds=moved(self.seconds), start=moved(self.start), segments=segments)


class Cancellation:
    """Ends a transcription from any thread: what it waits for now, and all that would follow."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ends: list[Callable[[], object]] = []
        self._is_cancelled = False

    @property
    def is_cancelled(self) -> bool:
        """Whether ``cancel`` was called."""
        return self._is_cancelled

    def check(self) -> None:
        """Check that ``cancel`` was not called.

        Raises:
            CancelledError: it was.
        """
        if self._is_cancelled:
            raise CancelledError

    def cancel(self) -> None:
        """End the transcription. A second call does nothing."""
        with self._lock:
            self._is_cancelled = True
            ends = list(self._ends)
            self._ends.clear()
        for end in ends:
            end()

    @contextmanager
    def ending(self, end: Callable[[], object]) -> Iterator[None]:
        """Let ``cancel`` call ``end`` during a block; if it was called before, ``end`` is called at once."""
        with self._lock:
            is_late = self._is_cancelled
            if not is_late:
                self._ends.append(end)
        if is_late:
            end()
        try:
            yield
        finally:
            with self._lock:
                if end in self._ends:
                    self._ends.remove(end)


@dataclass(frozen=True)
class TranscriptionWatch:
    """What a caller gets of a transcription that runs; the functions are called on its thread."""

    on_tokens: OnTokens = lambda tokens: True
    """Receives tokens of the text. If the recording has times, those of a window come together, at its end: what the
    end of a window cuts off is transcribed again with the next one."""
    on_window: Callable[[WindowHeard], object] = lambda window: None
    """Receives each window at its end."""
    cancellation: Cancellation = field(default_factory=Cancellation)
    """Ends the transcription."""
