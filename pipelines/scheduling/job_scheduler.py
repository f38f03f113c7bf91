"""Decides when a job may use the device that it shares with requests, for every policy that does not plan jobs itself."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import ceil
from statistics import median

from .device_share import TimeCredit, wait_for_share
from .interface import JobView, RequestView, View

MAX_JOB_SECONDS, JOBS_PER_TOKEN = 0.03, 4
"""Longest job beside requests, where its length can be chosen: a prompt that arrives meanwhile waits for it. On slow models,
allow up to a quarter of the token interval: short jobs fill the gaps better, and cost hardly more per token."""
JOB_FILL = 0.95
"""Share of the token interval filled by jobs of the longest duration; calls do not take equally long."""
LATE = 3.0
"""A job runs even if it delays a token once it has waited this many times as long as its share demands."""
BOUND_USED = 0.9
"""Share of the token bound that jobs and the next decode step may fill; costs are estimates."""
AHEAD_SECONDS = 0.1
"""Lead in device time that jobs of higher priority may take over waiting prompts."""
TTFT_SHARE = 0.25
"""Longest job beside conversations, as a share of the time to first token. Below 0.3, even a prompt that arrives as a job begins
has its first token within 1.3 times its time alone."""
LEAST_JOB_SECONDS = 0.002
"""Shortest job ever asked for; the host takes some tenths of a millisecond per call."""
ACTIVE_SECONDS = 30.0
"""Time after its last call for which a conversation counts as active: the user reads and writes."""
NUM_KEPT = 4
"""Recent prompts, and recent pauses, that count."""
HOLD_SECONDS = 0.01
"""If prompts usually arrive this soon after the last request ended, the device waits for the next one before it begins a job."""


class UrgentFirst:
    """Chooses among jobs: the most urgent first, but the others get ``BEHIND_SHARE`` of the device time, the oldest first."""

    def __init__(self) -> None:
        self._credit = TimeCredit()

    def next(self, jobs: Sequence[JobView]) -> JobView | None:
        """Return the next job; None if there is none."""
        if len(jobs) < 2:
            return jobs[0] if jobs else None
        first = min(jobs, key=urgency)
        oldest = min((job for job in jobs if job is not first), key=lambda job: job.arrival)
        return oldest if self._credit.covers(oldest.seconds) else first

    def begin(self, job: JobView, jobs: Sequence[JobView]) -> None:
        """Count a job that begins now and was chosen among ``jobs``."""
        if job == min(jobs, key=urgency):
            self._credit.lead(job.seconds, is_followed=len(jobs) > 1)
        else:
            self._credit.pay(job.seconds)


class ChatActivity:
    """Measures how conversations use a device, from the reactive requests in its views. Times are seconds on their clock.

    ``observe`` measures the time from the first view in which a prompt waits to its first token. This is the TTFT without the
    job that ran when the prompt arrived, and without the cached part of the prompt. ``delay`` subtracts later jobs.
    """

    def __init__(self) -> None:
        self._since: dict[int, float] = {}  # id of a request without a token -> when it was seen first
        self._times = deque[float](maxlen=NUM_KEPT)  # to first token
        self._pauses = deque[float](maxlen=NUM_KEPT)  # from the end of all requests to the next arrival
        self._last_busy = float("-inf")
        self._end: float | None = None  # the first view without requests after the last one with some

    def observe(self, view: View) -> None:
        """Record the requests of a view; a second call with the same view changes nothing."""
        requests = [request for request in view.requests if not request.is_proactive]
        if not requests:
            self._since.clear()
            if self._end is None and self._last_busy > float("-inf") and not view.idle:
                self._end = view.now
            return
        if self._end is not None:
            self._pauses.append(max(0.0, min(request.arrival for request in requests) - self._end))
        self._last_busy = view.now
        self._end = None
        since: dict[int, float] = {}
        for request in requests:
            if not request.num_generated:
                since[request.id] = self._since.get(request.id, view.now)
            elif request.id in self._since and request.last_token_time is not None:
                self._times.append(max(0.0, request.last_token_time - self._since[request.id]))
        self._since = since

    def delay(self, seconds: float) -> None:
        """Exclude the duration of a job from the TTFT of the prompts that wait for it."""
        self._since = {id: moment + seconds for id, moment in self._since.items()}

    def longest_job(self, now: float) -> float:
        """Return the longest seconds that a job should take, because prompts may arrive; infinite without conversations."""
        is_active = now - max(self._last_busy, self._end or 0.0) <= ACTIVE_SECONDS
        if not self._times or not is_active:
            return float("inf")
        return max(LEAST_JOB_SECONDS, TTFT_SHARE * median(self._times))

    def prompt_expected_until(self, now: float) -> float | None:
        """Return the moment until which a job should wait for an expected prompt; None if no prompt is expected."""
        if self._end is None or not self._pauses or median(self._pauses) > HOLD_SECONDS:
            return None
        moment = self._end + HOLD_SECONDS
        return moment if moment > now else None


class JobScheduler:
    """Decides which job runs before the next call of requests, if any.

    Without requests, a job runs immediately. While requests decode, it runs if each of them still gets its next token within
    ``token_bound``. Requests that are swapped or wait for their first token have precedence over jobs of their priority and
    below. Jobs of a higher priority run before them until they are ``AHEAD_SECONDS`` of device time ahead. Waiting jobs get
    ``MIN_SHARE`` of the device time, whatever the policy plans.
    """

    def __init__(self, activity: ChatActivity | None = None) -> None:
        self._start = float("-inf")  # of the last job, on the clock of the view
        self._seconds = 0.0
        self._ahead = 0.0  # seconds that jobs took before requests that wait, less those since
        self._num_hidden = 0  # calls for which prompts are hidden
        self._urgent = UrgentFirst()
        self._activity = ChatActivity() if activity is None else activity

    def longest_job(self, view: View) -> float:
        """Return the longest seconds that a job should take now: ``longest_job``, or less because prompts may arrive."""
        self._activity.observe(view)
        return longest_job(view, self._activity.longest_job(view.now))

    def hold_until(self, view: View) -> float | None:
        """Return the moment until which jobs wait for a prompt that is expected soon; None if they need not wait.

        Jobs with a higher priority than requests do not wait, and no job waits longer than its share requires.
        """
        self._activity.observe(view)
        job = self._urgent.next(view.jobs)
        if job is None or job.priority > 0 or view.requests or view.idle or self._has_waited_its_share(view, job):
            return None
        return self._activity.prompt_expected_until(view.now)

    def choose(self, view: View) -> JobView | None:
        """Return the job that runs now; None if the policy's plan does."""
        self._activity.observe(view)
        job = self._urgent.next(view.jobs)
        if job is None:
            return None
        runs_now = self._goes_first(view, job) and self._keeps_bound(view, job)
        if not runs_now and not self._has_waited_its_share(view, job):
            return None
        self._ahead = self._ahead_at(view) + job.seconds
        self._start = view.now
        self._seconds = job.seconds
        self._num_hidden = ceil(len(bounded(view)) / max(1, view.device.max_decoding))
        self._urgent.begin(job, view.jobs)
        self._activity.delay(job.seconds)
        return job

    def view_for_policy(self, view: View) -> View:
        """Return the view without jobs. If a job ran since the running requests got their last tokens, these decode first.

        The policy then sees no prompt for one call, or for as many calls as one token of each running request takes, because
        the job took the time that the policy would give to prompts.
        """
        is_behind = min(_token_times(view.running), default=self._start) < self._start
        if is_behind and self._num_hidden > 0:
            self._num_hidden -= 1
            return replace(view, jobs=(), waiting=(), prefilling=())
        return replace(view, jobs=()) if view.jobs else view

    def _goes_first(self, view: View, job: JobView) -> bool:
        """Return whether no request that does not decode goes before the job."""
        others = [each for each in (*view.waiting, *view.prefilling, *view.swapped) if not _is_behind(each, job)]
        if not others:
            return True
        return all(job.priority > request.priority for request in others) and self._ahead_at(view) <= AHEAD_SECONDS

    def _ahead_at(self, view: View) -> float:
        if not (view.waiting or view.prefilling or view.swapped):
            return 0.0
        return max(0.0, self._ahead - max(0.0, view.now - self._start - self._seconds))

    def _keeps_bound(self, view: View, job: JobView) -> bool:
        running = [request for request in view.running if not _is_behind(request, job)]
        return not running or job.seconds <= job_slack_of(view) - waited(view)

    def _has_waited_its_share(self, view: View, job: JobView) -> bool:
        """Return whether the job has waited long enough for ``MIN_SHARE``, and this is a good moment.

        Right after a token is a good moment, for jobs that keep the bound then and for those that never do. If no such moment
        comes, because the policy lets requests wait for tokens, the job waits ``LATE`` times as long.
        """
        end = self._start + self._seconds
        waits_for = wait_for_share(job.seconds)
        since = view.now - max(end, min(each.arrival for each in view.jobs))
        if since < waits_for:
            return False
        is_good = self._keeps_bound(view, job) or (job.seconds > job_slack_of(view) and has_just_decoded(view, end))
        return is_good or since >= LATE * waits_for


def urgency(job: JobView) -> tuple[float, float, float]:
    """Return the sort key of jobs: the highest priority, then the earliest deadline, then the oldest."""
    return -job.priority, float("inf") if job.deadline is None else job.deadline, job.arrival


def longest_job(view: View, most: float = float("inf")) -> float:
    """Return the longest time in seconds that a job should take now: jobs of this length fill the time between two tokens.

    Args:
        most: A limit that others set, in seconds.
    """
    if not view.running:
        return min(most, MAX_JOB_SECONDS)
    slack = job_slack_of(view)
    num_prompts = len(view.waiting) + len(view.prefilling)
    longest = min(most, MAX_JOB_SECONDS if num_prompts else max(MAX_JOB_SECONDS, slack / JOBS_PER_TOKEN))
    return JOB_FILL * slack / ceil(slack / longest) if slack > 0 else longest


def bounded(view: View) -> Sequence[RequestView]:
    """Return the running requests that have a bound on the time between tokens: the reactive requests; without any, all."""
    return [request for request in view.running if not request.is_proactive] or view.running


def _is_behind(request: RequestView, job: JobView) -> bool:
    """Return whether the request is proactive and the job is not."""
    return request.is_proactive and not job.is_proactive


def step_of(view: View) -> float:
    """Return the seconds of a decode step of the requests that have a bound; 0 without any."""
    return _decode_seconds(view, len(bounded(view)))


def slack_of(view: View) -> float:
    """Return the seconds that other calls may take between two tokens of the requests that have a bound.

    These are expected seconds: if calls take longer than expected, fewer of them fit into the bound.
    """
    step = step_of(view)
    return view.token_bound.of(step, view.tpot_ms) * BOUND_USED / view.device.overrun - step


def job_slack_of(view: View) -> float:
    """Return the seconds that jobs may take between two tokens of the requests that have a bound.

    The result leaves room for rows of proactive requests in the decode step, where a row takes much less time than in a
    separate call.
    """
    return slack_of(view) + step_of(view) - _decode_seconds(view, len(view.running))


def _decode_seconds(view: View, num_requests: int) -> float:
    num = min(num_requests, view.device.max_decoding)
    variant = view.device.call(num, num) if num else None
    return view.device.seconds(variant) if variant is not None else 0.0


def waited(view: View) -> float:
    """Return the seconds since the oldest last token of the requests that have a bound."""
    times = _token_times(bounded(view))
    return view.now - min(times) if times else 0.0


def has_just_decoded(view: View, since: float) -> bool:
    """Return whether every request that has a bound got a token after the moment ``since``."""
    return all(time >= since for time in _token_times(bounded(view)))


def _token_times(requests: Iterable[RequestView]) -> list[float]:
    return [request.last_token_time for request in requests if request.last_token_time is not None]
