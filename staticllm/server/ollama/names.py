"""Names of models and spans of time as Ollama writes them."""

from __future__ import annotations

import math
import re
from datetime import datetime, timezone

from staticllm.server.api_error import ApiError
from staticllm.server.model_hub import ModelHub

TAG = ":latest"
NANO = 1_000_000_000
FAR_FUTURE = "2318-01-01T00:00:00Z"
"""The moment at which Ollama says that a model expires which is kept for ever."""
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_SPAN = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")


def tagged(name: str) -> str:
    """Return the name of a model with its tag: Ollama's lists have no name without one."""
    return name if ":" in name else name + TAG


def served_name(hub: ModelHub, name: str) -> str:
    """Return the name that a model is served by: a client may add the tag ``latest``."""
    return name if name in hub.models else name.removesuffix(TAG)


def seconds_of(keep_alive: float | str) -> float:
    """Return the seconds of ``keep_alive``: a number of them, or Go's ``5m``, ``1h30m``; negative ones are ``math.inf``.

    Raises:
        ApiError: it is neither.
    """
    if isinstance(keep_alive, (int, float)):
        return math.inf if keep_alive < 0 else float(keep_alive)
    text = keep_alive.strip()
    sign, rest = text[:1] in ("-", "+"), text.lstrip("+-")
    if text == "0" or (sign and rest == "0"):
        return 0.0
    parts = _SPAN.findall(rest)
    if not parts or "".join(number + unit for number, unit in parts) != rest:
        raise ApiError(400, f"keep_alive is {keep_alive!r}: give seconds, or a span such as 5m or 1h30m")
    seconds = sum(float(number) * _UNITS[unit] for number, unit in parts)
    return math.inf if text.startswith("-") else seconds


def timestamp(seconds: float) -> str:
    """Return a moment (seconds since 1970) as Ollama writes it; one beyond all calendars is ``FAR_FUTURE``."""
    try:
        return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return FAR_FUTURE


def nanoseconds(seconds: float) -> int:
    """Return whole nanoseconds."""
    return max(0, round(seconds * NANO))
