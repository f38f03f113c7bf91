"""A thread that begins once, even if a signal interrupts whoever starts it."""

import os
import subprocess
import sys
import threading
import time

import pytest

from staticllm.core import FinishReason
from staticllm.errors import StaticLLMError
from staticllm.pipelines.engine.job_engine import JobEngine
from staticllm.pipelines.engine.request import Finished
from staticllm.pipelines.scheduling.planner import make_policy
from staticllm.system import threads
from staticllm.system.threads import LazyThread, ThreadPool, run_uninterrupted, start_thread
from staticllm.testing import fake_answer, fake_engine, fake_pipeline, fake_request

SECONDS = 20


def interrupt(monkeypatch, name, times=1, has_begun=True):
    """Let Ctrl-C come in the next starts of threads of this name, when the thread exists already, or before."""
    left = [times]

    def start(run, started):
        if started != name or not left[0]:
            return start_thread(run, started)
        left[0] -= 1
        if has_begun:
            start_thread(run, started)
        raise KeyboardInterrupt

    monkeypatch.setattr(threads, "start_thread", start)


def named(name, expected):
    """Return whether there are as many threads of a name, soon: one that finds another running ends at once."""
    until = time.monotonic() + SECONDS
    while (found := sum(each.name == name for each in threading.enumerate())) != expected and time.monotonic() < until:
        time.sleep(0.01)
    return found == expected


def number_of(name):
    return sum(thread.name == name for thread in threading.enumerate())


def test_it_begins_once_and_ends(monkeypatch):
    runs, may_end = [], threading.Event()

    def run():
        runs.append(threading.current_thread())
        may_end.wait(SECONDS)

    lazy = LazyThread("lazy")
    assert not lazy.has_begun and not lazy.is_alive()
    for has_begun in (False, True, True):
        interrupt(monkeypatch, "lazy", has_begun=has_begun)
        with pytest.raises(KeyboardInterrupt):
            lazy.start(run)
    for _ in range(3):
        lazy.start(run)
    assert lazy.has_begun and lazy.is_alive() and not lazy.is_current
    assert not lazy.join(0.01)
    may_end.set()
    assert lazy.join(SECONDS)
    assert [thread.name for thread in runs] == ["lazy"]
    assert not lazy.is_alive()
    lazy.start(run)
    assert len(runs) == 1, "it has ended"


def test_a_thread_that_raises_has_ended(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda found: None)
    lazy = LazyThread("lazy")
    lazy.start(lambda: 1 / 0)
    assert lazy.join(SECONDS)
    assert not lazy.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_child_that_was_forked_does_not_wait_for_it():
    may_end, lazy = threading.Event(), LazyThread("lazy")
    lazy.start(lambda: may_end.wait(SECONDS))
    child = os.fork()
    if not child:
        os._exit(0 if lazy.join(1) and not lazy.is_alive() else 1)
    assert os.waitpid(child, 0)[1] == 0
    may_end.set()
    assert lazy.join(SECONDS)


def test_what_must_not_be_interrupted_runs_without_more_threads_too(monkeypatch):
    def refuse(run, name):
        raise StaticLLMError("no more threads")

    done = []
    monkeypatch.setattr(threads, "start_thread", refuse)
    run_uninterrupted(lambda: done.append(threading.current_thread()), "through")
    assert done == [threading.main_thread()]


@pytest.mark.skipif(os.name == "nt", reason="sends SIGINT to a child")
def test_threads_under_ctrl_c(root):
    """In a process without OpenVINO, whose plugins leave signal stacks behind."""
    tests = root / "tests" / "support" / "engine" / "interrupted_threads.py"
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-p", "no:cacheprovider", "--noconftest", str(tests)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=root)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 passed" in done.stdout


def test_none_begins_after_it_was_joined(monkeypatch):
    """What follows may close what it would use."""
    lazy, runs, may_go_on = LazyThread("lazy"), [], threading.Event()
    late = []

    def start(run, name):
        late.append(start_thread(lambda: (may_go_on.wait(SECONDS), run()), name))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threads, "start_thread", start)
        with pytest.raises(KeyboardInterrupt):
            lazy.start(lambda: runs.append(1))
    assert lazy.join(SECONDS)
    may_go_on.set()
    late[0].join(SECONDS)
    lazy.start(lambda: runs.append(2))
    assert runs == [] and not lazy.has_begun


def test_a_thread_that_ends_before_it_begins_is_an_error(monkeypatch):
    """As by an exception in a hook of a debugger: whoever started it waited for good."""
    lazy, runs = LazyThread("lazy"), []
    with monkeypatch.context() as patch:
        patch.setattr(threads, "start_thread", lambda run, name: start_thread(lambda: None, name))
        with pytest.raises(StaticLLMError, match="'lazy' ended before it began"):
            lazy.start(lambda: runs.append(1))
    lazy.start(lambda: runs.append(2))
    assert lazy.join(SECONDS) and runs == [2]


def test_a_thread_that_cannot_start_can_start_later(monkeypatch):
    def refuse(run, name):
        raise StaticLLMError("no more threads")

    lazy, runs = LazyThread("lazy"), []
    with monkeypatch.context() as patch:
        patch.setattr(threads, "start_thread", refuse)
        with pytest.raises(StaticLLMError, match="no more threads"):
            lazy.start(lambda: None)
    lazy.start(lambda: runs.append(lazy.is_current))
    assert lazy.join(SECONDS) and runs == [True]


@pytest.mark.parametrize("has_begun", [True, False])
def test_an_interrupted_submission_leaves_one_thread_to_its_engine(has_begun, monkeypatch):
    """A second one ran on the same core: wrong tokens, slots freed twice, and a thread that close did not end."""
    engine, before = fake_engine(make_policy("dynamic")), number_of("staticllm-engine")
    interrupt(monkeypatch, "staticllm-engine", 2, has_begun)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            engine.submit_state(fake_request([1, 2, 3], 5))
    requests = [fake_request(range(number, number + 10), 20) for number in range(8)]
    for request in requests:
        engine.submit_state(request)
    assert named("staticllm-engine", before + 1)
    engine.close(drain=True)
    assert named("staticllm-engine", before)
    assert [request.tokens[10:] for request in requests] == [fake_answer(range(n, n + 10), 20)[10:] for n in range(8)]


@pytest.mark.parametrize("drain", [True, False])
def test_an_engine_whose_only_submission_was_interrupted_closes(drain, monkeypatch):
    engine = fake_engine(make_policy("dynamic"))
    request = fake_request([1, 2, 3], 5)
    engine.steps.add([request])
    ended = []
    request.queue.add_listener(lambda output: ended.append(threading.current_thread().name))
    interrupt(monkeypatch, "staticllm-engine", has_begun=False)
    with pytest.raises(KeyboardInterrupt):
        engine.submit_state(fake_request([4, 5], 5))
    engine.close(drain)
    end = request.queue.get(timeout=SECONDS)
    assert isinstance(end, Finished) and end.reason is FinishReason.CANCELLED
    assert ended == ["staticllm-close"], "Ctrl-C does not reach it"


def test_jobs_have_one_thread(monkeypatch):
    engine, before = JobEngine(), number_of("staticllm-jobs")
    interrupt(monkeypatch, "staticllm-jobs")
    with pytest.raises(KeyboardInterrupt):
        engine.need()
    engine.need()
    assert named("staticllm-jobs", before + 1)
    engine.close()
    assert named("staticllm-jobs", before)


def test_stop_strings_have_one_thread(monkeypatch):
    """Two took their work from one queue: of one end for both, close waited for the other one."""
    pipe, before = fake_pipeline("a b c d"), number_of("staticllm-stop-checker")
    interrupt(monkeypatch, "staticllm-stop-checker")
    with pytest.raises(KeyboardInterrupt):
        pipe.generate("hi", stop_strings={"c"}, include_stop_str_in_output=False)
    assert str(pipe.generate("hi", stop_strings={"c"}, include_stop_str_in_output=False)) == "a b "
    assert named("staticllm-stop-checker", before + 1)
    closing = threading.Thread(target=pipe.close, daemon=True)
    closing.start()
    closing.join(SECONDS)
    assert not closing.is_alive()
    assert named("staticllm-stop-checker", before)


@pytest.mark.parametrize(
    "start", ["ThreadPool(1, 'mine').submit(print)", "list(ThreadPool(1, 'mine').map(print, 'ab'))"]
)
def test_a_pool_that_can_start_no_thread_raises_one_of_our_errors(start):
    """The thread of a program may load a model when the main thread has ended."""
    program = f"""
import atexit, threading
from staticllm.errors import ClosedError
from staticllm.system.threads import ThreadPool

def late():
    if threading.current_thread() is not threading.main_thread():
        threading.main_thread().join()
    try:
        {start}
    except ClosedError as error:
        print(error, end=";")

threading.Thread(target=late).start()
atexit.register(late)
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (found.stdout.count("'mine'"), found.stdout.count("\n"), found.returncode) == (2, 0, 0), found.stderr


def test_a_pool_beside_too_many_threads_says_so(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(StaticLLMError, match=r"'mine' cannot be started beside .*ulimit -u"):
        ThreadPool(1, "mine").submit(print)


def test_a_thread_that_ends_before_it_begins_is_an_error_and_no_endless_wait(monkeypatch):
    """As where memory is missing for its first frame: Python's own ``start`` waits for ever then."""
    starter = "_start_joinable_thread" if hasattr(threading, "_start_joinable_thread") else "_start_new_thread"
    begin = getattr(threading, starter)
    monkeypatch.setattr(threading, starter, lambda run, *args, **options: None)
    with pytest.raises(StaticLLMError, match="not enough memory for the thread 'lost'") as refused:
        start_thread(lambda: None, "lost")
    assert "\n" not in str(refused.value)
    assert not [thread for thread in threading.enumerate() if thread.name == "lost"]
    monkeypatch.setattr(threading, starter, begin)
    done = threading.Event()
    start_thread(done.set, "begun").join(SECONDS)
    assert done.is_set()
