"""Tests calls in blocks that are jobs of an engine: their order, and what ends one between two of its blocks."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError
from itertools import groupby
from types import SimpleNamespace

import pytest

from staticllm.errors import ClosedError, DeviceError
from staticllm.pipelines.engine.queued_calls import QueuedCalls
from staticllm.system.threads import start_thread
from tests.support.interrupts import interrupt_in_enter

BLOCK_SECONDS = [1.0, 2.0, 2.0, 3.0]


class Calls:
    """Calls of four blocks, and what has run of each: its name and the first and last block."""

    def __init__(self):
        self.now = 0.0
        self.queue = QueuedCalls(
            SimpleNamespace(steps=SimpleNamespace(in_use=threading.RLock()), clock=self._tick), lambda: BLOCK_SECONDS
        )
        self.has_run = []
        self.during = lambda blocks: None

    def _tick(self):
        self.now += 1.0
        return self.now

    def submit(self, name, **options):
        def run(blocks, meanwhile):
            self.has_run.append((name, blocks.start, blocks.stop))
            self.during(blocks)
            return f"{name} after {blocks.stop}"

        return self.queue.submit(run, **options)

    def step(self, max_seconds=None):
        """Run the next job, and return how the scheduler saw it; None if there was none."""
        job = self.queue.next_job(max_seconds)
        assert self.queue.run_next() == (job is not None)
        return job


@pytest.fixture
def calls():
    return Calls()


def test_a_job_has_as_many_blocks_as_fit_and_one_at_least(calls):
    heard = calls.submit("a")
    assert calls.step(3.5).seconds == 3.0
    assert not heard.done() and calls.queue.has_jobs
    assert calls.step(0.1).seconds == 2.0
    assert calls.step(100.0).seconds == 3.0
    assert calls.has_run == [("a", 0, 2), ("a", 2, 3), ("a", 3, 4)]
    assert heard.result(0) == "a after 4" and not calls.queue.has_jobs
    calls.submit("b")
    assert calls.step().seconds == 8.0, "without a limit it is one job"
    assert calls.has_run[3:] == [("b", 0, 4)]


def test_a_call_that_has_begun_ends_before_others_and_has_their_urgency(calls):
    first = calls.submit("a", priority=-1)
    assert calls.step(1.0).priority == -1
    second = calls.submit("b", priority=1, deadline=9.0)
    third = calls.submit("c", priority=2, deadline=7.0)
    job = calls.step(1.0)
    assert (job.priority, job.deadline, job.arrival) == (2, 7.0, 1.0)
    while not third.done():
        assert calls.step(4.0).priority == 2
    assert first.done() and not second.done()
    assert calls.step(4.0).priority == 1
    assert [name for name, _ in groupby(calls.has_run, lambda each: each[0])] == ["a", "c", "b"]


def test_one_that_is_given_up_between_blocks_makes_way(calls):
    first = calls.submit("a", priority=1)
    second = calls.submit("b")
    calls.step(1.0)
    assert first.cancel()
    assert calls.step(1.0).priority == 0
    assert calls.has_run == [("a", 0, 1), ("b", 0, 1)], "the other one begins anew"
    calls.step()
    assert second.result(0) == "b after 4" and calls.step() is None
    with pytest.raises(CancelledError):
        first.result(0)


def test_one_that_is_given_up_during_its_last_block_is_not_cancelled(calls):
    heard = calls.submit("a")
    calls.step(5.0)
    calls.during = lambda blocks: calls.has_run.append(heard.cancel())
    calls.step(5.0)
    assert calls.has_run[-1] is False and heard.result(0) == "a after 4"


@pytest.mark.parametrize("begin", [0, 1, 3])
def test_an_error_in_a_block_ends_its_call_alone(calls, begin):
    def fail(blocks):
        if blocks.start == begin:
            raise DeviceError("broken")

    calls.during = fail
    first, second = calls.submit("a"), calls.submit("b")
    while not first.done():
        calls.step(1.0)
    with pytest.raises(DeviceError, match="broken"):
        first.result(0)
    calls.during = lambda blocks: None
    calls.step()
    assert second.result(0) == "b after 4" and not calls.queue.has_jobs


@pytest.mark.parametrize("fails", [False, True])
def test_closing_during_a_block_ends_the_call(calls, fails):
    def close(blocks):
        calls.queue.close()
        if fails:
            raise DeviceError("broken")

    first, second = calls.submit("a"), calls.submit("b")
    calls.during = close
    calls.step(1.0)
    for each in (first, second):
        with pytest.raises(ClosedError):
            each.result(0)
    assert calls.step() is None


def test_closing_during_the_last_block_leaves_its_result(calls):
    heard = calls.submit("a")
    calls.during = lambda blocks: calls.queue.close()
    calls.step()
    assert heard.result(0) == "a after 4"


def test_an_interrupted_reader_does_not_hold_the_device(calls, monkeypatch):
    found = calls.submit("a")
    device = start_thread(lambda: [time.sleep(0.1), *(calls.step() for _ in BLOCK_SECONDS)], "device")
    with monkeypatch.context() as patch:
        interrupt_in_enter(patch)
        assert found.result(20) == "a after 4"
    device.join(20)
    assert not device.is_alive()


def test_the_main_thread_does_not_end_calls_because_ctrl_c_could_come_between(calls):
    ended = []
    for name in "abc":
        calls.submit(name).add_done_callback(lambda _: ended.append(threading.current_thread().name))
    calls.queue.close()
    assert ended == ["staticllm-close"] * 3
