"""``/tokenize`` and ``/detokenize``: texts or conversations become token ids of a chat model, and back."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field
from starlette.responses import Response

from staticllm.pipelines.text.tokenization import check_ids, encode_messages
from staticllm.server.api_error import ApiError, json_response
from staticllm.server.endpoint import Call
from staticllm.server.openai.fields import Fields, Text
from staticllm.server.openai.messages import MAX_MESSAGES, Message, template_messages
from staticllm.server.served_model import ServedModel


class TokenizeRequest(Fields):
    """The body of a request for token ids: a text (``content`` or ``prompt``), or a conversation with the chat template."""

    model_config = ConfigDict(title="TokenizeRequest")

    model: Text | None = None
    content: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special: bool = True
    with_pieces: bool = False


class DetokenizeRequest(Fields):
    """The body of a request for the text of token ids."""

    model_config = ConfigDict(title="DetokenizeRequest")

    model: Text | None = None
    tokens: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(fail_fast=True, max_length=1 << 20)]


async def tokenize(call: Call, body: TokenizeRequest) -> Response:
    """Return token ids."""
    given = [value for value in (body.content, body.prompt, body.messages) if value is not None]
    if len(given) != 1:
        raise ApiError(400, "give one of content, prompt and messages", param="content")

    def run(model: ServedModel) -> dict[str, Any]:
        tokenizer = model.chat.get_tokenizer()
        if body.messages is not None:
            ids = encode_messages(tokenizer, template_messages(body.messages)).ids
        elif not given[0]:
            ids = []
        else:
            encoded = tokenizer.encode(given[0], add_special_tokens=body.add_special)
            ids = [int(token) for token in encoded.input_ids.data[0]]
        shown: list[Any] = list(ids)
        if body.with_pieces:
            shown = [{"id": token, "piece": tokenizer.decode([token])} for token in ids]
        return {"tokens": shown, "count": len(ids), "max_model_len": model.chat.config.max_seq_len}

    return await _on_model(call, body.model, run)


async def detokenize(call: Call, body: DetokenizeRequest) -> Response:
    """Return the text of token ids."""

    def run(model: ServedModel) -> dict[str, Any]:
        tokenizer = model.chat.get_tokenizer()
        if body.tokens:
            check_ids(body.tokens, len(tokenizer.get_vocab()), len(body.tokens))
        text = tokenizer.decode(body.tokens) if body.tokens else ""
        return {"content": text, "prompt": text}

    return await _on_model(call, body.model, run)


async def _on_model(call: Call, name: str | None, run: Any) -> Response:
    model = call.state.hub.find(name, "chat")

    async def loaded() -> Response:
        await call.state.hub.acquire(model)
        try:
            return await call.state.workers.run(lambda: json_response(run(model)))
        finally:
            call.state.hub.release(model)

    return await call.connected(loaded())
