"""Runs the ``staticllm`` command, in a child process or, to save its imports, in this one."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import warnings

import pytest

STATICLLM = [sys.executable, "-m", "staticllm"]
ENVIRONMENT = {**os.environ, "PYTHONIOENCODING": "utf-8", "PYTHONUNBUFFERED": ""}
IN_BOTH = pytest.mark.parametrize(
    "staticllm", ["here", pytest.param("child", marks=pytest.mark.slow)], indirect=True, scope="module"
)
"""Runs a test in this process, and with ``--all`` also in a child process. One test of each command has it, because a process
needs a second of processor time for its imports and compiles its programs anew."""


def in_child(*arguments, stdin=""):
    return subprocess.run(
        [*STATICLLM, *map(str, arguments)],
        input=stdin, capture_output=True, text=True, encoding="utf-8", timeout=120, env=ENVIRONMENT, check=False,
    )  # fmt: skip


def in_here(*arguments, stdin=""):
    """Run the command in this process, with the same entry point, and return what ``in_child`` returns."""
    from staticllm.cli import main

    command = ["staticllm", *map(str, arguments)]
    streams = {
        name: io.TextIOWrapper(io.BytesIO(data.encode()), encoding="utf-8", newline="")
        for name, data in (("stdin", stdin), ("stdout", ""), ("stderr", ""))
    }
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.resetwarnings()
        for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
            warnings.simplefilter("ignore", kind)  # as Python does by default
        patch.setattr(sys, "argv", command)
        for name, stream in streams.items():
            patch.setattr(sys, name, stream)
        try:
            code = main() or 0
        except SystemExit as leaving:
            code = leaving.code or 0
    for stream in (streams["stdout"], streams["stderr"]):
        stream.flush()
    written = [streams[name].buffer.getvalue().decode() for name in ("stdout", "stderr")]
    return subprocess.CompletedProcess(command, code, *written)
