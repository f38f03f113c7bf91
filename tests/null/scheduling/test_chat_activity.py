"""Tests that jobs beside conversations leave prompts their time to first token: by their length, and by waiting for a prompt."""

from dataclasses import replace
from itertools import pairwise

import pytest

from staticllm.config import StaticLLMConfig
from staticllm.core import Variant
from staticllm.pipelines.programs.variant_index import VariantIndex
from staticllm.pipelines.scheduling.device_share import MIN_SHARE
from staticllm.pipelines.scheduling.interface import Device, IdleView, JobView, Plan, RequestView, View
from staticllm.pipelines.scheduling.job_scheduler import (
    ACTIVE_SECONDS,
    HOLD_SECONDS,
    LEAST_JOB_SECONDS,
    MAX_JOB_SECONDS,
    NUM_KEPT,
    TTFT_SHARE,
    ChatActivity,
    JobScheduler,
)
from staticllm.pipelines.scheduling.planner import Planner, make_policy
from staticllm.pipelines.simulator.cluster import Scenario, configured_model
from staticllm.pipelines.simulator.cost_model import AnalyticCosts, HostCost
from staticllm.pipelines.simulator.workload import Arrival

DEVICE = Device(VariantIndex((Variant(1, 64), Variant(16, 0, 1))), lambda variant: 0.0006, high_slot=20)
BULK = JobView(7, 0.003, 0.0)
SLOW, FAST = AnalyticCosts(20e-3, 0.5e-3, 5e-8), AnalyticCosts(0.5e-3, 0.1e-3, 5e-9)


def view_of(now, waiting=(), running=(), jobs=(BULK,), idle=()):
    return View(now, waiting, (), running, (), 4, 40, 100, DEVICE, jobs=jobs, idle=idle)


def waits(id, arrival):
    return RequestView(id, "waiting", arrival, 10)


def runs(id, arrival, first_token, num_generated=1):
    return RequestView(id, "running", arrival, 11, 10, 10, num_generated, first_token)


def turn(observe, id, arrival, seen, first_token, end):
    """Show a request that arrives, is seen, gets its first token, and has ended."""
    observe(view_of(seen, (waits(id, arrival),)))
    observe(view_of(first_token, running=(runs(id, arrival, first_token),)))
    observe(view_of(end))


@pytest.mark.parametrize("costs", [FAST, SLOW], ids=["steps of 0.6 ms", "steps of 20.6 ms"])
def test_first_tokens_gaps_and_throughput_of_conversations_beside_bulk_calls(costs):
    """Prompts come at any moment of a call. Calls have 0.5 ms that do nothing, so short ones cost throughput."""
    config = StaticLLMConfig(max_prompt_len=256, min_response_len=100, max_num_seqs=4)
    arrivals = tuple(Arrival(number, 1 + 8.00137 * number, 128, 60) for number in range(16))
    scenario = Scenario(configured_model(config, "shared", costs, HostCost()), arrivals)
    (alone, *_), beside = scenario.run("dynamic").requests, scenario.with_jobs(1.0).run("dynamic")
    ttft = [request.token_times[0] - request.arrival for request in beside.requests]
    assert max(ttft[1:]) <= 1.3 * (alone.token_times[0] - alone.arrival), "the first prompt tells how long prompts take"
    gaps = [after - before for request in beside.requests for before, after in pairwise(request.token_times)]
    assert max(gaps) <= 0.1
    useful = sum(job.seconds - 0.5e-3 for job in beside.jobs[0]) / arrivals[-1].time
    assert useful >= 0.7 * (1 - 0.5e-3 / MAX_JOB_SECONDS)


def test_the_longest_job_follows_the_time_to_first_token():
    turns = JobScheduler()
    assert turns.longest_job(view_of(0.0)) == MAX_JOB_SECONDS
    for number, seconds in enumerate([0.04] * NUM_KEPT):
        begin = 1.0 + number
        turn(turns.longest_job, number, begin - 0.02, begin, begin + seconds, begin + 0.5)
    assert turns.longest_job(view_of(6.0)) == pytest.approx(TTFT_SHARE * 0.04), "the wait for the job does not count"
    assert turns.longest_job(view_of(6.1, running=(runs(9, 6.05, 6.1),))) <= TTFT_SHARE * 0.04
    assert turns.longest_job(view_of(6.2)) == pytest.approx(TTFT_SHARE * 0.04)
    assert turns.longest_job(view_of(6.3 + ACTIVE_SECONDS)) == MAX_JOB_SECONDS, "nobody chats any more"


def test_jobs_are_never_asked_to_be_shorter_than_the_host_can_serve():
    turns = JobScheduler()
    turn(turns.longest_job, 1, 1.0, 1.0, 1.0001, 1.1)
    assert turns.longest_job(view_of(1.2)) == LEAST_JOB_SECONDS


def test_a_long_prompt_among_short_ones_does_not_make_jobs_longer():
    activity = ChatActivity()
    for number, seconds in enumerate([0.02, 0.02, 5.0]):
        turn(activity.observe, number, 10.0 * number, 10.0 * number, 10.0 * number + seconds, 10.0 * number + 6)
    assert activity.longest_job(27.0) == pytest.approx(TTFT_SHARE * 0.02)


def test_a_job_that_runs_before_a_prompt_is_no_part_of_its_time():
    turns = JobScheduler()
    turns.longest_job(view_of(1.0, (waits(1, 0.9),)))
    assert turns.choose(view_of(1.0, (waits(1, 0.9),))) == BULK, "it has waited for its share"
    turn(turns.longest_job, 1, 0.9, 1.0 + BULK.seconds, 1.04 + BULK.seconds, 1.5)
    assert turns.longest_job(view_of(1.6)) == pytest.approx(TTFT_SHARE * 0.04)


def test_gaps_keep_their_bound_although_calls_take_twice_their_estimate():
    turns = JobScheduler()
    turn(turns.longest_job, 1, 0.9, 1.0, 1.013, 1.5)
    now = last = 2.0
    while True:
        view = view_of(now, running=(runs(2, 1.9, last, 5),))
        job = replace(BULK, seconds=turns.longest_job(view))
        if turns.choose(replace(view, jobs=(job,))) is None:
            break
        now += 2 * job.seconds
    assert 0.08 < now + 0.0006 - last <= 0.1


def held_turns(pause, count=NUM_KEPT):
    """Return turns that saw ``count`` prompts, each ``pause`` after the end of the last answer, and this end."""
    turns, now = JobScheduler(), 1.0
    for number in range(count + 1):
        turn(turns.hold_until, number, now, now, now + 0.01, now + 0.2)
        now += 0.2 + pause
    return turns, now - pause


def test_a_job_waits_for_a_prompt_that_always_comes_at_once():
    turns, end = held_turns(pause=HOLD_SECONDS / 5)
    fresh = (replace(BULK, arrival=end),)
    assert turns.hold_until(view_of(end, jobs=fresh)) == pytest.approx(end + HOLD_SECONDS)
    assert turns.hold_until(view_of(end + HOLD_SECONDS / 2, jobs=fresh)) == pytest.approx(end + HOLD_SECONDS)
    assert turns.hold_until(view_of(end + HOLD_SECONDS, jobs=fresh)) is None, "it did not come"


def test_no_job_waits_in_other_cases():
    turns, end = held_turns(pause=HOLD_SECONDS / 5)
    fresh = replace(BULK, arrival=end)
    assert turns.hold_until(view_of(end, jobs=(replace(fresh, priority=1),))) is None, "a query goes before prompts"
    assert turns.hold_until(view_of(end, jobs=())) is None, "there is none"
    assert turns.hold_until(view_of(end, jobs=(fresh,), idle=(IdleView(5, end, end + 0.001),))) is None
    assert turns.hold_until(view_of(end, (waits(99, end),), jobs=(fresh,))) is None, "the prompt is there"
    for pause, count in ((3 * HOLD_SECONDS, NUM_KEPT), (1.0, NUM_KEPT), (0.0, 0)):
        turns, end = held_turns(pause, count)
        assert turns.hold_until(view_of(end, jobs=(replace(BULK, arrival=end),))) is None


def test_tokens_that_a_client_chooses_are_no_prompts_that_come_at_once():
    turns, now = JobScheduler(), 1.0
    for number in range(20):
        away = IdleView(1, now, now + 0.002)
        turns.hold_until(view_of(now, idle=(away,)))
        turns.hold_until(view_of(now + 0.002, running=(runs(1, 0.0, now + 0.002, number + 1),)))
        now += 0.003
    assert turns.hold_until(view_of(now, jobs=(replace(BULK, arrival=now),))) is None


def test_jobs_get_their_share_beside_short_requests_that_always_come_at_once():
    turns, now, job_seconds, id, start = JobScheduler(), 1.0, 0.0, 0, 1.0
    while now < 30:
        id += 1
        turns.hold_until(view_of(now, (waits(id, now),)))
        now += 0.005
        turns.hold_until(view_of(now, running=(runs(id, now - 0.005, now),)))
        now, arrival = now + 0.001, now + 0.003
        while now < arrival:
            view = view_of(now)
            if (moment := turns.hold_until(view)) is not None:
                now = min(moment, arrival)
            else:
                now += turns.choose(view).seconds
                job_seconds += BULK.seconds
    assert 0.5 * MIN_SHARE < job_seconds / (now - start) < 2 * MIN_SHARE


def test_the_planner_waits_and_then_runs_the_job():
    planner = Planner(make_policy("dynamic"))
    planner._jobs, end = held_turns(pause=HOLD_SECONDS / 5)
    fresh = (replace(BULK, arrival=end),)
    assert planner.plan(view_of(end, jobs=fresh)) == Plan(wait_until=pytest.approx(end + HOLD_SECONDS))
    assert planner.plan(view_of(end + HOLD_SECONDS, jobs=fresh)) == Plan(job=BULK.id)
