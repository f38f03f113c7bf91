"""The settings of an attached program: environment variables that the launcher sets and child processes inherit."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass

from ..wire.messages import MAX_PRIORITY

MODES = ("auto", "require", "off")
WAIT_SECONDS = 5.0


class SettingsError(RuntimeError):
    """An environment variable has a value that is not allowed."""


@dataclass(frozen=True)
class Settings:
    """What an attached program may do."""

    mode: str = "auto"
    """``auto`` runs natively what the daemon does not take, ``require`` raises, ``off`` leaves OpenVINO alone."""
    devices: frozenset[str] = frozenset()
    """Devices whose models go to the daemon, in upper case; empty for all."""
    priority: int = 0
    """From -100 to 100; a higher one goes first."""
    is_exact: bool = False
    """Models run as they are, without packing."""
    daemon_command: tuple[str, ...] = ()
    """The command that starts the daemon; empty if it is not known."""
    wait_seconds: float = WAIT_SECONDS
    """Seconds in which a daemon that was started must answer."""


def read_settings() -> Settings:
    """Return the settings of this process.

    Raises:
        SettingsError: a variable has a value that is not allowed.
    """
    mode = os.environ.get("STATICLLM_ATTACH", "auto") or "auto"
    if mode not in MODES:
        raise SettingsError(f"STATICLLM_ATTACH={mode!r}: must be one of {', '.join(MODES)}")
    devices = frozenset(
        filter(None, os.environ.get("STATICLLM_ATTACH_DEVICES", "").upper().replace(" ", "").split(","))
    )
    is_exact = os.environ.get("STATICLLM_ATTACH_EXACT", "") not in ("", "0")
    return Settings(mode, devices, _priority(), is_exact, _daemon_command(), _wait_seconds())


def _priority() -> int:
    text = os.environ.get("STATICLLM_ATTACH_PRIORITY", "0")
    try:
        return check_priority(int(text))
    except ValueError:
        raise SettingsError(f"STATICLLM_ATTACH_PRIORITY={text!r}: must be a whole number from -100 to 100") from None


def check_priority(priority: int) -> int:
    """Return a priority that is allowed.

    Raises:
        ValueError: it is not from -100 to 100.
    """
    if not -MAX_PRIORITY <= priority <= MAX_PRIORITY:
        raise ValueError(f"the priority {priority} must be from {-MAX_PRIORITY} to {MAX_PRIORITY}")
    return priority


def _daemon_command() -> tuple[str, ...]:
    text = os.environ.get("STATICLLM_DAEMON_COMMAND")
    if not text:  # without the launcher, only an environment with staticllm knows how to start it
        is_installed = __name__.startswith("staticllm.")
        return (sys.executable, "-m", "staticllm", "daemon", "start", "--foreground") if is_installed else ()
    try:
        command = json.loads(text)
    except ValueError:
        command = None
    if not isinstance(command, list) or not all(isinstance(part, str) for part in command):
        raise SettingsError(f"STATICLLM_DAEMON_COMMAND={text!r}: must be a JSON list of texts")
    return tuple(command)


def _wait_seconds() -> float:
    text = os.environ.get("STATICLLM_ATTACH_WAIT", str(WAIT_SECONDS))
    try:
        return max(0.0, float(text))
    except ValueError:
        raise SettingsError(f"STATICLLM_ATTACH_WAIT={text!r}: must be a number of seconds") from None
