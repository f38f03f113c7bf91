"""``/v1/chat/completions``: a conversation is answered, as one object or as a stream of chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from starlette.responses import Response

from staticllm.pipelines.conversation.events import (
    ArgumentsDelta,
    CallBegin,
    ContentDelta,
    Event,
    ReasoningDelta,
    merged,
)
from staticllm.pipelines.text.output_processor import RequestOutput, TextDelta
from staticllm.server.answers.answers import AnswerDelta, AnswerEnd, Answers, Close, Handles, Part, Usage, respond
from staticllm.server.answers.asks import AnswerFields, Ask, schema_of
from staticllm.server.answers.fields import Fields, Function, MessageFields
from staticllm.server.answers.messages import MAX_MESSAGES, Message, template_messages
from staticllm.server.answers.results import PromptProgress, finish_reason, timings_of, token_logprobs
from staticllm.server.answers.work import is_proactive
from staticllm.server.endpoint import ApiCall
from staticllm.server.http.errors import ApiError
from staticllm.server.models.served import ServedModel
from staticllm.server.openai.generation import Chunk, Chunks, Decode, SamplingFields, head_of, stream_of


class JsonSchema(Fields):
    """A named JSON schema. The answer always satisfies it; ``strict`` changes nothing."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    """What the answer must be: any text, any JSON object, or JSON that satisfies a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Tool(MessageFields):
    """A tool: functions are the only ones, and all that the model sees is in ``function``."""

    type: Literal["function"]
    function: Function


class ChatRequest(SamplingFields):
    """The body of a request for an answer in a conversation."""

    model_config = ConfigDict(title="ChatCompletionRequest")

    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: int | None = Field(None, ge=-1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=-1, lt=2**31)
    max_output_tokens: int | None = Field(None, ge=-1, lt=2**31)  # as Jan calls it
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = Field(None, max_length=512)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: Literal["none", "auto"] | None = None

    def asked_chat(self) -> AnswerFields:
        """Return what a request asks for. Raises ``ApiError`` (fields contradict each other, or ask for what is not there)."""
        limits = {self.max_tokens, self.max_completion_tokens, self.max_output_tokens} - {None}
        if len(limits) > 1:
            raise ApiError(
                400, "max_tokens, max_completion_tokens and max_output_tokens differ: give one", param="max_tokens"
            )
        limit = limits.pop() if limits else None
        if limit == 0:
            raise ApiError(400, "max_tokens is 0: give at least 1, or -1 for as many as fit", param="max_tokens")
        if self.top_logprobs:
            raise ApiError(
                400, f"top_logprobs is {self.top_logprobs}: only the chosen tokens have log-probabilities, so leave it at 0",
                param="top_logprobs", code="unsupported_parameter",
            )  # fmt: skip
        if self.logprobs and self.is_search:
            raise ApiError(400, "logprobs with num_beams: leave one out", param="logprobs")
        format = self.response_format
        named = format.json_schema if format is not None else None
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return self.asked(
            max_tokens=limit,
            json_schema=None if format is None else schema_of(format.type, None if named is None else named.schema_),
            wants_logprobs=self.logprobs,
            tools=[tool.model_dump(exclude_none=True) for tool in self.tools or ()],
            tool_choice=self.tool_choice,
            context={**(self.chat_template_kwargs or {}), **effort},
        )


async def chat_completions(call: ApiCall, body: ChatRequest) -> Response:
    """Answer a conversation."""
    model = call.state.hub.find(body.model, "chat")
    messages = template_messages(body.messages)
    asked = body.asked_chat()
    is_behind = is_proactive(call, model, body.service_tier, body.priority)
    shown = body.tier_shown(is_behind)
    asks = [Ask.of(messages, asked, index, body.priority, is_behind) for index in range(body.num_handles)]

    def stream(answers: Answers, close: Close) -> Response:
        decode = model.chat.get_tokenizer().decode if body.logprobs else None
        chunks = ChatChunks(model.spec.name, body.has_usage_chunk, decode, shown)
        return stream_of(call, body, model, answers, close, chunks)

    await call.acquire(model)
    return await respond(
        call, model, asks, "messages", partial(_completion, body, model, shown), stream if body.stream else None
    )


def _completion(body: ChatRequest, model: ServedModel, shown: dict[str, str], handles: Handles) -> dict[str, Any]:
    decode = model.chat.get_tokenizer().decode
    choices = []
    for index, output in enumerate(output for outputs in handles for output in outputs):
        logprobs = None
        if body.logprobs:
            logprobs = {"content": token_logprobs(output.tokens, output.logprobs, decode), "refusal": None}
        choices.append(
            {
                "index": index,
                "message": _message(output),
                "logprobs": logprobs,
                "finish_reason": finish_reason(output.finish_reason),
            }
        )
    return {
        **head_of("chatcmpl", "chat.completion", model.spec.name),
        **shown,
        "choices": choices,
        "usage": Usage.of(handles, body.num_handles).as_dict(),
        "timings": timings_of(handles[0][0]),
    }


def _message(output: RequestOutput) -> dict[str, Any]:
    """Return the message of an answer; ``content`` is null if there are only calls."""
    if output.message is None:
        return {"role": "assistant", "content": output.text, "refusal": None}
    return {**output.message.to_dict(), "refusal": None}


class ChatChunks(Chunks):
    """Makes the chunks of a streamed chat."""

    def __init__(self, model: str, has_usage: bool, decode: Decode | None, shown: dict[str, str]) -> None:
        """``shown``: the tier, if the request named one."""
        super().__init__({**head_of("chatcmpl", "chat.completion.chunk", model), **shown}, has_usage, decode)
        self._logprobs: dict[int, list[dict[str, Any]]] = {}  # of tokens that had no text yet, by answer

    def begin(self, index: int) -> Iterable[Chunk]:
        return [self._chunk(index, {"role": "assistant", "content": ""})]

    def of(self, part: Part | PromptProgress) -> Iterator[Chunk]:
        if isinstance(part, AnswerDelta):
            yield from self._of_delta(part.index, part.delta)
        elif isinstance(part, AnswerEnd):
            yield self._of_end(part.index, part.outputs[0])
        else:
            yield {**self._chunk(0, {}), "prompt_progress": part.as_dict()}

    def _of_delta(self, index: int, delta: TextDelta) -> Iterator[Chunk]:
        if self._decode is not None:
            self._logprobs.setdefault(index, []).extend(token_logprobs(delta.tokens, delta.logprobs, self._decode))
        for event in merged(delta.events):
            fields = _fields_of(event)
            if fields:
                yield self._chunk(index, fields, logprobs=self._logprobs.pop(index, []))

    def _of_end(self, index: int, output: RequestOutput) -> Chunk:
        """Return the last chunk of an answer. Its tokens without text, such as that of the end, are in it."""
        rest = self._logprobs.pop(index, [])
        chunk = self._chunk(index, {}, finish_reason(output.finish_reason), rest)
        return chunk if self._has_usage else {**chunk, "timings": timings_of(output)}

    def _chunk(
        self, index: int, delta: Chunk, reason: str | None = None, logprobs: list[dict[str, Any]] | None = None
    ) -> Chunk:
        shown = {"content": logprobs, "refusal": None} if logprobs else None
        choice = {"index": index, "delta": delta, "logprobs": shown, "finish_reason": reason}
        chunk: Chunk = {**self._head, "choices": [choice]}
        if self._has_usage:
            chunk["usage"] = None
        return chunk


def _fields_of(event: Event) -> Chunk:
    """Return the ``delta`` of an event; empty if there is nothing to say."""
    if isinstance(event, ContentDelta):
        return {"content": event.text}
    if isinstance(event, ReasoningDelta):
        return {"reasoning_content": event.text}
    if isinstance(event, CallBegin):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
    if isinstance(event, ArgumentsDelta):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return {}
