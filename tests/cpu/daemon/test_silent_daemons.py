"""Tests programs that connect to a daemon whose process is suspended: it listens, and answers nothing."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading

import pytest

from staticllm.daemon.process import lifetime
from staticllm.errors import ConfigError, DeviceError, ProcessLostError, StaticLLMError
from staticllm.pipelines.daemon_client.daemon_link import DaemonLink
from staticllm.pipelines.daemon_client.remote_engine import UserDaemon
from staticllm.wire import endpoint
from staticllm.wire.endpoint import SilenceWatch
from staticllm.wire.messages import MAX_FRAME, Kind, Message, encode
from tests.support.helpers import one_line


@pytest.fixture
def silent(monkeypatch, tmp_path):
    """The listener of a runtime folder, which accepts nobody by itself, and its key."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("STATICLLM_RUNTIME_DIR", str(folder))
    monkeypatch.setattr(endpoint, "ANSWER_SECONDS", 0.3)
    monkeypatch.setattr(endpoint, "PROBE_SECONDS", 0.2)
    key = endpoint.make_key(folder)
    listener = endpoint.listen(folder)
    yield listener, key
    listener.close()


class Home(UserDaemon):
    """A daemon that must not be started: the one that is suspended has the lock."""

    def start(self):
        raise AssertionError("it was started")


CLIENTS = {
    "pipeline": (lambda: DaemonLink(Home()), DeviceError),
    "status": (lambda: lifetime.status(endpoint.runtime_folder()), StaticLLMError),
    "stop": (lambda: lifetime.stop(endpoint.runtime_folder()), StaticLLMError),
}


def test_a_connection_that_nobody_accepts_has_a_limit(silent):
    with pytest.raises(endpoint.SilentError, match=r"has not answered for 0\.3 s: .*continue it"):
        endpoint.connect(endpoint.runtime_folder())


@pytest.mark.parametrize("client", CLIENTS)
def test_every_client_gets_one_line(silent, client):
    ask, kind = CLIENTS[client]
    with pytest.raises(kind, match="has not answered") as caught:
        ask()
    one_line(caught)


@pytest.mark.parametrize("client", ["pipeline", "status"])
def test_a_daemon_that_is_suspended_before_it_answers_the_first_message(silent, client):
    listener, key = silent
    accepted = []

    def accept():
        accepted.append(listener.accept())  # kept open
        endpoint.welcome(accepted[0], key)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    ask, kind = CLIENTS[client]
    with pytest.raises(kind, match="has not answered"):
        ask()
    thread.join(10)
    accepted[0].close()


def control():
    with lifetime.control(endpoint.runtime_folder()):
        pass


@pytest.mark.parametrize("ask", [control, *(CLIENTS[client][0] for client in ("status", "stop"))])
def test_an_answer_that_is_no_message_is_one_line(silent, ask):
    listener, key = silent

    def answer():
        with listener.accept() as accepted:
            endpoint.welcome(accepted, key)
            accepted.recv_bytes()
            accepted.send_bytes(bytes(99))

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    with pytest.raises(StaticLLMError, match="the daemon's answer is damaged: ") as caught:
        ask()
    one_line(caught)
    thread.join(10)


def test_damaged_statistics_are_not_taken_for_a_daemon_that_does_not_run(silent):
    listener, key = silent

    def answer():
        with listener.accept() as accepted:
            endpoint.welcome(accepted, key)
            accepted.recv_bytes()
            accepted.send_bytes(encode(Message(Kind.WELCOME, body={"pid": 1})))
            accepted.recv_bytes()  # STATS
            accepted.send_bytes(bytes(99))

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    with pytest.raises(StaticLLMError, match="the daemon's answer is damaged: ") as caught:
        lifetime.status(endpoint.runtime_folder())
    one_line(caught)
    thread.join(10)


def link_to(listener, key, *answers):
    """Return a link to a daemon, and the thread that gives it these answers after the greeting."""

    def answer():
        with listener.accept() as accepted:
            endpoint.welcome(accepted, key)
            for data in (encode(Message(Kind.WELCOME, body={"pid": 1})), *answers):
                accepted.recv_bytes()
                accepted.send_bytes(data)

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    return DaemonLink(Home()), thread


def test_a_damaged_answer_to_a_pipeline_is_a_loss_so_that_the_next_try_has_another_daemon(silent):
    link, thread = link_to(*silent, bytes(99))
    with pytest.raises(ProcessLostError, match="the daemon's answer is damaged: ") as caught:
        link.ask(Message(Kind.MODEL))
    one_line(caught)
    thread.join(10)
    link.close()


def test_a_message_that_is_too_long_is_not_the_daemons_fault(silent):
    link, thread = link_to(*silent, encode(Message(Kind.OK, body={"is": "there"})))
    with pytest.raises(ConfigError, match=f"of more than {MAX_FRAME} bytes cannot go to the daemon") as caught:
        link.ask(Message(Kind.MODEL, body={"directory": "x" * MAX_FRAME}))
    one_line(caught)
    assert link.ask(Message(Kind.PING)).body == {"is": "there"}
    thread.join(10)
    link.close()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems refuse who comes when too many wait")
def test_a_place_among_too_many_who_wait_has_a_limit(silent):
    where, waiting = endpoint.address(endpoint.runtime_folder()), []
    with contextlib.ExitStack() as stack, contextlib.suppress(BlockingIOError):
        while len(waiting) < 1000:
            waiting.append(stack.enter_context(socket.socket(socket.AF_UNIX)))
            waiting[-1].setblocking(False)
            waiting[-1].connect(where)
    assert len(waiting) < 1000
    with pytest.raises(endpoint.SilentError, match="has not answered") as caught:  # who has gone keeps the place
        endpoint.connect(endpoint.runtime_folder())
    one_line(caught)


def test_one_look_serves_all_who_wait_and_a_daemon_that_has_ended_is_not_silent(silent, monkeypatch):
    looks = []
    monkeypatch.setattr(endpoint, "PROBE_SECONDS", 1000.0)
    watch, check = SilenceWatch(endpoint.runtime_folder()), endpoint.listens
    monkeypatch.setattr(endpoint, "listens", lambda folder: (looks.append(folder), check(folder)))

    def ask():
        with pytest.raises(endpoint.SilentError, match="has not answered"):
            watch.check()

    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert len(looks) == 1
    silent[0].close()
    monkeypatch.setattr(endpoint, "PROBE_SECONDS", 0.0)
    watch.check()
    assert len(looks) == 2
