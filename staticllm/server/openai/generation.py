"""What chats and completions of OpenAI's API share: their fields, and the stream of their chunks."""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, ClassVar

from pydantic import Field
from starlette.responses import Response

from staticllm.core import MAX_ANSWERS
from staticllm.pipelines.generation.options.table import MAX_BEAMS
from staticllm.server.answers.answers import AnswerDelta, AnswerEnd, Answers, Close, Part, Usage, respond
from staticllm.server.answers.asks import AnswerFields, Ask, numbers_of
from staticllm.server.answers.fields import Fields, IgnoredFields, Priority, Stop, Text, number_fields
from staticllm.server.answers.results import (
    PromptProgress,
    SpelledToken,
    Speller,
    speller_of,
    timings_of,
    with_progress,
)
from staticllm.server.answers.stream import ChunkStream
from staticllm.server.answers.work import TierFields
from staticllm.server.endpoint import ApiCall
from staticllm.server.http.errors import ApiError
from staticllm.server.models.served import ServedModel

Chunk = dict[str, Any]


class StreamOptions(Fields):
    """What a stream has beside its chunks."""

    include_usage: bool = False
    include_obfuscation: bool = False


class SamplingFields(number_fields(IgnoredFields, "openai"), TierFields):  # type: ignore[misc]
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
    def wants_logprobs(self) -> bool:
        raise NotImplementedError

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
            wants_logprobs=self.wants_logprobs,
            **rest,
        )


Spellers = Callable[[], Speller]


class Chunks:
    """Makes the chunks of a request's answers, and the whole of them; both begin with ``head``.

    Subclasses say what a part of an answer becomes, and what the chunks of one make together.
    """

    WHOLE: ClassVar[str]
    """OpenAI's name of the whole object."""

    def __init__(self, head: Chunk, body: SamplingFields, spellers: Spellers | None) -> None:
        """``spellers`` is None without log-probabilities."""
        self._head = head
        self._per_prompt = body.num_handles
        self._has_usage = body.has_usage_chunk
        self._new_speller = spellers
        self._spellers: dict[int, Speller] = {}

    def begin(self, index: int) -> Iterable[Chunk]:
        return ()

    def of(self, part: Part | PromptProgress) -> Iterator[Chunk]:
        """Yield the chunks of a part: of an increment, of the end of an answer, or of a prompt that runs."""
        raise NotImplementedError

    def joined(self, index: int, choices: Sequence[Chunk]) -> Chunk:
        """Return the choice that those of the chunks of answer ``index`` make together."""
        raise NotImplementedError

    def usage(self, ends: Sequence[AnswerEnd]) -> Chunk:
        """Return the chunk about the tokens of all answers, with the times of the first one."""
        return {**self._head, "choices": [], **self._counts(ends)}

    def whole(self, parts: Sequence[Part]) -> Chunk:
        """Return the whole of all answers: that of the chunks that a stream would have."""
        choices: dict[int, list[Chunk]] = {}
        for part in parts:
            for chunk in self.of(part):
                for choice in chunk["choices"]:
                    choices.setdefault(choice["index"], []).append(choice)
        joined = [self.joined(index, found) for index, found in sorted(choices.items())]
        ends = [part for part in parts if isinstance(part, AnswerEnd)]
        return {**self._head, "object": self.WHOLE, "choices": joined, **self._counts(ends)}

    def _counts(self, ends: Sequence[AnswerEnd]) -> Chunk:
        first = min(ends, key=lambda end: end.index)
        usage = Usage.of_ends(ends, self._per_prompt)
        return {"usage": usage.as_dict(), "timings": timings_of(first.outputs[0])}

    def _spelled(self, part: AnswerDelta) -> list[SpelledToken]:
        """Return the tokens of an increment with their log-probabilities; none if nobody asked for them."""
        if self._new_speller is None:
            return []
        if part.index not in self._spellers:
            self._spellers[part.index] = self._new_speller()
        return self._spellers[part.index].spell(part.delta)


def head_of(prefix: str, kind: str, model: str) -> Chunk:
    """Return what an answer and each of its chunks begins with: an id of this ``prefix``, OpenAI's name of the object …"""
    return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": model}


def stream_of(
    call: ApiCall, body: SamplingFields, model: ServedModel, answers: Answers, close: Close, chunks: Chunks
) -> Response:
    """Return the stream of a request's answers, which ends with a chunk about tokens if the request has asked for it."""

    async def generate() -> AsyncGenerator[list[Chunk], None]:
        begin = [chunk for index in range(answers.num_answers) for chunk in chunks.begin(index)]
        if begin:
            yield begin
        ends: list[AnswerEnd] = []
        found = with_progress(model.local_engine, answers) if body.return_progress else answers.batches()
        async with contextlib.aclosing(found) as batches:
            async for parts in batches:
                ready = [chunk for part in parts for chunk in chunks.of(part)]
                ends += [part for part in parts if isinstance(part, AnswerEnd)]
                if ready:
                    yield ready
        if body.has_usage_chunk:
            yield [chunks.usage(ends)]

    return ChunkStream(call, generate(), close)


async def answered(
    call: ApiCall,
    body: SamplingFields,
    model: ServedModel,
    asks: Sequence[Ask],
    field: str,
    chunks_with: Callable[[Spellers | None], Chunks],
) -> Response:
    """Run answers on a model that the caller has acquired, as ``respond``: a stream and a whole answer have the same chunks.

    ``chunks_with`` makes the chunks with what spells tokens, which is None without log-probabilities.
    """
    chunks: Chunks

    def stream(answers: Answers, close: Close) -> Response:
        return stream_of(call, body, model, answers, close, chunks)

    try:
        spellers = await call.state.workers.run(partial(speller_of, model)) if body.wants_logprobs else None
        chunks = chunks_with(spellers)
    except BaseException:
        call.state.hub.release(model)
        raise
    return await respond(call, model, asks, field, chunks.whole, stream if body.stream else None)
