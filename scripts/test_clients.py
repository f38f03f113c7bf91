"""Installs programs that talk to the server (clients in Python and JavaScript, a browser, Ray) into environments of their own,
`.venv-clients` and, for packages that need a newer openai than others allow, `.venv-newer-clients`, and runs the tests that need
them. Node and Chromium are the system's; without them their tests are skipped.

python scripts/test_clients.py
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from _setup import ROOT, make_environment, run

EXTRAS = "server,test,clients,browser,otel,cluster"
NEWER_EXTRAS, NEWER_TESTS = "server,test,newer-clients", ("test_newer_clients.py",)
NPM = ("openai@^6.49", "ollama@^0.6.4")
TESTS = (
    "test_clients.py",
    "test_npm_clients.py",
    "test_recorded_requests.py",
    "test_conformance.py",
    "test_telemetry.py",
    "test_page.py",
    "test_page_documents.py",
    "test_page_markdown.py",
    "test_ray_app.py",
)


def environment(name: str, extras: str) -> Path:
    """Make an environment with these extras, if it is not there, and return its Python."""
    place = ROOT / name
    python = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.is_file():
        make_environment(place)
    run(python, "-m", "pip", "install", "-q", "-e", f"{ROOT}[{extras}]")
    return python


def test(python: Path, names: Sequence[str]) -> None:
    """Run these files of tests of the server."""
    tests = [str(ROOT / "tests" / "cpu" / "server" / name) for name in names]
    run(python, "-m", "pytest", "-n0", "--all", "-rs", "--durations=10", *tests, *sys.argv[1:])


def main() -> None:
    os.environ["PYTHONPATH"] = str(ROOT)
    test(environment(".venv-newer-clients", NEWER_EXTRAS), NEWER_TESTS)
    place = ROOT / ".venv-clients"
    python = environment(place.name, EXTRAS)
    if npm := shutil.which("npm"):
        run(npm, "install", "--prefix", place, "--no-audit", "--no-fund", *NPM)
        os.environ["STATICLLM_NODE_MODULES"] = str(place / "node_modules")
    test(python, TESTS)


if __name__ == "__main__":
    main()
