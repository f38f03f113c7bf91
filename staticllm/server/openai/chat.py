"""``/v1/chat/completions``: a conversation is answered, as one object or as a stream of chunks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from starlette.responses import Response

from staticllm.events import ArgumentsDelta, CallBegin, CallBroken, ContentDelta, Event, ReasoningDelta, merged
from staticllm.pipelines.text.output_processor import RequestOutput
from staticllm.server.answers.answers import AnswerDelta, AnswerEnd, Part
from staticllm.server.answers.asks import AnswerFields, Ask, schema_of
from staticllm.server.answers.fields import Fields, Function, MessageFields
from staticllm.server.answers.messages import MAX_MESSAGES, ChatMessage, template_messages
from staticllm.server.answers.results import PromptProgress, finish_reason, timings_of
from staticllm.server.answers.work import is_proactive
from staticllm.server.endpoint import ApiCall
from staticllm.server.http.errors import ApiError
from staticllm.server.openai.generation import Chunk, Chunks, SamplingFields, Spellers, answered, head_of


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

    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
    max_tokens: int | None = Field(None, ge=-1, lt=2**31)
    max_completion_tokens: int | None = Field(None, ge=-1, lt=2**31)
    max_output_tokens: int | None = Field(None, ge=-1, lt=2**31)  # as Jan calls it
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = Field(None, max_length=512)
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    modalities: Annotated[list[Literal["text"]], Field(fail_fast=True)] | None = None
    functions: Annotated[list[Any], Field(max_length=0)] | None = None
    function_call: Literal["none", "auto"] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs

    def asked_chat(self) -> AnswerFields:
        """Return what a request asks for.

        Raises:
            ApiError: fields contradict each other, or ask for what is not there.
        """
        limits = {self.max_tokens, self.max_completion_tokens, self.max_output_tokens} - {None}
        if len(limits) > 1:
            raise ApiError(
                400, "max_tokens, max_completion_tokens and max_output_tokens differ: give one", param="max_tokens"
            )
        limit = limits.pop() if limits else None
        if limit == 0:
            raise ApiError(400, "max_tokens is 0: give at least 1, or -1 for as many as fit", param="max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise ApiError(400, "top_logprobs without logprobs: set logprobs to true", param="top_logprobs")
        if self.logprobs and self.is_search:
            raise ApiError(400, "logprobs with num_beams: leave one out", param="logprobs")
        format = self.response_format
        named = format.json_schema if format is not None else None
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return self.asked(
            max_tokens=limit,
            num_top_logprobs=self.top_logprobs or 0,
            json_schema=None if format is None else schema_of(format.type, None if named is None else named.schema_),
            tools=[tool.model_dump(exclude_none=True) for tool in self.tools or ()],
            tool_choice=self.tool_choice,
            parallel_tool_calls=self.parallel_tool_calls,
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
    head = {**head_of("chatcmpl", "chat.completion.chunk", model.spec.name), **shown}
    await call.acquire(model)
    return await answered(call, body, model, asks, "messages", partial(ChatChunks, head, body))


class ChatChunks(Chunks):
    """Makes the chunks of a chat.

    A chunk cannot be taken back, so those of a call are held until its end, unless the call is required: until then it may turn
    out to be none.
    """

    WHOLE = "chat.completion"

    def __init__(self, head: Chunk, body: ChatRequest, spellers: Spellers | None) -> None:
        super().__init__(head, body, spellers)
        self._logprobs: dict[int, list[dict[str, Any]]] = {}  # of tokens that had no text yet, by answer
        self._calls: dict[int, _Calls] = {}  # by answer
        self._are_calls_certain = body.tool_choice not in (None, "none", "auto")

    def begin(self, index: int) -> Iterable[Chunk]:
        return [self._chunk(index, {"role": "assistant", "content": ""})]

    def of(self, part: Part | PromptProgress) -> Iterator[Chunk]:
        if isinstance(part, AnswerDelta):
            yield from self._of_delta(part)
        elif isinstance(part, AnswerEnd):
            for place, output in enumerate(part.outputs):
                yield self._of_end(part.index + place, output)
        else:
            yield {**self._chunk(0, {}), "prompt_progress": part.as_dict()}

    def _of_delta(self, part: AnswerDelta) -> Iterator[Chunk]:
        index = part.index
        self._logprobs.setdefault(index, []).extend(token.entry() for token in self._spelled(part))
        calls = self._calls.setdefault(index, _Calls(self._are_calls_certain))
        for event in merged(part.delta.events):
            for fields in calls.fields_of(event):
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

    def joined(self, index: int, choices: Sequence[Chunk]) -> Chunk:
        deltas = [choice["delta"] for choice in choices]
        entries = [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", ())]
        return {
            "index": index,
            "message": _message(deltas),
            "logprobs": None if self._new_speller is None else {"content": entries, "refusal": None},
            "finish_reason": choices[-1]["finish_reason"],
        }


def _message(deltas: Sequence[Chunk]) -> dict[str, Any]:
    """Return the message that deltas make; ``content`` is null if there are only calls."""
    content = "".join(delta.get("content", "") for delta in deltas)
    reasoning = "".join(delta.get("reasoning_content", "") for delta in deltas)
    calls: dict[int, dict[str, Any]] = {}
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        known = calls.setdefault(
            call["index"], {"id": call.get("id"), "type": "function", "function": {"arguments": ""}}
        )
        arguments = known["function"]["arguments"] + call["function"]["arguments"]
        known["function"] = {"name": call["function"].get("name"), **known["function"], "arguments": arguments}
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message |= {"content": content if content.strip() else None, "tool_calls": [*calls.values()]}
    return message


class _Calls:
    """Makes the ``delta`` fields of the events of one answer. Calls that are not ``are_certain`` are held until their ends."""

    def __init__(self, are_certain: bool) -> None:
        self._are_certain = are_certain
        self._num_calls = 0
        self._held: list[Chunk] | None = None  # of the call that has begun, if it is held

    def fields_of(self, event: Event) -> list[Chunk]:
        """Return the fields of each ``delta`` that an event makes ready."""
        if isinstance(event, ContentDelta):
            return [{"content": event.text}]
        if isinstance(event, ReasoningDelta):
            return [{"reasoning_content": event.text}]
        if isinstance(event, CallBegin):
            function = {"name": event.name, "arguments": ""}
            self._held = None if self._are_certain else []
            return self._ready({"index": self._num_calls, "id": event.id, "type": "function", "function": function})
        if isinstance(event, ArgumentsDelta):
            return self._ready({"index": self._num_calls, "function": {"arguments": event.text}})
        return self._ended(isinstance(event, CallBroken))

    def _ended(self, is_broken: bool) -> list[Chunk]:
        """Return the call that has ended, in one piece, if it was held and is one."""
        held = self._held
        self._held = None
        if is_broken and not self._are_certain:
            return []
        self._num_calls += 1
        if not held:
            return []
        arguments = "".join(part["function"]["arguments"] for part in held)
        return [{"tool_calls": [{**held[0], "function": {**held[0]["function"], "arguments": arguments}}]}]

    def _ready(self, call: Chunk) -> list[Chunk]:
        if self._held is None:
            return [{"tool_calls": [call]}]
        self._held.append(call)
        return []
