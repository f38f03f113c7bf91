"""Tests programs that connect to a daemon whose process is suspended: it listens, and answers nothing."""

from __future__ import annotations

import threading

import pytest

from staticllm.daemon import lifetime
from staticllm.errors import DeviceError, StaticLLMError
from staticllm.pipelines.remote.daemon_home import UserDaemon
from staticllm.pipelines.remote.daemon_link import DaemonLink
from staticllm.wire import endpoint
from tests.helpers import one_line


@pytest.fixture
def silent(monkeypatch, tmp_path):
    """The listener of a runtime folder, which accepts nobody by itself, and its key."""
    folder = tmp_path / "run"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("STATICLLM_RUNTIME_DIR", str(folder))
    monkeypatch.setattr(endpoint, "ANSWER_SECONDS", 0.3)
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
    with pytest.raises(endpoint.SilentError, match=r"has not answered for 0\.3 s: .*kill -CONT"):
        endpoint.connect(endpoint.runtime_folder())


@pytest.mark.parametrize("client", CLIENTS)
def test_every_client_gets_one_line(silent, client):
    ask, kind = CLIENTS[client]
    with pytest.raises(kind, match="has not answered") as caught:
        ask()
    one_line(caught)


@pytest.mark.parametrize("client", ["pipeline"])
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
