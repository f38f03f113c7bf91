"""Tests the end of a stream of tokens to a client that does not read them, so that a send to it waits."""

from __future__ import annotations

import os
import socket
import threading
import time
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

from staticllm.core import FinishReason
from staticllm.daemon.clients import connection, streams
from staticllm.daemon.clients.connection import Connection
from staticllm.daemon.clients.streams import OutputStream
from staticllm.daemon.sharing.device_scheduler import ClientId
from staticllm.pipelines.engine.request import EngineRequest, Finished, TokenOutput
from staticllm.wire.channel import Channel
from staticllm.wire.messages import Kind
from tests.support.attach.daemons import wait_for

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
    session = SimpleNamespace(
        priority=0,
        client=ClientId(1),
        usage=SimpleNamespace(add_calls=lambda *_: None),
        follow=lambda *_: None,
        count_block=lambda _: None,
    )
    model = SimpleNamespace(id=1, engine=engine, request_of=lambda _: EngineRequest((1,)))
    lock = threading.Lock()
    stream = OutputStream(ours, lock, session)
    for number in (1, 2):
        stream.submit(model, number, {})
    yield SimpleNamespace(stream=stream, session=session, engine=engine, lock=lock, ours=ours, client=theirs)
    theirs.close()
    closing = threading.Thread(target=stream.close, daemon=True)
    closing.start()
    closing.join(SECONDS)
    ours.close()


@pytest.fixture
def blocked(stream):
    """The stream while a send of it waits for the client."""
    for _ in range(5000):  # 1 MB, more than a socket holds
        stream.engine.step()
    waiting = -1
    while waiting != (waiting := stream.stream._outputs.qsize()):
        time.sleep(0.3)
    assert stream.lock.locked()
    assert not stream.engine.cancelled
    return stream


def serve(blocked):
    """Serve the connection of the stream on a thread, and return it."""
    served = Connection(blocked.ours, None, blocked.session, is_first=False)
    served._send_lock = blocked.lock
    served._requests._stream = blocked.stream
    thread = threading.Thread(target=served.run, daemon=True)
    thread.start()
    return thread


def test_a_client_that_does_not_read_loses_its_requests(blocked):
    for _ in range(10_000):
        blocked.engine.step()
    assert not blocked.engine.queues
    assert len(blocked.engine.cancelled) == 2
    wait_for(lambda: not blocked.stream.running)  # the send that waited has ended
    assert blocked.lock.acquire(timeout=SECONDS)
    blocked.lock.release()


def test_a_bad_frame_of_a_client_that_does_not_read_frees_all(blocked):
    thread = serve(blocked)
    blocked.client.connection.send_bytes(b"no message")
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert not blocked.stream.thread.is_alive()
    assert len(blocked.engine.cancelled) == 2
    assert blocked.ours.connection.closed


def test_a_client_that_only_stops_sending_frees_all(blocked):
    thread = serve(blocked)
    with socket.socket(fileno=os.dup(blocked.client.fileno())) as client:
        client.shutdown(socket.SHUT_WR)
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert not blocked.stream.thread.is_alive()
    assert len(blocked.engine.cancelled) == 2


def test_the_answer_to_a_bad_frame_does_not_lie_in_another_frame(blocked, monkeypatch):
    monkeypatch.setattr(connection, "REFUSE_SECONDS", SECONDS, raising=False)
    thread = serve(blocked)
    blocked.client.connection.send_bytes(b"no message")
    wait_for(lambda: len(blocked.engine.cancelled) == 2)
    kinds = []
    with pytest.raises(EOFError):
        while True:
            kinds.append(blocked.client.receive().kind)
    assert kinds.pop() is Kind.REFUSED
    assert set(kinds) == {Kind.OUTPUT}
    thread.join(SECONDS)
    assert not thread.is_alive()
