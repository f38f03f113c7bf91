"""Suspends the process of a daemon while calls and requests run there: they go on elsewhere or end with one line.

What only takes long is not cut off.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import openvino as ov
import openvino.opset13 as op
import psutil
import pytest

import staticllm
from staticllm import StaticLLMPipeline
from staticllm.daemon.models import plain
from staticllm.daemon.process import daemon as process
from staticllm.errors import ProcessLostError
from staticllm.wire import endpoint
from tests.support.attach.daemons import daemon_process, daemon_thread, wait_for
from tests.support.helpers import EXACT, one_line
from tests.support.inside import engine_of

SECONDS = 120
PROMPT = "What is an NPU?"
LONG = {"max_new_tokens": 200, "ignore_eos": True}
PROGRAM = """
import concurrent.futures, json, sys
import numpy as np
import staticllm.attach
import openvino as ov
from staticllm.wire import endpoint

def call(request, value):
    try:
        return float(request.infer([np.full((1, 1), value, np.float32)])[0][0, 0])
    except Exception as error:
        return f"{type(error).__name__}: {error}"

endpoint.PROBE_SECONDS = 0.2
compiled = ov.Core().compile_model(sys.argv[1], "CPU")
requests = [compiled.create_infer_request() for _ in range(3)]
with concurrent.futures.ThreadPoolExecutor(3) as pool:
    for line in sys.stdin:
        if line.startswith("limit"):
            endpoint.ANSWER_SECONDS = float(line.split()[1])
            continue
        print(json.dumps(list(pool.map(call, requests, [float(line)] * 3))), flush=True)
"""


@pytest.fixture(scope="module")
def sum_path(tmp_path_factory):
    """A model that adds up what it gets."""
    path = tmp_path_factory.mktemp("sum") / "model.xml"
    x = op.parameter([1, 1], np.float32, name="x")
    total = op.add(op.read_value(op.constant(np.zeros((1, 1), np.float32)), "total"), x)
    model = ov.Model([op.result(total)], [op.assign(total, "total")], [x], "sum")
    ov.save_model(model, path, compress_to_fp16=False)
    return path


@contextlib.contextmanager
def suspended(process):
    """Suspend a process, whose threads may run for a moment after the signal was sent."""
    os.kill(process.pid, signal.SIGSTOP)
    wait_for(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGCONT)


class AttachedProgram:
    """``PROGRAM`` with a model, attached: three threads that wait for a call each."""

    def __init__(self, path, mode):
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(path)], env={**os.environ, "STATICLLM_ATTACH": mode}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip

    def write(self, line):
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()

    def call(self, value):
        self.write(value)
        return json.loads(self.process.stdout.readline())

    def end(self):
        return self.process.communicate(timeout=SECONDS)[1]


pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no signal that suspends a process")


def test_waiting_calls_of_a_program_go_on_natively_with_their_states(monkeypatch, tmp_path, sum_path):
    with daemon_process(monkeypatch, tmp_path / "run") as daemon:
        program = AttachedProgram(sum_path, "auto")
        assert program.call(1) == [1.0] * 3
        with suspended(daemon):
            program.write("limit 1")
            assert program.call(2) == [3.0] * 3
        assert program.call(4) == [7.0] * 3
        errors = program.end()
    assert errors.count("has not answered for 1 s") == 1, errors
    assert program.process.returncode == 0


def test_waiting_calls_that_must_not_run_natively_get_one_line(monkeypatch, tmp_path, sum_path):
    with daemon_process(monkeypatch, tmp_path / "run") as daemon:
        program = AttachedProgram(sum_path, "require")
        assert program.call(1) == [1.0] * 3
        with suspended(daemon):
            program.write("limit 1")
            for text in program.call(2):
                assert "has not answered for 1 s" in text
                assert "STATICLLM_ATTACH=require" in text
                assert "\n" not in text
        program.end()


def test_calls_wait_for_a_daemon_that_goes_on_in_time(monkeypatch, tmp_path, sum_path):
    with daemon_process(monkeypatch, tmp_path / "run") as daemon:
        program = AttachedProgram(sum_path, "require")
        assert program.call(1) == [1.0] * 3
        with suspended(daemon):
            program.write(2)
            time.sleep(1)  # several of its looks begin
        assert json.loads(program.process.stdout.readline()) == [3.0] * 3
        program.end()


@pytest.fixture(scope="module")
def expected():
    with load() as pipe:
        return pipe.submit(PROMPT, **LONG).output(SECONDS).tokens


def load(**more):
    options = {**EXACT, "MAX_PROMPT_LEN": 64, "MIN_RESPONSE_LEN": 300, "PROGRAMS": "shared"}
    return StaticLLMPipeline(staticllm.demo_model_path(), "CPU", **options, **more)


@contextlib.contextmanager
def answering(monkeypatch, tmp_path):
    """Return a daemon's process, a pipeline there, and a request of it that has begun."""
    monkeypatch.setattr(endpoint, "PROBE_SECONDS", 0.2)
    with daemon_process(monkeypatch, tmp_path / "run") as daemon, load(daemon=True) as pipe:
        handle = pipe.submit(PROMPT, **LONG)
        live = engine_of(pipe).live[handle.request_id]
        wait_for(lambda: live.is_over or live.delivered[0], SECONDS)
        yield daemon, pipe, handle, live


def test_a_request_ends_with_one_line_and_the_next_one_too(monkeypatch, tmp_path):
    with answering(monkeypatch, tmp_path) as (daemon, pipe, handle, _), suspended(daemon):
        monkeypatch.setattr(endpoint, "ANSWER_SECONDS", 0.5)
        with pytest.raises(ProcessLostError, match=r"has not answered for 0\.5 s") as caught:
            handle.output(SECONDS)
        one_line(caught)
        with pytest.raises(staticllm.StaticLLMError, match="has not answered") as caught:
            pipe.submit(PROMPT, **LONG).output(SECONDS)
        one_line(caught)
        monkeypatch.setattr(endpoint, "ANSWER_SECONDS", 60.0)


def test_a_request_that_was_given_up_goes_on_when_the_daemon_does(monkeypatch, tmp_path, expected):
    with answering(monkeypatch, tmp_path) as (daemon, pipe, handle, live):
        with suspended(daemon):
            monkeypatch.setattr(endpoint, "ANSWER_SECONDS", 1.0)
            wait_for(lambda: live.is_lost, SECONDS)
            monkeypatch.setattr(endpoint, "ANSWER_SECONDS", 60.0)
        assert handle.output(SECONDS).tokens == expected
        assert live.num_losses == 1
        assert engine_of(pipe).is_connected


def test_a_request_waits_for_a_daemon_that_goes_on_in_time(monkeypatch, tmp_path, expected):
    with answering(monkeypatch, tmp_path) as (daemon, _, handle, live):
        with suspended(daemon):
            time.sleep(1)
        assert handle.output(SECONDS).tokens == expected
        assert live.num_losses == 0


def test_a_slow_compilation_and_slow_calls_are_not_cut_off(monkeypatch, tmp_path, sum_path):
    compile_model, infer, welcome = process.compile_model, plain.PlainRequest.call, endpoint.welcome
    looks, waits = [], []

    def wait_for_looks():
        begin = len(looks)
        wait_for(lambda: len(looks) >= begin + 3, SECONDS)  # the one who waits has looked and waits on
        waits.append(begin)

    monkeypatch.setattr(endpoint, "welcome", lambda *given: (welcome(*given), looks.append(1)))
    monkeypatch.setattr(process, "compile_model", lambda origin: (wait_for_looks(), compile_model(origin))[1])
    monkeypatch.setattr(plain.PlainRequest, "call", lambda self, *given: (wait_for_looks(), infer(self, *given))[1])
    with daemon_thread(monkeypatch, tmp_path / "run"):
        program = AttachedProgram(sum_path, "require")
        try:
            assert program.call(5) == [5.0] * 3
        finally:
            errors = program.end()
    assert len(waits) == 4, errors


def test_an_idle_daemon_ends_although_its_folder_has_gone(monkeypatch, tmp_path):
    """Nobody can connect to wake it."""
    folder = tmp_path / "run"
    with daemon_process(monkeypatch, folder, "--idle-seconds", "2") as daemon:
        shutil.rmtree(folder)
        assert daemon.wait(SECONDS) == 0


def test_a_daemon_ends_that_was_suspended_when_it_was_told_to(monkeypatch, tmp_path):
    """The signal may reach any of its threads then, not only the one that accepts."""
    for number in range(4):
        with daemon_process(monkeypatch, tmp_path / f"run{number}") as daemon:
            with suspended(daemon):
                daemon.terminate()
            assert daemon.wait(SECONDS) == 0


@pytest.mark.skipif(sys.platform == "win32", reason="the folder of a daemon cannot be deleted there")
@pytest.mark.parametrize("is_told", [True, False])
def test_a_daemon_whose_folder_was_made_anew_leaves_the_other_one_alone(is_told, monkeypatch, tmp_path):
    folder = tmp_path / "run"
    with daemon_process(monkeypatch, folder) as first:
        if is_told:
            first.send_signal(signal.SIGSTOP)  # or it would end by itself
        shutil.rmtree(folder)
        with daemon_process(monkeypatch, folder) as second:
            if is_told:
                first.send_signal(signal.SIGTERM)
                first.send_signal(signal.SIGCONT)
            assert first.wait(20) == 0
            assert endpoint.stopped_pid(folder) is None
            endpoint.connect(folder).close()
            assert second.poll() is None


@pytest.mark.skipif(sys.platform == "win32", reason="pipes have no queue of connections")
def test_nobody_waits_to_knock(tmp_path):
    """The thread that accepts is the one that ends the daemon, also while the queue of connections is full."""
    listener, waiting = endpoint.listen(tmp_path), list[socket.socket]()
    try:
        with pytest.raises(BlockingIOError):
            while True:
                waiting.append(socket.socket(socket.AF_UNIX))
                waiting[-1].setblocking(False)
                waiting[-1].connect(endpoint.address(tmp_path))
        with pytest.raises(BlockingIOError):
            endpoint.knock(tmp_path)
    finally:
        for each in waiting:
            each.close()
        listener.close()
