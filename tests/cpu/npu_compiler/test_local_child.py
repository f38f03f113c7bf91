"""Tests the child that uses the installed OpenVINO, with a core that compiles for the CPU: requests, answers, and its end."""

from __future__ import annotations

import os
import signal
import sys
import time

import numpy as np
import openvino as ov
import psutil
import pytest
from support.npu_compiler.models import a_weighted_model

from staticllm.compiler_passes.npu_compiler import local
from staticllm.compiler_passes.npu_compiler.child_compiler import ChildCompiler, Launch
from staticllm.devices import get_core
from staticllm.errors import DeviceError

CPU_CORE = """
import openvino as ov, time, pathlib
from staticllm.compiler_passes.npu_compiler import local

class Core:
    core = ov.Core()

    def read_model(self, path):
        return self.core.read_model(path)

    def set_property(self, device, properties):
        assert properties == {"NPU_COMPILER_TYPE": "PLUGIN"}

    def get_property(self, device, name):
        return 524292

    def compile_model(self, model, device, properties):
        assert device == "NPU"
        pathlib.Path("properties.txt").write_text(repr(properties))
        if "SLEEP" in properties:
            time.sleep(float(properties["SLEEP"]))
        print("what the compiler prints", flush=True)
        if "FAIL" in properties:
            raise RuntimeError("Exception from a.cpp:1:\\n" + properties["FAIL"])
        return self.core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

local.get_core = lambda: Core()
local.main()
"""


@pytest.fixture
def compiler():
    started = local.launch()
    launch = Launch((sys.executable, "-c", CPU_CORE), started.environment, started.what, started.remedy)
    with ChildCompiler(launch) as found:
        yield found


def test_the_blob_computes_what_the_model_computes(compiler):
    model = a_weighted_model()
    for _ in range(2):
        blob = compiler.compile(model, "4000", {"NPU_TILES": "2", "EMPTY": ""}, with_schedule=False).blob
        value = np.random.default_rng(1).standard_normal((1, 16, 128)).astype(np.float16)
        compiled = get_core().import_model(blob, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
        (weights,) = [node for node in model.get_ops() if node.get_type_name() == "Constant"]
        expected = value.astype(np.float32) @ weights.get_data().astype(np.float32)
        assert np.allclose(compiled([value])[0], expected, rtol=1e-2, atol=1e-2)
    assert compiler.version == f"openvino {ov.get_version()}, NPU compiler 8.4"


def test_a_refusal_is_one_line_and_the_child_goes_on(compiler):
    model = a_weighted_model()
    with pytest.raises(DeviceError, match=r"refused with weights for platform 3720 .*: no such layer; another form"):
        compiler.compile(model, "3720", {"FAIL": "no such layer"})
    child = compiler.session.child.pid
    assert compiler.compile(model, "3720", with_schedule=False).blob
    assert compiler.session.child.pid == child


@pytest.mark.skipif(sys.platform == "win32", reason="it has no signals")
def test_the_child_ends_with_its_stdin_also_while_it_compiles(compiler):
    """So it ends with its parent, however that ended."""
    model = a_weighted_model()
    compiler.compile(model, "4000", with_schedule=False)
    session = compiler.session
    process = psutil.Process(session.child.pid)
    session.save(model, "a job")
    session.child.tell("model.xml\tprogram.blob\tSLEEP=300")
    time.sleep(0.2)
    os.kill(process.pid, signal.SIGINT)  # Ctrl-C reaches only the parent
    assert process.is_running()
    session.child.process.stdin.close()
    process.wait(60)


def test_an_installation_without_the_compiler_says_so():
    if not local.npu_compiler_problem(get_core()):
        pytest.skip("this one has the compiler")
    with pytest.raises(DeviceError, match=r"the NPU compiler of the installed OpenVINO cannot be used: .* is missing"):
        local.local_compiler()
    with (
        ChildCompiler(local.launch()) as compiler,
        pytest.raises(DeviceError, match=r"OpenVINO cannot be used \(.*\): install"),
    ):
        assert compiler.version


def test_a_frozen_application_is_refused(monkeypatch):
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(DeviceError, match="cannot be run by a frozen application"):
        local.local_compiler()
