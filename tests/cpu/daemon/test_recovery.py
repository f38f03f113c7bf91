"""Tests what happens to requests of a lost connection, over pipes whose other ends the test holds."""

from __future__ import annotations

import threading
import time
from queue import SimpleQueue

import pytest

from staticllm.children.answers import refused
from staticllm.core import FinishReason
from staticllm.errors import BusyError, ClosedError, DeviceError, ProcessLostError
from staticllm.pipelines.daemon_client import recovery
from staticllm.pipelines.daemon_client.engine_connection import EngineConnection
from staticllm.pipelines.daemon_client.recovery import MAX_LOSSES, LiveRequest
from staticllm.pipelines.daemon_client.remote_engine import RemoteEngine
from staticllm.pipelines.engine.request import EngineRequest, Finished, OutputQueue, TokenOutput
from staticllm.wire.messages import Kind, Message
from tests.support.attach.daemons import wait_for
from tests.support.attach.peers import Peer

SECONDS = 20


def token(id, index=0):
    return TokenOutput(id, -0.5 * id, 0.0, 0.0, index)


class Network:
    """Makes the connections of an engine, each to the next of the test's peers, or the next error."""

    def __init__(self):
        self.peers = SimpleQueue()
        self.first = Peer()
        self.peers.put(self.first)
        self.engine = RemoteEngine(self.connect, self.give_up, resumes=True)

    def connect(self, on_lost):
        peer = self.peers.get(timeout=SECONDS)
        if isinstance(peer, Exception):
            raise peer
        return EngineConnection(peer, 1, on_lost)

    def give_up(self):
        self.peers.put(ClosedError("given up"))

    def submit(self, request, peer=None):
        """Submit a request, which a peer accepts; return its queue."""
        queues = []
        thread = threading.Thread(target=lambda: queues.append(self.engine.submit(request)), daemon=True)
        thread.start()
        (peer or self.first).answer()
        thread.join(SECONDS)
        return queues[0]

    def next(self, peer=None):
        peer = peer or Peer()
        self.peers.put(peer)
        return peer


@pytest.fixture
def network():
    network = Network()
    yield network
    network.engine.close()
    names = ("staticllm-remote-watch", "staticllm-remote-recovery")
    wait_for(lambda: not [each for each in threading.enumerate() if each.name in names], SECONDS)


def ids(queue, count):
    return [queue.get(SECONDS).id for _ in range(count)]


def error_of(queue):
    end = queue.get(SECONDS)
    assert end.reason is FinishReason.ERROR
    assert isinstance(end.error, ProcessLostError)
    assert "send it again" in str(end.error)
    assert "\n" not in str(end.error)
    return end.error


def test_what_was_delivered_is_compared_and_dropped(network):
    request = EngineRequest((1, 2), seed=99)
    queue = network.submit(request)
    network.first.send(request.id, token(5), token(6))
    assert ids(queue, 2) == [5, 6]
    network.first.die()
    second = network.next()
    again = second.answer()
    assert again.kind is Kind.SUBMIT
    assert again.number == request.id
    assert again.body["request"]["seed"] == 99
    assert again.body["request"]["prompt"] == [1, 2]
    second.send(request.id, token(5))
    second.send(request.id, token(6), token(7), Finished(FinishReason.LENGTH))
    assert queue.get(SECONDS) == token(7)
    assert queue.get(SECONDS) == Finished(FinishReason.LENGTH)
    assert queue.get(0) is None
    assert not network.engine.live


@pytest.mark.parametrize("others", [[token(5), token(9)], [token(5), Finished(FinishReason.STOP)]])
def test_an_answer_that_differs_ends_with_an_error_and_is_never_mixed(network, others):
    request = EngineRequest((1,))
    queue = network.submit(request)
    network.first.send(request.id, token(5), token(6))
    assert ids(queue, 2) == [5, 6]
    network.first.die()
    second = network.next()
    second.answer()
    wait_for(lambda: not network.engine.recovery.is_running, SECONDS)
    second.send(request.id, *others)
    error_of(queue)
    if isinstance(others[-1], TokenOutput):  # the daemon need not go on with it
        cancel = second.answer()
        assert cancel.kind is Kind.CANCEL
        assert cancel.body["request"] == request.id
        second.send(request.id, token(7), Finished(FinishReason.CANCELLED))
    wait_for(lambda: not network.engine.live)
    assert queue.get(0.1) is None


def test_answers_that_ended_stay_as_they_are(network):
    request = EngineRequest((1,), num_sequences=3)
    queue = network.submit(request)
    stop = Finished(FinishReason.STOP, None, 1)
    network.first.send(request.id, token(5), token(7, 1), stop, token(8, 2))
    assert [queue.get(SECONDS) for _ in range(4)] == [token(5), token(7, 1), stop, token(8, 2)]
    network.engine.cancel(request.id, 2, FinishReason.STOP)  # the reader found a stop string
    network.first.answer()  # the cancel; the daemon dies before it can end the answer
    network.first.die()
    assert queue.get(SECONDS) == Finished(FinishReason.STOP, None, 2)  # at once
    second = network.next()
    second.answer()
    cancel = second.answer()
    assert cancel.kind is Kind.CANCEL
    assert cancel.body["index"] == 2
    second.send(request.id, token(5), token(7, 1), stop, token(8, 2), token(6), Finished(FinishReason.LENGTH))
    assert [queue.get(SECONDS) for _ in range(2)] == [token(6), Finished(FinishReason.LENGTH)]
    assert queue.get(0) is None


def test_what_is_cancelled_or_late_ends_while_nobody_listens(network):
    whole, one, late = EngineRequest((1,)), EngineRequest((1,), num_sequences=2), None
    queues = [network.submit(whole), network.submit(one)]
    late = EngineRequest((1,), deadline=time.perf_counter() + 0.5)
    queues.append(network.submit(late))
    network.first.die()
    wait_for(lambda: network.engine.recovery.is_running)
    network.engine.cancel(whole.id)
    network.engine.cancel(one.id, 1)
    assert queues[0].get(SECONDS) == Finished(FinishReason.CANCELLED)
    assert queues[1].get(SECONDS) == Finished(FinishReason.CANCELLED, None, 1)
    assert queues[2].get(SECONDS) == Finished(FinishReason.DEADLINE)
    second = network.next()
    assert second.answer().number == one.id  # the only one that is left
    second.send(one.id, token(4), Finished(FinishReason.STOP), Finished(FinishReason.CANCELLED, None, 1))
    assert queues[1].get(SECONDS) == token(4)
    assert queues[1].get(SECONDS) == Finished(FinishReason.STOP)


def test_a_cancel_while_it_is_submitted_again_reaches_the_daemon(network):
    request = EngineRequest((1,))
    queue = network.submit(request)
    network.first.die()
    second = network.next()
    submit = second.receive()
    network.engine.cancel(request.id)
    assert queue.get(SECONDS) == Finished(FinishReason.CANCELLED)
    second.channel.send(Message(Kind.OK, number=submit.number))
    assert second.answer().kind is Kind.CANCEL


def test_a_request_that_ends_daemons_is_not_sent_for_ever(network):
    request, peer = EngineRequest((1,)), network.first
    queue = network.submit(request)
    for _ in range(MAX_LOSSES - 1):
        peer.die()
        peer = network.next()
        peer.answer()
    peer.die()
    error_of(queue)
    wait_for(lambda: not network.engine.recovery.is_running)
    last = network.next()
    queue = network.submit(EngineRequest((2,)), last)  # the next request has its own count
    assert network.peers.empty()


def test_daemons_that_end_while_they_load_or_accept_count_too(network):
    request = EngineRequest((1,))
    queue = network.submit(request)
    network.first.die()
    network.next(ProcessLostError("the process has ended"))
    error_of(queue)
    request, peer = EngineRequest((2,)), network.next()
    queue = network.submit(request, peer)
    peer.die()
    other = network.next()
    other.receive()  # SUBMIT, which gets no answer
    other.die()
    error_of(queue)


@pytest.mark.parametrize("error", [DeviceError("the daemon cannot be reached"), KeyError("vocab_size")])
def test_a_daemon_that_cannot_be_had_ends_requests_with_the_cause(network, error):
    queues = [network.submit(EngineRequest((1,))) for _ in range(2)]
    network.first.die()
    for _ in range(1 + isinstance(error, DeviceError)):
        network.next(error)
    for queue in queues:
        assert error_of(queue).__cause__ is error


def test_a_daemon_that_listens_late_is_found(network):
    request = EngineRequest((1,))
    queue = network.submit(request)
    network.first.die()
    network.next(DeviceError("the daemon cannot be reached: it could not be started after 20.0 s"))
    second = network.next()
    second.answer()
    second.send(request.id, Finished(FinishReason.STOP))
    assert queue.get(SECONDS) == Finished(FinishReason.STOP)


def test_outputs_that_are_faster_than_the_acceptance_are_not_delivered_twice(network):
    request, queues = EngineRequest((1,)), []
    thread = threading.Thread(target=lambda: queues.append(network.engine.submit(request)), daemon=True)
    thread.start()
    assert network.first.receive().kind is Kind.SUBMIT
    network.first.send(request.id, token(5))
    wait_for(lambda: [len(each) for each in network.engine.live[request.id].delivered] == [1], SECONDS)
    network.first.die()  # before it has said that it accepts the request
    second = network.next()
    second.answer()
    thread.join(SECONDS)
    second.send(request.id, token(5), token(6), Finished(FinishReason.STOP))
    assert ids(queues[0], 2) == [5, 6]
    assert queues[0].get(SECONDS) == Finished(FinishReason.STOP)


def test_a_daemon_that_refuses_the_request_ends_it(network):
    queue = network.submit(EngineRequest((1,)))
    network.first.die()
    network.next().answer(Kind.REFUSED, **refused(BusyError("it is full")).body)
    assert isinstance(error_of(queue).__cause__, BusyError)


def test_an_error_that_a_living_daemon_sends_is_no_loss_of_it(network):
    request = EngineRequest((1,))
    queue = network.submit(request)
    network.first.send(request.id, Finished(FinishReason.ERROR, ProcessLostError("a process behind it has ended")))
    assert type(queue.get(SECONDS).error) is ClosedError
    assert network.engine.recovery.lost() == []


def test_the_recovery_has_a_limit(network, monkeypatch):
    monkeypatch.setattr(recovery, "RECOVERY_SECONDS", 0.3)
    queue = network.submit(EngineRequest((1,)))
    network.first.die()
    error_of(queue)  # while the engine still connects
    second = network.next()
    network.submit(EngineRequest((2,)), second)


def test_a_daemon_that_hangs_in_a_submit_has_the_limit_too(network, monkeypatch):
    monkeypatch.setattr(recovery, "RECOVERY_SECONDS", 3.0)
    queue = network.submit(EngineRequest((1,)))
    second = network.next()
    network.first.die()
    second.receive()  # and no answer
    error_of(queue)
    second.die()


def test_close_ends_what_is_lost_at_once(network):
    queues = [network.submit(EngineRequest((1,))) for _ in range(2)]
    network.first.die()
    wait_for(lambda: len(network.engine.recovery.lost()) == 2)
    network.engine.close()
    assert [queue.get(SECONDS) for queue in queues] == [Finished(FinishReason.CANCELLED)] * 2
    with pytest.raises(ClosedError):
        network.engine.submit(EngineRequest((1,)))


def test_a_daemon_that_was_stopped_is_not_replaced(network):
    network.first.was_stopped = True
    queue = network.submit(EngineRequest((1,)))
    network.first.die()
    error_of(queue)
    assert not network.engine.recovery.is_running


def test_requests_come_back_in_their_order_while_new_ones_come(network):
    requests = [EngineRequest((number,)) for number in range(4)]
    for request in requests:
        network.submit(request)
    network.first.die()
    second = network.next()
    assert [second.answer().number for _ in requests] == [request.id for request in requests]
    fresh = EngineRequest((9,))
    assert network.submit(fresh, second).get(0) is None


def test_a_listener_may_call_back_while_an_output_is_put():
    queue, ended = OutputQueue(), []
    live = LiveRequest(EngineRequest((1,), id=3), queue, ended.append)
    queue.add_listener(lambda output: live.end(FinishReason.CANCELLED))
    live.put(token(1))
    assert ended == [3]
    assert live.is_over
    assert queue.get(0) == token(1)
    assert queue.get(0) == Finished(FinishReason.CANCELLED)
    assert queue.get(0) is None
