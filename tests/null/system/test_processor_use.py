"""Tests that the use of the processors by other processes is told apart from our own."""

import subprocess
import sys
import time

import psutil
import pytest

from staticllm.system import processor_use
from staticllm.system.processor_use import SHORTEST, ProcessorUse, own_processors


def test_a_busy_process_is_seen():
    others = ProcessorUse()
    spin = "import time; end = time.process_time() + 60\nprint(flush=True)\nwhile time.process_time() < end: pass"
    with subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            others.begin()
            time.sleep(1.0)
            assert others.share(with_own=False) >= 0.3 / len(own_processors())
            assert others.share(with_own=False) == 0.0, "too short ago"
        finally:
            process.kill()


def test_our_own_work_is_none_of_others(monkeypatch):
    busy = [100.0]
    own = [5.0]
    monkeypatch.setattr(processor_use, "_busy_seconds", lambda processors: busy[0])
    monkeypatch.setattr(processor_use.time, "process_time", lambda: own[0])
    others = ProcessorUse()
    time.sleep(0.11)
    busy[0] += 0.1
    own[0] += 0.1
    assert others.share(with_own=False) < 1e-6
    time.sleep(0.11)
    busy[0] += 0.1
    own[0] += 0.1
    assert others.share(with_own=True) > 0.0
    time.sleep(0.11)
    busy[0] += 0.1
    assert others.share(with_own=False) > 0.0


@pytest.mark.parametrize("error", [OSError(24, "Too many open files"), RuntimeError("syscall failed")])
def test_a_system_that_does_not_say_counts_as_idle(error, monkeypatch):
    """As in a process without free file descriptors, or on macOS: the thread that asks must go on."""
    others = ProcessorUse()

    def refuses(percpu):
        raise error

    time.sleep(SHORTEST)
    with monkeypatch.context() as patch:
        patch.setattr(psutil, "cpu_times", refuses)
        assert others.share(with_own=False) == 0.0
    time.sleep(SHORTEST)
    assert others.share(with_own=False) == 0.0, "its beginning is not known"
    time.sleep(SHORTEST)
    assert 0.0 <= others.share(with_own=False) <= 1.0
