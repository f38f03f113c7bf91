"""Tests the messages about absent devices."""

from __future__ import annotations

import pytest

import staticllm
from staticllm.cli import cli
from staticllm.devices import check_device, check_known, get_core, known_properties, npu_compiler_problem
from staticllm.errors import DeviceError
from staticllm.pipelines.diagnostics.kinds import job_in


class Core:
    def __init__(self, *devices):
        self.available_devices = devices


def test_without_any_device_the_error_says_that_plugins_are_missing():
    """This happens in an application that PyInstaller built without the plugins."""
    with pytest.raises(DeviceError, match=r"its plugins are missing; .*PyInstaller must collect them .docs/desktop.md"):
        check_device(Core(), "CPU")
    with pytest.raises(DeviceError, match=r"there are: CPU, GPU\.0"):
        check_device(Core("CPU", "GPU.0"), "NPU")


def test_an_absent_npu_is_a_known_device():
    assert check_known(Core("CPU"), "NPU.4000") == "NPU.4000"
    assert check_known(Core("CPU"), "CPU") == "CPU"
    with pytest.raises(DeviceError, match="TPU"):
        check_known(Core("CPU"), "TPU")
    assert {"INFERENCE_PRECISION_HINT", "NPU_TURBO"} <= known_properties(get_core(), "NPU")


@pytest.mark.parametrize(
    ("error", "problem"),
    [
        (
            'Exception from src/plugin.cpp:1:\nCannot load library "/opt/libs/libnpu_compiler.so": no such file\n',
            "libnpu_compiler.so is missing beside OpenVINO's plugins",
        ),
        ("Exception from src/core.cpp:2:\nthe platform 4000 is unknown\n", "the platform 4000 is unknown"),
        (None, ""),
    ],
)
def test_the_library_that_an_npu_compilation_lacks_is_named(error, problem):
    class Compiler:
        def compile_model(self, model, device, properties):
            assert (device, properties["NPU_COMPILER_TYPE"]) == ("NPU", "PLUGIN")
            if error is not None:
                raise RuntimeError(error)

    assert npu_compiler_problem(Compiler()) == problem


def test_what_this_machine_lacks_for_an_npu_is_one_line():
    assert "\n" not in npu_compiler_problem(get_core())


def test_a_model_that_is_not_a_language_model_is_a_one_line_error(zoo, tmp_path):
    from click.testing import CliRunner

    for end in ("xml", "bin"):
        data = (zoo / "llama" / f"openvino_tokenizer.{end}").read_bytes()
        (tmp_path / f"openvino_model.{end}").write_bytes(data)
    for arguments in (["verify"], ["inspect"], ["bench"]):
        done = CliRunner().invoke(cli, [*arguments, str(tmp_path)])
        assert done.exit_code == 1
        assert done.stderr.startswith("Error: ")
        assert len(done.stderr.strip().splitlines()) == 1
    with pytest.raises(
        staticllm.ModelError
    ):  # at once, or when it is lowered: other tests may have loaded its operations
        job = job_in(tmp_path, "CPU", {})
        job.kind.plan(job)


def test_the_module_lists_its_lazy_imports():
    assert "StaticLLMPipeline" in dir(staticllm)
    assert set(staticllm.__all__) <= set(dir(staticllm))
