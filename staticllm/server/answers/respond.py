"""What chats and completions share: a model is acquired, answers run on it, and everything is released at the end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Protocol

from starlette.responses import Response

from staticllm.errors import PromptTooLongError
from staticllm.pipelines.conversation.templates.bounds import MAX_CHARS
from staticllm.pipelines.text.output_processor import RequestOutput
from staticllm.server.answers.answers import Answers
from staticllm.server.endpoint import Call
from staticllm.server.http.errors import ApiError, json_response, prompt_too_long
from staticllm.server.models.served import ServedModel

Handles = list[list[RequestOutput]]
"""The answers of each handle: one, or those of a beam search."""
Close = Callable[[], Awaitable[None]]


class Asked(Protocol):
    """What a request says about its answers: whether they are streamed, whether they are found by beam search, and which field
    has the prompt."""

    @property
    def stream(self) -> bool: ...

    @property
    def is_search(self) -> bool: ...

    @property
    def prompt_field(self) -> str: ...


async def respond(
    call: Call,
    body: Asked,
    model: ServedModel,
    inputs: Sequence[tuple[Any, dict[str, Any]]],
    complete: Callable[[Handles], dict[str, Any]],
    stream: Callable[[Answers, Close], Response],
) -> Response:
    """Load the model if necessary, run one answer for each of ``inputs``, a prompt with its options, and return the response.

    ``complete`` makes a body of all answers; it runs in a thread. ``stream`` makes a response that must await ``Close``.

    Raises:
        ApiError, StaticLLMError: the request is refused, or an answer failed.
        ClientDisconnect: the client has closed the connection.
    """
    await call.acquire(model)
    return await respond_with(call, body, model, inputs, complete, stream)


async def respond_with(
    call: Call,
    body: Asked,
    model: ServedModel,
    inputs: Sequence[tuple[Any, dict[str, Any]]],
    complete: Callable[[Handles], dict[str, Any]],
    stream: Callable[[Answers, Close], Response],
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
        pipeline = model.chat
        _check_chars([prompt for prompt, _ in inputs], pipeline.config.max_prompt_len, body.prompt_field)

        priority = inputs[0][1].get("priority", 0)
        in_engine = min(0, priority)  # all clients are there: a request may only go behind others
        submits = [partial(pipeline.submit, prompt, **{**options, "priority": in_engine}) for prompt, options in inputs]
        is_by_token = "logprobs" in inputs[0][1]  # the texts of tokens have their places in the answer
        num_beams = inputs[0][1].get("num_beams", pipeline.get_generation_config().num_beams)
        answers = Answers(
            call.state, model, call.client, submits, body.is_search, priority, is_by_token, num_beams
        )  # fmt: skip
        await call.connected(answers.begin())
        if body.stream:
            response = stream(answers, close)
            is_handed_over = True
            return response
        handles = await call.connected(answers.outputs())
        return await call.state.workers.run(lambda: json_response(complete(handles)))
    except PromptTooLongError as error:
        raise prompt_too_long(error, body.prompt_field) from None
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
