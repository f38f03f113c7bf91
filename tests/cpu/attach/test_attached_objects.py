"""Tests what a program does with the classes and objects that attaching gives it: it derives from them, and drops them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from staticllm import demo_model_path
from staticllm.cli.attach import attached_environment
from tests.support.attach.daemons import daemon_thread


@pytest.fixture
def run(monkeypatch, tmp_path):
    """A function that runs a program attached to a daemon in this process, and returns what it prints as JSON."""

    def run(code, *arguments):
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, arguments)], env=attached_environment(dict(os.environ)), text=True,
            capture_output=True, timeout=240, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1]), done.stderr

    with daemon_thread(monkeypatch, tmp_path / "run"):
        yield run


QUEUES = """
import gc, json, threading, time, weakref
import numpy as np, openvino as ov
from openvino import opset13 as ops
x = ops.parameter([1, 4], np.float32, name="x")
model = ov.Core().compile_model(ov.Model([ops.abs(x)], [x]), "CPU")
gc.collect()
gc.disable()
queue = ov.AsyncInferQueue(model, 2)
for _ in range(3):
    queue.start_async({0: np.ones((1, 4), np.float32)})
queue.wait_all()
requests = [weakref.ref(request) for request in queue]
del queue
for _ in range(200):  # the threads of the last calls return soon
    idle = [request() is None for request in requests]
    all(idle) or time.sleep(0.01)
called, may_end = threading.Event(), threading.Event()
queue = ov.AsyncInferQueue(model, 1)
queue.set_callback(lambda request, event: (may_end.wait(20), event.set()))
queue.start_async({0: np.ones((1, 4), np.float32)}, called)
del queue
may_end.set()
print(json.dumps([type(model).__name__, idle, called.wait(20)]))
"""


def test_a_queue_is_freed_when_the_program_drops_it_and_its_calls_have_ended(run):
    assert run(QUEUES)[0] == ["AttachedCompiledModel", [True, True], True]


UNFINISHED = """
import json, threading, time
import numpy as np, openvino as ov
from openvino import opset13 as ops
x = ops.parameter([1, 4], np.float32, name="x")
model = ov.Core().compile_model(ov.Model([ops.abs(x)], [x]), "CPU")
queue, begun = ov.AsyncInferQueue(model, 1), threading.Event()
queue.set_callback(lambda request, _: (begun.set(), time.sleep(0.5), print(json.dumps("ended"))))
queue.start_async({0: np.ones((1, 4), np.float32)})
begun.wait(20)
"""


def test_a_program_ends_after_its_callbacks(run):
    """A thread that the interpreter stops while it frees a native object would abort the process."""
    assert run(UNFINISHED)[0] == "ended"


SUBCLASSES = """
import json, sys
from openvino_genai import LLMPipeline

class Mixin:
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)

class Mine(LLMPipeline):
    def __init__(self, path, greeting):
        super().__init__(path, "CPU")
        self.greeting = greeting

    def greet(self):
        return self.greeting + str(self.generate("Hi", max_new_tokens=4))[:0]

class Other(Mixin, LLMPipeline):
    def __init__(self, path):
        LLMPipeline.__init__(self, path, "CPU")

mine, other = Mine(sys.argv[1], greeting="hello"), Other(sys.argv[1])
print(json.dumps([
    mine.greet(), isinstance(mine, LLMPipeline), issubclass(Mine, LLMPipeline), issubclass(LLMPipeline, LLMPipeline),
    issubclass(dict, LLMPipeline), [type(mine).__name__, type(other).__name__], len(str(other.generate("Hi"))) > 0,
    type(LLMPipeline(sys.argv[1], "CPU")).__name__,
]))
"""


def test_a_class_that_derives_from_the_pipeline_keeps_its_methods(run):
    found, said = run(SUBCLASSES, demo_model_path())
    assert found == ["hello", True, True, True, False, ["Mine", "Other"], True, "StaticLLMPipeline"]
    assert "Mine derives from LLMPipeline, and the daemon has no such class: it runs natively" in said


CHANGED_WEIGHTS = """
import json, sys
import numpy as np, openvino as ov
from openvino import opset13 as ops
x = ops.parameter([1, 2], np.float32, name="x")
path = sys.argv[1]
ov.save_model(ov.Model([ops.multiply(x, ops.constant(np.full((1, 2), 2, np.float32)))], [x], "m"), path, False)
core, found = ov.Core(), []

def constant_of(model):
    return next(node for node in model.get_ops() if node.get_type_name() == "Constant")

def note(model):
    compiled = core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    found.append([type(compiled).__name__, float(compiled({0: np.ones((1, 2), np.float32)})[0].max())])

def replace(model):
    old = constant_of(model)
    new = ops.constant(np.full((1, 2), 50, np.float32))
    new.set_friendly_name(old.get_friendly_name())
    for target in old.output(0).get_target_inputs():
        target.replace_source_output(new.output(0))
    return model

note(core.read_model(path))
note(replace(core.read_model(path)))
model = core.read_model(path, None, {"ENABLE_MMAP": False})
constant_of(model).get_tensor_view().data[:] = 70
note(model)
core.set_property({"ENABLE_MMAP": False})
model = core.read_model(path)
note(model)
constant_of(model).get_tensor_view().data[0, 1] = 90
note(model)
print(json.dumps(found))
"""


def test_weights_that_a_program_changes_in_a_model_reach_the_daemon(run, tmp_path):
    """Tools that merge adapters or compress weights replace constants by others of the same name and shape."""
    found = run(CHANGED_WEIGHTS, tmp_path / "m.xml")[0]
    assert [name for name, _ in found] == ["AttachedCompiledModel"] * 5
    assert [value for _, value in found] == [2, 50, 70, 2, 90]


RELATIVE = """
import json, os, sys
import numpy as np, openvino as ov
from openvino import opset13 as ops
os.chdir(sys.argv[1])
x = ops.parameter([1, 2], np.float32, name="x")
ov.save_model(ov.Model([ops.abs(x)], [x], "m"), "m.xml")
core = ov.Core()
core.set_property({"CACHE_DIR": "blobs"})
model = core.compile_model("m.xml", "CPU")
print(json.dumps([type(model).__name__, len(os.listdir("blobs"))]))
"""


def test_a_relative_path_in_a_property_is_one_of_the_program(run, tmp_path):
    assert run(RELATIVE, tmp_path)[0] == ["AttachedCompiledModel", 1]


KEPT = """
import gc, json
import numpy as np, openvino as ov
from openvino import opset13 as ops
x = ops.parameter([-1, 1200], np.float32, name="x")
model = ov.Core().compile_model(ov.Model([ops.add(x, ops.constant(np.float32(1)))], [x]), "CPU")

def see(tensor):
    return [tensor.data.shape[0], float(tensor.data.min()), float(tensor.data.max())]

def output(request):
    request.infer({0: np.ones((1500, 1200), np.float32)})
    return request.get_output_tensor()

request = model.create_infer_request()
kept = output(model.create_infer_request())
view = output(model.create_infer_request()).data
live = output(request)
gc.collect()
found = []
for rows, value in ((1500, 7), (2, 9), (4000, 11)):
    request.infer({0: np.full((rows, 1200), value, np.float32)})
    found.append(see(live))
print(json.dumps([see(kept), float(view.max()), *found]))
"""


def test_a_large_output_outlives_its_request_and_shows_later_calls(run):
    """Its values came in memory that is shared with the daemon, and replaced by larger one."""
    found = run(KEPT)[0]
    assert found == [[1500, 2, 2], 2, [1500, 8, 8], [2, 10, 10], [4000, 12, 12]]


SHARED = """
import gc, json
import numpy as np, openvino as ov
from openvino import opset13 as ops
x = ops.parameter([-1, 1200], np.float32, name="x")
model = ov.Core().compile_model(ov.Model([ops.add(x, ops.constant(np.float32(1)))], [x]), "CPU")
request = model.create_infer_request()
request.start_async({0: np.ones((1500, 1200), np.float32)})
request._remote.poll(None)
(kept,) = request._remote.finish().outputs
del request
gc.collect()
print(json.dumps([float(kept.min()), float(kept.max())]))
"""


def test_an_array_over_shared_memory_outlives_its_connection(run):
    assert run(SHARED)[0] == [2, 2]
