"""Long calls of native code: the thread that waits tells how far they are, leaves them, and the process ends beside them."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

from staticllm.core import ProgressEvent
from staticllm.errors import ClosedError
from staticllm.system import long_calls
from staticllm.system.long_calls import attended, attended_each, checkpoint, told, unless

EVENT = ProgressEvent("compile", 2, 5, 0.0)
ENDLESS = 600
"""Seconds of a native call that no test waits for."""


def test_results_and_errors_are_those_of_the_calls():
    def fail():
        raise ValueError("mine")

    assert attended(lambda: 7) == 7
    with pytest.raises(ValueError, match="mine"):
        attended(fail)
    rng = random.Random(0)
    for num_parallel in (1, 2, 3, 100):
        numbers = [rng.random() for _ in range(rng.randint(1, 9))]
        assert list(attended_each([lambda n=n: n for n in numbers], num_parallel=num_parallel)) == numbers
    with pytest.raises(ValueError, match="mine"):
        list(attended_each([lambda: 1, fail, lambda: 2]))


@pytest.mark.parametrize("num_parallel", [1, 2, 4])
def test_at_most_so_many_calls_run_at_once(num_parallel):
    lock = threading.Lock()
    now, most = 0, []

    def call():
        nonlocal now
        with lock:
            now += 1
            most.append(now)
        for _ in range(100):
            threading.Event().wait(1e-4)
        with lock:
            now -= 1

    list(attended_each([call] * 9, num_parallel=num_parallel))
    assert max(most) <= num_parallel


def test_a_thread_without_signals_and_looks_runs_a_call_itself():
    found = []
    thread = threading.Thread(target=lambda: found.append(attended(threading.current_thread)))
    thread.start()
    thread.join()
    assert found == [thread]
    assert attended(threading.current_thread) is not threading.current_thread(), "the main thread gets Ctrl-C"


def test_a_part_tells_how_far_it_is(monkeypatch):
    monkeypatch.setattr(long_calls, "TICK_SECONDS", 0.0)
    events = []
    enough = threading.Event()

    def tell(event):
        events.append(event)
        if len(events) == 5:
            enough.set()

    with told(tell, EVENT):
        attended(enough.wait)
    assert all(not event.is_done and (event.stage, event.index, event.total) == ("compile", 2, 5) for event in events)
    parts = [event.part for event in events]
    assert parts == sorted(set(parts)), "each is larger than the one before"
    assert parts[0] > 0 and parts[-1] < 1


def test_leaving_drops_the_result_and_hastens_the_end():
    may_end, dropped = threading.Event(), threading.Event()
    asked = []

    is_over = threading.Event()

    def call():
        is_over.set()
        may_end.wait()
        return "program"

    def drop(result):
        assert result == "program"
        dropped.set()

    with pytest.raises(ClosedError), unless(is_over.is_set), told(lambda event: None, EVENT):
        attended(call, on_leave=lambda: asked.append("end"), drop=drop)
    assert asked == ["end"]
    assert not dropped.is_set(), "the call runs on"
    may_end.set()
    assert dropped.wait(60)


@pytest.mark.parametrize("error", [ValueError("mine"), RuntimeError("mine"), ClosedError("mine")], ids=repr)
def test_errors_of_progress_are_not_taken_for_those_of_the_work(monkeypatch, error):
    monkeypatch.setattr(long_calls, "TICK_SECONDS", 0.0)

    def fail(event):
        raise error

    def work():  # as probes do
        try:
            attended(threading.Event().wait)
        except Exception:
            return "refused"

    with pytest.raises(type(error), match="mine") as caught, told(fail, EVENT):
        work()
    assert caught.value is error


def test_the_block_that_is_unwanted_is_left_and_no_other():
    rng = random.Random(1)
    for _ in range(200):
        depth = rng.randint(1, 6)
        unwanted = rng.randrange(depth)
        left = []

        def enter(level, unwanted=unwanted, depth=depth, left=left):
            try:
                with unless(lambda: level == unwanted):
                    try:
                        checkpoint() if level == depth - 1 else enter(level + 1)
                    except ClosedError:
                        left.append(level)
                        raise
            except ClosedError:
                assert level == unwanted

        enter(0)
        assert left == [], "inside of the block nothing catches it"


def test_ctrl_c_leaves_a_call():
    """In a process of its own: other libraries change the handlers and stacks of signals in this one."""
    program = """
import signal, threading
from staticllm.system.long_calls import attended
signal.signal(signal.SIGINT, signal.default_int_handler)
may_end = threading.Event()
main = threading.main_thread().ident

def interrupt():
    signal.pthread_kill(main, signal.SIGINT) if hasattr(signal, "pthread_kill") else signal.raise_signal(signal.SIGINT)
    may_end.wait()

try:
    attended(interrupt)
except KeyboardInterrupt:
    print("left", threading.active_count())
may_end.set()
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (found.stdout.strip(), found.returncode) == ("left 2", 0), found.stderr


ENDINGS = {
    "the end": ("", 0),
    "exit": ("sys.exit(7)", 7),
    "exit text": ("sys.exit('mine')", 1),
    "error": ("raise ValueError('mine')", 1),
    "Ctrl-C": ("signal.raise_signal(signal.SIGINT)", -signal.SIGINT),
}
PROGRAM = f"""
import ctypes, signal, sys, threading
from staticllm.errors import ClosedError
from staticllm.system.long_calls import attended, unless

def work():
    try:
        with unless(has_begun.is_set):
            attended(native)
    except ClosedError:
        print("left", end=" ")

def native():
    has_begun.set()
    ctypes.CDLL(None).sleep({ENDLESS})

has_begun = threading.Event()
signal.signal(signal.SIGINT, signal.default_int_handler)
thread = threading.Thread(target=work)
thread.start()
thread.join()
print("not flushed", end="")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the end of the process waits for the call")
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_ends_beside_a_call_as_without(ending):
    line, code = ENDINGS[ending]
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM + line], capture_output=True, text=True, timeout=ENDLESS / 2, check=False
    )
    assert (found.stdout, found.returncode) == ("left not flushed", code), found.stderr
    assert ("mine" in found.stderr) == ("mine" in line)
    assert "terminate" not in found.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="sleeps in the C library")
@pytest.mark.parametrize("code", [0, 3, 143])
def test_a_command_ends_beside_a_call_with_its_exit_code(code):
    end = textwrap.dedent(f"""
        import atexit
        from staticllm.system.long_calls import exit_process
        atexit.register(print, " at exit", end="")
        exit_process({code})
    """)
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM + end], capture_output=True, text=True, timeout=ENDLESS / 2, check=False
    )
    assert (found.stdout, found.returncode) == ("left not flushed at exit", code), found.stderr


def test_the_end_of_the_interpreter_is_not_taken_for_an_error_of_the_work(monkeypatch):
    monkeypatch.setattr(long_calls, "_is_exiting", threading.Event())
    long_calls._is_exiting.set()
    with pytest.raises(ClosedError), unless(lambda: False), told(lambda event: None, EVENT):
        try:
            attended(lambda: 1)
        except RuntimeError:
            pytest.fail("a probe would log it")


def test_no_call_begins_while_the_interpreter_ends():
    program = """
import atexit
@atexit.register
def late():
    try:
        attended(print)
    except ClosedError:
        print("refused")
from staticllm.errors import ClosedError
from staticllm.system.long_calls import attended
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (found.stdout.strip(), found.returncode) == ("refused", 0), found.stderr


DAEMON_THREAD = f"""
import ctypes, threading
from staticllm.system.long_calls import attended

def native():
    has_begun.set()
    ctypes.CDLL(None).sleep({ENDLESS})

has_begun = threading.Event()
threading.Thread(target=attended, args=[native], daemon=True).start()
has_begun.wait()
"""
"""The calling thread runs the call itself: it gets no signals, and has nothing to look at."""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread that ends does not unwind the frames of C++")
@pytest.mark.parametrize("ending", ENDINGS)
def test_a_process_ends_beside_a_daemon_thread_of_the_user_that_loads(ending):
    line, code = ENDINGS[ending]
    program = f"""
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
{DAEMON_THREAD}
ctypes.CDLL(None).__cxa_atexit(ctypes.CDLL(None).abort, None, None)  # a destructor, which may meet the call
print("not flushed", end="")
{line}
"""
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=ENDLESS / 2, check=False
    )
    assert (found.stdout, found.returncode) == ("not flushed", code), found.stderr
    assert ("mine" in found.stderr) == ("mine" in line)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the C library")
@pytest.mark.parametrize("is_forked", [False, True])
def test_only_a_process_that_uses_no_native_code_runs_the_destructors(is_forked):
    program = f"""
import ctypes, os, sys, threading
import staticllm.system.long_calls
threading.Thread(target=threading.Event().wait, daemon=True).start()
if {is_forked} and (child := os.fork()):
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
buffer = ctypes.create_string_buffer(b"destructor")
ctypes.pythonapi.Py_IncRef(ctypes.py_object(buffer))
library = ctypes.CDLL(None)
library.on_exit(ctypes.cast(library.dprintf, ctypes.c_void_p), buffer)
sys.exit(1)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (found.stdout, found.returncode) == ("" if is_forked else "destructor", 1), found.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no process is forked here")
def test_a_forked_child_does_not_wait_for_the_calls_of_its_parent():
    """The thread of a call that was left does not exist in the child."""
    child = """
from staticllm.system.long_calls import wait_for_left

looks = []
if (child := os.fork()):
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
try:
    with unless(lambda: looks.append(0) or len(looks) > 3):
        wait_for_left()
    print(" ended", end="")
except ClosedError:
    print(" waits", end="")
sys.exit(7)
"""
    program = "import os\n" + PROGRAM.replace('print("not flushed", end="")', "sys.stdout.flush()") + child
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=ENDLESS / 2, check=False
    )
    assert (found.stdout, found.returncode) == ("left  ended", 7), found.stderr
