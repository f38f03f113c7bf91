"""``/tokenize`` and ``/detokenize``: texts or conversations become token ids of a chat model, and back.

Long answers are made in parts, each a call of its own in a thread: other requests run in between, and a client that has gone ends
the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from starlette.responses import Response

from staticllm.errors import encoding
from staticllm.pipelines.conversation.chat_templates import CHAT_TEMPLATES
from staticllm.pipelines.conversation.sandbox import MAX_CHARS
from staticllm.pipelines.text.chat_prompt import encode_messages
from staticllm.pipelines.text.detokenizer import INCOMPLETE
from staticllm.pipelines.text.inputs import check_ids
from staticllm.server.answers.fields import Fields, Text, TokenId
from staticllm.server.answers.messages import MAX_MESSAGES, ChatMessage, template_messages
from staticllm.server.answers.results import is_text
from staticllm.server.endpoint import ApiCall
from staticllm.server.http.errors import ApiError, json_response, to_json
from staticllm.server.models.served import ServedModel
from staticllm.server.models.workers import Workers

SLICE = 1 << 14
"""Tokens that are written as JSON at once: a millisecond, in which no other thread runs."""
DECODED = 1 << 8
"""Tokens that are decoded at once."""


class TokenizeRequest(Fields):
    """The body of a request for token ids: a text, or a conversation with the chat template.

    ``content`` is llamacpp's name of the text, ``prompt`` that of vLLM, which adds special tokens by default. Their texts in a
    text always count as such.
    """

    model_config = ConfigDict(title="TokenizeRequest")

    model: Text | None = None
    content: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special: bool | None = None
    parse_special: Literal[True] = True
    with_pieces: bool = False


class DetokenizeRequest(Fields):
    """The body of a request for the text of token ids."""

    model_config = ConfigDict(title="DetokenizeRequest")

    model: Text | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True, max_length=1 << 20)]


async def tokenize(call: ApiCall, body: TokenizeRequest) -> Response:
    """Return token ids."""
    given = [value for value in (body.content, body.prompt, body.messages) if value is not None]
    if len(given) != 1:
        raise ApiError(400, "give one of content, prompt and messages", param="content")
    text = given[0]
    if isinstance(text, str) and len(text) > MAX_CHARS:
        raise ApiError(
            400, f"a text of {len(text)} characters: at most {MAX_CHARS} are tokenized at once", code="text_too_long"
        )

    async def answer(model: ServedModel) -> Response:
        ids = await call.state.workers.run(lambda: _encoded(model, body, text))
        pieces = await _pieces(call.state.workers, model, ids) if body.with_pieces else None
        parts = [
            await call.state.workers.run(partial(_shown, ids[start : start + SLICE], pieces))
            for start in range(0, len(ids), SLICE)
        ]
        config = model.chat.config
        rest = to_json(
            {"count": len(ids), "max_model_len": config.max_seq_len, "max_prompt_len": config.max_prompt_len}
        )
        return Response(f'{{"tokens":[{",".join(parts)}],{rest[1:]}', media_type="application/json")

    return await _on_model(call, body.model, answer)


def _encoded(model: ServedModel, body: TokenizeRequest, text: Any) -> list[int]:
    tokenizer = model.chat.get_tokenizer()
    if body.messages is not None:
        return encode_messages(tokenizer, CHAT_TEMPLATES, model.spec.conversation(template_messages(body.messages))).ids
    if not text:
        return []
    adds = body.prompt is not None if body.add_special is None else body.add_special
    with encoding(f"{len(text)} characters"):
        found: list[int] = tokenizer.encode(text, add_special_tokens=adds).input_ids.data[0].tolist()
    return found


async def _pieces(workers: Workers, model: ServedModel, ids: list[int]) -> dict[int, str | list[int]]:
    """Return the text of each token by its id; of one that is a part of a character its bytes, as llamacpp does."""
    different = sorted(await workers.run(lambda: set(ids)))
    decode = model.chat.get_tokenizer().decode
    found: dict[int, str | list[int]] = {}
    for start in range(0, len(different), DECODED):
        part = different[start : start + DECODED]
        texts = await workers.run(partial(decode, [[token] for token in part]))
        found.update(zip(part, texts, strict=True))
    if parts := [token for token in different if INCOMPLETE in found[token]]:
        tokens = (await workers.run(lambda: model.vocabulary)).tokens
        found.update((token, [*tokens[token]]) for token in parts if not is_text(tokens[token]))
    return found


def _shown(ids: list[int], pieces: dict[int, str | list[int]] | None) -> str:
    """Return the JSON of some of the tokens, without the brackets."""
    shown: list[Any] = ids if pieces is None else [{"id": token, "piece": pieces[token]} for token in ids]
    return to_json(shown)[1:-1]


async def detokenize(call: ApiCall, body: DetokenizeRequest) -> Response:
    """Return the text of token ids."""

    def run(model: ServedModel) -> Response:
        tokenizer = model.chat.get_tokenizer()
        if body.tokens:
            check_ids(body.tokens, len(tokenizer.get_vocab()), len(body.tokens))
        text = tokenizer.decode(body.tokens) if body.tokens else ""
        return json_response({"content": text, "prompt": text})

    async def answer(model: ServedModel) -> Response:
        return await call.state.workers.run(lambda: run(model))

    return await _on_model(call, body.model, answer)


async def _on_model(
    call: ApiCall, name: str | None, answer: Callable[[ServedModel], Coroutine[Any, Any, Response]]
) -> Response:
    model = call.state.hub.find(name, "chat")

    async def loaded() -> Response:
        async with call.state.hub.using(model):
            return await answer(model)

    return await call.connected(loaded())
