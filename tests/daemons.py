"""Daemons for tests: in a thread of this process, or as a process of their own that can be killed."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

from staticllm.daemon.limits import default_limits
from staticllm.daemon.server import Daemon
from staticllm.wire import endpoint


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
