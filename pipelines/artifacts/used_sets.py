"""The blob sets that a process has imported, in a file that is read after it has crashed."""

from __future__ import annotations

import contextlib
from pathlib import Path

SETS = "sets"


def note_set(folder: Path, path: str) -> None:
    """Note before a set is imported that the daemon of a runtime folder uses it. A full disk is ignored."""
    if path not in read_sets(folder):
        with contextlib.suppress(OSError), (folder / SETS).open("a", encoding="utf-8") as file:
            file.write(path + "\n")


def read_sets(folder: Path) -> list[str]:
    """Return the folders of the sets that were noted."""
    try:
        return (folder / SETS).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []


def forget_sets(folder: Path) -> None:
    """Forget what was noted, before another daemon begins."""
    (folder / SETS).unlink(missing_ok=True)
