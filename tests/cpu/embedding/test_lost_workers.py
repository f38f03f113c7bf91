"""Tests worker processes of a pool that are killed or frozen, and calls that Ctrl-C interrupts while they are admitted."""

import threading
import time
from concurrent.futures import CancelledError

import pytest
from support.encoders.fake_instances import Adder, request, sums

from staticllm.errors import ClosedError, DeviceError, StaticLLMError
from staticllm.pipelines.embedding.pool import failures
from staticllm.pipelines.embedding.pool.instances import WorkerLostError
from staticllm.pipelines.embedding.pool.pool_loader import make_pool
from staticllm.pipelines.embedding.pool.thread_driver import ThreadDriver
from staticllm.pipelines.embedding.queue import drivers, text_queue

SECONDS = 30


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(failures, "RETRY_SECONDS", 0.001)
    monkeypatch.setattr(failures, "REST_SECONDS", 0.05)
    monkeypatch.setattr(text_queue, "REST_SECONDS", 0.05)


@pytest.fixture
def worker():
    return Adder("A")


@pytest.fixture
def pool(worker):
    found = ThreadDriver(make_pool([worker], "plain", None, 1 << 20))
    yield found
    worker.gate.set()
    found.close()


def submit(pool, *ids, **options):
    found = request(*ids, **options)
    pool.submit(found)
    return found.future


def wait_until(is_true):
    until = time.monotonic() + SECONDS
    while not is_true():
        assert time.monotonic() < until
        time.sleep(0.005)


def lost(number):
    return [WorkerLostError("the worker process of A ended by signal 9") for _ in range(number)]


def test_a_worker_that_is_killed_while_it_is_started_again_loses_nothing(pool, worker):
    worker.gate.clear()
    running = submit(pool, 20)
    assert worker.began.wait(SECONDS)
    waiting = submit(pool, 21, 22)
    worker.problems = lost(failures.MAX_FAILURES + 1)  # more often than a device may fail
    worker.killed.set()
    worker.gate.set()
    assert running.result(SECONDS).tolist() == sums(20)
    assert waiting.result(SECONDS).tolist() == sums(21, 22)
    assert worker.num_recovered == failures.MAX_FAILURES + 2


def test_a_worker_that_cannot_be_started_for_long_is_used_again_later(pool, worker):
    worker.gate.clear()
    running = submit(pool, 20)
    assert worker.began.wait(SECONDS)
    may_start = threading.Event()

    def recover():
        if not may_start.is_set():
            raise lost(1)[0]

    worker.recover = recover
    worker.killed.set()
    worker.gate.set()
    with pytest.raises(DeviceError, match="ended by signal 9"):
        running.result(SECONDS)
    with pytest.raises(
        DeviceError, match=r"A ended by signal 9\): try again later, .* started again every .* s, or load"
    ):
        submit(pool, 21)
    assert pool.num_waiting == 0
    may_start.set()
    wait_until(lambda: pool.alive)
    assert submit(pool, 22).result(SECONDS).tolist() == sums(22)


def test_a_worker_that_is_killed_in_batch_after_batch_serves_on(pool, worker):
    for number in range(20, 20 + 3 * failures.MAX_FAILURES):
        worker.killed.set()
        assert submit(pool, number).result(SECONDS).tolist() == sums(number)
    assert pool.alive == ("A",)


def test_a_pool_closes_while_a_worker_is_being_started_again(pool, worker):
    starting = threading.Event()

    def recover():
        starting.set()
        assert worker.killed.wait(SECONDS), "close() interrupts the start"
        raise lost(1)[0]

    worker.recover = recover
    worker.killed.set()
    waiting = submit(pool, 20)
    assert starting.wait(SECONDS)
    pool.close()
    with pytest.raises(ClosedError):
        waiting.result(0)
    assert worker.is_closed
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("staticllm-embedding")]


def test_ctrl_c_while_texts_are_admitted_gives_them_up(pool, worker, monkeypatch):
    monkeypatch.setattr(drivers, "SLICE", 4)
    worker.gate.clear()
    blocking = submit(pool, 20)
    assert worker.began.wait(SECONDS)
    admit, calls = pool._queue.admit, []

    def interrupted(*given):
        calls.append(given)
        if len(calls) == 3:
            raise KeyboardInterrupt
        admit(*given)

    monkeypatch.setattr(pool._queue, "admit", interrupted)
    bulk = request(*range(21, 61))
    with pytest.raises(KeyboardInterrupt):
        pool.submit(bulk)
    assert pool.num_waiting == 0
    with pytest.raises(CancelledError):
        bulk.future.result(0)
    monkeypatch.undo()
    worker.gate.set()
    assert blocking.result(SECONDS).tolist() == sums(20)
    assert worker.calls == [[20]]


@pytest.mark.parametrize("end", ["cancel", "close"])
def test_what_the_garbage_collector_ends_inside_the_lock_does_not_lock_the_pool_up(pool, worker, monkeypatch, end):
    worker.gate.clear()
    running = submit(pool, 20)
    assert worker.began.wait(SECONDS)
    waiting, later = submit(pool, 21), submit(pool, 22)
    begin, collected = pool.pool.begin, threading.Event()

    def collecting(*given):
        found = begin(*given)
        if not collected.is_set():  # an object of the user whose __del__ gives a text up, or closes the pipeline
            collected.set()
            (waiting.cancel if end == "cancel" else pool.close)()
        return found

    monkeypatch.setattr(pool.pool, "begin", collecting)
    worker.gate.set()
    assert running.result(SECONDS).tolist() == sums(20)
    if end == "cancel":
        assert later.result(SECONDS).tolist() == sums(22)
        wait_until(lambda: pool.num_waiting == 0)
        assert submit(pool, 23).result(SECONDS).tolist() == sums(23)
    else:
        wait_until(lambda: worker.is_closed)
        with pytest.raises(ClosedError):
            submit(pool, 23)
    assert collected.is_set()


def test_a_deadline_passes_while_a_worker_is_frozen(pool, worker):
    """The batch goes on; the caller of the late text does not wait until it ends, or until the worker is killed."""
    worker.gate.clear()
    late = submit(pool, 2, deadline=time.perf_counter() + 0.5)
    with pytest.raises(StaticLLMError, match="deadline"):
        late.result(SECONDS)
    assert worker.calls == [[2]]
    other = submit(pool, 3)
    worker.gate.set()
    assert other.result(SECONDS).tolist() == sums(3)
    assert pool.num_waiting == 0
    assert not worker.num_recovered
