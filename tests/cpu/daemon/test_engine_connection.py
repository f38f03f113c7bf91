"""Tests the connection to an engine in another process over a pipe whose other end the test holds."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from multiprocessing import Pipe

import pytest

from staticllm.children.answers import check, failed, refused
from staticllm.core import FinishReason
from staticllm.errors import (
    BusyError,
    ClosedError,
    DeviceError,
    ProcessLostError,
    PromptTooLongError,
    StaticLLMError,
    UnsupportedModelError,
    to_wire,
)
from staticllm.pipelines.daemon_client import engine_connection
from staticllm.pipelines.daemon_client.engine_connection import EngineConnection
from staticllm.pipelines.daemon_client.remote_engine import RemoteEngine
from staticllm.pipelines.engine.request import EngineRequest, Finished, OutputQueue
from staticllm.wire.channel import Channel
from staticllm.wire.endpoint import SilentError
from staticllm.wire.messages import LAST, MAX_FRAME, Kind, Message
from tests.support.attach.daemons import wait_for
from tests.support.attach.peers import Peer
from tests.support.interrupts import interrupt_in_enter

SECONDS = 10


@pytest.fixture
def peer():
    peer = Peer()
    yield peer
    peer.channel.close()
    peer.ours.close()


def run(work):
    """Run ``work`` on a thread; return the thread and the list that gets its result or exception."""
    results = []

    def keep():
        try:
            results.append(work())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    return thread, results


def accepted(connection, peer):
    """Submit request 5, which the peer accepts; return its queue."""
    queue = OutputQueue()
    thread, _ = run(lambda: connection.submit(EngineRequest((1,), id=5), queue))
    peer.answer()
    thread.join(SECONDS)
    return queue


def test_a_finalizer_in_the_middle_of_a_send_does_not_stop_it(peer, monkeypatch):
    connection = EngineConnection(peer, 1, lambda: None)
    send = peer.ours.send

    def collect_garbage_and_send(message):
        if message.kind is Kind.STATS:
            connection.tell(Message(Kind.CANCEL, body={"request": 7}))  # as GenerationHandle.__del__ does
        send(message)

    monkeypatch.setattr(peer.ours, "send", collect_garbage_and_send)
    thread, _ = run(lambda: connection.ask(Message(Kind.STATS)))
    kinds = {peer.answer().kind for _ in range(2)}
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert kinds == {Kind.STATS, Kind.CANCEL}
    connection.close()
    assert peer.is_closed


@pytest.mark.parametrize("body", [{"tokens": "x" * MAX_FRAME}, {"tokens": {1, 2}}], ids=["too long", "no JSON"])
def test_a_notice_that_cannot_be_sent_is_logged_and_the_next_ones_go_on(peer, caplog, body):
    connection = EngineConnection(peer, 1, lambda: None)
    connection.tell(Message(Kind.CLAIM, body=body))
    connection.tell(Message(Kind.CANCEL, body={"request": 7}))
    assert peer.answer().body == {"request": 7}
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith("CLAIM was not sent to the daemon: ")
    connection.close()


def test_outputs_are_read_while_a_send_waits(peer):
    connection = EngineConnection(peer, 1, lambda: None)
    queue = accepted(connection, peer)
    large, results = run(lambda: connection.ask(Message(Kind.STATS, body={"of": "x" * (MAX_FRAME // 2)})))
    ended = {"reason": "stop", "error": None, "index": 0, "is_found": True}
    peer.channel.send(Message(Kind.OUTPUT, number=5, body={"outputs": [ended]}))  # nobody has read the large message
    assert queue.get(SECONDS) == Finished(FinishReason.STOP)
    peer.answer()
    large.join(SECONDS)
    assert isinstance(results[0], Message)
    connection.close()


class Deaf(Channel):
    """A channel whose sends fail, and whose receiving side notices nothing until it is shut."""

    def __init__(self, connection):
        super().__init__(connection)
        self.is_shut = threading.Event()

    def send(self, message):
        raise BrokenPipeError

    def receive(self):
        self.is_shut.wait(SECONDS)
        raise EOFError

    def shut(self):
        self.is_shut.set()


def test_a_loss_that_a_send_sees_first_is_a_loss(peer):
    """A daemon that was killed is noticed by the next send or by the thread that reads, whichever is first."""
    peer.ours = deaf = Deaf(Pipe()[0])
    connections, second, lost = [], Peer(), []

    def connect(on_lost):
        connections.append(EngineConnection(peer if not connections else second, 1, on_lost))
        return connections[-1]

    engine = RemoteEngine(connect, on_lost=lambda: lost.append(True))
    queue = OutputQueue()
    thread, results = run(lambda: engine.submit(EngineRequest((1,)), queue))
    assert second.answer().kind is Kind.SUBMIT
    thread.join(SECONDS)
    assert results == [queue]
    assert len(connections) == 2
    assert not connections[0].is_alive
    assert deaf.is_shut.is_set()
    assert queue.get(0) is None  # the loss of the first connection is not an end of the request
    wait_for(lambda: lost == [True])
    engine.close()
    second.channel.close()


class Silent(Deaf):
    """A channel to a daemon that does not answer."""

    def send(self, message):
        raise SilentError("it is silent")


def test_a_notice_to_a_silent_daemon_ends_the_connection_as_half_of_it_may_have_been_sent(peer):
    peer.ours = silent = Silent(Pipe()[0])
    connection = EngineConnection(peer, 1, lambda: None)
    connection.tell(Message(Kind.CANCEL))
    assert silent.is_shut.wait(SECONDS)
    wait_for(lambda: not connection.is_alive)
    connection.close()


def test_a_closed_connection_is_not_a_lost_one(peer):
    lost = []
    connection = EngineConnection(peer, 1, lambda: lost.append(True))
    connection.close()
    connection.close()
    with pytest.raises(ClosedError):
        connection.ask(Message(Kind.STATS))
    connection.tell(Message(Kind.CANCEL))  # ignored
    assert not lost
    assert connection.is_alive


def test_a_lost_connection_ends_what_was_accepted_and_what_waits(peer):
    connection = EngineConnection(peer, 1, lambda: None)
    queue = accepted(connection, peer)
    thread, results = run(lambda: connection.ask(Message(Kind.STATS)))
    peer.channel.receive()
    peer.channel.close()
    end = queue.get(SECONDS)
    thread.join(SECONDS)
    assert end.reason is FinishReason.ERROR
    assert isinstance(end.error, ProcessLostError)
    assert isinstance(results[0], ProcessLostError)
    assert not connection.is_alive
    connection.close()


class Interrupted(Future):
    """What a question waits for when Ctrl-C comes."""

    def result(self, timeout=None):
        raise KeyboardInterrupt


def test_an_interrupted_submit_ends_the_request_in_the_daemon(peer, monkeypatch):
    connection = EngineConnection(peer, 1, lambda: None)
    with monkeypatch.context() as change, pytest.raises(KeyboardInterrupt):
        change.setattr(engine_connection, "InterruptibleFuture", Interrupted)
        connection.submit(EngineRequest((1,), id=5), OutputQueue())
    assert not connection.answers
    assert not connection.has(5)
    assert peer.answer().kind is Kind.SUBMIT
    cancel = peer.answer()
    assert cancel.kind is Kind.CANCEL
    assert cancel.handle == 1
    assert cancel.body == {"request": 5, "index": None, "reason": "cancelled"}
    token = {"id": 7, "logprob": 0.0, "time": 0.0, "sampling_seconds": 0.0}
    peer.channel.send(Message(Kind.OUTPUT, number=5, body={"outputs": [token]}))  # nobody waits for it any more
    thread, results = run(lambda: connection.ask(Message(Kind.STATS)))
    peer.answer()
    thread.join(SECONDS)
    assert isinstance(results[0], Message)
    connection.close()


def test_a_request_that_is_forgotten_while_its_outputs_are_read_harms_no_other(peer):
    connection = EngineConnection(peer, 1, lambda: None)
    queue = OutputQueue()
    queue.add_listener(lambda output: connection._forget(5))  # as an interrupted submit does
    thread, _ = run(lambda: connection.submit(EngineRequest((1,), id=5), queue))
    peer.answer()
    thread.join(SECONDS)
    token = {"id": 7, "logprob": 0.0, "time": 0.0, "sampling_seconds": 0.0}
    ended = {"reason": "stop", "error": None, "index": 0, "is_found": True}
    peer.channel.send(Message(Kind.OUTPUT, number=5, flags=LAST, body={"outputs": [token, ended]}))
    thread, results = run(lambda: connection.ask(Message(Kind.STATS)))
    peer.answer()
    thread.join(SECONDS)
    assert isinstance(results[0], Message)
    assert connection.is_alive
    connection.close()


@pytest.mark.parametrize("answer", [failed, refused])
@pytest.mark.parametrize(
    "error",
    [UnsupportedModelError("lift_state", "a state"), PromptTooLongError(9, 8), BusyError("it is full", 2.5)],
    ids=repr,
)
def test_an_error_that_the_daemon_answers_is_raised_with_its_fields(peer, answer, error):
    peer.channel.send(answer(error))
    with pytest.raises(type(error)) as raised:
        check(peer.ours.receive())
    assert (str(raised.value), vars(raised.value)) == (str(error), vars(error))


@pytest.mark.parametrize("body", [{}, {"type": 5}, {**to_wire(BusyError("full")), "text": "a" * 100_000}])
def test_an_error_that_is_damaged_is_one_line(body):
    with pytest.raises(DeviceError, match=r"the daemon's answer is damaged: .* must be") as raised:
        check(Message(Kind.FAILED, body=body))
    assert len(str(raised.value)) < 500


def test_a_daemon_of_another_protocol_can_still_say_why_it_refuses():
    reason = "this program speaks protocol 6, the daemon 5: restart the older one"
    with pytest.raises(StaticLLMError, match=f"^{reason}$"):
        check(Message(Kind.REFUSED, body={"reason": reason}))


def test_an_output_with_a_damaged_error_ends_the_connection_and_its_requests(peer):
    connection, request, queue = EngineConnection(peer, 1, lambda: None), EngineRequest((1,)), OutputQueue()
    thread, _ = run(lambda: connection.submit(request, queue))
    peer.answer()
    thread.join(SECONDS)
    damaged = {"reason": "error", "error": {"type": 5}, "index": 0}
    peer.channel.send(Message(Kind.OUTPUT, number=request.id, flags=LAST, body={"outputs": [damaged]}))
    assert isinstance(queue.get(SECONDS).error, DeviceError)
    connection.close()


def test_an_interrupted_question_does_not_hold_the_thread_that_reads(peer, monkeypatch):
    connection = EngineConnection(peer, 1, lambda: None)
    run(peer.answer)
    with monkeypatch.context() as patch:
        interrupt_in_enter(patch)
        assert connection.ask(Message(Kind.STATS)).kind is Kind.OK
    connection.close()  # waits for the thread that reads


def test_a_second_close_ends_what_an_interrupted_one_has_left(peer, monkeypatch):
    connection, interruptions = EngineConnection(peer, 1, lambda: None), [KeyboardInterrupt]
    join = connection.notifier.join
    monkeypatch.setattr(
        connection.notifier, "join", lambda: join() if not interruptions else _raise(interruptions.pop())
    )
    with pytest.raises(KeyboardInterrupt):
        connection.close()
    assert not peer.is_closed
    connection.close()
    assert peer.is_closed
    assert not connection.thread.is_alive()


def _raise(error):
    raise error
