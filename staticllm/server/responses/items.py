"""Turns items of the Responses API into the messages that chat templates take, and answers into items."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from staticllm.server.answers.messages import text_of
from staticllm.server.http.errors import ApiError
from staticllm.server.responses.fields import InputItem
from staticllm.server.responses.store import ResponseStore

Item = dict[str, Any]
Message = dict[str, Any]


def new_id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def resolved(items: str | list[InputItem], store: ResponseStore, owner: str) -> str | list[InputItem]:
    """Return the input of a request with the items that the server remembers in place of references to them.

    Raises:
        ApiError: an item is unknown or was forgotten (404), or is named twice (400).
    """
    if isinstance(items, str) or not any(item.type == "item_reference" for item in items):
        return items
    found = list[InputItem]()
    named = set[str]()
    for index, item in enumerate(items):
        if item.type != "item_reference":
            found.append(item)
            continue
        id = _needed(item.id, f"input.{index}.id")
        where = f"input.{index}.id"
        kept = store.item(id, owner)
        if kept is None:
            text = f"Item with id {id[:100]!r} not found: it is of no answer that is stored; send the item itself"
            raise ApiError(404, text, param=where, code="item_not_found")
        if id in named:
            text = f"Duplicate item found with id {id[:100]!r}: remove one of them"
            raise ApiError(400, text, param=where, code="invalid_value")
        named.add(id)
        found.append(InputItem.model_validate(kept))
    return found


def messages_of(items: str | list[InputItem]) -> list[Message]:
    """Return the messages of a request's input. Calls and reasoning join the assistant's message that they belong to.

    Raises:
        ApiError: a part is not text, or an item lacks what its type needs.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}] if items else []
    found: list[Message] = []
    for index, item in enumerate(items):
        where = f"input.{index}"
        if item.type == "message":
            _add_message(found, item, where)
        elif item.type == "function_call_output":
            content = text_of(_needed(item.output, f"{where}.output"), f"{where}.output")
            call_id = _needed(item.call_id, f"{where}.call_id")
            found.append({"role": "tool", "tool_call_id": call_id, "content": content})
        elif item.type == "function_call":
            name = _needed(item.name, f"{where}.name")
            arguments = _needed(item.arguments, f"{where}.arguments")
            call = {"id": _needed(item.call_id, f"{where}.call_id"), "type": "function"}
            function = {"name": name, "arguments": arguments}
            message = _assistant(found)
            message["content"] = message["content"] or None
            message.setdefault("tool_calls", []).append({**call, "function": function})
        else:
            text = text_of(item.content, f"{where}.content")
            if text:
                found.append({"role": "assistant", "content": "", "reasoning_content": text})
    return found


def _add_message(found: list[Message], item: InputItem, where: str) -> None:
    role = _needed(item.role, f"{where}.role")
    text = text_of(item.content, f"{where}.content")
    last = found[-1] if found else {}
    if role == "assistant" and last.get("role") == "assistant" and not last["content"] and "tool_calls" not in last:
        last["content"] = text  # it follows its reasoning
    else:
        found.append({"role": "system" if role == "developer" else role, "content": text})


def _assistant(found: list[Message]) -> Message:
    """Return the assistant's message that a call belongs to: the last one, or a new one."""
    if not found or found[-1]["role"] != "assistant":
        found.append({"role": "assistant", "content": ""})
    return found[-1]


def _needed(value: Any, where: str) -> Any:
    if value is None:
        raise ApiError(400, f"Missing required parameter: {where!r}", param=where, code="missing_required_parameter")
    return value


def input_items(items: str | list[InputItem]) -> list[Item]:
    """Return the input of a request as items with ids, as ``/v1/responses/ID/input_items`` lists them."""
    if isinstance(items, str):
        content = [{"type": "input_text", "text": items}]
        return [{"id": new_id("msg"), "type": "message", "role": "user", "status": "completed", "content": content}]
    shown = [item.model_dump(exclude_none=True) for item in items]
    return [{"id": new_id("item"), **item} for item in shown]


def message_item(id: str, text: str, status: str, logprobs: Sequence[dict[str, Any]] = ()) -> Item:
    content = [{"type": "output_text", "text": text, "annotations": [], "logprobs": [*logprobs]}]
    return {"id": id, "type": "message", "status": status, "role": "assistant", "content": content}


def reasoning_item(id: str, text: str, status: str) -> Item:
    content = [{"type": "reasoning_text", "text": text}]
    return {"id": id, "type": "reasoning", "status": status, "summary": [], "content": content}


def call_item(id: str, call_id: str, name: str, arguments: str, status: str) -> Item:
    found = {"id": id, "type": "function_call", "status": status, "call_id": call_id}
    return {**found, "name": name, "arguments": arguments}
