"""``POST /v1/responses``: an answer as one object or as events; the server remembers it for the next request."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.responses import Response

from staticllm.errors import encoding
from staticllm.pipelines.text.output_processor import RequestOutput
from staticllm.server.answers.answers import AnswerDelta, AnswerEnd, Answers, Close, Part, Usage, respond
from staticllm.server.answers.asks import AnswerFields, Ask, numbers_of, schema_of
from staticllm.server.answers.results import finish_reason, speller_of
from staticllm.server.answers.stream import ChunkStream, EventFrame
from staticllm.server.answers.work import is_proactive
from staticllm.server.catalog import context_length
from staticllm.server.endpoint import ApiCall
from staticllm.server.http.errors import ApiError, to_json
from staticllm.server.models.served import ServedModel
from staticllm.server.responses.events import EventMaker
from staticllm.server.responses.fields import ResponsesRequest
from staticllm.server.responses.items import Item, Message, input_items, messages_of, new_id, resolved
from staticllm.server.responses.store import ResponseStore, StoredResponse

_TOOL = {"name", "description", "parameters"}


async def create(store: ResponseStore, call: ApiCall, body: ResponsesRequest) -> Response:
    """Answer, in the conversation of ``previous_response_id`` or in a new one."""
    model = call.state.hub.find(body.model, "chat")
    before: tuple[Message, ...] = ()
    if body.previous_response_id is not None:
        find = partial(store.previous, body.previous_response_id, call.client)
        before = (await call.state.workers.run(find)).messages
    items = await call.state.workers.run(partial(resolved, body.input, store, call.client))
    is_given = "input" in body.model_fields_set
    body = body.model_copy(update={"input": items})
    conversation = [*before, *messages_of(body.input)]
    system = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if not conversation and not system:
        raise _no_input(is_given)
    is_behind = is_proactive(call, model, body.service_tier, body.priority)
    shown = body.tier_shown(is_behind)
    maker = ResponseMaker(body, model, store, call.client, tuple(conversation), shown)
    await call.state.workers.run(maker.check)
    asked = asked_of(body, context_length(model, call.state.settings))
    asks = [Ask.of([*system, *conversation], asked, 0, body.priority, is_behind)]
    await call.acquire(model)
    try:
        speller = (await call.state.workers.run(partial(speller_of, model)))() if body.wants_logprobs else None
    except BaseException:
        call.state.hub.release(model)
        raise
    events = EventMaker(speller)

    def stream(answers: Answers, close: Close) -> Response:
        return ResponseStream(call, maker, events, answers, close)

    whole = partial(maker.whole, events)
    return await respond(call, model, asks, "input", whole, stream if body.stream else None)


def _no_input(is_given: bool) -> ApiError:
    if not is_given:
        return ApiError(400, "Missing required parameter: 'input'", param="input", code="missing_required_parameter")
    return ApiError(
        400, "Invalid input: it is empty; give a text or at least one item", param="input", code="invalid_value"
    )


def asked_of(body: ResponsesRequest, max_seq_len: int | None) -> AnswerFields:
    """Return what a request asks for.

    With ``truncation`` a prompt or conversation that is too long loses its middle; without a limit of its own the answer then has
    at most ``max_seq_len`` tokens.

    Raises:
        ApiError: fields contradict each other, or ask for what is not there.
    """
    if body.top_logprobs and not body.wants_logprobs:
        text = "top_logprobs without log-probabilities: add message.output_text.logprobs to include"
        raise ApiError(400, text, param="top_logprobs")
    is_truncated = body.truncation != "disabled"
    effort = body.reasoning.effort
    limit = body.max_output_tokens
    return AnswerFields(
        numbers=numbers_of(body, "responses"),
        stop=body.stop,
        max_tokens=max_seq_len if limit is None and is_truncated else limit,
        json_schema=schema_of(body.text.format.type, body.text.format.schema_),
        wants_logprobs=body.wants_logprobs,
        num_top_logprobs=body.top_logprobs if body.wants_logprobs else 0,
        tools=[
            {"type": "function", "function": tool.model_dump(include=_TOOL, exclude_none=True)} for tool in body.tools
        ],
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        context={**(body.chat_template_kwargs or {}), **({} if effort is None else {"reasoning_effort": effort})},
        is_truncated=is_truncated,
    )


def _tool_choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") != "function" or not isinstance(choice.get("name"), str):
        raise ApiError(
            400, "tool_choice must be none, auto, required, or {type: function, name: NAME}", param="tool_choice",
            code="invalid_value",
        )  # fmt: skip
    return {"type": "function", "function": {"name": choice["name"]}}


@dataclass(frozen=True)
class _Result:
    """How an answer ended: OpenAI's status, and the reason if it is incomplete."""

    status: str
    reason: str | None

    @classmethod
    def of(cls, output: RequestOutput) -> _Result:
        is_cut = finish_reason(output.finish_reason) == "length"
        return cls("incomplete", "max_output_tokens") if is_cut else cls("completed", None)


class ResponseMaker:
    """Makes the objects of one answer, and stores it at its end. Any thread may call."""

    def __init__(
        self,
        body: ResponsesRequest,
        model: ServedModel,
        store: ResponseStore,
        owner: str,
        conversation: tuple[Message, ...],
        shown: dict[str, str],
    ) -> None:
        """``shown``: the tier, if the request named one."""
        self._body = body
        self._model = model
        self._store = store
        self._owner = owner
        self._conversation = conversation
        self._shown = shown
        self._id = new_id("resp")
        self._created = int(time.time())

    def check(self) -> None:
        """Check that what the answer and the store repeat of the request can be written as JSON.

        Raises:
            ApiError: a number is outside the range of JSON's readers, such as 1e999, which was read as infinite.
        """
        try:
            to_json([self.unfinished(), self._conversation, input_items(self._body.input)])
        except ValueError:
            raise ApiError(400, "a number of the request is not finite: leave it out", code="invalid_value") from None

    def whole(self, events: EventMaker, parts: Sequence[Part]) -> dict[str, Any]:
        """Return the whole of an answer: that of the events that a stream would have."""
        for part in parts:
            for _ in _events_of(events, part):
                pass
        last = parts[-1]
        assert isinstance(last, AnswerEnd), "answers end"
        return self.finished(last.outputs[0], events.items)

    def unfinished(self, error: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the answer before its end, or the one that failed."""
        return self._object("in_progress" if error is None else "failed", [], None, error)

    def finished(self, output: RequestOutput, items: list[Item]) -> dict[str, Any]:
        """Return the answer at its end, and store it."""
        result = _Result.of(output)
        found = self._object(result.status, items, result.reason, None)
        found["usage"] = self._usage(output)
        if result.status == "completed":
            found["completed_at"] = int(time.time())
        if self._body.store:
            assert output.message is not None, "answers are parsed"
            messages = (*self._conversation, output.message.to_dict())
            self._store.put(StoredResponse(found, messages, tuple(input_items(self._body.input)), self._owner))
        return found

    def _usage(self, output: RequestOutput) -> dict[str, Any]:
        usage = Usage.of([[output]], 1)
        message = output.message
        reasoning = message.reasoning_content if message is not None else ""
        num_reasoning = 0
        if reasoning:
            with encoding(f"{len(reasoning)} characters"):
                encoded = self._model.chat.get_tokenizer().encode(reasoning, add_special_tokens=False)
            num_reasoning = int(encoded.input_ids.get_size())
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": min(num_reasoning, usage.completion_tokens)},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _object(
        self, status: str, items: list[Item], reason: str | None, error: dict[str, Any] | None
    ) -> dict[str, Any]:
        body = self._body
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "background": False,
            **self._shown,
            "error": error,
            "incomplete_details": None if reason is None else {"reason": reason},
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "model": self._model.spec.name,
            "output": items,
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "reasoning": {"effort": body.reasoning.effort, "summary": None},
            "store": body.store,
            "temperature": body.temperature,
            "text": {"format": body.text.format.model_dump(exclude_none=True, exclude_defaults=True, by_alias=True)
                     | {"type": body.text.format.type}},
            "tool_choice": body.tool_choice,
            "tools": [{"strict": None, **tool.model_dump()} for tool in body.tools],
            "top_p": body.top_p,
            "truncation": body.truncation,
            "usage": None,
            "user": body.user if isinstance(body.user, str) else None,
            "metadata": body.metadata if isinstance(body.metadata, dict) else {},
        }  # fmt: skip


class ResponseStream(ChunkStream):
    """A stream of numbered events, which ends with that of the finished answer."""

    END_MARK = ""

    def __init__(
        self,
        call: ApiCall,
        maker: ResponseMaker,
        events: EventMaker,
        answers: Answers,
        close: Callable[[], Awaitable[None]],
    ) -> None:
        self._maker = maker
        self._number = 0
        super().__init__(call, _events(call, maker, events, answers), close)

    def _encoded(self, chunk: dict[str, Any]) -> bytes:
        numbered = {"type": chunk["type"], "sequence_number": self._number, **chunk}
        self._number += 1
        return EventFrame.of(chunk["type"]).around(to_json(numbered))

    def _chunk_of(self, error: ApiError) -> dict[str, Any]:
        described = {"code": error.code or "server_error", "message": error.message}
        return {"type": "response.failed", "response": self._maker.unfinished(described)}


async def _events(
    call: ApiCall, maker: ResponseMaker, events: EventMaker, answers: Answers
) -> AsyncGenerator[list[dict[str, Any]], None]:
    begun = maker.unfinished()
    yield [{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")]
    async with contextlib.aclosing(answers.batches()) as batches:
        async for parts in batches:
            ready = [event for part in parts for event in _events_of(events, part)]
            if ready:
                yield ready
            if isinstance(parts[-1], AnswerEnd):
                output = parts[-1].outputs[0]
                found = await call.state.workers.run(partial(maker.finished, output, events.items))
                yield [{"type": f"response.{found['status']}", "response": found}]


def _events_of(events: EventMaker, part: Part) -> Iterator[dict[str, Any]]:
    if isinstance(part, AnswerDelta):
        return events.of(part.delta)
    return events.end(_Result.of(part.outputs[0]).status)
