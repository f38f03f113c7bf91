"""Notes the blob sets that a process uses, and how often one crashed with a set: after two crashes a set is not used again.

Blobs are machine code for one driver. After an update of the driver, a set that was verified when it was made can crash the
process, and again after every restart. The supervisor counts (``staticllm serve --supervise``); the process itself cannot.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from pathlib import Path

from staticllm.errors import BlobError, quoted
from staticllm.system.files import read_regular, whole_file

from .blob_set import CRASHES

LIMIT = 2
"""Crashes after which a set is quarantined."""
MAX_BYTES = 4096
SETS = "sets"
"""The file in a runtime folder that names the sets in use."""
WINDOWS_CRASH = 0xC0000000
"""Lowest Windows exit code of an unhandled exception."""
_SIGNALS = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGTRAP", "SIGSYS")


def crash_name(exit_code: int) -> str | None:
    """Return the name of the crash that ended a process; None if it exited or was killed from outside (SIGKILL, SIGTERM).

    ``exit_code`` is that of ``subprocess``: on POSIX systems a negative one is a signal.
    """
    if sys.platform == "win32":
        code = exit_code & 0xFFFFFFFF
        return f"exception {code:#x}" if code >= WINDOWS_CRASH else None
    names = {-int(getattr(signal, name)): name for name in _SIGNALS if hasattr(signal, name)}
    return names.get(exit_code)


def count_crash(folder: Path, crash: str) -> int:
    """Note that a process crashed while it used the set in ``folder``, and return how many have. 0 if it cannot be noted."""
    found = num_crashes(folder) + 1
    try:
        with whole_file(folder / CRASHES) as file:
            file.write(json.dumps({"crashes": found, "last": crash, "time": int(time.time())}).encode())
    except OSError:
        return 0
    return found


def num_crashes(folder: Path) -> int:
    """Return how many processes have crashed with a set; 0 if none was noted, or the note is damaged."""
    try:
        found = json.loads(read_regular(folder / CRASHES, MAX_BYTES, follow=False))["crashes"]
    except (OSError, ValueError, TypeError, KeyError):
        return 0
    return found if type(found) is int and found > 0 else 0


def quarantine_text(folder: Path) -> str | None:
    """Return why a set is not used any more, with the remedy; None if it may be used."""
    found = num_crashes(folder)
    if found < LIMIT:
        return None
    return (
        f"{found} processes have crashed with the blobs in {quoted(folder)}, they are in quarantine: remove the folder to "
        "compile them again"
    )


def check_crashes(folder: Path) -> None:
    """Check that a set may be used.

    Raises:
        BlobError: it is in quarantine.
    """
    text = quarantine_text(folder)
    if text is not None:
        raise BlobError(text)


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
