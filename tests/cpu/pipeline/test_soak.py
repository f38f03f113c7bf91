"""Runs a short soak test; scripts/soak.py runs a long one."""

import subprocess
import sys

import pytest


@pytest.mark.slow
def test_clients_that_behave_badly_leave_nothing_behind(root):
    command = [sys.executable, root / "scripts" / "soak.py", "--clients", "32", "--seconds", "6"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
