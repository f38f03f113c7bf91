"""Tests of threads under Ctrl-C, which ``tests/cpu/system/test_lazy_thread.py`` runs in a process of their own."""

import os
import signal
import threading
import time
from contextlib import contextmanager

import pytest

from staticllm.system import threads
from staticllm.system.threads import LazyThread, run_uninterrupted

SECONDS = 20


@contextmanager
def sigint_after(seconds):
    """Let Ctrl-C come in this block, in the main thread."""
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        yield
    finally:
        timer.join()


@pytest.mark.parametrize("timeout", [None, SECONDS])
def test_an_interrupted_join_does_not_take_a_thread_that_runs_for_one_that_has_ended(timeout):
    """As ``Thread.join`` of Python 3.11 does. Whatever the thread used was closed under it."""
    may_end, lazy = threading.Event(), LazyThread("lazy")
    lazy.start(lambda: may_end.wait(SECONDS))
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt), sigint_after(0.05):
            lazy.join(timeout)
        assert lazy.is_alive()
        assert not lazy.join(0.05)
    may_end.set()
    assert lazy.join(timeout)
    assert not lazy.is_alive()


def test_ctrl_c_ends_the_wait_for_what_must_not_be_interrupted_and_not_the_work():
    done, may_end = [], threading.Event()

    def work():
        may_end.wait(SECONDS)
        done.append(threading.current_thread().name)

    with pytest.raises(KeyboardInterrupt), sigint_after(0.05):
        run_uninterrupted(work, "through")
    may_end.set()
    run_uninterrupted(work, "again")
    until = time.monotonic() + SECONDS
    while len(done) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert sorted(done) == ["again", "through"]


def test_ctrl_c_while_something_is_deleted_comes_after_it():
    """An exception in a finalizer is printed and lost."""
    may_end, order = threading.Event(), []
    with pytest.raises(KeyboardInterrupt):
        with sigint_after(0.05):
            threads._close_elsewhere(lambda: may_end.wait(SECONDS))
            order.append("deleted")
        time.sleep(SECONDS)
    assert order == ["deleted"]
    may_end.set()
