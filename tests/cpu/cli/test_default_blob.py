"""Tests where ``staticllm compile`` and ``EXPORT_BLOB`` write a blob set if no path is given, and what they refuse."""

import os
import shutil
import sys
from pathlib import Path

import pytest
from support.command_line import IN_BOTH
from support.models import gguf_files

from staticllm import ConfigError, StaticLLMPipeline

SIZE = ["--max-prompt-len", "64"]


@pytest.fixture
def model(zoo, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(zoo / "llama", tmp_path / "my_model")


@pytest.fixture
def read_only(model, monkeypatch):
    """Make the folder of the model read-only, also for root."""
    access = os.access
    monkeypatch.setattr("os.access", lambda path, mode: Path(path) != model and access(path, mode))
    return model


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(
    "arguments", [["my_model", "--export-blob"], ["my_model"], ["-m", "my_model", "--export-blob"]]
)
def test_a_set_without_a_path_is_written_beside_the_model(arguments, staticllm):
    done = staticllm("compile", *arguments, *SIZE)
    assert done.returncode == 0, done.stderr
    target = Path("my_model", "openvino_model.blob")
    assert (target / "manifest.json").is_file()
    assert f"in {target} (" in done.stdout
    assert f"-p BLOB_PATH={target}" in done.stdout
    expected = staticllm("run", "my_model", "hello", "-n", 4, "-p", "PROGRAMS=shared", *SIZE).stdout
    assert staticllm("run", "my_model", "hello", "-n", 4, "-p", f"BLOB_PATH={target}").stdout == expected
    again = staticllm("compile", *arguments, *SIZE)
    assert "exists already: choose another path or remove it" in again.stderr
    assert again.returncode == 1


def test_the_set_of_a_gguf_file_is_written_beside_it(staticllm, tmp_path, monkeypatch, model_path):
    monkeypatch.chdir(tmp_path)
    gguf_files.write(model_path("llama"), tmp_path / "tiny.Q8_0.gguf", "llama", "Q8_0")
    done = staticllm("compile", "tiny.Q8_0.gguf", "--export-blob", *SIZE)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tiny.Q8_0.blob" / "manifest.json").is_file()
    expected = staticllm("run", "tiny.Q8_0.gguf", "hello", "-n", 4, "-p", "PROGRAMS=shared", *SIZE).stdout
    assert staticllm("run", "tiny.Q8_0.gguf", "hello", "-n", 4, "-p", "BLOB_PATH=tiny.Q8_0.blob").stdout == expected
    assert expected


@pytest.mark.slow
def test_that_of_the_embedded_model_is_written_here(tmp_path, monkeypatch):
    from support.command_line import in_here

    monkeypatch.chdir(tmp_path)
    assert in_here("compile", "--export-blob", *SIZE).returncode == 0
    assert (tmp_path / "demo_model.blob" / "manifest.json").is_file()


@IN_BOTH
@pytest.mark.usefixtures("model")
def test_a_model_after_the_option_is_no_path_of_a_set(staticllm):
    done = staticllm("compile", "--export-blob", "my_model")
    assert "give it first, staticllm compile my_model --export-blob" in done.stderr
    assert done.returncode == 2


@pytest.mark.usefixtures("read_only")
def test_a_read_only_folder_is_refused_before_compiling(monkeypatch):
    from support.command_line import in_here

    monkeypatch.setattr("staticllm.pipelines.loading.export.export_set", lambda *_: 1 / 0)
    done = in_here("compile", "my_model", "--export-blob")
    assert "is read-only: give another path with BLOB_PATH or --export-blob PATH" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.returncode == 1


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_a_place_that_takes_no_files_is_refused_before_compiling(model, monkeypatch, tmp_path):
    from support.command_line import in_here

    monkeypatch.setattr("os.access", lambda path, mode: True)  # as for root
    monkeypatch.setattr("staticllm.pipelines.loading.export.export_set", lambda *_: 1 / 0)
    before = sorted(tmp_path.iterdir())
    done = in_here("compile", "my_model", "--export-blob", "/proc/x")
    assert "the blob set '/proc/x' cannot be written, '/proc' takes no files (No such file or directory)" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.returncode == 1
    with pytest.raises(ConfigError, match="'/proc' takes no files"):
        StaticLLMPipeline(model, "CPU", EXPORT_BLOB="YES", BLOB_PATH="/proc/x", MAX_PROMPT_LEN=64)
    with pytest.raises(ZeroDivisionError):
        in_here("compile", "my_model", "--export-blob", "set")
    assert sorted(tmp_path.iterdir()) == before, "the check leaves nothing"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(
    "arguments", [["trace", "record", "-o", "/proc/x.json"], ["run", "hi", "--profile", "/proc/x.json"]]
)
def test_a_file_that_cannot_be_written_is_refused_before_loading(arguments, monkeypatch):
    from support.command_line import in_here

    monkeypatch.setattr("staticllm.StaticLLMPipeline.__init__", lambda *_, **__: 1 / 0)
    done = in_here(*arguments, "-m", "my_model")
    assert "'/proc/x.json' cannot be written, '/proc' takes no files" in done.stderr
    assert done.returncode == 1


def test_export_blob_of_a_read_only_folder_is_refused_too(read_only):
    with pytest.raises(ConfigError, match="is read-only: give another path with BLOB_PATH"):
        StaticLLMPipeline(read_only, "CPU", EXPORT_BLOB="YES", MAX_PROMPT_LEN=64)


def test_export_blob_writes_to_the_same_place(model):
    StaticLLMPipeline(model, "CPU", EXPORT_BLOB="YES", MAX_PROMPT_LEN=64).close()
    assert (model / "openvino_model.blob" / "manifest.json").is_file()


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
@IN_BOTH
@pytest.mark.usefixtures("model")
def test_a_link_to_nothing_is_refused_before_anything_is_compiled(staticllm, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    done = staticllm("compile", "my_model", "--export-blob", "link", *SIZE)
    assert done.returncode == 1
    assert done.stderr == "Error: 'link' exists already: choose another path or remove it\n"
    assert not (tmp_path / "nowhere").exists()
