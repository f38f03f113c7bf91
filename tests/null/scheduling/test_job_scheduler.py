"""Tests when a job of another model runs beside requests: alone, beside streams, beside prompts, and never forever late."""

import warnings
from dataclasses import replace

import pytest

from staticllm.core import Variant
from staticllm.errors import ConfigError
from staticllm.pipelines.programs.variant_index import VariantIndex
from staticllm.pipelines.scheduling.device_share import MIN_SHARE
from staticllm.pipelines.scheduling.interface import Device, JobView, Plan, RequestView, TokenBound, View
from staticllm.pipelines.scheduling.job_scheduler import JobScheduler
from staticllm.pipelines.scheduling.planner import POLICIES, Planner, make_policy
from staticllm.pipelines.scheduling.plans import IllegalPlanError, check

STEP = 0.02
"""The seconds of a decode step."""
VARIANTS = (Variant(1, 64), Variant(4, 64, 4), Variant(16, 0, 1), Variant(16, 64, 4))
BULK = JobView(7, 0.02, arrival=0.0)
WAITING = RequestView(1, "waiting", 1.0, 10)


def running(last_token_time, id=2):
    return RequestView(id, "running", 0.0, 12, 11, 11, 3, last_token_time)


def view_of(now=100.0, jobs=(BULK,), waiting=(), streams=(), swapped=(), **targets):
    device = Device(VariantIndex(VARIANTS), lambda variant: STEP if variant.rows <= 4 else 0.05, high_slot=20)
    return View(now, waiting, (), streams, swapped, 4, 40, 100, device, jobs=jobs, **targets)


def chosen(turns, view):
    job = turns.choose(view)
    return None if job is None else job.id


def test_without_requests_the_most_urgent_job_runs():
    query, soon = JobView(8, 0.1, 50.0, priority=1), JobView(9, 0.1, 60.0, deadline=101.0)
    assert chosen(JobScheduler(), view_of(jobs=(BULK, query, soon))) == 8
    assert chosen(JobScheduler(), view_of(jobs=(BULK, soon))) == 9
    assert chosen(JobScheduler(), view_of(jobs=(replace(BULK, id=3, arrival=-1.0), BULK))) == 3
    assert chosen(JobScheduler(), view_of(jobs=())) is None


def test_jobs_fill_less_of_the_time_where_calls_take_longer_than_expected():
    """Calls that take 1.5 times their costs: of the three jobs of exact costs, one is left."""
    turns, now, count = JobScheduler(), 100.0, 0
    while True:
        view = view_of(now, streams=(running(100.0),))
        if not chosen(turns, replace(view, device=replace(view.device, overrun=1.5))):
            break
        now, count = now + 1.5 * BULK.seconds, count + 1
    assert count == 1
    assert now + 1.5 * STEP < 100.1


@pytest.mark.parametrize(
    ("targets", "num_jobs", "bound"),
    [
        ({}, 3, 0.1),
        ({"tpot_ms": 65}, 1, 0.065),
        ({"tpot_ms": 180}, 7, 0.18),
        ({"token_bound": TokenBound(2.5, 0.04)}, 1, 0.05),
        ({"token_bound": TokenBound(10, 0.04)}, 8, 0.2),
    ],
)
def test_jobs_fill_the_time_between_two_tokens_and_no_more(targets, num_jobs, bound):
    turns, now, last, count = JobScheduler(), 100.0, 100.0, 0
    while now < 101 and chosen(turns, view_of(now, streams=(running(last), running(last + 0.005, 3)), **targets)):
        now, count = now + BULK.seconds, count + 1
    assert count == num_jobs
    assert now + STEP - last <= bound


def test_a_prompt_goes_before_jobs_of_its_priority_and_after_those_of_a_higher_one():
    turns = JobScheduler()
    assert chosen(turns, view_of(100.0)) == BULK.id  # now the jobs have had their share
    for waiting in (WAITING, replace(WAITING, status="prefilling"), replace(WAITING, status="swapped")):
        assert chosen(turns, view_of(100.021, waiting=(waiting,))) is None
        assert chosen(turns, view_of(100.021, (replace(BULK, priority=1),), waiting=(waiting,))) == BULK.id
        turns = JobScheduler()
        turns.choose(view_of(100.0))


def test_streams_decode_before_a_prompt_that_comes_after_a_job():
    policy = Recorder()
    policy.plan = lambda view: policy.views.append(view) or make_policy("prefill_first").plan(view)
    planner = Planner(policy)
    try:
        assert planner.plan(view_of(100.0, streams=(running(99.99),))) == Plan(job=BULK.id)
        waiting = (WAITING, replace(WAITING, id=3, status="prefilling"))
        assert planner.plan(view_of(100.02, waiting=waiting, streams=(running(99.99),))) == Plan(decode=(2,))
        assert planner.plan(view_of(100.04, waiting=waiting, streams=(running(100.04),))).prefill
        assert planner.plan(view_of(100.04, (), waiting=waiting, streams=(running(100.04),))).prefill
    finally:
        planner.close()


def test_jobs_get_their_share_while_prompts_always_wait():
    turns, now, job_seconds = JobScheduler(), 0.0, 0.0
    while now < 20:
        job = turns.choose(view_of(now, waiting=(WAITING,)))
        now += 0.03 if job is None else job.seconds
        job_seconds += 0.0 if job is None else job.seconds
    assert 0.5 * MIN_SHARE < job_seconds / now <= MIN_SHARE


def test_a_job_that_never_fits_between_two_tokens_runs_right_after_one_and_within_its_share():
    turns, now, last, job_seconds, gaps = JobScheduler(), 0.0, 0.0, 0.0, []
    long = (JobView(7, 0.2, 0.0),)
    while now < 60:
        job = turns.choose(view_of(now, long, streams=(running(last),)))
        if job is None:
            now += STEP
            gaps.append(now - last)
            last = now
        else:
            now, job_seconds = now + job.seconds, job_seconds + job.seconds
    assert 0.5 * MIN_SHARE < job_seconds / now <= MIN_SHARE
    assert max(gaps) == pytest.approx(0.2 + STEP)


class Recorder:
    """A user's policy that keeps its views and runs the first prompt, or the first job if it plans jobs."""

    def __init__(self, plans_jobs=None):
        self.views = []
        if plans_jobs is not None:
            self.plans_jobs = plans_jobs

    def plan(self, view):
        self.views.append(view)
        if view.jobs:
            return Plan(job=view.jobs[-1].id)
        return Plan(prefill=((view.waiting[0].id, 10),))


def test_a_policy_of_before_there_were_jobs_never_sees_one():
    policy = Recorder()
    planner = Planner(policy)
    try:
        assert planner.plan(view_of()) == Plan(job=BULK.id)
        assert planner.plan(view_of(100.02, waiting=(WAITING,))) == Plan(prefill=((1, 10),))
        assert [view.jobs for view in policy.views] == [()]
    finally:
        planner.close()


def test_a_policy_may_plan_jobs_itself():
    policy = Recorder(plans_jobs=True)
    planner = Planner(policy)
    try:
        other = replace(BULK, id=8)
        assert planner.plan(view_of(jobs=(BULK, other), waiting=(WAITING,))) == Plan(job=8)
        assert planner.plan(view_of(jobs=(BULK,))) == Plan(job=7)
        assert len(policy.views) == 2
        assert policy.views[0].jobs == (BULK, other)
    finally:
        planner.close()


@pytest.mark.parametrize(
    ("plan", "rule"),
    [(Plan(job=5), "known-jobs"), (Plan(job=7, decode=(2,)), "one-model-a-call"), (Plan(job="7"), "known-jobs")],
)
def test_an_illegal_job_is_found(plan, rule):
    with pytest.raises(IllegalPlanError) as caught:
        check(plan, view_of(streams=(running(99.0),)))
    assert caught.value.rule == rule


@pytest.mark.parametrize("answer", [Plan(job=5), Plan(job=7, prefill=((1, 10),)), Plan(job=1.5), None])
@pytest.mark.parametrize("has_requests", [True, False])
def test_a_policy_with_illegal_jobs_is_replaced(answer, has_requests):
    policy = Recorder(plans_jobs=True)
    policy.plan = lambda view: answer
    planner = Planner(policy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = planner.plan(view_of(waiting=(WAITING,) if has_requests else ()))
    assert plan == (Plan(prefill=((1, 10),)) if has_requests else Plan(job=7))
    assert planner.plan(view_of(waiting=())) == Plan(job=7)


@pytest.mark.parametrize("name", POLICIES)
def test_every_shipped_policy_shares_the_device_with_jobs(name):
    planner = Planner(make_policy(name))
    plans = [planner.plan(view_of(100 + i, waiting=(WAITING,))) for i in range(4)]
    assert {plan.job for plan in plans} == {BULK.id} or Plan(job=BULK.id) in plans
    assert planner.plan(view_of(103.001, waiting=(WAITING,))).prefill


class Raising(Recorder):
    """A policy whose property ``plans_jobs`` raises."""

    @property
    def plans_jobs(self):
        raise OSError("no answer")


@pytest.mark.parametrize("policy", [Raising(), Recorder(plans_jobs="no"), Recorder(plans_jobs=1)])
def test_a_policy_whose_plans_jobs_is_no_bool_is_refused(policy):
    with pytest.raises(ConfigError, match="must be a bool"):
        Planner(policy)
