"""Remembers how conversations use a device, so that jobs beside them do not delay the first tokens of their prompts."""

from __future__ import annotations

from collections import deque
from statistics import median

from staticllm.pipelines.scheduling.interface import View

TTFT_SHARE = 0.25
"""The longest job beside conversations, as a share of the time to first token: a prompt that comes during it waits for its end.
With less than 0.3, even a prompt that comes at its begin has its first token within 1.3 times the time alone."""
LEAST_JOB_SECONDS = 0.002
"""Jobs are never asked to be shorter: the host takes some tenths of a millisecond per call."""
ACTIVE_SECONDS = 30.0
"""A conversation is active for so long after its last call: its user reads, and writes the next prompt."""
NUM_KEPT = 4
"""The number of the last prompts, and of the last pauses, that count."""
HOLD_SECONDS = 0.01
"""If the next prompt has come within this time after the last requests ended, the device waits for it before it begins a job."""


class ChatActivity:
    """What the views of a device say about its conversations. Moments are seconds on the clock of the views.

    ``observe`` gets every view. It measures the time from the first view in which a prompt waits to its first token: the time to
    first token without the job that ran when the prompt came, and without the part of the prompt that was cached. ``delay`` takes
    the jobs off that ran later.
    """

    def __init__(self) -> None:
        self._since: dict[int, float] = {}  # id of a request without a token -> when it was seen first
        self._times = deque[float](maxlen=NUM_KEPT)  # to first token
        self._pauses = deque[float](maxlen=NUM_KEPT)  # from the end of all requests to the next arrival
        self._last_busy = float("-inf")
        self._end: float | None = None  # the first view without requests after the last one with some

    def observe(self, view: View) -> None:
        """Take note of the requests of a view; a second call with the same view changes nothing."""
        requests = view.requests
        if not requests:
            self._since.clear()
            if self._end is None and self._last_busy > float("-inf") and not view.away:
                self._end = view.now
            return
        if self._end is not None:
            self._pauses.append(max(0.0, min(request.arrival for request in requests) - self._end))
        self._last_busy, self._end = view.now, None
        since: dict[int, float] = {}
        for request in requests:
            if not request.num_generated:
                since[request.id] = self._since.get(request.id, view.now)
            elif request.id in self._since and request.last_token_time is not None:
                self._times.append(max(0.0, request.last_token_time - self._since[request.id]))
        self._since = since

    def delay(self, seconds: float) -> None:
        """A job runs for so long before the prompts that wait: this is no part of their own time to first token."""
        self._since = {id: moment + seconds for id, moment in self._since.items()}

    def longest_job(self, now: float) -> float:
        """Return the longest time that a job should take for the sake of prompts that may come, s; infinite without any."""
        is_active = now - max(self._last_busy, self._end or 0.0) <= ACTIVE_SECONDS
        if not self._times or not is_active:
            return float("inf")
        return max(LEAST_JOB_SECONDS, TTFT_SHARE * median(self._times))

    def prompt_expected_until(self, now: float) -> float | None:
        """Return the moment until which a job should wait for a prompt that is about to come; None if none is expected."""
        if self._end is None or not self._pauses or median(self._pauses) > HOLD_SECONDS:
            return None
        moment = self._end + HOLD_SECONDS
        return moment if moment > now else None
