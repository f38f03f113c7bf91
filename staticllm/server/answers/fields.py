"""The fields of requests that several APIs share: numbers of the table of options, and those that are accepted without effect."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Literal, cast, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator
from pydantic_core import PydanticCustomError

from staticllm.pipelines.generation.options.table import OPTIONS, Api, http_fields

MAX_STOPS = 16
Priority = Annotated[int, Field(ge=-1000, le=1000)]
Text = Annotated[str, Field(min_length=1, max_length=1000)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[list[TokenId], Field(fail_fast=True, min_length=1)]
"""Token ids. Lists that may be long end at their first error: an error for each element takes about a KiB."""
Stop = Literal[""] | Text | Annotated[list[Literal[""] | Text], Field(fail_fast=True, max_length=MAX_STOPS)]
"""Texts that end an answer; an empty text is none."""


class Fields(BaseModel):
    """A JSON object without unknown fields; numbers are numbers, not text.

    Fields that are null count as absent. A whole number may be written as 12.0, as JSON Schema says.
    """

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _as_written(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        if None in values.values():
            values = {name: value for name, value in values.items() if value is not None}
        names = [name for name in _integer_fields(cls) if isinstance(values.get(name), (float, list))]
        return {**values, **{name: _whole(values[name]) for name in names}} if names else values


class MessageFields(Fields):
    """An object of a conversation. Unknown fields are ignored: other servers and clients write their own into messages."""

    model_config = ConfigDict(extra="ignore")


@cache
def _integer_fields(kind: type[BaseModel]) -> tuple[str, ...]:
    """Return the names of the fields that take whole numbers, or lists of them."""
    return tuple(field.alias or name for name, field in kind.model_fields.items() if _takes_integers(field.annotation))


def _takes_integers(annotation: Any) -> bool:
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return any(type(each) is int for each in parts)
    return annotation is int or (get_origin(annotation) is not dict and any(map(_takes_integers, parts)))


def _whole(value: Any, depth: int = 2) -> Any:
    """Return 3.0 as 3, also within lists of lists."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if not (depth and isinstance(value, list) and any(isinstance(each, (float, list)) for each in value)):
        return value
    return [_whole(each, depth - 1) for each in value]


class Function(MessageFields):
    """A function that the model may call. ``parameters`` is a JSON schema.

    Unknown fields are ignored, because clients pass on what the servers of their tools say of them. A name that looks like a
    known one misspelled is refused: its value would be lost.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_misspelled(cls, values: Any) -> Any:
        for name in values if isinstance(values, dict) else ():
            close = get_close_matches(str(name), cls.model_fields, 1, 0.8) if name not in cls.model_fields else []
            if close:
                raise PydanticCustomError(
                    "misspelled",
                    "Unknown parameter: {name}; did you mean {close}?",
                    {"name": str(name)[:50], "close": close[0]},
                )
        return values


class IgnoredFields(Fields):
    """Fields of OpenAI's API and of its clients that change nothing here; they are accepted and ignored."""

    user: Any = None
    metadata: Any = None
    store: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    verbosity: Any = None
    cache_prompt: Any = None
    ctx_len: Any = None  # of Jan: how many tokens it keeps of a conversation


def number_fields(base: type[BaseModel], api: Api) -> Any:
    """Return a subclass of ``base`` with a field for each row of the table of options that an HTTP API has."""
    found: dict[str, Any] = {}
    for name, option in http_fields(api).items():
        row = OPTIONS[option]
        found[name] = ((int if row.is_whole else float) | None, Field(None, **cast(Any, row.http_bounds())))
    return create_model(f"{api.title()}Numbers", __base__=base, __module__=__name__, **found)
