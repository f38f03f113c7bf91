"""Ctrl-C in a thread that takes the lock of a condition or waits for a future: other threads must go on."""

import threading
import time

import pytest

from staticllm.system.threads import Condition, InterruptibleFuture, start_thread
from tests.support.interrupts import InterruptionError, interrupt_in_enter

SECONDS = 20


def test_a_plain_condition_would_stay_locked(monkeypatch):
    condition, safe = threading.Condition(), Condition()
    with monkeypatch.context() as patch:
        interrupt_in_enter(patch)
        with pytest.raises(InterruptionError), condition:
            pass
        with safe:
            pass
    free = []
    for each in (condition, safe):
        thread = threading.Thread(target=lambda each=each: free.append(each._lock.acquire(timeout=0.2)))
        thread.start()
        thread.join()
    assert free == [False, True]


def test_a_thread_ends_a_future_whose_reader_was_interrupted(monkeypatch):
    future = InterruptibleFuture()
    ends = start_thread(lambda: [time.sleep(0.1), future.set_result(7)], "device")
    with monkeypatch.context() as patch:
        interrupt_in_enter(patch)
        assert future.result(SECONDS) == 7
    ends.join(SECONDS)
    assert not ends.is_alive()
