"""Tests that a client which does not read its tokens loses its requests, while their sends wait."""

from __future__ import annotations

import threading
import time
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

from staticllm.core import FinishReason
from staticllm.daemon import streams
from staticllm.daemon.streams import OutputStream
from staticllm.pipelines.engine.output_queue import Finished, TokenOutput
from staticllm.pipelines.engine.request import EngineRequest
from staticllm.wire.channel import Channel
from tests.daemons import wait_for

SECONDS = 10


class Engine:
    """An engine that chooses a token whenever the test says so, until a request is cancelled."""

    def __init__(self):
        self.queues, self.cancelled = {}, set()

    def submit(self, request, queue):
        self.queues[request.id] = queue

    def cancel(self, id, index=None, reason=FinishReason.CANCELLED):
        self.cancelled.add(id)

    def step(self):
        for id, queue in list(self.queues.items()):
            if id in self.cancelled:
                del self.queues[id]
                queue.put(Finished(FinishReason.CANCELLED))
            else:
                queue.put(TokenOutput(5, 0.0, 0.0, 0.0))


@pytest.fixture
def stream(monkeypatch):
    """A stream to a client that reads nothing, and the engine of its model."""
    monkeypatch.setattr(streams, "MAX_BACKLOG", 20_000)
    ours, theirs = map(Channel, Pipe())
    engine = Engine()
    session = SimpleNamespace(priority=0, count_call=lambda *_: None)
    model = SimpleNamespace(id=1, engine=engine, request_of=lambda _: EngineRequest((1,)))
    stream = OutputStream(ours, threading.Lock(), session)
    for number in (1, 2):
        stream.submit(model, number, {})
    yield SimpleNamespace(stream=stream, engine=engine, lock=stream._channel_lock)
    theirs.close()
    closing = threading.Thread(target=stream.close, daemon=True)
    closing.start()
    closing.join(SECONDS)
    ours.close()


def test_a_client_that_does_not_read_loses_its_requests(stream):
    for _ in range(5000):  # 1 MB, more than a socket holds
        stream.engine.step()
    waiting = -1
    while waiting != (waiting := stream.stream._outputs.qsize()):
        time.sleep(0.3)
    assert stream.lock.locked() and not stream.engine.cancelled
    for _ in range(10_000):
        stream.engine.step()
    assert not stream.engine.queues and len(stream.engine.cancelled) == 2
    wait_for(lambda: not stream.stream._running)  # the send that waited has ended
    assert stream.lock.acquire(timeout=SECONDS)
    stream.lock.release()
