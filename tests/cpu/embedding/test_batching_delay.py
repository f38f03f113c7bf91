"""Tests that a call waits a moment for the clients that got vectors together, and for nobody else."""

import time

import pytest
from support.encoders.fake_encoders import Adder, request

from staticllm.pipelines.embedding.queue import planned_calls
from staticllm.pipelines.embedding.queue.drivers import JobDriver
from staticllm.pipelines.embedding.queue.planned_calls import DELAY_SHARE, LONGEST_DELAY, BatchingDelay
from staticllm.pipelines.engine.job_engine import JobEngine


def served(num_requests, seconds=0.1, is_last=True):
    found = BatchingDelay()
    for number in range(num_requests):
        found.come(request(number + 1))
    found.serve(num_requests, seconds, is_last, now=5.0)
    return found


def test_a_call_waits_until_as_many_have_come_as_were_served():
    found = served(3)
    for number in range(3):
        assert found.seconds(5.0) == pytest.approx(0.1 * DELAY_SHARE)
        found.come(request(number + 1))
    assert found.seconds(5.0) == 0.0


def test_the_wait_has_an_end():
    assert served(3, seconds=1.0).seconds(5.0) == pytest.approx(LONGEST_DELAY)
    assert served(3).seconds(5.0 + 0.1 * DELAY_SHARE) == 0.0


@pytest.mark.parametrize("more", [{"priority": 1}, {"deadline": 9.0}])
def test_an_urgent_request_waits_for_nobody(more):
    found = served(3)
    found.come(request(1, **more))
    assert found.seconds(5.0) == 0.0


def test_nobody_waits_after_one_client_or_while_others_wait():
    alone, early = served(1), served(3, is_last=False)
    for each in (alone, early):
        each.come(request(9))
        assert each.seconds(5.0) == 0.0


def test_calls_one_after_another_serve_clients_that_came_together():
    found = served(3, is_last=False)
    found.serve(2, 0.1, is_last=True, now=5.1)
    for number in range(5):
        assert found.seconds(5.1) > 0.0
        found.come(request(number + 1))
    assert found.seconds(5.1) == 0.0


@pytest.fixture
def queue(monkeypatch):
    """The queue of an engine, which begins with three requests and more once ``begin`` is called; waits last up to 20 s."""
    monkeypatch.setattr(planned_calls, "DELAY_SHARE", 1e9)
    monkeypatch.setattr(planned_calls, "LONGEST_DELAY", 20.0)
    engine, found = JobEngine(), JobDriver(Adder(), 100)
    for number in (1, 2, 3):
        found.submit(request(number))
    monkeypatch.setattr(found, "begin", lambda: engine.add_jobs(found), raising=False)
    yield found
    engine.close()


def test_clients_that_ask_again_one_after_another_share_the_next_call(queue):
    first = request(4)
    queue.submit(first)
    queue.begin()
    first.future.result(20)
    waiting = [request(number) for number in (5, 6, 7, 8)]
    for each in waiting:
        time.sleep(0.02)
        queue.submit(each)
    for each in waiting:
        each.future.result(20)
    assert [sorted(call) for call in queue.runner.calls] == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_a_client_that_comes_alone_is_served_in_the_end(queue, monkeypatch):
    monkeypatch.setattr(planned_calls, "LONGEST_DELAY", 0.05)
    first, second = request(4), request(5)
    queue.submit(first)
    queue.begin()
    first.future.result(20)
    queue.submit(second)
    second.future.result(20)
    assert [sorted(call) for call in queue.runner.calls] == [[1, 2, 3, 4], [5]]


def test_a_lone_client_and_an_urgent_one_begin_at_once(monkeypatch):
    """The queue forgot to count who came: every call after one that had emptied it waited."""
    monkeypatch.setattr(planned_calls, "LONGEST_DELAY", 20.0)
    monkeypatch.setattr(planned_calls, "DELAY_SHARE", 1e6)
    queue = JobDriver(Adder(), 100)
    for more in ({}, {}, {"priority": 1}):
        queue.submit(request(3, **more))
        assert queue.wait_seconds == 0.0
        assert queue.run_next() == 1
    for number in (1, 2):
        queue.submit(request(number))
    assert queue.run_next() == 2
    queue.submit(request(1))
    assert queue.wait_seconds > 1.0
    queue.submit(request(1, deadline=1e9))
    assert queue.wait_seconds == 0.0
    queue.close()
