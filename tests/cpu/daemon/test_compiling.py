"""Tests compiling in a child process: the same outputs, and one line when the compiler refuses or crashes."""

from __future__ import annotations

import os

import numpy as np
import openvino as ov
import openvino.opset13 as op
import pytest

from staticllm.children.child import Child, ChildLostError
from staticllm.daemon.models.client_models import ModelOrigin
from staticllm.daemon.models.compiling import compile_model
from staticllm.errors import DeviceError


@pytest.fixture(scope="module")
def origin(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.xml"
    rows = op.parameter([2, 8], np.float32)
    weights = op.constant(np.random.default_rng(1).normal(size=(8, 4)).astype(np.float32))
    ov.save_model(ov.Model([op.matmul(rows, weights, False, False)], [rows], "m"), path, compress_to_fp16=False)
    return ModelOrigin(path, path.with_suffix(".bin"), "CPU", (("INFERENCE_PRECISION_HINT", "f32"),), "auto", False)


def test_a_child_compiles_the_same_program(origin):
    rows = np.random.default_rng(0).normal(size=(2, 8)).astype(np.float32)
    here, there = compile_model(origin), compile_model(origin, in_child=True)
    np.testing.assert_array_equal(here(rows)[0], there(rows)[0])
    assert there.get_property("INFERENCE_PRECISION_HINT") == here.get_property("INFERENCE_PRECISION_HINT")


def test_what_the_compiler_refuses_is_told_in_one_line(origin):
    from dataclasses import replace

    wrong = replace(origin, config=(("NO_SUCH_PROPERTY", 1),))
    with pytest.raises(DeviceError, match=r"CPU refused model\.xml: .*NO_SUCH_PROPERTY") as raised:
        compile_model(wrong, in_child=True)
    assert "\n" not in str(raised.value)


def test_a_compiler_that_crashes_ends_only_the_child(origin, monkeypatch):
    def crash(child, message, seconds):
        raise ChildLostError("by signal 11", -11)

    monkeypatch.setattr(Child, "ask", crash)
    with pytest.raises(DeviceError, match=r"the compiler of CPU crashed on model\.xml \(exit code -11\)"):
        compile_model(origin, in_child=True)


def test_a_child_that_cannot_start_says_why_in_one_line(origin, tmp_path, monkeypatch):
    (tmp_path / "openvino.py").write_text("raise ImportError('libopenvino.so is missing\x1b[31m')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    with pytest.raises(DeviceError, match=r"crashed on model\.xml \(exit code 1\): ImportError: libopenvino") as raised:
        compile_model(origin, in_child=True)
    assert str(raised.value).isprintable()
