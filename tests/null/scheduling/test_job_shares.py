"""Tests that neither jobs nor requests starve beside others, whatever the priorities, the arrivals and the policy are."""

from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from staticllm.core import Variant
from staticllm.pipelines.programs.variant_index import VariantIndex
from staticllm.pipelines.scheduling.device_share import BEHIND_SHARE, MIN_SHARE
from staticllm.pipelines.scheduling.interface import Device, JobView, Plan, RequestView, View
from staticllm.pipelines.scheduling.job_scheduler import (
    AHEAD_SECONDS,
    JOB_FILL,
    JOBS_PER_TOKEN,
    LATE,
    MAX_JOB_SECONDS,
    JobScheduler,
    UrgentFirst,
    longest_job,
    slack_of,
)
from staticllm.pipelines.scheduling.planner import Planner

STEP = 0.02
VARIANTS = (Variant(1, 64), Variant(2, 64, 2), Variant(16, 0, 1), Variant(16, 64, 2))
DEVICE = Device(VariantIndex(VARIANTS), lambda variant: STEP if variant.rows <= 2 else 0.05, high_slot=20)
PROMPT = RequestView(1, "waiting", 0.0, 10)
BULK = JobView(7, 0.02, 0.0)
QUERY = JobView(8, 0.01, 0.0, priority=1)


def running(last_token_time, id=2):
    return RequestView(id, "running", 0.0, 12, 11, 11, 3, last_token_time)


def view_of(now, jobs=(BULK,), waiting=(), streams=(), device=DEVICE, **targets):
    return View(now, waiting, (), streams, (), 4, 40, 100, device, jobs=jobs, **targets)


def shares(jobs, seconds=20.0):
    """Return the share of the time of each of several sources whose next job arrives when one has run."""
    turns, now, taken = UrgentFirst(), 0.0, dict.fromkeys((job.id for job in jobs), 0.0)
    arrivals = dict(taken)
    while now < seconds:
        waiting = [replace(job, arrival=arrivals[job.id]) for job in jobs]
        job = turns.next(waiting)
        turns.begin(job, waiting)
        now, taken[job.id] = now + job.seconds, taken[job.id] + job.seconds
        arrivals[job.id] = now
    return [taken[job.id] / now for job in jobs]


@pytest.mark.parametrize("urgent", [QUERY, replace(QUERY, priority=0, deadline=-5.0), replace(QUERY, seconds=0.2)])
@pytest.mark.parametrize("seconds", [0.001, 0.02, 0.3])
def test_jobs_of_a_lower_priority_get_their_share(urgent, seconds):
    first, behind = shares([urgent, replace(BULK, seconds=seconds)])
    assert 0.8 * BEHIND_SHARE <= behind <= BEHIND_SHARE + 0.02
    assert first > 0.85


def test_all_of_many_sources_run():
    jobs = [replace(BULK, id=id, priority=id, seconds=0.001 * id) for id in range(1, 9)]
    assert min(shares(jobs)) > 0


def test_what_waited_behind_nothing_is_owed_nothing():
    turns = UrgentFirst()
    for _ in range(100):
        assert turns.next([QUERY]) is QUERY
        turns.begin(QUERY, [QUERY])
    assert turns.next([BULK, QUERY]) is QUERY


def test_prompts_get_their_share_beside_queries_that_always_wait():
    turns, now, ahead, prompt_seconds = JobScheduler(), 0.0, 0.0, 0.0
    while now < 20:
        job = turns.choose(view_of(now, (replace(QUERY, arrival=now),), waiting=(PROMPT,)))
        now += 0.03 if job is None else job.seconds
        prompt_seconds += 0.03 if job is None else 0.0
        ahead = max(ahead, now - 2 * prompt_seconds)
    assert 0.4 < prompt_seconds / now < 0.6
    assert ahead <= AHEAD_SECONDS + 2 * QUERY.seconds


def test_a_query_goes_before_a_prompt_again_after_a_pause():
    turns, now = JobScheduler(), 0.0
    while turns.choose(view_of(now, (QUERY,), waiting=(PROMPT,))):
        now += QUERY.seconds
    assert now == pytest.approx(AHEAD_SECONDS, abs=2 * QUERY.seconds)
    assert turns.choose(view_of(now + 1, (QUERY,), waiting=(PROMPT,))) is QUERY


class Stubborn:
    """A user's policy that decodes only the first running request, and runs prompts whenever it sees one."""

    def __init__(self):
        self.num_prompts = 0

    def plan(self, view):
        if view.waiting:
            self.num_prompts += 1
            return Plan(prefill=((view.waiting[0].id, 5),))
        return Plan(decode=(view.running[0].id,))


def test_a_policy_that_never_decodes_a_request_sees_prompts_after_a_job():
    policy = Stubborn()
    planner = Planner(policy)
    try:
        assert planner.plan(view_of(100.0, streams=(running(100.0), running(100.0, 3)))) == Plan(job=BULK.id)
        plans = [
            planner.plan(view_of(100.02 + n * STEP, waiting=(PROMPT,), streams=(running(100.02), running(99.0, 3))))
            for n in range(3)
        ]
        assert plans[0] == Plan(decode=(2,))
        assert plans[1].prefill
    finally:
        planner.close()


def test_prompts_are_hidden_until_all_running_requests_had_a_call():
    turns, streams = JobScheduler(), tuple(running(99.99, id) for id in range(2, 7))
    assert turns.choose(view_of(100.0, streams=streams)) is BULK
    views = [turns.view_for_policy(view_of(100.02, waiting=(PROMPT,), streams=streams)) for _ in range(5)]
    assert [len(view.waiting) for view in views] == [0, 0, 0, 1, 1], "5 requests, 2 per call"


@pytest.mark.parametrize("has_prompts", [True, False])
def test_jobs_get_a_share_beside_a_policy_that_never_decodes_a_request(has_prompts):
    turns, now, job_seconds = JobScheduler(), 100.0, 0.0
    waiting = (PROMPT,) if has_prompts else ()
    while now < 130:
        job = turns.choose(view_of(now, waiting=waiting, streams=(running(now), running(0.0, 3))))
        now += STEP if job is None else job.seconds
        job_seconds += 0.0 if job is None else job.seconds
    assert MIN_SHARE / LATE / 2 < job_seconds / (now - 100) < MIN_SHARE


MOST_SECONDS = 3 * 0.3 / (MIN_SHARE / LATE * BEHIND_SHARE)
"""The time within which three jobs of 0.3 s run behind others, beside a policy that never decodes."""


@settings(deadline=None)
@example([(0, 0.25, False), (0, 0.25, False), (0, 0.25, True)], ["prompt"], 500.0, 1)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0.001, 0.3), st.booleans()), min_size=1, max_size=4),
    st.lists(st.sampled_from(["decode", "prompt", "one"]), min_size=1, max_size=7),
    st.sampled_from([None, 30.0, 80.0, 500.0]),
    st.integers(0, 3),
)
def test_every_source_and_every_request_goes_on(sources, policy, tpot_ms, num_running):
    """Sources always have jobs, requests always have tokens to decode, a prompt always waits, and the policy repeats itself."""
    turns, now, count = JobScheduler(), 0.0, 0
    ran, since = dict.fromkeys(range(len(sources)), 0), dict.fromkeys(range(len(sources)), 0.0)
    tokens, num_calls = [0.0] * num_running, 0
    while now < 60 or (now < MOST_SECONDS and min(ran.values()) == 0):
        jobs = tuple(
            JobView(id, seconds, since[id], priority, now + 1 if has_deadline else None)
            for id, (priority, seconds, has_deadline) in enumerate(sources)
        )
        streams = tuple(running(moment, id + 2) for id, moment in enumerate(tokens))
        job = turns.choose(view_of(now, jobs, (PROMPT,), streams, tpot_ms=tpot_ms))
        if job is not None:
            now += job.seconds
            ran[job.id] += 1
            since[job.id] = now
            continue
        view = turns.view_for_policy(view_of(now, jobs, (PROMPT,), streams, tpot_ms=tpot_ms))
        kind = "prompt" if not view.running else "decode" if not view.waiting else policy[count % len(policy)]
        count, num_calls = count + 1, num_calls + 1
        now += 0.05 if kind == "prompt" else STEP
        if kind != "prompt":
            for id in range(1 if kind == "one" else num_running):
                tokens[id] = now
    assert min(ran.values()) > 0
    assert num_calls > 0.4 * now / (0.05 + MIN_SHARE)


def test_jobs_of_equal_length_fill_the_time_between_two_tokens():
    view = view_of(100.0, streams=(running(100.0),))
    slack = slack_of(view)
    assert longest_job(view) == pytest.approx(JOB_FILL * slack / 3)
    slow = replace(DEVICE, seconds=lambda variant: 0.2)
    view = view_of(100.0, streams=(running(100.0),), device=slow)
    assert longest_job(view) == pytest.approx(JOB_FILL * slack_of(view) / JOBS_PER_TOKEN)
    with_prompt = view_of(100.0, waiting=(PROMPT,), streams=(running(100.0),), device=slow)
    assert JOB_FILL * 0.9 * MAX_JOB_SECONDS < longest_job(with_prompt) < MAX_JOB_SECONDS
    assert longest_job(view_of(100.0)) == longest_job(view_of(100.0, waiting=(PROMPT,))) == MAX_JOB_SECONDS
    assert longest_job(view_of(100.0, streams=(running(100.0),), tpot_ms=10.0)) > 0
