"""The values of Ollama's API: bodies of requests, names of models, and spans of time."""

from __future__ import annotations

import math
import re
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from staticllm.server.answers.fields import Fields, Function, MessageFields, Stop, Text, TokenId, number_fields
from staticllm.server.answers.messages import MAX_MESSAGES
from staticllm.server.http.errors import ApiError
from staticllm.server.models.hub import ModelHub

Number = Annotated[int, Field(ge=-(2**63), lt=2**63)]
KeepAlive = float | Annotated[str, Field(max_length=100)]
Think = bool | Literal["low", "medium", "high", "max"]
Format = Literal["", "json"] | dict[str, Any]
Images = Annotated[list[Any], Field(max_length=64)]
TAG = ":latest"
NANO = 1_000_000_000
FAR_FUTURE = "2318-01-01T00:00:00Z"
"""Ollama's moment of expiry of a model that is never unloaded."""
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_SPAN = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|ms|s|m|h)")


class OllamaOptions(number_fields(Fields, "ollama")):  # type: ignore[misc]
    """How tokens are chosen. The fields from ``num_ctx`` on are accepted without effect: they are settings of the server."""

    stop: Stop | None = None
    num_predict: Annotated[int, Field(ge=-2, lt=2**31)] | None = None
    num_ctx: Number | None = None
    num_keep: Number | None = None
    num_batch: Number | None = None
    num_gpu: Number | None = None
    num_gqa: Number | None = None
    num_thread: Number | None = None
    main_gpu: Number | None = None
    repeat_last_n: Number | None = None
    tfs_z: float | None = None
    penalize_newline: bool | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    logits_all: bool | None = None
    vocab_only: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None
    embedding_only: bool | None = None


class _Request(Fields):
    model: Text
    options: OllamaOptions = Field(default_factory=OllamaOptions)
    keep_alive: KeepAlive | None = None
    truncate: bool = True


class OllamaGeneration(_Request):
    """What chats and texts have in common. A request streams unless it says otherwise."""

    stream: bool = True
    format: Format | None = None
    think: Think | None = None
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=20)
    shift: bool = True


class OllamaFunctionCall(MessageFields):
    """A function with its arguments, as an object."""

    name: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class OllamaToolCall(MessageFields):
    """A call that the model made before."""

    function: OllamaFunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class OllamaMessage(MessageFields):
    """A message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: Annotated[list[OllamaToolCall], Field(fail_fast=True)] | None = None
    tool_name: str | None = None
    name: str | None = None
    tool_call_id: str | None = None


class OllamaTool(MessageFields):
    """A tool: functions are the only ones."""

    type: Literal["function"] = "function"
    function: Function


class OllamaChatRequest(OllamaGeneration):
    """The body of ``/api/chat``. Without messages, the model is loaded, or with ``keep_alive`` 0 unloaded."""

    model_config = ConfigDict(title="OllamaChatRequest")

    messages: Annotated[list[OllamaMessage], Field(fail_fast=True)] = Field(
        default_factory=list, max_length=MAX_MESSAGES
    )
    tools: Annotated[list[OllamaTool], Field(fail_fast=True)] = Field(default_factory=list, max_length=512)


class OllamaGenerateRequest(OllamaGeneration):
    """The body of ``/api/generate``: a prompt with the chat template, or without it (``raw``)."""

    model_config = ConfigDict(title="OllamaGenerateRequest")

    prompt: str = ""
    system: str = ""
    raw: bool = False
    suffix: str = ""
    template: str = ""
    images: Images | None = None
    context: Annotated[list[TokenId], Field(fail_fast=True, max_length=1 << 20)] | None = None


class OllamaEmbedRequest(_Request):
    """The body of ``/api/embed``: one text or several."""

    model_config = ConfigDict(title="OllamaEmbedRequest")

    input: str | Annotated[list[str], Field(fail_fast=True, max_length=2048)]
    dimensions: int | None = Field(None, ge=1, lt=2**31)


class OllamaEmbeddingsRequest(_Request):
    """The body of ``/api/embeddings``, the older form: one text."""

    model_config = ConfigDict(title="OllamaEmbeddingsRequest")

    prompt: str = ""


class OllamaShowRequest(Fields):
    """The body of ``/api/show``; ``name`` is the older word for ``model``. The other fields are accepted without effect."""

    model_config = ConfigDict(title="OllamaShowRequest")

    model: Text | None = None
    name: Text | None = None
    verbose: bool = False
    system: str = ""
    template: str = ""
    options: dict[str, Any] | None = None


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
    sign = text[:1] in ("-", "+")
    rest = text.lstrip("+-")
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
        return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
    except (OverflowError, ValueError, OSError):
        return FAR_FUTURE


def nanoseconds(seconds: float) -> int:
    """Return whole nanoseconds."""
    return max(0, round(seconds * NANO))
