"""The Python that exports run with: an environment of its own in the user's cache, or one that the user names.

An environment has absolute paths, so that it cannot be made elsewhere and renamed. A file that is written last says that it is
whole; what a killed process has left is made anew.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

from filelock import Timeout

from staticllm.children.child import ChildLostError, last_words
from staticllm.children.line_child import LineChild
from staticllm.errors import ConfigError, ModelError, StaticLLMError, quoted
from staticllm.export.packages import OPENVINO, PACKAGES, installations, mismatches
from staticllm.system.file_lock import acquire
from staticllm.system.files import read_regular, user_cache, whole_file

FOLDER, MARKER = "export_env", "complete.json"
TOOL = Path(__file__).with_name("tool.py")
NEEDED_BYTES = 3_000_000_000
"""Free space that set-up needs at least: with a torch for CPUs the environment has 1.6 GB, and pip unpacks wheels meanwhile."""
SETUP_SECONDS, CHECK_SECONDS = 7200.0, 60.0
_MAX_MARKER = 1 << 16
_DIGEST_CHARS = 16
_CONNECTION = (
    "NewConnectionError",
    "NameResolutionError",
    "ConnectTimeout",
    "ReadTimeout",
    "ProxyError",
    "Network is unreachable",
)


class OnStep(Protocol):
    """Gets what is done now, and with which file or package."""

    def __call__(self, text: str, detail: str = "") -> None: ...


def ignore_step(text: str, detail: str = "") -> None:
    """Show nothing."""


@dataclass(frozen=True)
class ExportEnvironment:
    """A complete environment: its folder, its interpreter, and the bytes that it takes on the disk."""

    folder: Path
    num_bytes: int

    @property
    def python(self) -> Path:
        return python_in(self.folder)


def python_in(folder: Path) -> Path:
    return folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def default_folder() -> Path:
    """Return the folder of the environment for these versions and this Python; it may not exist."""
    names = (installations(), sys.version, sys.base_prefix)
    return user_cache() / FOLDER / sha256(repr(names).encode()).hexdigest()[:_DIGEST_CHARS]


def find_environment(folder: Path | None = None) -> ExportEnvironment | None:
    """Return the environment if it was set up completely."""
    place = folder or default_folder()
    with suppress(OSError, ValueError, TypeError, KeyError):
        found = ExportEnvironment(place, int(json.loads(read_regular(place / MARKER, _MAX_MARKER))["num_bytes"]))
        return found if found.python.is_file() else None
    return None


def set_up(on_step: OnStep = ignore_step) -> ExportEnvironment:
    """Return the environment, which is made if it is missing, as a whole or not at all. pip is configured as the user has it.

    Raises:
        ConfigError: another process makes it, there is no room, or ``venv`` or pip failed; the message has pip's reason.
    """
    folder = default_folder()
    found = find_environment(folder)
    if found is not None:
        return found
    _check_frozen()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lease = acquire(folder.with_name(f"{folder.name}.lock"), timeout=0)
    except Timeout:
        raise ConfigError(f"another process sets up {quoted(folder)} now: wait for its end") from None
    except OSError as error:
        raise _unwritable(folder, error) from None
    with lease:
        return find_environment(folder) or _made(folder, on_step)


def _made(folder: Path, on_step: OnStep) -> ExportEnvironment:
    free = shutil.disk_usage(folder.parent).free
    if free < NEEDED_BYTES:
        raise ConfigError(
            f"the environment for exports needs {NEEDED_BYTES / 1e9:.0f} GB or more in {quoted(folder.parent)}, which has "
            f"{free / 1e9:.1f} GB free: free some, set XDG_CACHE_HOME to a folder of a larger disk, or give --python"
        )
    try:
        shutil.rmtree(folder, ignore_errors=True)
        on_step("making the environment")
        _run((sys.executable, "-m", "venv", str(folder)), "python -m venv", on_step)
        pip = (str(python_in(folder)), "-m", "pip", "install", "--no-input", "--disable-pip-version-check")
        for arguments in installations():
            names = " ".join(each.partition("==")[0] for each in arguments if not each.startswith("-"))
            on_step(f"installing {names}")
            _run((*pip, "--progress-bar", "off", *arguments), f"pip install {names}", on_step)
        on_step("checking the environment")
        check_python(python_in(folder))
        num_bytes = sum(path.lstat().st_size for path in folder.rglob("*") if not path.is_dir())
        with whole_file(folder / MARKER) as file:
            file.write(json.dumps({"num_bytes": num_bytes, "installed": installations()}).encode())
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise _unwritable(folder, error) from None
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return ExportEnvironment(folder, num_bytes)


@contextmanager
def _scratch() -> Iterator[Path]:
    """Make a temporary folder for a process and what it leaves, and remove it."""
    with tempfile.TemporaryDirectory(prefix="staticllm-export-", ignore_cleanup_errors=True) as place:
        yield Path(place)


def _temporary(place: Path) -> dict[str, str]:
    """Return the variables with which a process makes its temporary files in a folder; one that is killed leaves them."""
    return dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(place))


def _run(command: Sequence[str], what: str, on_step: OnStep) -> None:
    """Run a program to its end, and show the wheels that pip loads. Raises ``ConfigError`` (it failed) and ``OSError``."""
    with _scratch() as place:
        errors = place / "stderr.txt"
        moment = time.monotonic() + SETUP_SECONDS
        try:
            with LineChild(command, environment=_temporary(place), errors=errors) as child:
                while True:
                    line = child.next_line(moment).strip()
                    if line.startswith(("Downloading ", "Installing collected")):
                        on_step(what, line[:100])
        except ChildLostError as error:
            if error.code:
                raise ConfigError(f"{what} failed: {_reason(errors)}") from None
        except TimeoutError:
            raise ConfigError(f"{what} did not end in {SETUP_SECONDS:g} s: check the network, and try again") from None


def _reason(errors: Path) -> str:
    """Return the last error that pip has written, and what helps."""
    text = errors.read_text("utf-8", "replace") if errors.is_file() else ""
    lines = [line for line in text.splitlines() if line.startswith("ERROR: ")]
    said = lines[-1].removeprefix("ERROR: ") if lines else last_words(errors) or "it said nothing"
    said = "".join(each if each.isprintable() else "?" for each in said[:300]).rstrip(".")
    if "No space left" in text:
        return f"{said}: free space, or set XDG_CACHE_HOME to a folder of a larger disk"
    if any(word in text for word in _CONNECTION):
        return f"{said}: there is no connection; check the network, and the index and proxy that pip is configured with"
    return f"{said}: check the index that pip is configured with, or give --python"


def check_python(python: Path) -> None:
    """Check that an interpreter has the packages.

    Raises:
        ConfigError: it cannot be run, or has other versions.
    """
    names = [*(package.name for package in PACKAGES), *OPENVINO]
    try:
        found = ask(python, {"do": "versions", "packages": names}, CHECK_SECONDS)
    except StaticLLMError as error:
        raise ConfigError(
            f"{quoted(python)} is no Python that can export ({error}): give another with --python"
        ) from None
    packages = found.get("packages")
    wrong = mismatches(packages if isinstance(packages, dict) else {})
    if wrong:
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise ConfigError(
            f"{quoted(python)}: {wrong[0]}{more}: install it there, or use `staticllm export --setup` without --python"
        )


def ask(
    python: Path,
    request: Mapping[str, Any],
    seconds: float,
    on_step: OnStep = ignore_step,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Let the tool answer a request in a process of ``python``, and return its answer. The process is ended in any case.

    Raises:
        ModelError: the tool reports an error, or its process ended or took more than ``seconds``; the message is only the
            reason.
        ConfigError: the interpreter cannot be started.
    """
    _check_frozen()
    with _scratch() as place:
        errors = place / "stderr.txt"
        variables = {**_temporary(place), **(environment or {})}
        try:
            child = LineChild((str(python), "-I", "-X", "utf8", str(TOOL)), environment=variables, errors=errors)
        except OSError as error:
            raise ConfigError(f"it cannot be started: {error.strerror or error}") from None
        try:
            with child:
                child.tell(json.dumps(request))
                return _answer(child, time.monotonic() + seconds, on_step)
        except TimeoutError:
            raise ModelError(f"it did not end in {seconds:g} s") from None
        except ChildLostError as error:
            said = last_words(errors)
            killed = "; it may have been killed because memory was short" if error.code == -9 else ""
            raise ModelError(f"its process ended {error}{killed}{f': {said}' if said else ''}") from None


def _answer(child: LineChild, moment: float, on_step: OnStep) -> dict[str, Any]:
    while True:
        try:
            found = json.loads(child.next_line(moment))
        except (ValueError, RecursionError):  # something else that the interpreter prints when it starts
            continue
        if not isinstance(found, dict):
            continue
        if isinstance(found.get("step"), str):
            on_step(found["step"])
        if isinstance(found.get("error"), str):
            raise ModelError("".join(each if each.isprintable() else "?" for each in found["error"]))
        if isinstance(found.get("done"), dict):
            return dict(found["done"])


def _check_frozen() -> None:
    if getattr(sys, "frozen", False) or not TOOL.is_file():
        raise ConfigError("a frozen application cannot export models: install staticllm with pip, and export with it")


def _unwritable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"the environment for exports cannot be made in {quoted(folder)} ({error.strerror or error}): set XDG_CACHE_HOME to a "
        "writable folder with free space, or give --python"
    )
