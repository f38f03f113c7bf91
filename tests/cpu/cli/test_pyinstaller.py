"""Tests what the PyInstaller hook collects. With ``--all`` an application is built and run: minutes, 300 MB."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import types
from importlib.metadata import entry_points, requires
from pathlib import Path

import pytest

import staticllm
from staticllm.pyinstaller import hook_dirs


def hook():
    (folder,) = hook_dirs()
    return Path(folder) / "hook-staticllm.py"


def test_the_wheel_names_the_folder_of_the_hook():
    (found,) = [entry for entry in entry_points(group="pyinstaller40") if entry.value.startswith("staticllm")]
    assert found.load()() == hook_dirs()
    assert hook().is_file()


def test_plugins_and_readers_and_the_demo_model_are_collected(monkeypatch):
    """Uses PyInstaller's own functions if it is installed, else stand-ins that look into the same folders."""
    try:
        import PyInstaller.utils.hooks  # noqa: F401
    except ImportError:
        monkeypatch.setitem(sys.modules, "PyInstaller", types.ModuleType("PyInstaller"))
        monkeypatch.setitem(sys.modules, "PyInstaller.utils", types.ModuleType("PyInstaller.utils"))
        monkeypatch.setitem(sys.modules, "PyInstaller.utils.hooks", stand_ins())
    found = runpy.run_path(str(hook()))
    libraries = " ".join(Path(source).name for source, _ in found["binaries"])
    for part in ("intel_cpu_plugin", "intel_npu_plugin", "ir_frontend", "openvino_tokenizers", "openvino_genai"):
        assert part in libraries, f"{part} is not collected"
    assert "onnx" not in libraries
    data = {Path(source).name for source, _ in found["datas"]}
    assert {"openvino_model.xml", "openvino_model.bin", "chat_template.jinja"} <= data
    assert "staticllm.pipelines.llm_pipeline" in found["hiddenimports"]


def test_the_metadata_of_all_requirements_is_collected(monkeypatch):
    """llguidance, prompt_toolkit and others read their version from it when they are imported."""
    for name, module in (("PyInstaller", None), ("PyInstaller.utils", None), ("PyInstaller.utils.hooks", stand_ins())):
        monkeypatch.setitem(sys.modules, name, module or types.ModuleType(name))
    found = {source for source, place in runpy.run_path(str(hook()))["datas"] if source == place}
    needed = {re.match(r"[\w.-]+", line).group() for line in requires("staticllm") if "extra ==" not in line}
    assert {"staticllm", "llguidance", "prompt_toolkit", "openvino"} <= needed | {"staticllm"}
    assert needed <= found


APPLICATION = """
from staticllm import StaticLLMPipeline, demo_model_path

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}

if __name__ == "__main__":
    with StaticLLMPipeline(demo_model_path(), "CPU", MAX_PROMPT_LEN=128) as pipe:
        print(pipe.generate("What is an NPU?", max_new_tokens=24, json_schema=SCHEMA))
"""
UNUSED = ("matplotlib", "pytest", "hypothesis", "fastapi", "litellm", "openai", "av", "jsonschema", "PIL", "mypy")


@pytest.mark.slow
def test_a_frozen_program_answers_by_a_schema(tmp_path, root):
    pytest.importorskip("PyInstaller")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", tmp_path / "site", root]
    subprocess.run(install, check=True)  # PyInstaller does not follow the mapping of an editable installation
    (tmp_path / "app.py").write_text(APPLICATION)
    excluded = [part for name in UNUSED for part in ("--exclude-module", name)]
    build = [sys.executable, "-m", "PyInstaller", "--noconfirm", "--log-level", "ERROR", *excluded, "app.py"]
    subprocess.run(build, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(tmp_path / "site")}, check=True)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([tmp_path / "dist" / "app" / "app"], env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert isinstance(json.loads(done.stdout)["a"], int)


def stand_ins():
    def folder(package):
        return Path(pytest.importorskip(package).__file__).parent

    hooks = types.ModuleType("PyInstaller.utils.hooks")
    hooks.collect_data_files = lambda package: [
        (str(path), package) for path in folder(package).rglob("*") if path.suffix not in (".py", ".pyc")
    ]
    hooks.collect_dynamic_libs = lambda package, search_patterns: [
        (str(path), package) for pattern in search_patterns for path in folder(package).rglob(pattern)
    ]
    hooks.collect_submodules = lambda package, on_error: ["staticllm.pipelines.llm_pipeline", "staticllm.pyinstaller"]
    hooks.copy_metadata = lambda name: [(name, name)]
    return hooks


def test_the_error_names_a_missing_plugin(monkeypatch):
    from staticllm import devices

    class Core:
        available_devices: tuple[str, ...] = ()

    monkeypatch.setattr("staticllm.pipelines.launch.arguments.get_core", Core)
    monkeypatch.setattr(devices, "get_core", Core)
    with pytest.raises(staticllm.DeviceError, match="its plugins are missing"):
        staticllm.StaticLLMPipeline(staticllm.demo_model_path())
