"""Installs programs that talk to the server (clients in Python and JavaScript, a browser, Ray) into an environment of their own,
`.venv-clients`, and runs the tests that need them. Node and Chromium are the system's; without them their tests are skipped.

python scripts/test_clients.py
"""

from __future__ import annotations

import os
import shutil
import sys

from _setup import ROOT, make_environment, run

EXTRAS = "server,test,clients,browser,otel,cluster"
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


def main() -> None:
    place = ROOT / ".venv-clients"
    python = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.is_file():
        make_environment(place)
    run(python, "-m", "pip", "install", "-q", "-e", f"{ROOT}[{EXTRAS}]")
    if npm := shutil.which("npm"):
        run(npm, "install", "--prefix", place, "--no-audit", "--no-fund", *NPM)
        os.environ["STATICLLM_NODE_MODULES"] = str(place / "node_modules")
    os.environ["PYTHONPATH"] = str(ROOT)
    tests = [str(ROOT / "tests" / "cpu" / "server" / name) for name in TESTS]
    run(python, "-m", "pytest", "-n0", "--all", "-rs", "--durations=10", *tests, *sys.argv[1:])


if __name__ == "__main__":
    main()
