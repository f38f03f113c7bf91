"""What a schema says about the parameters of a function: its arguments are an object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from staticllm.errors import GenerationConfigError, shown


def object_schema(schema: Mapping[str, Any], owner: str) -> dict[str, Any]:
    """Return the schema of the objects among the values of ``schema``; ``owner`` names it in errors.

    Raises:
        GenerationConfigError: its type excludes objects.
    """
    types = schema.get("type", "object")
    if types != "object" and not (isinstance(types, list) and "object" in types):
        raise GenerationConfigError(f"the parameters of {owner} have type={shown(types)}: must be 'object'")
    return {**schema, "type": "object"}
