"""Tests jobs of other models on an engine that serves requests, and on one that has none."""

import threading
import time
import warnings

import pytest
from support.engine.output_queues import outputs_of

from staticllm.errors import ClosedError
from staticllm.pipelines.engine.job_engine import JobEngine
from staticllm.pipelines.engine.jobs import JobSources, new_source_id
from staticllm.pipelines.scheduling.interface import JobView
from staticllm.pipelines.scheduling.planner import make_policy
from staticllm.testing import fake_answer, fake_engine, fake_request, run_to_end
from tests.support.interrupts import InterruptionError

PROMPT = list(range(2, 30))


class Counter:
    """A source of a given number of jobs, each of which only notes when it ran."""

    def __init__(self, count, seconds=1e-4, priority=0):
        self.id, self.count, self.seconds, self.priority = new_source_id(), count, seconds, priority
        self.arrival, self.ran, self.is_closed, self.max_seconds = time.perf_counter(), [], False, None
        self.failure, self.has_ended = None, threading.Event()
        self.wake, self.wait_seconds = lambda: None, 0.0

    @property
    def has_jobs(self):
        return self.count > 0

    def attach(self, wake):
        self.wake = wake

    def add(self, count=1):
        self.count += count
        self.wake()

    def next_job(self, max_seconds=None):
        self.max_seconds = max_seconds
        return JobView(self.id, self.seconds, self.arrival, self.priority) if self.count else None

    def run_next(self, meanwhile=None):
        if self.failure:
            raise self.failure
        if not self.count:
            return 0
        if meanwhile:
            meanwhile()
        self.count -= 1
        self.ran.append(time.perf_counter())
        if not self.count:
            self.has_ended.set()
        return 1

    def close(self):
        self.is_closed = True
        self.count = 0


@pytest.mark.parametrize("policy", ["dynamic", "fcfs", "chunked"])
def test_requests_get_their_answers_beside_jobs(policy):
    engine = fake_engine(make_policy(policy), starts_thread=False)
    source = Counter(30)
    engine.add_jobs(source)
    requests = [fake_request(PROMPT[i:], 12) for i in range(6)]
    run_to_end(engine, requests)
    assert [request.tokens for request in requests] == [fake_answer(PROMPT[i:], 12) for i in range(6)]
    assert len(source.ran) == 30
    times = [moment for request in requests for moment in request.token_times]
    assert min(times) < max(source.ran) and min(source.ran) < max(times), "neither waited for the other to end"
    stats = engine.stats()
    assert (stats.num_jobs, stats.num_requests) == (30, 6)
    engine.close()


def test_a_request_that_waits_for_a_job_takes_the_prefix_that_comes_meanwhile():
    engine = fake_engine(make_policy("fcfs"), starts_thread=False)
    source = Counter(1, priority=1)
    engine.add_jobs(source)
    request = fake_request([*PROMPT, 40, 41], 4)
    engine.steps.add([request])
    engine.steps.step()
    assert source.ran and not request.state.started
    run_to_end(engine, [fake_request(PROMPT, 4, priority=1)])
    assert request.num_cached == len(PROMPT)
    assert request.tokens == fake_answer([*PROMPT, 40, 41], 4)
    engine.close()


def test_tokens_are_posted_before_a_job_ends():
    engine = fake_engine(make_policy("dynamic"), starts_thread=False)
    request = fake_request(PROMPT, 8)
    engine.steps.add([request])
    while request.num_generated < 2:
        engine.steps.step()
    source, posted = Counter(1), []
    run_next = source.run_next

    def run(meanwhile):
        found = run_next(meanwhile)
        posted.extend(outputs_of(request))
        return found

    source.run_next = run
    engine.add_jobs(source)
    before = request.num_generated
    while source.count:
        engine.steps.step()
    assert len(posted) == before
    run_to_end(engine)
    engine.close()


def test_jobs_run_on_the_thread_of_an_engine_without_requests():
    engine, source = fake_engine(make_policy("dynamic")), Counter(0)
    engine.add_jobs(source)
    source.add(5)
    assert source.has_ended.wait(10)
    source.has_ended.clear()
    source.add(3)
    assert source.has_ended.wait(10)
    engine.remove_jobs(source)
    assert source.is_closed
    engine.close()


def test_closing_with_drain_runs_all_jobs_and_without_closes_the_source():
    for drain in (True, False):
        engine, source = fake_engine(make_policy("dynamic")), Counter(0)
        engine.add_jobs(source)
        run_next = source.run_next
        source.run_next = lambda meanwhile=None, run_next=run_next: (time.sleep(0.005), run_next(meanwhile))[1]
        source.add(50)
        engine.close(drain)
        assert source.is_closed
        assert (len(source.ran) == 50) is drain
        with pytest.raises(ClosedError):
            engine.add_jobs(Counter(1))


def test_a_source_that_raises_is_closed_and_requests_go_on():
    engine, source, other = fake_engine(make_policy("dynamic"), starts_thread=False), Counter(3), Counter(4)
    source.failure, source.priority = OSError("broken"), 1
    engine.add_jobs(source)
    engine.add_jobs(other)
    request = fake_request(PROMPT, 8)
    with pytest.warns(RuntimeWarning, match="broken"):
        run_to_end(engine, [request])
    assert request.tokens == fake_answer(PROMPT, 8)
    assert source.is_closed
    assert len(other.ran) == 4
    engine.close()


def test_a_source_that_cannot_say_its_job_is_closed_and_requests_go_on():
    engine, source, other = fake_engine(make_policy("dynamic"), starts_thread=False), Counter(3), Counter(4)
    source.next_job = lambda max_seconds: 1 / 0
    engine.add_jobs(source)
    engine.add_jobs(other)
    request = fake_request(PROMPT, 8)
    with pytest.warns(RuntimeWarning, match="ZeroDivisionError"):
        run_to_end(engine, [request])
    assert request.tokens == fake_answer(PROMPT, 8)
    assert source.is_closed
    assert len(other.ran) == 4
    engine.close()


def test_a_source_that_is_removed_while_it_is_planned_does_nothing():
    sources, source = JobSources(), Counter(2)
    sources.add(source)
    (job,) = sources.views()
    sources.remove(source)
    assert sources.run(job.id) == 0
    assert not sources.has_jobs
    assert sources.views() == ()


class Keeper:
    """A policy of a user that decodes or prefills whatever comes first, and knows nothing of jobs."""

    def plan(self, view):
        assert not view.jobs
        return make_policy("fcfs").plan(view)


def test_a_policy_of_a_user_shares_the_device():
    engine, source = fake_engine(Keeper(), starts_thread=False), Counter(10)
    engine.add_jobs(source)
    request = fake_request(PROMPT, 12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_to_end(engine, [request])
    assert request.tokens == fake_answer(PROMPT, 12)
    assert len(source.ran) == 10
    engine.close()


def test_several_sources_share_an_engine_without_requests():
    engine = JobEngine()
    bulk, query = Counter(0), Counter(0, priority=1)
    engine.add_jobs(bulk)
    engine.add_jobs(query)
    hold = threading.Event()
    run_next = bulk.run_next
    bulk.run_next = lambda meanwhile=None: (hold.wait(10), run_next(meanwhile))[1]
    bulk.add(3)
    query.add(3)
    assert query.has_ended.wait(10) or hold.set()
    hold.set()
    assert bulk.has_ended.wait(10) and query.has_ended.wait(10)
    assert max(query.ran) < bulk.ran[1]
    engine.close()
    assert bulk.is_closed and query.is_closed
    with pytest.raises(ClosedError):
        bulk.wake()


def test_a_job_that_was_held_for_a_prompt_runs_when_none_came(monkeypatch):
    moments, source = [], Counter(1, seconds=60.0)

    def expected(activity, now):
        moments.append(now)
        return now + 0.02 if len(moments) < 3 else None

    monkeypatch.setattr("staticllm.pipelines.scheduling.job_scheduler.ChatActivity.prompt_expected_until", expected)
    engine = fake_engine(make_policy("dynamic"))
    engine.add_jobs(source)
    source.wake()
    assert source.has_ended.wait(60)
    assert len(moments) == 3
    engine.close()


def test_a_source_is_closed_by_the_second_call_if_the_first_was_interrupted():
    sources, source, closed = JobSources(), Counter(2), []

    def interrupted():
        raise InterruptionError

    sources.add(source)
    source.close = interrupted
    with pytest.raises(InterruptionError):
        sources.close()
    source.close = lambda: closed.append(1)
    for _ in range(2):
        sources.close()
    assert closed == [1]
