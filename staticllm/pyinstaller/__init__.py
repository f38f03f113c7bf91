"""What PyInstaller asks an installed package (entry point ``pyinstaller40``): where its hooks are."""

from __future__ import annotations

from pathlib import Path


def hook_dirs() -> list[str]:
    """The folder of ``hook-staticllm.py``."""
    return [str(Path(__file__).parent)]
