"""Daemons for tests: in a thread of this process, or as a process of their own that can be killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import openvino as ov

from staticllm.daemon.limits import default_limits
from staticllm.daemon.process.daemon import Daemon
from staticllm.wire import endpoint
from staticllm.wire.channel import Channel
from staticllm.wire.messages import PROTOCOL, Kind, Message


@contextlib.contextmanager
def daemon_thread(monkeypatch, folder, **limits):
    """Serve ``folder`` in a thread, and return the ``Daemon``."""
    folder.mkdir(mode=0o700, exist_ok=True)
    monkeypatch.setenv("STATICLLM_RUNTIME_DIR", str(folder))
    daemon = Daemon(folder, replace(default_limits(), **limits))
    ready = threading.Event()
    thread = threading.Thread(target=daemon.run, args=(ready.set,))
    thread.start()
    assert ready.wait(10)
    try:
        yield daemon
    finally:
        daemon.stop()
        thread.join(20)
        assert not thread.is_alive()


@contextlib.contextmanager
def daemon_process(monkeypatch, folder, *arguments):
    """Serve ``folder`` in a process of its own, and return the ``Popen``."""
    folder.mkdir(mode=0o700, exist_ok=True)
    monkeypatch.setenv("STATICLLM_RUNTIME_DIR", str(folder))
    command = [sys.executable, "-m", "staticllm", "daemon", "start", "--foreground", *arguments]
    process = subprocess.Popen(command, env=dict(os.environ), stdout=subprocess.DEVNULL)
    try:
        wait_for(lambda: _listens(folder), 30)
        yield process
    finally:
        process.terminate()
        process.wait(20)


def wait_for(condition, seconds=5.0):
    """Wait until ``condition()`` is true."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)


def _listens(folder):
    try:
        endpoint.connect(folder).close()
    except endpoint.EndpointError:
        return False
    return True


class RawClient:
    """A client that says exactly what a test wants."""

    def __init__(self, session=None, **hello):
        self.channel = Channel(endpoint.connect(endpoint.runtime_folder()))
        body = {"protocol": PROTOCOL, "openvino": ov.get_version(), "pid": os.getpid(), "program": "test", **hello}
        self.welcome = self.ask(Kind.HELLO, **(body if session is None else {**body, "session": session}))
        self.session = self.welcome.body.get("session")

    def ask(self, kind, handle=0, **body):
        """Send a message and return the answer."""
        self.channel.send(Message(kind, handle, body=body))
        return self.channel.receive()

    def model(self, path, /, **more):
        """Have a model compiled, and return the answer."""
        return self.ask(Kind.MODEL, **{"path": str(path), "device": "CPU", "config": {}, "mode": "auto", **more})

    def request(self, model):
        """Return a further connection with an infer request of a model."""
        other = RawClient(self.session)
        assert other.ask(Kind.REQUEST, model, block=0).kind is Kind.OK
        return other

    def infer(self, *arrays):
        """Run a call, and return copies of the outputs, or the answer if it is an error."""
        self.channel.send_tensors(Message(Kind.INFER), arrays, range(len(arrays)))
        answer = self.channel.receive()
        if answer.kind is not Kind.DONE:
            return answer
        return [array.copy() for _, array in self.channel.tensors_of(answer)]

    def close(self):
        """Close the connection."""
        self.channel.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
