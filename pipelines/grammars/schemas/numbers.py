"""Says the bounds of numbers in a JSON schema so that llguidance's regular expressions are right for them.

llguidance 1.7 allows a bound that is whole and excluded if the other bound is a fraction of the same unit: 0 for
``{"exclusiveMinimum": 0, "maximum": 0.5}``. It reads numbers as 64-bit floats, and clips whole bounds to 64-bit integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import Any

from staticllm.errors import GenerationConfigError

BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
MAX_WHOLE = 1 << 63
_COMBINERS = ("$ref", "$dynamicRef", "anyOf", "oneOf")
STEP_DIGITS = 3
"""An excluded whole bound becomes an included one that is further in by 10 to the power of minus so many digits more than the
other bound has, and by a millionth at most."""
Schema = dict[str, Any]


def with_exact_bounds(schema: Schema, is_combined: bool) -> Schema:
    """Return a schema object whose bounds llguidance keeps; it may lack numbers within a millionth of an excluded bound.

    ``is_combined``: other parts of the schema may add bounds to these, so that each excluded whole one is replaced.

    Raises:
        GenerationConfigError: a bound, or a whole number that is a value, is not exact as a 64-bit float, or too large.
    """
    bounds = {name: schema[name] for name in BOUNDS if name in schema and _is_number(schema[name])}
    for name, bound in bounds.items():
        if isinstance(bound, int) and (abs(bound) >= MAX_WHOLE or int(float(bound)) != bound):
            raise _inexact(name, bound)
    for number in _whole_numbers([schema.get("const"), schema.get("enum")]):
        if _written(number) != number:
            raise _inexact("the value", number)
    if schema.get("type") == "integer":
        return schema
    for excluded, included, others, sign in (
        ("exclusiveMinimum", "minimum", ("maximum", "exclusiveMaximum"), 1),
        ("exclusiveMaximum", "maximum", ("minimum", "exclusiveMinimum"), -1),
    ):
        end = next((bounds[name] for name in others if name in bounds), None)
        if excluded in bounds and _is_loose(bounds[excluded], end, is_combined):
            bound = float(Decimal(bounds[excluded]) + sign * _step(end))
            further = max if sign > 0 else min
            schema = {name: value for name, value in schema.items() if name != excluded}
            schema[included] = further(bound, bounds.get(included, bound))
    return schema


def _inexact(what: str, number: int) -> GenerationConfigError:
    return GenerationConfigError(
        f"the JSON schema has {what} {str(number)[:40]}: a number must be below 2^63 and exact as a 64-bit float, as all whole "
        "ones up to 2^53 are; use a string instead, another number, or leave it out"
    )


def _whole_numbers(value: object) -> Iterator[int]:
    """Yield the whole numbers in a JSON value."""
    left = [value]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            left += part.values()
        elif isinstance(part, list):
            left += part
        elif isinstance(part, int) and not isinstance(part, bool):
            yield part


def _written(number: int) -> int | None:
    """Return the number that llguidance writes for this one; None if it has none."""
    if abs(number) < MAX_WHOLE:
        return int(float(number))
    try:
        return int(Decimal(repr(float(number))))
    except OverflowError:
        return None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_loose(excluded: float, end: float | None, is_combined: bool) -> bool:
    if excluded != int(excluded):
        return False
    return is_combined if end is None else abs(end - excluded) < 1


def _step(end: float | None) -> Decimal:
    exponent = 0 if end is None else Decimal(repr(end)).normalize().as_tuple().exponent
    digits = -exponent if isinstance(exponent, int) else 0
    return Decimal(1).scaleb(-max(6, digits + STEP_DIGITS))


def adds_bounds(schema: object) -> bool:
    """Return whether a schema may bound one number in several places, which llguidance then takes together."""
    if isinstance(schema, list):
        return any(adds_bounds(part) for part in schema)
    if not isinstance(schema, dict):
        return False
    is_beside = any(name in schema for name in BOUNDS) and any(name in schema for name in _COMBINERS)
    return "allOf" in schema or is_beside or any(adds_bounds(part) for part in schema.values())
