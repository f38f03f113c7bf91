"""What chats and completions share: a model is acquired, answers run on it, and everything is released at the end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.responses import Response

from staticllm.errors import PromptTooLongError
from staticllm.pipelines.conversation.sandbox import MAX_CHARS
from staticllm.pipelines.text.output_processor import RequestOutput
from staticllm.server.answers.answers import Answers
from staticllm.server.answers.asks import Ask
from staticllm.server.endpoint import Call
from staticllm.server.http.errors import ApiError, json_response, prompt_too_long
from staticllm.server.models.served import ServedModel

Handles = list[list[RequestOutput]]
"""The answers of each handle: one, or those of a beam search."""
Close = Callable[[], Awaitable[None]]


Whole = Callable[[Handles], dict[str, Any]]
"""Makes the body of all answers; runs in a thread."""
Stream = Callable[[Answers, Close], Response]
"""Makes a response that must await ``Close``."""


async def respond(
    call: Call, model: ServedModel, asks: Sequence[Ask], field: str, whole: Whole, stream: Stream | None
) -> Response:
    """Load the model if necessary, run the answers, and return the response: a stream if ``stream`` is given, else a whole one.

    ``field`` is the name of the field that has the prompt, for errors.

    Raises:
        ApiError, StaticLLMError: the request is refused, or an answer failed.
        ClientDisconnect: the client has closed the connection.
    """
    await call.acquire(model)
    return await respond_with(call, model, asks, field, whole, stream)


async def respond_with(
    call: Call, model: ServedModel, asks: Sequence[Ask], field: str, whole: Whole, stream: Stream | None
) -> Response:
    """Do as ``respond`` with a model that the caller has acquired. It is released here, however the request ends."""
    answers: Answers | None = None
    is_handed_over = False

    async def close() -> None:
        try:
            if answers is not None:
                await answers.close()
        finally:
            call.state.hub.release(model)

    try:
        _check_chars([ask.prompt for ask in asks], model.chat.config.max_prompt_len, field)
        answers = Answers(call.state, model, call.client, asks)
        await call.connected(answers.begin())
        if stream is not None:
            response = stream(answers, close)
            is_handed_over = True
            return response
        handles = await call.connected(answers.outputs())
        return await call.state.workers.run(lambda: json_response(whole(handles)))
    except PromptTooLongError as error:
        raise prompt_too_long(error, field) from None
    finally:
        if not is_handed_over:
            await close()


def _check_chars(prompts: Sequence[Any], limit: int, field: str) -> None:
    """Check that no prompt has more characters than a chat template may make, before it is rendered.

    Raises:
        ApiError: one has.
    """
    for prompt in prompts:
        texts = [prompt] if isinstance(prompt, str) else prompt if isinstance(prompt, list) else []
        contents = (text if isinstance(text, str) else str(text.get("content") or "") for text in texts)
        num_chars = sum(map(len, contents))
        if num_chars > MAX_CHARS:
            raise ApiError(
                400,
                f"This model's maximum context length for prompts is {limit} tokens; of {num_chars} characters in "
                f"{field}, at most {MAX_CHARS} are read: send less",
                code="context_length_exceeded",
                param=field,
            )
