"""Tests child processes: they are asked over pipes, end within a bounded time, and say how they ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest

from staticllm.children import child as module
from staticllm.children.child import Child, ChildLostError, python_command, start_daemon
from staticllm.wire import endpoint
from staticllm.wire.endpoint import EndpointError, SilentError
from staticllm.wire.messages import Kind, Message, write_message

ECHO = """
from staticllm.children.child import take_pipes
from staticllm.wire.messages import read_message, write_message
questions, answers = take_pipes()
print("what a compiler prints is no answer")
while (message := read_message(questions)) is not None:
    write_message(answers, message)
"""


def child_of(code, **more):
    paths = f"import sys; sys.path[:] = {sys.path!r}\n"
    return Child([sys.executable, "-c", paths + code], has_pipes=True, **more)


def test_a_child_answers_and_ends_with_its_pipes(tmp_path):
    child = child_of(ECHO, errors=tmp_path / "err", environment={"STATICLLM_MARK": "1"})
    body = {"text": "x" * 3000}
    for payload in (b"", bytes(range(256)) * 8000):  # 2 MB, more than a message on a socket may have
        answer = child.ask(Message(Kind.INFER, 1, 2, body=body, payload=payload), 60)
        assert (answer.kind, answer.handle, answer.number, answer.body) == (Kind.INFER, 1, 2, body)
        assert bytes(answer.payload) == payload
    assert child.is_usable
    assert child.end(60) == 0
    assert not child.is_usable
    assert "what a compiler prints" in (tmp_path / "err").read_text()


@pytest.mark.parametrize(
    ("code", "how"),
    [
        ("sys.exit(3)", "with code 3, it closed its pipe"),
        ("print('not a message' * 9, flush=True); sys.stdin.read()", "is not the start of a message"),
        ("sys.stdout.buffer.write(b'\\0\\0\\0\\x40half'); sys.stdout.flush(); sys.exit(0)", "ended within a message"),
    ],
)
def test_a_child_that_gives_no_answer_says_how_it_ended(code, how, monkeypatch):
    child = child_of(code)
    with pytest.raises(ChildLostError, match=how) as lost:
        child.ask(Message(Kind.PING))
    assert lost.value.code == child.exit_code


@pytest.mark.skipif(sys.platform == "win32", reason="it has no signals")
def test_a_child_that_is_killed_or_late_is_lost():
    child = child_of("sys.stdin.read()")
    threading.Timer(0.2, child.kill).start()
    with pytest.raises(ChildLostError, match="by signal 9"):
        child.ask(Message(Kind.PING))
    late = child_of("import time; time.sleep(600)")
    with pytest.raises(TimeoutError):
        late.ask(Message(Kind.PING), 0.3)
    assert late.exit_code == -9


@pytest.mark.skipif(sys.platform == "win32", reason="it has no signals")
def test_a_child_that_does_not_end_is_killed():
    child = child_of("import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)")
    assert child.end(0.5) == -9


@pytest.mark.skipif(sys.platform == "win32", reason="it has no signals")
@pytest.mark.parametrize("is_left_early", [False, True])
def test_a_block_ends_a_child_at_once_if_it_is_left_early(tmp_path, is_left_early):
    """The child would note that its pipe has ended, and does so unless it was killed."""
    noted = tmp_path / "noted"
    code = f"sys.stdin.read(); open({str(noted)!r}, 'w').close()"
    with contextlib.suppress(KeyboardInterrupt), child_of(code) as child:
        if is_left_early:
            raise KeyboardInterrupt
    assert child.exit_code is not None
    assert noted.exists() != is_left_early


@pytest.mark.skipif(sys.platform == "win32", reason="a signal to one process ends it there")
def test_ctrl_c_does_not_end_a_child_that_has_taken_its_pipes():
    child = child_of(ECHO)
    child.ask(Message(Kind.PING), 60)
    os.kill(child.pid, signal.SIGINT)
    assert child.ask(Message(Kind.PING), 60).kind is Kind.PING
    assert child.end(60) == 0


def test_waiting_for_a_child_ends_when_it_is_ready_has_ended_or_is_late():
    child = child_of("sys.stdin.read()")
    looks = iter((False, False, True))
    assert child.wait_until(lambda: next(looks), 60)
    assert not child.wait_until(lambda: False, 0.1)
    child.end(60)
    assert not child.wait_until(lambda: True, 60)


def test_a_daemon_that_cannot_start_says_where_and_why(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "OTHER_SECONDS", 0.1)
    monkeypatch.setattr(module, "daemon_command", lambda: [sys.executable, "-c", "raise SystemExit('no device')"])
    with pytest.raises(EndpointError, match=r"does not listen after \d+ s: see .*daemon\.log; no device"):
        start_daemon(tmp_path)


@pytest.mark.parametrize("code", ["import time; time.sleep(60)", "raise SystemExit(1)"])
def test_a_daemon_that_is_silent_while_it_starts_is_waited_for(tmp_path, monkeypatch, code):
    """With exit code 1, another program's daemon is the one that listens."""
    looks = []

    def listens(folder):
        looks.append(folder)
        if len(looks) < 3:
            raise SilentError("it has not answered")
        return True

    monkeypatch.setattr(endpoint, "listens", listens)
    monkeypatch.setattr(module, "daemon_command", lambda: [sys.executable, "-c", code])
    start_daemon(tmp_path)
    assert looks == [tmp_path] * 3
    started = module._detached.pop()
    started.kill()
    started.wait(60)


def test_modules_beside_a_users_script_do_not_take_the_place_of_the_standard_librarys(tmp_path, monkeypatch):
    (tmp_path / "types.py").write_text("raise SystemExit(3)\n")
    (tmp_path / "a_child.py").write_text("def main():\n    print('here')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    done = subprocess.run(python_command("a_child"), capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.returncode) == ("here\n", 0), done.stderr


ANSWERS = """
import sys, time, pathlib
from staticllm.children.answers import answer_all
def answer(body):
    pathlib.Path(body["mark"]).touch()
    time.sleep(600 if body["is_long"] else 0)
    return {"is_long": body["is_long"]}
answer_all(answer, None)
"""


def test_a_child_that_answers_ends_with_its_parents_pipe_while_it_works(tmp_path):
    """A parent that was killed has closed it as well."""
    child = child_of(ANSWERS)
    mark = tmp_path / "mark"
    asked = Message(Kind.MODEL, body={"mark": str(mark), "is_long": False})
    assert child.ask(asked, 60).body == {"is_long": False}
    mark.unlink()
    write_message(child.process.stdin, Message(Kind.MODEL, body={"mark": str(mark), "is_long": True}))
    assert child.wait_until(mark.exists, 60)
    child.process.stdin.close()
    assert child.process.wait(60) == 0
