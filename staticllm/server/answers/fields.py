"""The fields of requests that several endpoints share: sampling, and those that are accepted without effect."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from staticllm.core import MAX_ANSWERS

MAX_STOPS = 16
Text = Annotated[str, Field(min_length=1, max_length=1000)]
Ids = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True, min_length=1)]
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
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None
    parallel_tool_calls: Any = None
    verbosity: Any = None
    cache_prompt: Any = None
    ctx_len: Any = None  # of Jan: how many tokens it keeps of a conversation


class StreamOptions(Fields):
    """What a stream has beside its chunks."""

    include_usage: bool = False
    include_obfuscation: bool = False


class SamplingFields(IgnoredFields):
    """How tokens are chosen, and when an answer ends. The fields from ``top_k`` on are not OpenAI's."""

    model: Text | None = None
    temperature: float | None = Field(None, ge=0, le=100)
    top_p: float | None = Field(None, ge=0, le=1)
    n: int = Field(1, ge=1, le=MAX_ANSWERS)
    stop: Stop | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, float] | None = Field(None, max_length=1024)
    stream: bool = False
    stream_options: StreamOptions | None = None
    top_k: int | None = Field(None, ge=-1, lt=2**31)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, ge=0.001, le=1000)
    repeat_penalty: float | None = Field(None, ge=0.001, le=1000)
    typical_p: float | None = Field(None, gt=0, le=1)
    xtc_probability: float | None = Field(None, ge=0, le=1)
    xtc_threshold: float | None = Field(None, ge=0, le=1)
    dry_multiplier: float | None = Field(None, ge=0, le=1000)
    dry_base: float | None = Field(None, ge=1, le=1000)
    dry_allowed_length: int | None = Field(None, ge=1, le=1 << 20)
    dry_penalty_last_n: int | None = Field(None, ge=-1, le=1 << 31)
    dry_sequence_breakers: list[Text] | None = Field(None, max_length=64)
    mirostat: int | None = Field(None, ge=0, le=2)
    mirostat_tau: float | None = Field(None, gt=0, le=100)
    mirostat_eta: float | None = Field(None, ge=0, le=10)
    num_beams: int | None = Field(None, ge=1, le=64)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    ignore_eos: bool | None = None
    return_progress: bool = False
    priority: int = Field(0, ge=-1000, le=1000)

    @property
    def has_usage_chunk(self) -> bool:
        """Whether a stream ends with a chunk about tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def num_answers(self) -> int:
        """The number of handles: a beam search finds all answers by itself."""
        return 1 if self.is_search else self.n

    @property
    def is_search(self) -> bool:
        """Whether the answer is found by beam search."""
        return self.num_beams is not None and self.num_beams > 1
