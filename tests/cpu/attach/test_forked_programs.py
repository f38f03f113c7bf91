"""Forks attached programs while their other threads use models, requests and queues: the child has its own, and does not hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from staticllm.cli.attach import attached_environment
from tests.support.attach.daemons import daemon_thread

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
FORK = """
import json, os, signal, sys, threading
import numpy as np, openvino as ov
from openvino import opset13 as ops

x = ops.parameter([1, 4], np.float32, name="x")
model = ov.Core().compile_model(ov.Model([ops.abs(x)], [x]), "CPU")
request, waiting, called = model.create_infer_request(), model.create_infer_request(), model.create_infer_request()
queue = ov.AsyncInferQueue(model, 2)
row, ended = np.full((1, 4), -2, np.float32), []

def answer(request):
    return float(request.infer([row])[0][0, 0])

may_end, is_in_callback = threading.Event(), threading.Event()
called.set_callback(lambda event: (event.set(), may_end.wait(100)), is_in_callback)
called.start_async([row])
queue.set_callback(lambda request, _: (may_end.wait(100), ended.append(1)))
queue.start_async([row])
assert [answer(each) for each in (request, waiting)] == [2.0, 2.0] and is_in_callback.wait(100)
waiting.start_async([row])
remote, client = model._remote, model._remote._client
channels = client._control, request._remote._place._channel
held = [client._lock, remote._lock, request._lock, queue._change, *(channel._closing for channel in channels)]
are_held = threading.Event()

def hold():
    for lock in held:
        lock.acquire()
    request._call._phase = type(request._call._phase).RUNNING  # as in the middle of a call
    request._remote._pending = {0: row}
    are_held.set()
    may_end.wait(100)
    request._call._phase, request._remote._pending = type(request._call._phase).NONE, None
    for lock in reversed(held):
        lock.release()

thread = threading.Thread(target=hold)
thread.start()
assert are_held.wait(100)
child = os.fork()
if not child:
    signal.alarm(60)
    waiting.wait()
    found = [answer(each) for each in (request, called, model.create_infer_request())]
    found.append(waiting.get_tensor(model.output(0)).data[0, 0])
    may_end.set()
    queue.start_async([row])
    queue.start_async([row])
    queue.wait_all()
    model.get_property("NETWORK_NAME")
    del queue, request, waiting, called
    os._exit(0 if found == [2.0] * 4 and len(ended) == 2 else 3)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
may_end.set()
thread.join()
queue.wait_all()
called.wait()
waiting.wait()
print(json.dumps([status, answer(request), len(ended)]))
"""


def test_a_child_forked_while_other_threads_hold_locks_does_not_hang(monkeypatch, tmp_path):
    with daemon_thread(monkeypatch, tmp_path / "run"):
        environment = attached_environment({**os.environ, "STATICLLM_ATTACH": "require"})
        done = subprocess.run(
            [sys.executable, "-c", FORK], env=environment, text=True, capture_output=True, timeout=240, check=False
        )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [0, 2.0, 1], done.stderr
