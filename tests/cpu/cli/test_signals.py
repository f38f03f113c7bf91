"""Signals that end a command, which removes what it has made and ends what it has started.

They are sent to processes of their own: one that runs tests may not survive them.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from staticllm.cli import signals
from staticllm.cli.signals import CLOSE, ENDING, LOGOFF, SHUTDOWN, on_console_event, unwound_at_signals

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="it has no signals")
COMMAND = """
import os, signal, sys, threading
from staticllm.cli.signals import unwound_at_signals

number = int(sys.argv[1])
signal.signal(number, signal.SIG_IGN if sys.argv[2] == "ignored" else signal.SIG_DFL)
before = signal.getsignal(number)
try:
    with unwound_at_signals():
        os.kill(os.getpid(), number)
        threading.Event().wait(60 if sys.argv[2] == "taken" else 0)
        print("inside")
finally:
    print("left", signal.getsignal(number) == before)
"""


@pytest.mark.parametrize("number", ENDING)
@pytest.mark.parametrize("way,said", [("taken", "left True\n"), ("ignored", "inside\nleft True\n")])
def test_a_signal_leaves_the_block_with_its_exit_code_unless_it_is_ignored(number, way, said):
    command = [sys.executable, "-c", COMMAND, str(int(number)), way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == said
    assert done.returncode == (128 + number if way == "taken" else 0)


def test_another_thread_changes_nothing():
    before = signal.getsignal(signal.SIGTERM)
    found = []

    def run():
        with unwound_at_signals():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert found == [before]


@pytest.mark.parametrize("event", [CLOSE, LOGOFF, SHUTDOWN])
def test_the_end_of_a_console_is_ctrl_c_and_is_held_back_meanwhile(event, monkeypatch):
    is_over = threading.Event()
    monkeypatch.setattr(signals, "time", SimpleNamespace(sleep=is_over.wait))
    order = []

    def close():
        order.append(bool(on_console_event(event)))

    thread = threading.Thread(target=close)  # the system has one for it
    with pytest.raises(KeyboardInterrupt):
        thread.start()
        for _ in range(300):  # a signal of another thread does not end a wait
            threading.Event().wait(0.1)
    assert order == [], "the process would have been ended by now"
    is_over.set()
    thread.join(30)
    assert order == [True]


def test_other_events_of_a_console_are_left_to_python():
    assert not any(on_console_event(event) for event in (0, 1))  # Ctrl-C and Ctrl-Break
