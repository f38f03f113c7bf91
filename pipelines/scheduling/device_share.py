"""The share of a device for work behind other work, for jobs, embedded texts and the calls of other programs alike."""

from __future__ import annotations

MIN_SHARE = 0.15
"""Least share of device time for work that would delay the next token of running requests."""
BEHIND_SHARE = 0.1
"""Least share of device time for work behind other work, of higher priority or with a deadline, that always waits."""


def wait_for_share(seconds: float) -> float:
    """Return how long work of this duration waits before it may delay tokens, s: then it has ``MIN_SHARE`` of the time."""
    return seconds * (1 - MIN_SHARE) / MIN_SHARE


class TimeCredit:
    """Device time owed to work behind other work: ``BEHIND_SHARE`` of the time while the other work always waits."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def covers(self, seconds: float) -> bool:
        """Return whether work of this duration is due."""
        return self._seconds >= seconds

    def lead(self, seconds: float, is_followed: bool) -> None:
        """Count work of this duration that goes first; ``is_followed``: other work waits behind it."""
        self._seconds = self._seconds + BEHIND_SHARE / (1 - BEHIND_SHARE) * seconds if is_followed else 0.0

    def clear(self) -> None:
        """Owe nothing: the work behind has had the device for itself."""
        self._seconds = 0.0

    def pay(self, seconds: float) -> None:
        """Count work of this duration that was due and runs."""
        self._seconds = max(0.0, self._seconds - seconds)
