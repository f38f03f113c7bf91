"""Signals that end a command, which removes what it has made and ends what it has started."""

from __future__ import annotations

import os
import signal
import sys
import threading

import pytest

from staticllm.cli.signals import ENDING, unwound_at_signals

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="it has no signals")


@pytest.mark.parametrize("number", ENDING)
def test_a_signal_leaves_the_block_with_its_exit_code(number):
    before = signal.getsignal(number)
    left = []
    with pytest.raises(SystemExit) as caught, unwound_at_signals():
        try:
            os.kill(os.getpid(), number)
            threading.Event().wait(30)
        finally:
            left.append(number)
    assert caught.value.code == 128 + number
    assert left == [number]
    assert signal.getsignal(number) == before


def test_an_ignored_signal_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with unwound_at_signals():
            os.kill(os.getpid(), signal.SIGHUP)
            assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


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
