"""Sets up the environment of the other scripts: a ``.venv`` in the checkout, with the package and the extras they need."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
MIN_PYTHON = (3, 11)


def python() -> Path:
    """Return the interpreter of the environment."""
    return VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def ensure_environment(*extras: str) -> Path:
    """Make ``.venv`` if there is none, and install the package with ``extras``. Return the environment's interpreter.

    If nothing has changed, this is quick.
    """
    if sys.version_info < MIN_PYTHON:
        sys.exit(f"Python {sys.version.split()[0]} is too old: staticllm needs 3.11 or later")
    if not python().is_file() or not has_pip():
        print(f"making {VENV.name} …", flush=True)
        make_environment(VENV)
    stamp = VENV / f".installed-{'-'.join(extras) or 'core'}"
    wanted = hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest()
    if not stamp.is_file() or stamp.read_text() != wanted:
        target = f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT)
        print(f"installing staticllm{target.removeprefix(str(ROOT))} …", flush=True)
        run(python(), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--editable", target)
        stamp.write_text(wanted)
    return python()


def has_pip() -> bool:
    """Return whether the environment is complete; an interrupted creation leaves an interpreter without pip."""
    return subprocess.run([str(python()), "-c", "import pip"], capture_output=True, check=False).returncode == 0


def make_environment(place: Path) -> None:
    """Make an environment like ``python -m venv``, with links if possible: a copied interpreter may miss its library."""
    venv.create(place, with_pip=True, symlinks=os.name != "nt", clear=True)


def run(*command: str | Path, cwd: Path = ROOT) -> None:
    """Run a command, and exit with its exit code if it fails.

    Compiled modules are kept beside the environment, also where the user lets Python keep none: tests start hundreds of
    processes.
    """
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(VENV / "pycache")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    result = subprocess.run([str(part) for part in command], cwd=cwd, check=False, env=environment)
    if result.returncode:
        sys.exit(result.returncode)
