"""Puts the hook into a Python environment, so that its programs attach themselves where STATICLLM_ATTACH says so."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from staticllm.errors import ConfigError
from staticllm.system.files import whole_file

FILE = "staticllm-attach.pth"
"""The name of the file in the environment's site-packages. Python runs its line at each start, and reads it as the locale says:
it is ASCII."""
_SECONDS = 60.0
_LINE = (
    'import os, sys; os.environ.get("STATICLLM_ATTACH", "off") not in ("", "off") and not sys.flags.ignore_environment '
    'and {hook!a} not in sys.path and ((os.environ.setdefault("STATICLLM_DAEMON_COMMAND", {daemon!a}), '
    "sys.path.insert(0, {hook!a})) if os.path.isfile({module!a}) else (hasattr(sys, '_staticllm_gone') or "
    "sys.stderr and sys.stderr.write({gone!a}), setattr(sys, '_staticllm_gone', True), "  # some environments read it twice
    'os.environ["STATICLLM_ATTACH"] == "require" and os._exit(1)))\n'
)
_GONE = "staticllm attach: {module!a} is not there any more: install staticllm again, or remove {file!a}\n"


def install(python: str, hook: Path, daemon: list[str]) -> Path:
    """Write the file into the environment of the interpreter ``python``, and return its path.

    ``hook`` is the folder with our ``sitecustomize``, which the interpreter then finds first; it runs the one that this hides.
    ``daemon`` is the command that starts the daemon.

    If ``hook`` is gone when a program starts, the program says so in one line; with STATICLLM_ATTACH=require it ends.

    Raises:
        ConfigError: the interpreter cannot be run, or its folder cannot be written.
    """
    path, module = _folder_of(python) / FILE, str(hook / "sitecustomize.py")
    gone = _GONE.format(module=module, file=str(path))
    line = _LINE.format(hook=str(hook), module=module, daemon=json.dumps(daemon), gone=gone)
    try:
        with whole_file(path, mode=0o644) as file:  # a link is replaced, not what it names
            file.write(line.encode("ascii"))
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror or error}") from None
    return path


def uninstall(python: str) -> Path | None:
    """Remove the file, and return its path; None if it was not there.

    Raises:
        ConfigError: the interpreter cannot be run, or the file cannot be removed.
    """
    path = _folder_of(python) / FILE
    try:
        path.unlink()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be removed: {error.strerror or error}") from None
    return path


def _folder_of(python: str) -> Path:
    """Return the folder of the packages of an interpreter."""
    if python == sys.executable:
        import sysconfig

        return Path(sysconfig.get_path("purelib"))
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    try:
        done = subprocess.run(
            [python, "-I", "-c", code], capture_output=True, text=True, timeout=_SECONDS, check=True, encoding="utf-8"
        )
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())[-200:]
        raise ConfigError(f"{python!r} is no Python interpreter that can be run: {reason}") from None
    folder = Path(done.stdout.strip())
    try:
        is_there = folder.is_absolute() and folder.is_dir()
    except OSError:  # the name is too long
        is_there = False
    if not is_there:
        raise ConfigError(f"{python!r} says no folder for its packages: give the path of a Python interpreter")
    return folder
