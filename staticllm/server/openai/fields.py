"""The fields that chats and completions of OpenAI's API share."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from staticllm.core import MAX_ANSWERS
from staticllm.pipelines.generation.options.table import MAX_BEAMS
from staticllm.server.answers.asks import AnswerFields, numbers_of
from staticllm.server.answers.fields import Fields, IgnoredFields, Priority, Stop, Text, number_fields
from staticllm.server.http.errors import ApiError


class StreamOptions(Fields):
    """What a stream has beside its chunks."""

    include_usage: bool = False
    include_obfuscation: bool = False


class SamplingFields(number_fields(IgnoredFields, "openai")):  # type: ignore[misc]
    """How tokens are chosen, and when an answer ends. Many of these fields are those of llamacpp's server, not OpenAI's."""

    model: Text | None = None
    n: int = Field(1, ge=1, le=MAX_ANSWERS)
    stop: Stop | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=1024)
    stream: bool = False
    stream_options: StreamOptions | None = None
    dry_sequence_breakers: list[Text] | None = Field(None, max_length=64)
    num_beams: int | None = Field(None, ge=1, le=MAX_BEAMS)
    min_tokens: int | None = Field(None, ge=0, lt=2**31)
    ignore_eos: bool | None = None
    return_progress: bool = False
    priority: Priority = 0

    @property
    def has_usage_chunk(self) -> bool:
        """Whether a stream ends with a chunk about tokens."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def num_handles(self) -> int:
        """The number of handles: a beam search finds all answers by itself."""
        return 1 if self.is_search else self.n

    @property
    def is_search(self) -> bool:
        """Whether the answer is found by beam search."""
        return self.num_beams is not None and self.num_beams > 1

    def asked(self, **rest: Any) -> AnswerFields:
        """Return what these fields ask for; ``rest`` are the fields of ``AnswerFields`` that the endpoint adds.

        Raises:
            ApiError: fields contradict each other.
        """
        numbers = numbers_of(self, "openai")
        if self.is_search and self.stream:
            raise ApiError(
                400, "num_beams with stream: the best beam is known at the end; leave one out", param="num_beams"
            )
        if self.has_usage_chunk and not self.stream:
            raise ApiError(400, "stream_options.include_usage without stream: leave it out", param="stream_options")
        more = {
            "dry_sequence_breakers": self.dry_sequence_breakers,
            "ignore_eos": self.ignore_eos,
            "min_new_tokens": self.min_tokens,
            **rest.pop("more", {}),
        }
        return AnswerFields(
            numbers=numbers,
            stop=self.stop,
            logit_bias=self.logit_bias or {},
            more={name: value for name, value in more.items() if value is not None},
            num_answers=self.n,
            num_beams=self.num_beams or 1,
            **rest,
        )
