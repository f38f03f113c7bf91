"""Computes the device share of work with lower precedence: jobs, embedded texts and the calls of other programs."""

from __future__ import annotations

MIN_SHARE = 0.15
"""Least share of device time for work that would delay the next token of running requests."""
BEHIND_SHARE = 0.1
"""Least share of device time for work behind other work, of higher priority or with a deadline, that always waits."""


def wait_for_share(seconds: float) -> float:
    """Return how many seconds work of this duration waits before it may delay tokens, to get ``MIN_SHARE`` of the time."""
    return seconds * (1 - MIN_SHARE) / MIN_SHARE


class TimeCredit:
    """Device time owed to work with lower precedence: ``BEHIND_SHARE`` of the time while other work is always waiting."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def covers(self, seconds: float) -> bool:
        """Return whether work of this duration is due."""
        return self._seconds >= seconds

    def lead(self, seconds: float, is_followed: bool) -> None:
        """Count work of this duration that runs first.

        Args:
            is_followed: Whether work with lower precedence is waiting.
        """
        self._seconds = self._seconds + BEHIND_SHARE / (1 - BEHIND_SHARE) * seconds if is_followed else 0.0

    def clear(self) -> None:
        """Clear the debt: the work with lower precedence has had the device to itself."""
        self._seconds = 0.0

    def pay(self, seconds: float) -> None:
        """Count work of this duration that was due and runs."""
        self._seconds = max(0.0, self._seconds - seconds)
