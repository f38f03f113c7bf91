"""Tests ``staticllm export``: its usage errors, the environment that is made only if somebody asks, and its report."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from support.command_line import in_child, in_here
from support.export.stub_python import right_versions, stub_python, writes

VARIABLE = "STATICLLM_EXPORT_PYTHON"


@pytest.fixture
def source(tmp_path, monkeypatch):
    """A Hugging Face folder, and a cache without an environment."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["SomeForCausalLM"]}))
    (folder / "model.safetensors").write_text("x")
    return folder


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "give SOURCE and DIR, or --setup"),
        (["SOURCE"], 2, "give the folder to write: staticllm export "),
        (["SOURCE", "OUT", "--weights", "int3"], 2, "'int3' is not one of"),
        (["SOURCE", "OUT", "--group-size", "100"], 1, "--group-size 100 is impossible: give 16, 32"),
        (["SOURCE", "OUT", "--weights", "f16", "--symmetric"], 1, "leave it out"),
        (["SOURCE", "SOURCE"], 1, "is not empty: choose the path of a new folder"),
        (["SOURCE", "OUT", "--device", "TPU"], 2, "'TPU' is not one of"),
        (["SOURCE", "OUT", "--setup", "--python", "x"], 2, "--setup makes an environment, and --python"),
        (["SOURCE", "OUT", "--python", "/none"], 1, "it cannot be started: "),
        (["SOURCE", "OUT"], 1, "make it with `staticllm export --setup` (1.6 GB"),
    ],
)
def test_each_mistake_is_one_line(arguments, code, words, source, tmp_path):
    places = {"SOURCE": str(source), "OUT": str(tmp_path / "out")}
    found = in_here("export", *(places.get(each, each) for each in arguments))
    assert found.returncode == code
    assert words in found.stderr
    assert "Traceback" not in found.stderr
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "cache").exists(), "nothing is made unasked"


def test_an_export_says_what_it_wrote(source, tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(stub_python(tmp_path, writes())))
    found = in_here("export", source, tmp_path / "out", "--device", "cpu")
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith(f"{tmp_path / 'out'}: int8, asymmetric, by channel; 0 MB in ")
    assert found.stderr == f"working\ntry it: staticllm run {tmp_path / 'out'}\n"


def test_setup_makes_the_environment_that_later_exports_use(source, tmp_path, monkeypatch):
    stub = tmp_path / "stub"
    stub.mkdir()
    monkeypatch.setattr(sys, "executable", str(stub_python(stub, writes(), right_versions())))
    found = in_here("export", "--setup")
    assert found.returncode == 0, found.stderr
    assert "making the environment\ninstalling torch\ninstalling optimum optimum-intel\n" in found.stderr
    assert in_here("export", source, tmp_path / "out").returncode == 0
    assert (tmp_path / "out" / "openvino_model.xml").is_file()


def test_the_help_loads_neither_the_exporter_nor_openvino():
    code = (
        "import sys; from staticllm.cli.export import command; "
        "print([name for name in sys.modules if name in ('torch', 'openvino', 'numpy', 'staticllm.export.exporter')])"
    )
    found = in_child("export", "--help")
    assert "--group-size" in found.stdout

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
