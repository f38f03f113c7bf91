"""``/v1/messages``: a conversation in Anthropic's form is answered, or its tokens are counted."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from starlette.responses import Response

from staticllm.pipelines.conversation.chat_templates import CHAT_TEMPLATES
from staticllm.pipelines.generation.options.extra import ToolOptions
from staticllm.pipelines.text.chat_prompt import encode_messages
from staticllm.server.answers.answers import AnswerEnd, Answers, Close, Part, respond
from staticllm.server.answers.asks import AnswerFields, Ask
from staticllm.server.answers.stream import ChunkStream, EventFrame
from staticllm.server.answers.work import is_proactive
from staticllm.server.anthropic.events import MessageMaker, StreamEvent
from staticllm.server.anthropic.fields import CountRequest, MessagesRequest
from staticllm.server.endpoint import ApiCall
from staticllm.server.http.errors import ApiError, json_response, to_json


async def messages(call: ApiCall, body: MessagesRequest) -> Response:
    """Answer a conversation, as a message or as a stream of events."""
    model = call.state.hub.find(body.model, "chat")
    is_behind = is_proactive(call, model)
    asks = [Ask.of(body.conversation(), _asked(body), is_proactive=is_behind)]
    name = model.spec.name
    are_certain = body.choice() not in (None, "none", "auto")
    await call.acquire(model)

    def stream(answers: Answers, close: Close) -> Response:
        maker = MessageMaker(name, len(answers.first_handle.prompt_tokens), are_certain)
        return MessageStream(call, _events(maker, answers), close)

    def whole(parts: Sequence[Part]) -> dict[str, Any]:
        maker = MessageMaker(name, 0, are_certain)
        for part in parts:
            for _ in maker.of(part):
                pass
        last = parts[-1]
        assert isinstance(last, AnswerEnd), "answers end"
        return maker.whole(last.outputs[0])

    return await respond(call, model, asks, "messages", whole, stream if body.stream else None)


async def count_tokens(call: ApiCall, body: CountRequest) -> Response:
    """Return the number of a prompt's tokens."""
    model = call.state.hub.find(body.model, "chat")
    conversation = model.spec.conversation(body.conversation())
    functions = [] if body.choice() == "none" else body.functions()

    async def counted() -> int:
        async with call.state.hub.using(model):
            tokenizer = model.chat.get_tokenizer()
            options = ToolOptions(tools=tuple(functions), extra_context=body.context)
            return await call.state.workers.run(
                lambda: len(encode_messages(tokenizer, CHAT_TEMPLATES, conversation, options).ids)
            )

    return json_response({"input_tokens": await call.connected(counted())})


def _asked(body: MessagesRequest) -> AnswerFields:
    given = {"temperature": body.temperature, "top_p": body.top_p, "top_k": body.top_k}
    choice = body.tool_choice
    return AnswerFields(
        numbers={name: value for name, value in given.items() if value is not None},
        stop=body.stop_sequences,
        max_tokens=body.max_tokens,
        tools=body.functions(),
        tool_choice=body.choice(),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        context=body.context,
    )


async def _events(maker: MessageMaker, answers: Answers) -> AsyncGenerator[list[StreamEvent], None]:
    yield list(maker.begin())
    async with contextlib.aclosing(answers.batches()) as batches:
        async for parts in batches:
            if ready := [event for part in parts for event in maker.of(part)]:
                yield ready


class MessageStream(ChunkStream):
    """A stream of named events, which ends with ``message_stop``."""

    END_MARK = ""

    def _encoded(self, chunk: StreamEvent) -> bytes:
        return EventFrame.of(chunk["type"]).around(to_json(chunk))

    def _chunk_of(self, error: ApiError) -> StreamEvent:
        found: StreamEvent = error.body("/v1/messages")
        return found
