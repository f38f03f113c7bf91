"""Tests what callbacks of futures may do: wait for the device, raise, block, and cancel, without harm to the device's thread."""

import gc
import threading
import time
import weakref
from concurrent.futures import CancelledError

import numpy as np
import pytest
from support.encoders.fake_encoders import Adder, request

from staticllm.errors import StaticLLMError
from staticllm.pipelines.embedding import embedding_request
from staticllm.pipelines.embedding.queue.drivers import JobDriver
from staticllm.pipelines.engine.job_engine import JobEngine
from staticllm.system import threads
from staticllm.system.threads import close_when_collected

SECONDS = 20


@pytest.fixture
def adder():
    return Adder()


@pytest.fixture
def queue(adder):
    engine, queue = JobEngine(), JobDriver(adder, 1000)
    engine.add_jobs(queue)
    yield queue
    engine.close()


def embed(queue, number):
    mine = request(number)
    queue.submit(mine)
    return mine.wait().tolist()


def test_a_callback_may_wait_for_the_device(queue):
    found, ended = [], threading.Event()
    first = request(1)

    def again(future):
        found.append(embed(queue, 2))
        ended.set()

    first.future.add_done_callback(again)
    queue.submit(first)
    assert first.wait().tolist() == [[8, 8]]
    assert ended.wait(SECONDS)
    assert found == [[[16, 8]]]


def test_callbacks_run_in_order_and_one_that_blocks_holds_only_callbacks(queue):
    order, may_go_on, ended = [], threading.Event(), threading.Event()
    requests = [request(i) for i in range(5)]
    requests[0].future.add_done_callback(lambda _: may_go_on.wait(SECONDS))
    for number, each in enumerate(requests):
        each.future.add_done_callback(lambda _, number=number: order.append(number))
    requests[-1].future.add_done_callback(lambda _: ended.set())
    for each in requests:
        queue.submit(each)
        each.wait()
    assert embed(queue, 7) == [[56, 8]]
    assert order == []
    may_go_on.set()
    assert ended.wait(SECONDS)
    assert order == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit(3), KeyboardInterrupt()])
def test_a_callback_that_raises_harms_no_other_text(queue, error):
    ended = threading.Event()
    requests = [request(i) for i in range(3)]

    def fail(_):
        raise error

    requests[0].future.add_done_callback(fail)
    requests[1].future.add_done_callback(lambda _: ended.set())
    for each in requests:
        queue.submit(each)
    assert [each.wait().tolist() for each in requests] == [[[0, 8]], [[8, 8]], [[16, 8]]]
    assert ended.wait(SECONDS)


def test_a_callback_that_is_added_after_the_end_is_called_at_once(queue):
    done, threads = request(1), []
    queue.submit(done)
    done.wait()
    done.future.add_done_callback(lambda future: threads.append((threading.current_thread(), future.result().tolist())))
    assert threads == [(threading.current_thread(), [[8, 8]])]


def test_the_callback_of_a_cancelled_future_gets_it(queue):
    cancelled, found = request(1), []
    ended = threading.Event()
    cancelled.future.add_done_callback(lambda future: (found.append(future), ended.set()))
    assert cancelled.future.cancel()
    assert ended.wait(SECONDS)
    assert found == [cancelled.future] and found[0].cancelled()


def test_the_thread_of_callbacks_ends(queue):
    ended = threading.Event()
    mine, names = request(1), []
    mine.future.add_done_callback(lambda _: (names.append(threading.current_thread()), ended.set()))
    queue.submit(mine)
    assert ended.wait(SECONDS)
    names[0].join(SECONDS)
    assert not names[0].is_alive()
    assert not names[0].daemon


def test_callbacks_in_quick_succession_share_a_thread_that_holds_nothing_while_it_waits(queue, monkeypatch):
    monkeypatch.setattr(embedding_request, "IDLE_SECONDS", SECONDS)
    names, ended = [], threading.Event()

    class Held:
        pass

    held = Held()
    for number in range(3):
        ended.clear()
        mine = request(number)
        mine.future.add_done_callback(lambda _, held=held: (names.append(threading.current_thread()), ended.set()))
        queue.submit(mine)
        assert ended.wait(SECONDS)
    assert len(set(names)) == 1
    reference = weakref.ref(held)
    del held, mine
    for _ in range(100):
        gc.collect()
        if reference() is None:
            break
        time.sleep(0.02)
    assert reference() is None
    assert names[0].is_alive()
    wakes = embedding_request._callbacks._condition
    with wakes:
        wakes.notify()
    names[0].join(SECONDS)
    assert not names[0].is_alive()


def test_waiting_on_the_thread_of_a_device_is_refused_in_one_line(queue, adder):
    errors, original = [], adder.run

    def run(*given):
        try:
            embed(queue, 2)
        except StaticLLMError as error:
            errors.append(error)
        return original(*given)

    adder.run = run
    assert embed(queue, 1) == [[8, 8]]
    assert "'staticllm-jobs'" in str(errors[0]) and "\n" not in str(errors[0])


def test_what_is_garbage_collected_is_closed_on_another_thread(monkeypatch):
    monkeypatch.setattr(threads, "CLOSE_SECONDS", 0.05)

    class Owner:
        pass

    lock, closed, ended = threading.Lock(), [], threading.Event()

    def close():
        with lock:
            closed.append(threading.current_thread().name)
        ended.set()

    owner = Owner()
    owner.itself = owner
    close_when_collected(owner, close)
    with lock:  # the collector runs inside the lock that closing needs
        there = weakref.ref(owner)
        del owner
        gc.collect()
        assert there() is None
        assert not closed
    assert ended.wait(SECONDS)
    assert closed == ["staticllm-close"]


def test_ctrl_c_while_waiting_gives_the_texts_up(queue, adder):
    held, may_go_on, original = threading.Event(), threading.Event(), adder.run

    def run(*given):
        held.set()
        may_go_on.wait(SECONDS)
        return original(*given)

    adder.run = run
    mine, told = request(*range(3)), []

    def interrupt(done, total):
        told.append(done)
        raise KeyboardInterrupt

    queue.submit(mine)
    assert held.wait(SECONDS)
    mine.put(0, np.zeros(2, np.float32))
    with pytest.raises(KeyboardInterrupt):
        mine.wait(interrupt)
    may_go_on.set()
    with pytest.raises(CancelledError):
        mine.future.result(0)
    adder.run = original
    assert embed(queue, 5) == [[40, 8]]
