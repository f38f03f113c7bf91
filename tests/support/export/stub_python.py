"""Interpreters for tests of exports: scripts that behave like Python as far as set-up and the tool need it.

On Windows they are programs as pip makes them of console scripts: its launcher, the line with the interpreter, and an archive.
As ``python.exe`` of an environment, they run the interpreter as their child.
"""

from __future__ import annotations

import io
import json
import os
import sys
import zipfile
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from staticllm.export.environment import python_in
from staticllm.export.packages import OPENVINO, PACKAGES

PYTHON = sys.executable  # tests put another in its place
NAME = "python.exe" if os.name == "nt" else "python"
TEMPLATE = """
import json, os, pathlib, shutil, sys, tempfile, time
place = pathlib.Path({place!r})
arguments = sys.argv[1:]
with (place / "calls").open("a") as file:
    file.write(json.dumps(arguments) + chr(10))
if arguments[:2] == ["-m", "venv"]:
    target = pathlib.Path(arguments[2], {python_in_folder!r})
    target.parent.mkdir(parents=True)
    shutil.copy(sys.argv[0], target)
elif arguments[:3] == ["-m", "pip", "install"]:
    tempfile.mkdtemp()  # pip unpacks there, and removes it at its end if it is not killed
    print("Downloading something.whl (1.0 MB)", flush=True)
    time.sleep({pip_seconds})
    reason = place / "pip_fails"
    if reason.exists() and {fails_at!r} in arguments:
        sys.stderr.write(reason.read_text())
        sys.exit(1)
else:
    request = json.loads(sys.stdin.readline())
    (place / "pid").write_text(str(os.getpid()))
    print("a line of something else")
    answer = lambda values: print(json.dumps(values), flush=True)
    if request["do"] == "versions":
        answer({{"done": {{"python": "3", "packages": {versions!r}}}}})
    else:
        (place / "request").write_text(json.dumps({{**request, "offline": os.environ.get("HF_HUB_OFFLINE")}}))
        answer({{"step": "working"}})
        {work}
"""
WRITES = """
        for name in {names!r}:
            pathlib.Path(request["target"], name).write_text("x")
        answer({{"done": {{}}}})
"""
MODEL = (
    "openvino_model.xml", "openvino_model.bin", "openvino_tokenizer.xml", "openvino_tokenizer.bin",
    "openvino_detokenizer.xml", "openvino_detokenizer.bin",
)  # fmt: skip


def right_versions():
    return {
        **{package.name: package.tested for package in PACKAGES},
        **{name: version(name) for name in OPENVINO},
    }


def writes(names=MODEL):
    """Return the work of a tool that writes these files."""
    return WRITES.format(names=names).strip()


def stub_python(place, work="answer({'done': {}})", versions=None, fails_at="", pip_seconds=0):
    """Write an interpreter to a folder and return its path. Its calls are lines of the file ``calls`` there.

    ``work``: what the tool does. ``fails_at``: the argument at which pip fails if there is a file ``pip_fails`` with its reason.
    """
    path = place / NAME
    text = TEMPLATE.format(
        place=str(place), versions=versions or right_versions(), work=work, fails_at=fails_at, pip_seconds=pip_seconds,
        python_in_folder=str(python_in(Path())),
    )  # fmt: skip
    path.write_bytes(_program(f"#!{PYTHON}\n", text))
    path.chmod(0o755)
    return path


def _program(first_line, text):
    """Return the bytes of a program that runs a text of Python."""
    if os.name != "nt":
        return (first_line + text).encode()
    pip = find_spec("pip")
    if pip is None:
        pytest.skip("pip is not installed, whose launchers make programs of scripts")
    launcher = Path(*pip.submodule_search_locations, "_vendor", "distlib", "t64.exe")
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("__main__.py", text)
    return launcher.read_bytes() + first_line.encode() + archive.getvalue()


def calls_of(place):
    """Return the arguments of each call of the interpreter in a folder."""
    return [json.loads(line) for line in (place / "calls").read_text().splitlines()]


def has_ended(pid):
    """Return whether a process ends, which may take a moment."""
    try:
        psutil.Process(pid).wait(10)
    except psutil.NoSuchProcess:
        return True
    except psutil.TimeoutExpired:
        return False
    return True
