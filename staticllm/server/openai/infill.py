"""``/infill``: the text between two others, as editors ask llamacpp's server for it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Annotated, Any

from pydantic import ConfigDict, Field
from starlette.responses import Response

from staticllm.server.answers.answers import AnswerDelta, AnswerEnd, Answers, Close, Part, respond
from staticllm.server.answers.asks import AnswerFields, Ask, numbers_of
from staticllm.server.answers.fields import Fields, IgnoredFields, Stop, Text, number_fields
from staticllm.server.answers.results import finish_reason, timings_of
from staticllm.server.answers.stream import ChunkStream
from staticllm.server.answers.work import is_proactive
from staticllm.server.endpoint import ApiCall
from staticllm.server.http.errors import ApiError

Chunk = dict[str, Any]
MAX_FILES = 256


class InfillFile(Fields):
    """Another file, which the model reads before the text."""

    filename: str = ""
    text: str


class InfillRequest(number_fields(IgnoredFields, "openai")):  # type: ignore[misc]
    """The body of a request for the text between two others. ``prompt`` stands right before the answer."""

    model_config = ConfigDict(title="InfillRequest", extra="ignore")

    model: Text | None = None
    input_prefix: str = ""
    input_suffix: str = ""
    input_extra: Annotated[list[InfillFile], Field(fail_fast=True)] | None = Field(None, max_length=MAX_FILES)
    prompt: str = ""
    n_predict: int | None = Field(None, ge=-1, lt=2**31)
    stop: Stop | None = None
    stream: bool = False

    @property
    def before(self) -> str:
        """The text before the answer: the other files, each below its name, and the prefix."""
        files = "".join(f"{file.filename}\n{file.text}\n" for file in self.input_extra or ())
        return f"{files}{self.input_prefix}{self.prompt}"


async def infill(call: ApiCall, body: InfillRequest) -> Response:
    """Write what stands between two texts."""
    model = call.state.hub.find(body.model, "chat")
    if not body.before and not body.input_suffix:
        raise ApiError(400, "input_prefix and input_suffix are empty: give at least one of them", param="input_prefix")
    asked = AnswerFields(
        numbers=numbers_of(body, "openai"),
        stop=body.stop,
        max_tokens=body.n_predict,
        is_chat=False,
        more={"suffix": body.input_suffix},
    )
    asks = [Ask.of(body.before, asked, is_proactive=is_proactive(call, model))]
    await call.acquire(model)

    def whole(parts: Sequence[Part]) -> Chunk:
        text = "".join(part.delta.text for part in parts if isinstance(part, AnswerDelta))
        last = parts[-1]
        assert isinstance(last, AnswerEnd), "answers end"
        return {**_end(last, model.spec.name), "content": text}

    def stream(answers: Answers, close: Close) -> Response:
        return ChunkStream(call, _chunks(answers, model.spec.name), close)

    return await respond(call, model, asks, "input_prefix", whole, stream if body.stream else None)


async def _chunks(answers: Answers, name: str) -> AsyncGenerator[list[Chunk], None]:
    async with contextlib.aclosing(answers.batches()) as batches:
        async for parts in batches:
            yield [
                _end(part, name) if isinstance(part, AnswerEnd) else {"content": part.delta.text, "stop": False}
                for part in parts
            ]


def _end(end: AnswerEnd, name: str) -> Chunk:
    output = end.outputs[0]
    is_cut = finish_reason(output.finish_reason) == "length"
    return {
        "content": "",
        "stop": True,
        "model": name,
        "stop_type": "limit" if is_cut else "word" if output.stop_string else "eos",
        "stopping_word": output.stop_string or "",
        "tokens_predicted": output.metrics.get_num_generated_tokens(),
        "tokens_evaluated": output.metrics.get_num_input_tokens(),
        "tokens_cached": output.num_cached,
        "timings": timings_of(output),
    }
