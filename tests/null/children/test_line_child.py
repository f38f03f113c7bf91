"""Tests children that answer by lines: bounded lines and times, and descendants that hold the pipe."""

from __future__ import annotations

import sys
import time

import psutil
import pytest

from staticllm.children.child import ChildLostError
from staticllm.children.line_child import MAX_LINE, LineChild

HOLD = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']{});"


def child_of(code, **more):
    return LineChild([sys.executable, "-c", code], **more)


def soon():
    return time.monotonic() + 60


def test_lines_are_answered_in_order_and_the_end_of_stdin_ends_the_child():
    child = child_of("import sys\nfor line in sys.stdin: print(line.strip()[::-1], flush=True)")
    for text in ("abc", "tab\tand ü"):
        child.tell(text)
        assert child.next_line(soon()) == text[::-1]
    assert child.end(60) == 0


def test_a_last_line_is_read_after_the_end():
    child = child_of("print('first'); print('last', end='')")
    child.wait(60)
    assert [child.next_line(soon()) for _ in range(2)] == ["first", "last"]
    with pytest.raises(ChildLostError, match="with code 0, it closed its pipe"):
        child.next_line(soon())


@pytest.mark.skipif(sys.platform == "win32", reason="its sessions are those of POSIX")
@pytest.mark.parametrize("session", ["", ", start_new_session=True"])
def test_the_end_of_a_child_is_noticed_although_a_descendant_holds_its_pipe(session):
    """As Wine's servers do, which have sessions of their own."""
    child = child_of(HOLD.format(session) + "print(1, flush=True); sys.exit(7)")
    assert child.next_line(soon()) == "1"
    before = time.monotonic()
    with pytest.raises(ChildLostError, match="with code 7"):
        child.next_line(soon())
    assert time.monotonic() - before < 30, "the descendant lives for 60 s"


@pytest.mark.skipif(sys.platform == "win32", reason="exit codes are those of POSIX")
def test_a_late_child_is_killed_with_its_descendants():
    child = child_of(HOLD.format("") + "import time; print('on', flush=True); time.sleep(60)")
    assert child.next_line(soon()) == "on"
    family = psutil.Process(child.pid).children(recursive=True)
    assert len(family) == 1
    with pytest.raises(TimeoutError):
        child.next_line(time.monotonic() + 0.2)
    assert child.exit_code == -9
    _, alive = psutil.wait_procs(family, 10)
    assert not [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]


def test_lines_that_never_stop_do_not_outlast_the_moment():
    child = child_of("while True: print()")
    moment = time.monotonic() + 0.5
    with pytest.raises(TimeoutError):
        for _ in range(2_000_000):
            child.next_line(moment)
    assert child.exit_code is not None


@pytest.mark.parametrize("code", ["print('x' * 3_000_000)", "import sys\nwhile True: sys.stdout.write('x' * 65536)"])
def test_a_line_that_is_too_long_ends_the_child(code):
    child = child_of(code)
    with pytest.raises(ChildLostError, match=rf"a line has more than {MAX_LINE} bytes|by signal"):
        child.next_line(soon())
    assert child.exit_code is not None


def test_a_child_that_writes_more_than_is_asked_for_waits():
    child = child_of("for number in range(100_000): print(number)")
    assert [child.next_line(soon()) for _ in range(1000)] == [str(number) for number in range(1000)]
    child.kill()
    assert child.end(60) != 0


def test_a_child_that_has_ended_is_told_nothing():
    child = child_of("pass")
    child.wait(60)
    with pytest.raises(ChildLostError, match="with code 0"):
        for _ in range(10):
            child.tell("x" * 100_000)
