"""Checks values that were read from JSON which anybody may have written."""

from __future__ import annotations

from typing import Any

MAX_SIZE = 1 << 24
"""The limit of any count or length."""


def object_of(value: object, most: int) -> dict[str, Any]:
    """Return ``value`` if it is an object of at most ``most`` entries.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(value, dict) or len(value) > most:
        raise TypeError(f"{str(value)[:40]!r} should be an object of at most {most} entries")
    return value


def list_of(value: object, most: int) -> list[Any]:
    """Return ``value`` if it is a list of at most ``most`` entries.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(value, list) or len(value) > most:
        raise TypeError(f"{str(value)[:40]!r} should be a list of at most {most}")
    return value


def whole_of(value: object, least: int, most: int = MAX_SIZE) -> int:
    """Return ``value`` if it is a whole number from ``least`` to ``most``.

    Raises:
        ValueError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{str(value)[:40]} should be a whole number from {least} to {most}")
    return value


def text_of(value: object, what: str, most: int) -> str:
    """Return ``value`` if it is a string of at most ``most`` characters. ``what`` names it in the error.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(value, str) or len(value) > most:
        raise TypeError(f"{what} should be a string of at most {most} characters")
    return value


def check_flag(value: object) -> None:
    """Check that ``value`` is true or false.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(value, bool):
        raise TypeError(f"{str(value)[:40]!r} should be true or false")


def check_one_of(value: object, allowed: tuple[Any, ...], what: str) -> None:
    """Check that ``value`` is one of ``allowed``, of the same type. ``what`` names it in the error.

    Raises:
        ValueError: it is something else.
    """
    if not any(value == item and type(value) is type(item) for item in allowed):
        raise ValueError(f"{what} {str(value)[:40]!r} should be one of {allowed}")
