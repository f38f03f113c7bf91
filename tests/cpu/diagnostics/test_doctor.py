"""Tests what `staticllm doctor` looks at."""

from __future__ import annotations

import re
from importlib.metadata import requires

import pytest

from staticllm.compiler_passes.npu_compiler.find import CompilerStatus
from staticllm.pipelines.diagnostics import doctor
from staticllm.pipelines.diagnostics.doctor import PACKAGES


def test_every_package_that_must_be_there_is_examined():
    needed = [each for each in requires("staticllm") if "extra ==" not in each]
    assert {re.match(r"[\w-]+", each)[0] for each in needed} == set(PACKAGES)


LOCAL, WINE = CompilerStatus("local", "openvino 1"), CompilerStatus("wine", "openvino 1, NPU compiler 8.4")


@pytest.mark.parametrize(
    ("local", "wine", "level", "value"),
    [
        (LOCAL, WINE, "ok", "found beside OpenVINO's plugins"),
        (CompilerStatus("local", problem="a.so is missing"), WINE, "ok", "openvino 1, NPU compiler 8.4, under Wine"),
        (
            CompilerStatus("local", problem="a.so is missing"),
            CompilerStatus("wine", problem="no"),
            "warn",
            "a.so is missing",
        ),
    ],
)
def test_an_npu_compiler_is_found_wherever_it_is(monkeypatch, tmp_path, local, wine, level, value):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "compiler_statuses", lambda: (local, wine))
    found = doctor._npu_compiler()
    assert (found.level, found.value) == (level, value)
    assert ("scripts/npu_compiler.py setup" in found.remedy) == (level == "warn")
