"""Ctrl-C in a thread that waits for vectors: the thread of the device must go on."""

import threading
import time

import numpy as np
import pytest
from support.encoders.fake_encoders import Adder

from staticllm.errors import ClosedError
from staticllm.pipelines.embedding import embedding_request
from staticllm.pipelines.embedding.embedding_request import EmbeddingRequest, RequestFuture
from staticllm.pipelines.embedding.packing.tokenized_text import TokenizedText
from staticllm.pipelines.embedding.queue.drivers import JobDriver
from staticllm.system.threads import start_thread
from tests.support.interrupts import interrupt_in_enter

SECONDS = 20


def request_of(count=1):
    return EmbeddingRequest([TokenizedText(np.arange(3, dtype=np.int64))] * count, 4)


def test_an_interrupted_wait_leaves_the_future_to_the_thread_of_the_device(monkeypatch):
    request, told = request_of(2), []
    ends = start_thread(lambda: [time.sleep(0.1), *(request.put(i, np.full(4, i)) for i in range(2))], "device")
    with monkeypatch.context() as patch:
        interrupt_in_enter(patch)
        vectors = request.wait(lambda *done: told.append(done))
    assert np.array_equal(vectors, [[0] * 4, [1] * 4])
    assert told[-1] == (2, 2)
    ends.join(SECONDS)
    assert not ends.is_alive()


def test_the_main_thread_does_not_end_requests_because_ctrl_c_could_come_between(monkeypatch):
    """A request whose end had begun was never ended: its reader waited for good."""
    queue, names = JobDriver(Adder(), 1000), []
    fail = EmbeddingRequest.fail
    monkeypatch.setattr(
        EmbeddingRequest, "fail", lambda *given: names.append(threading.current_thread().name) or fail(*given)
    )
    requests = [request_of() for _ in range(3)]
    for each in requests:
        queue.submit(each)
    queue.close()
    assert names == ["staticllm-close"] * 3
    for each in requests:
        with pytest.raises(ClosedError):
            each.future.result(0)


def test_callbacks_run_after_the_start_of_their_thread_was_interrupted(monkeypatch):
    callbacks, called = embedding_request._DoneCallbacks(), threading.Event()

    def interrupted(self):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(embedding_request.threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            callbacks.add(lambda: None)
    callbacks.add(called.set)
    assert called.wait(SECONDS)


def test_a_future_is_a_future():
    future = RequestFuture()
    called = threading.Event()
    future.add_done_callback(lambda _: called.set())
    assert future.set_running_or_notify_cancel()
    future.set_result(np.zeros((1, 4)))
    assert called.wait(SECONDS)
    assert future.result(0).shape == (1, 4)
