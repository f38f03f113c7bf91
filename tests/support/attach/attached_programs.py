"""Runs programs attached to a daemon."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from staticllm.cli.attach import attached_environment


@contextlib.contextmanager
def daemon_environment():
    """Return an environment whose attached programs have a daemon of their own."""
    folder = Path(tempfile.mkdtemp(prefix="attach"))  # pytest's folders are too long for a socket
    clean = {name: value for name, value in os.environ.items() if not name.startswith("STATICLLM_")}
    yield attached_environment({**clean, "STATICLLM_RUNTIME_DIR": str(folder), "STATICLLM_ATTACH_WAIT": "60"})
    stop = [sys.executable, "-m", "staticllm", "daemon", "stop"]
    subprocess.run(stop, env={**clean, "STATICLLM_RUNTIME_DIR": str(folder)}, check=False, capture_output=True)
    shutil.rmtree(folder, ignore_errors=True)


def run(environment, *command, mode="auto", **more):
    return subprocess.run(
        [sys.executable, *map(str, command)], env={**environment, "STATICLLM_ATTACH": mode, **more}, text=True,
        capture_output=True, timeout=240, check=False,
    )  # fmt: skip


def last_json(done):
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])
