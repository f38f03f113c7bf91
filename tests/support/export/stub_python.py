"""Interpreters for tests of exports: scripts that behave like Python as far as set-up and the tool need it."""

from __future__ import annotations

import json
import sys
from importlib.metadata import version

from staticllm.export.packages import OPENVINO, PACKAGES

TEMPLATE = """#!{python}
import json, os, pathlib, shutil, sys, tempfile, time
place = pathlib.Path({place!r})
arguments = sys.argv[1:]
with (place / "calls").open("a") as file:
    file.write(json.dumps(arguments) + chr(10))
if arguments[:2] == ["-m", "venv"]:
    target = pathlib.Path(arguments[2]) / "bin"
    target.mkdir(parents=True)
    shutil.copy(__file__, target / "python")
elif arguments[:3] == ["-m", "pip", "install"]:
    tempfile.mkdtemp()  # pip unpacks there, and removes it at its end if it is not killed
    print("Downloading something.whl (1.0 MB)", flush=True)
    time.sleep(0)
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


def stub_python(place, work="answer({'done': {}})", versions=None, fails_at=""):
    """Write an interpreter to a folder and return its path. Its calls are lines of the file ``calls`` there."""
    path = place / "python"
    text = TEMPLATE.format(
        python=sys.executable, place=str(place), versions=versions or right_versions(), work=work, fails_at=fails_at
    )
    path.write_text(text)
    path.chmod(0o755)
    return path


def calls_of(place):
    """Return the arguments of each call of the interpreter in a folder."""
    return [json.loads(line) for line in (place / "calls").read_text().splitlines()]
