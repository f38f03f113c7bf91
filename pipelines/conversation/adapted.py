"""Adapts a conversation to what a chat template shows, as GenAI does it: nothing of it may be lost on the way to the model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from staticllm.errors import PromptError, shown

from .template_shape import (
    REASONING_KEYS,
    CallForm,
    Message,
    TemplateShape,
    in_parts,
    named_id,
    with_tools,
)

TEXT_TYPES = ("text", "input_text", "output_text")
SHORT_ID_CHARS = 9
_DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
TOOLS_INTRO = "You can call any of the following tools to satisfy the user's requests: "
EXAMPLE_INTRO = "Example tool call syntax:"
GENERIC_CALL = {"tool_calls": [{"name": "tool_name", "arguments": {"arg1": "some_value"}, "id": "call_1___"}]}
"""How calls are written where a template shows none: as GenAI describes them to the model."""


@dataclass(frozen=True)
class Adapted:
    """A conversation in the shape that a template shows."""

    messages: list[Message]
    tools: list[Any]
    """The template's variable."""
    written: Mapping[str, str]
    """Pieces of what was written into the messages, by what it is."""

    def check_shown(self, text: str) -> None:
        """Check that a prompt has what was written into the messages: some templates show only one of them.

        Raises:
            PromptError: something is missing.
        """
        for what, piece in self.written.items():
            forms = (piece, json.dumps(piece)[1:-1], json.dumps(piece, ensure_ascii=False)[1:-1])
            if not any(form in text for form in forms):
                raise PromptError(
                    f"the chat template shows no {what}: leave them out, or set another template on the tokenizer"
                )


def adapted(shape: TemplateShape, messages: Sequence[Message], tools: Sequence[Any]) -> Adapted:
    """Return the messages and the tools in the shape that a template shows.

    - The text of a system message moves to the head of the user's next message if no system message is shown.
    - Parts with text are one text, and a text is a list with one part, as the template takes it.
    - Calls have the content, the arguments and the ids that it takes. Where it shows no tools, calls or results, they are
      written into the messages.

    Raises:
        PromptError: a message has a part that is not text, or the template cannot show the arguments of a call.
    """
    turns = [_with_plain_content(message, index, shape) for index, message in enumerate(messages)]
    written: dict[str, str] = {}
    if any(turn.get("tool_calls") or turn.get("role") == "tool" for turn in turns):
        form = shape.calls if tools else shape.lone_calls
        turns = _complete([_with_reasoning(turn, shape) for turn in turns])
        if form is not None and not form.has_several:
            turns = _one_by_one(turns)
        written = _pieces_of_written(turns, form)
        turns = _written_calls(turns, form)
    variable: list[Any] = []
    if tools and shape.tools is not None:
        turns, variable = with_tools(turns, tools, shape.tools)
    elif tools:
        written["tools"] = TOOLS_INTRO.strip()
        example = shape.examples.one if shape.examples is not None else _to_json(GENERIC_CALL)
        turns = _with_written_tools(turns, tools, example)
    has_system = shape.has_system_beside_tools if tools and shape.tools is not None else shape.has_system
    if not has_system and any(turn.get("role") == "system" for turn in turns):
        turns = _system_to_user(turns)
    return Adapted([in_parts(turn) for turn in turns] if shape.wants_parts else turns, variable, written)


def _with_plain_content(message: Message, index: int, shape: TemplateShape) -> Message:
    """Return a message whose content is a text, or parts that the template takes, and which has nothing else that is null."""
    message = {key: value for key, value in message.items() if key == "content" or not _is_void(key, value)}
    content = message.get("content")
    role = message.get("role")
    if content is None and not message.get("tool_calls"):
        return {**message, "content": ""}
    if role == "tool" and isinstance(content, (Mapping, int, float)):
        return {**message, "content": _to_text(content)}
    if not isinstance(content, (list, tuple)):
        return message
    texts = [_text_of(part) for part in content]
    if None not in texts:
        return {**message, "content": "".join(text for text in texts if text is not None)}
    if role == "tool" and not any(isinstance(part, Mapping) and "type" in part for part in content):
        return {**message, "content": _to_text(content)}
    if shape.takes_parts:
        return message
    part = content[texts.index(None)]
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise PromptError(f"messages.{index}.content has a part of type {shown(kind)}: only text is supported")


def _with_reasoning(message: Message, shape: TemplateShape) -> Message:
    """Return a message with calls whose reasoning has the template's key, or none if it refuses that beside a text."""
    text = next((value for key in REASONING_KEYS if isinstance(value := message.get(key), str) and value), "")
    if not message.get("tool_calls") or not text or shape.reasoning is None:
        return message
    if message.get("content") and not shape.has_reasoning_beside_text:
        return {key: value for key, value in message.items() if key != shape.reasoning}
    return {shape.reasoning: text, **message}


def _is_void(key: str, value: object) -> bool:
    """Return whether a key of a message says nothing: templates ask whether it is there."""
    return value is None or (key == "tool_calls" and not value)


def _text_of(part: object) -> str | None:
    """Return the text of a part; None if it has none."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        return None
    kind = part.get("type", "text")
    text = part.get("refusal") if kind == "refusal" else part.get("text") if kind in TEXT_TYPES else None
    return text if isinstance(text, str) else None


def _complete(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with an id for every call, and with the id and the name of its call for every result."""
    found: list[Message] = []
    pending: list[Mapping[str, Any]] = []
    num_calls = 0
    for message in messages:
        calls = message.get("tool_calls")
        if isinstance(calls, (list, tuple)) and calls:
            made = []
            for call in calls:
                num_calls += 1
                is_known = not isinstance(call, Mapping) or call.get("id")
                made.append(call if is_known else {**call, "id": f"call{num_calls:05d}"})
            pending = [call for call in made if isinstance(call, Mapping)]
            found.append({**message, "tool_calls": made})
        else:
            found.append(_with_call(message, pending) if message.get("role") == "tool" else message)
    return found


def _with_call(message: Message, pending: list[Mapping[str, Any]]) -> Message:
    """Return a result with the id and the name of the call that it answers, which is then no longer pending."""
    id = message.get("tool_call_id")
    name = message.get("name")
    for call in pending:
        if (call.get("id") == id) if id else (not name or _name_of(call) == name):
            pending.remove(call)
            return {**message, "tool_call_id": call.get("id"), "name": name or _name_of(call)}
    return message


def _function_of(call: object) -> Mapping[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    return function if isinstance(function, Mapping) else {}


def _name_of(call: object) -> str:
    return str(_function_of(call).get("name", ""))


def _written_calls(messages: Sequence[Message], form: CallForm | None) -> list[Message]:
    """Return the messages with calls and results as the template shows them, or as text where it does not."""
    found = list[Message]()
    has_results = form is not None and form.has_results
    ids: dict[object, str] = {}
    is_written = False  # whether the last message is a result that was written as text
    for message in messages:
        if message.get("tool_calls"):
            found += [_as_text(message)] if form is None else _in_form(message, form, ids)
        elif message.get("role") == "tool" and has_results:
            id = message.get("tool_call_id")
            found.append({**message, "tool_call_id": ids[id]} if id in ids else message)
        elif message.get("role") == "tool" or (is_written and message.get("role") == "user"):
            content = message.get("content") if message.get("role") == "user" else _result_text(message)
            if is_written:
                found[-1] = {**found[-1], "content": f"{found[-1]['content']}\n{content}"}
            else:
                found.append({"role": "user", "content": content})
        else:
            found.append(message)
        is_written = message.get("role") == "tool" and not has_results
    return found


def _pieces_of_written(messages: Sequence[Message], form: CallForm | None) -> dict[str, str]:
    """Return a piece of what is written as text of calls and of results."""
    pieces: dict[str, str] = {}
    for message in messages:
        if message.get("tool_calls") and form is None:
            last = message["tool_calls"][-1]
            pieces["calls of tools"] = f'"id": {_to_text(last.get("id") if isinstance(last, Mapping) else None)}'
        elif message.get("role") == "tool" and (form is None or not form.has_results):
            pieces["results of tools"] = '"tool_response": {'
    return pieces


def _as_text(message: Message) -> Message:
    """Return a message of the assistant with its calls as JSON in the content."""
    calls = [
        {"name": _name_of(call), "arguments": _parsed(_function_of(call).get("arguments")), "id": call.get("id")}
        for call in message["tool_calls"]
        if isinstance(call, Mapping)
    ]
    content = message.get("content")
    written = {"tool_calls": calls, **({} if content is None else {"content": content})}
    return {**{key: value for key, value in message.items() if key != "tool_calls"}, "content": _to_json(written)}


def _result_text(message: Message) -> str:
    response = {
        "tool": message.get("name"),
        "content": message.get("content"),
        "tool_call_id": message.get("tool_call_id"),
    }
    return _to_json({"tool_response": {key: value for key, value in response.items() if value is not None}})


def _one_by_one(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with at most one call each, which its result follows."""
    found: list[Message] = []
    todo = list(messages)
    while todo:
        message = todo.pop(0)
        calls = message.get("tool_calls") or []
        if len(calls) < 2:
            found.append(message)
            continue
        results: list[Message] = []
        while todo and todo[0].get("role") == "tool":
            results.append(todo.pop(0))
        for index, call in enumerate(calls):
            id = call.get("id") if isinstance(call, Mapping) else None
            found.append({**message, "tool_calls": [call], **({} if index == 0 else {"content": None})})
            found += [result for result in results if result.get("tool_call_id") == id]
        known = [call.get("id") for call in calls if isinstance(call, Mapping)]
        found += [result for result in results if result.get("tool_call_id") not in known]
    return found


def _in_form(message: Message, form: CallForm, ids: dict[object, str]) -> list[Message]:
    """Return a message with calls whose content, arguments and ids have the form that the template shows.

    Its text is in a message before it if the template would show one of them only. ``ids`` learns the ids of the calls, by those
    that they had before.
    """
    calls: list[Any] = []
    for call in message["tool_calls"]:
        function = _function_of(call)
        if not function or not isinstance(call, Mapping):
            calls.append(call)
            continue
        written = {**function, "arguments": _arguments(function.get("arguments"), form)}
        id = _id_in_form(call, form, len(ids))
        ids[call.get("id")] = id
        calls.append({"type": "function", **(call if "function" in call else {}), "function": written, "id": id})
    empty = None if form.has_null_content else ""
    text = message.get("content")
    asked = {**message, "content": text if text and form.text == "beside" else empty, "tool_calls": calls}
    before = {key: value for key, value in message.items() if key != "tool_calls"}
    return [before, asked] if text and form.text == "before" else [asked]


def _id_in_form(call: Mapping[str, Any], form: CallForm, number: int) -> str:
    if form.ids == "named":
        return named_id(_name_of(call), number)
    return _short_id(call.get("id")) if form.ids == "short" else str(call.get("id"))


def _short_id(id: object) -> str:
    """Return an id of nine letters and digits: the same one if it has them, else one that is made of it."""
    text = str(id)
    if len(text) == SHORT_ID_CHARS and text.isascii() and text.isalnum():
        return text
    number = int.from_bytes(hashlib.sha256(text.encode(errors="replace")).digest()[:8], "big")
    return "".join(_DIGITS[number // 36**place % 36] for place in range(SHORT_ID_CHARS))


def _arguments(value: object, form: CallForm) -> object:
    """Return the arguments as a template takes them; malformed ones as they are.

    Raises:
        PromptError: they are no object.
    """
    if form.arguments == "text":
        return value if isinstance(value, str) else _to_text({} if value is None else value)
    parsed = _parsed(value)
    if isinstance(parsed, Mapping) or form.arguments == "either":
        return parsed
    if isinstance(value, str) and parsed is value:  # no JSON
        return {"arguments": value}
    raise PromptError(
        f"the arguments of a call are no JSON object: {json.dumps(parsed, ensure_ascii=False, default=str)[:80]}; the chat "
        'template of this model needs an object such as {"name": "value"}'
    )


def _parsed(arguments: object) -> object:
    """Return the value of arguments that are JSON text, and a text that is none as it is."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments


def _with_written_tools(messages: Sequence[Message], tools: Sequence[Any], example: str) -> list[Message]:
    """Return the messages with the tools in the system message, as GenAI describes them."""
    text = f"{TOOLS_INTRO}{_to_json(list(tools))}\n\n{EXAMPLE_INTRO}\n\n{example}"
    first = messages[0] if messages else {}
    if first.get("role") != "system":
        return [{"role": "system", "content": text}, *messages]
    content = first.get("content")
    return [{**first, "content": f"{content}\n\n{text}" if content else text}, *messages[1:]]


def _system_to_user(messages: Sequence[Message]) -> list[Message]:
    adapted: list[Message] = []
    pending: list[str] = []
    for message in messages:
        content = message.get("content")
        if message.get("role") == "system" and isinstance(content, str):
            pending += [content] if content else []
            continue
        if pending and message.get("role") == "user" and isinstance(content, str):
            adapted.append({**message, "content": "\n".join([*pending, *([content] if content else [])])})
        else:
            if pending:
                adapted.append({"role": "user", "content": "\n".join(pending)})
            adapted.append(message)
        pending = []
    return [*adapted, {"role": "user", "content": "\n".join(pending)}] if pending else adapted


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2, default=str)


def _to_text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
