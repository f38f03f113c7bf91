"""Decides when a job may use the device that it shares with requests, for every policy that does not plan jobs itself."""

from __future__ import annotations

from dataclasses import replace

from staticllm.pipelines.scheduling.interface import JobView, RequestView, View
from staticllm.pipelines.scheduling.policies.dynamic import GAP_SECONDS, GAP_STEPS

MIN_JOB_SHARE = 0.15
"""The least share of device time that jobs get while requests that go first want all of it."""
BOUND_USED = 0.9
"""The share of the bound of two tokens that jobs and the next decode step may fill, because costs are estimates."""


class JobTurns:
    """Lets jobs and requests take turns.

    A job runs at once if the device has no requests. Beside requests that decode, it runs while every one of them still gets its
    next token within its bound: ``tpot_ms``, or without it as long as ``dynamic`` lets prompts take. A request that waits for its
    first token, or is swapped, goes before jobs of its priority and below; a job of a higher priority goes before it. Jobs that
    must wait get ``MIN_JOB_SHARE`` of the device time, so that none waits for ever.
    """

    def __init__(self) -> None:
        self._start, self._seconds = float("-inf"), 0.0  # of the last job, on the clock of the view

    def choose(self, view: View) -> JobView | None:
        """Return the job that runs now; None if the policy's plan does."""
        if not view.jobs:
            return None
        job = min(view.jobs, key=urgency)
        runs_now = self._goes_first(view, job) and self._keeps_bound(view, job)
        if not runs_now and not self._has_waited_its_share(view, job):
            return None
        self._start, self._seconds = view.now, job.seconds
        return job

    def view_for_policy(self, view: View) -> View:
        """Return the view without jobs. If one ran since the last tokens of the running requests, these decode first.

        The policy then sees no prompt for one call: the job took the time that the policy would give to it.
        """
        if min(_token_times(view.running), default=self._start) < self._start:
            return replace(view, jobs=(), waiting=(), prefilling=())
        return replace(view, jobs=()) if view.jobs else view

    def _goes_first(self, view: View, job: JobView) -> bool:
        """Return whether no request that does not decode goes before the job."""
        others = (*view.waiting, *view.prefilling, *view.swapped)
        return all(job.priority > request.priority for request in others)

    def _keeps_bound(self, view: View, job: JobView) -> bool:
        return not view.running or job.seconds <= slack_of(view) - waited(view)

    def _has_waited_its_share(self, view: View, job: JobView) -> bool:
        """Return whether the job has waited so long that its time is the share, and does not delay a token needlessly.

        A job that keeps the bound right after a token waits for that moment. One that never does runs right after a token too.
        """
        end = self._start + self._seconds
        if (view.now - max(end, job.arrival)) * MIN_JOB_SHARE < job.seconds * (1 - MIN_JOB_SHARE):
            return False
        return self._keeps_bound(view, job) or (job.seconds > slack_of(view) and has_just_decoded(view, end))


def urgency(job: JobView) -> tuple[float, float, float]:
    """Return the key by which jobs are sorted: the highest priority, then the first deadline, then the oldest."""
    return -job.priority, float("inf") if job.deadline is None else job.deadline, job.arrival


def slack_of(view: View) -> float:
    """Return the seconds that jobs may take between two tokens of the running requests."""
    variant = view.device.call(num := min(len(view.running), view.device.max_decoding), num)
    step = view.device.seconds(variant) if variant is not None else 0.0
    bound = max(GAP_STEPS * step, GAP_SECONDS) if view.tpot_ms is None else view.tpot_ms / 1e3
    return bound * BOUND_USED - step


def waited(view: View) -> float:
    """Return the seconds since the oldest of the running requests' last tokens."""
    times = _token_times(view.running)
    return view.now - min(times) if times else 0.0


def has_just_decoded(view: View, since: float) -> bool:
    """Return whether every running request got a token after the moment ``since``."""
    return all(time >= since for time in _token_times(view.running))


def _token_times(requests: tuple[RequestView, ...]) -> list[float]:
    return [request.last_token_time for request in requests if request.last_token_time is not None]
