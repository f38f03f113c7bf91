"""Lets a call wait a moment for the texts of clients that ask again together, because they got their vectors together."""

from __future__ import annotations

from staticllm.pipelines.embedding.embedding_request import EmbeddingRequest

SHARE, LONGEST = 0.15, 0.02
"""The longest wait: as a share of the call before, and in seconds."""


class BatchingDelay:
    """Expects as many requests as were served before the queue was empty. The queue's lock is held around every method.

    Without it, the first of n clients would get a call alone, and the others the next one, which takes nearly as long with n
    texts as with n - 1. A request with a deadline or a higher priority waits for nobody, and after one client nobody waits.
    """

    def __init__(self) -> None:
        self._num_expected = self._num_come = self._num_served = 0
        self._until = 0.0
        self._is_urgent = False

    def come(self, request: EmbeddingRequest) -> None:
        """Count a request that was added."""
        self._num_come += 1
        self._is_urgent = self._is_urgent or request.priority > 0 or request.deadline is not None

    def serve(self, num_requests: int, seconds: float, is_last: bool, now: float) -> None:
        """Count the requests of a call that took ``seconds``, before they end; ``is_last``: nothing else waits."""
        self._num_served = num_requests + (0 if self._num_come else self._num_served)
        self._num_come, self._is_urgent = 0, False
        self._num_expected = self._num_served if is_last else 0
        self._until = now + min(SHARE * seconds, LONGEST)

    def seconds(self, now: float) -> float:
        """Return how much longer the next call should wait; 0 if all have come."""
        is_complete = self._is_urgent or self._num_come >= self._num_expected
        return 0.0 if is_complete else max(0.0, self._until - now)
