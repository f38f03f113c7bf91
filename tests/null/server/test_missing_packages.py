"""Tests that the server's tests are skipped with a line that says why, not silently, where a package is missing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize("package", ["fastapi", "httpx"])
def test_each_file_of_the_servers_tests_is_counted_as_skipped(root, tmp_path, package):
    (tmp_path / "hiding.py").write_text(f"import sys; sys.modules[{package!r}] = None")
    files = ["tests/cpu/server/test_admission.py", "tests/cpu/server/test_ray_ingress.py"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:xdist",
        "-p",
        "no:cacheprovider",
        "-p",
        "hiding",
        "-rs",
        "-q",
        *files,
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root), *sys.path])}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=120, check=False)
    (skipped,) = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert skipped.startswith(f"SKIPPED [{len(files)}] ")
    assert skipped.endswith(f"not installed: {package}")
