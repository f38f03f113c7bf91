"""A hub on loopback, an empty cache of Hugging Face, and the command in a process that sees both."""

from __future__ import annotations

import os
import subprocess

import pytest
from support.command_line import STATICLLM, in_here
from support.hub import Repository, serving

from staticllm.model_dir import demo_model_path

pytest.importorskip("huggingface_hub")


@pytest.fixture
def hub():
    with serving() as found:
        yield found


@pytest.fixture
def environment(hub, tmp_path, monkeypatch):
    """The variables of a user of that hub; they also hold in this process, for what reads them."""
    values = {
        "HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_ETAG_TIMEOUT": "2", "HF_HUB_DOWNLOAD_TIMEOUT": "2", "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONIOENCODING": "utf-8", "NO_PROXY": "127.0.0.1",
    }  # fmt: skip
    for name in ("HF_TOKEN", "HF_HUB_CACHE", "HF_TOKEN_PATH", "HUGGING_FACE_HUB_TOKEN", "STATICLLM_SERVER"):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    from huggingface_hub import constants  # it has read its variables already

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf" / "hub"))
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return values


@pytest.fixture
def cache(environment, tmp_path):
    return tmp_path / "hf" / "hub"


@pytest.fixture
def command(environment):
    """Return a function that runs the command with these variables, and with those that are given in a child process."""

    def run(*arguments, stdin="", **variables):
        if not variables:
            return in_here(*arguments, stdin=stdin)
        return subprocess.run(
            [*STATICLLM, *map(str, arguments)], input=stdin, capture_output=True, text=True, encoding="utf-8",
            timeout=180, check=False, env={**os.environ, **variables},
        )  # fmt: skip

    return run


@pytest.fixture
def bring(environment):
    """Return a function that pulls a name in this process, and returns its place and what was said."""
    from staticllm.model_files.hub_downloads import pull
    from staticllm.model_paths.hub_names import parse_hub_name

    def pulled(text, on_progress=lambda event: None):
        said = []
        return pull(parse_hub_name(text), said.append, on_progress), said

    return pulled


@pytest.fixture
def demo(hub):
    """The embedded model as a repository, beside files that no one must take."""
    files = {path.name: path.read_bytes() for path in demo_model_path().iterdir() if path.is_file()}
    files.pop("__init__.py", None)
    unwanted = {
        "pytorch_model.bin": b"\x80\x04",
        "model.safetensors": b"x",
        "model.onnx": b"x",
        "modeling.py": b"1 / 0",
    }
    large = tuple(name for name in (*files, *unwanted) if name.endswith((".bin", ".safetensors", ".onnx")))
    hub.repositories["small/demo-ov"] = Repository(
        {**files, **unwanted, ".gitattributes": b"*.bin filter=lfs\n"}, large
    )
    return hub.repositories["small/demo-ov"]
