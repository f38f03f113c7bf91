"""What is asked and answered, in the JSON of OpenAI's API: questions, the state, answers, and known answers."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from .answers import Answer, ChoiceAnswer, PredicateAnswer, ScoreAnswer
from .questions import Choice, Level, Option, Predicate, Question, QuestionError, Score, checked

Path: TypeAlias = tuple[str | int, ...]
MAX_DEPTH = 32
MAX_VALUES = 10_000
MAX_BYTES = 256 << 10
"""OpenAI's limits of ``input_json``."""
ROLES = ("user", "developer", "system", "assistant")
_KINDS = {
    "predicate": ("instructions", "name"),
    "choice": ("instructions", "name", "choices"),
    "score": ("instructions", "name", "levels"),
}
_CALLS = {"function_call": ("name", "arguments"), "custom_tool_call": ("name", "input")}


def questions_of(items: Sequence[Any]) -> list[Question]:
    """Return the questions of a body.

    Raises:
        QuestionError: one has a wrong form; ``path`` says where.
    """
    return [_question(item, ("questions", place)) for place, item in enumerate(items)]


def _question(item: Any, path: Path) -> Question:
    values = _object(item, path)
    kind = values.get("type")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise _wrong((*path, "type"), kind, f"must be one of {', '.join(_KINDS)}")
    _check_keys(values, ("type", *_KINDS[kind]), path)
    instructions = _instructions(values.get("instructions"), (*path, "instructions"))
    name = values.get("name")
    if kind == "predicate":
        return Predicate(instructions, name)
    if kind == "choice":
        choices = _list(values.get("choices"), (*path, "choices"))
        return Choice(instructions, [_option(each, (*path, "choices", at)) for at, each in enumerate(choices)], name)
    levels = _list(values.get("levels"), (*path, "levels"))
    return Score(instructions, [_level(each, (*path, "levels", at)) for at, each in enumerate(levels)], name)


def _option(item: Any, path: Path) -> Option:
    values = _object(item, path)
    _check_keys(values, ("value", "description"), path)
    if "value" not in values:
        raise QuestionError(f"{_shown(path)} has no value", (*path, "value"))
    return Option(values["value"], values.get("description"))


def _level(item: Any, path: Path) -> Level:
    values = _object(item, path)
    _check_keys(values, ("label", "description"), path)
    if "label" not in values:
        raise QuestionError(f"{_shown(path)} has no label", (*path, "label"))
    return Level(values["label"], values.get("description"))


def _instructions(value: Any, path: Path) -> Any:
    return _parts(value, path, "input_text") if isinstance(value, list) else value


def state_of(value: Any) -> str:
    """Return the text of ``input``: a text, or messages. A message of the user alone is its text.

    Raises:
        QuestionError: it is empty, has a wrong form, or has parts that are no text; ``path`` says where.
    """
    path: Path = ("input",)
    if not isinstance(value, str | list):
        raise _wrong(path, value, "must be a text or a list of messages")
    items = value if isinstance(value, list) else [{"role": "user", "content": value}]
    said = _Said()
    for place, item in enumerate(items):
        said.add(_object(item, (*path, place)), (*path, place) if isinstance(value, list) else path)
    text = said.text
    if not text.strip():
        raise QuestionError("input is empty: give the state that the questions are about", path)
    return text


class _Said:
    """The text of a conversation: who said what, and which tools were called."""

    def __init__(self) -> None:
        self._parts: list[tuple[str, str]] = []
        self._calls: dict[str, str] = {}

    @property
    def text(self) -> str:
        if len(self._parts) == 1 and self._parts[0][0] == "user":
            return self._parts[0][1]
        return "\n\n".join(f"{who}: {text}" for who, text in self._parts)

    def add(self, item: Mapping[str, Any], path: Path) -> None:
        """Add an item of ``input``."""
        kind = item.get("type", "message")
        if not isinstance(kind, str):
            raise _wrong((*path, "type"), kind, "must be a text")
        if kind in _CALLS:
            self._add_call(item, kind, path)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            call = item.get("call_id")
            if not isinstance(call, str) or call not in self._calls:
                raise QuestionError(
                    f"{_shown(path)} is the output of no call before it: send the call, too", (*path, "call_id")
                )
            self._parts.append((f"{self._calls[call]} returned", _content(item.get("output"), (*path, "output"))))
        elif kind == "message":
            role = item.get("role")
            if role not in ROLES:
                raise _wrong((*path, "role"), role, f"must be one of {', '.join(ROLES)}")
            self._parts.append(
                (role, _content(item.get("content"), path if path == ("input",) else (*path, "content")))
            )
        else:
            raise _wrong((*path, "type"), kind, "must be a message, a call or the output of one")

    def _add_call(self, item: Mapping[str, Any], kind: str, path: Path) -> None:
        found = []
        for key in ("call_id", *_CALLS[kind]):
            value = item.get(key)
            if not isinstance(value, str):
                raise _wrong((*path, key), value, "must be a text")
            found.append(value)
        call, name, given = found
        self._calls[call] = name
        self._parts.append(("assistant", f"calls {name}({given})"))


def _content(value: Any, path: Path) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong(path, value, "must be a text or a list of parts")
    return _parts(value, path, "input_text", "output_text", "text", "refusal")


def _parts(parts: Sequence[Any], path: Path, *texts: str) -> str:
    """Return the text of parts; JSON is shown as such."""
    found: list[str] = []
    for place, part in enumerate(parts):
        here = (*path, place)
        values = _object(part, here)
        kind = values.get("type")
        if kind in texts:
            text = values.get("refusal" if kind == "refusal" else "text")
            if not isinstance(text, str):
                raise _wrong((*here, "text"), text, "must be a text")
            found.append(text)
        elif kind == "input_json":
            found.append(_json(values.get("data"), (*here, "data")))
        else:
            raise _wrong(here, kind, "this model reads texts only: send input_text or input_json")
    return "\n".join(found)


def _json(data: Any, path: Path) -> str:
    is_list = isinstance(data, list) and all(isinstance(each, dict) for each in data)
    if not isinstance(data, dict) and not is_list:
        raise _wrong(path, data, "must be an object or a list of objects")
    if _size(data, 1) > MAX_VALUES:
        raise QuestionError(f"{_shown(path)} has more than {MAX_VALUES} values or {MAX_DEPTH} levels: send less", path)
    text = json.dumps(data, ensure_ascii=False)
    if len(text.encode("utf-8", "replace")) > MAX_BYTES:
        raise QuestionError(f"{_shown(path)} has more than {MAX_BYTES} bytes: send less", path)
    return text


def _size(data: Any, depth: int) -> int:
    """Return the number of values in JSON; more than ``MAX_VALUES`` if it is too deep."""
    if depth > MAX_DEPTH:
        return MAX_VALUES + 1
    items = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return 1 + sum(_size(each, depth + 1) for each in items)


def _object(item: Any, path: Path) -> Mapping[str, Any]:
    if not isinstance(item, dict):
        raise _wrong(path, item, "must be an object")
    return {key: value for key, value in item.items() if value is not None or key == "value"}


def _list(item: Any, path: Path) -> Sequence[Any]:
    if not isinstance(item, list):
        raise _wrong(path, item, "must be a list")
    return item


def _check_keys(values: Mapping[str, Any], known: Sequence[str], path: Path) -> None:
    unknown = next((key for key in values if key not in known), None)
    if unknown is not None:
        raise QuestionError(f"Unknown parameter: {_shown((*path, unknown))!r}", (*path, unknown))


def _wrong(path: Path, value: object, rule: str) -> QuestionError:
    said = "missing" if value is None else repr(value) if len(repr(value)) < 80 else f"a {type(value).__name__}"
    return QuestionError(f"{_shown(path)} is {said}: {rule}", path)


def _shown(path: Path) -> str:
    return ".".join(map(str, path))[:200]


def question_of(item: Any) -> Question:
    """Return one question.

    Raises:
        QuestionError: as for ``questions_of``.
    """
    (found,) = checked(questions_of([item]))
    return found


def written(answer: Answer) -> dict[str, Any]:
    """Return an answer as OpenAI's API has it."""
    if isinstance(answer, PredicateAnswer):
        return {"type": "predicate", "name": answer.name, "probability": answer.probability}
    if isinstance(answer, ChoiceAnswer):
        options = [{"value": each.value, "probability": each.probability} for each in answer.probabilities]
        head: dict[str, Any] = {"type": "choice", "name": answer.name, "choice": answer.choice}
        return {**head, "confidence": answer.confidence, "probabilities": options}
    if isinstance(answer, ScoreAnswer):
        levels = [
            {"label": each.label, "value": each.value, "probability": each.probability} for each in answer.probabilities
        ]
        head = {"type": "score", "name": answer.name, "score": answer.score}
        return {**head, "confidence": answer.confidence, "probabilities": levels}
    return {"type": "refusal", "name": answer.name}


def right_option(question: Question, answer: Any) -> int:
    """Return the number of the option that is the known answer to a question; of a predicate, 0 is yes.

    Raises:
        QuestionError: it is none of the options.
    """
    if isinstance(question, Predicate):
        options: Sequence[Any] = (True, False)
    else:
        options = question.values if isinstance(question, Choice) else question.labels
    for place, option in enumerate(options):
        if type(option) is type(answer) and option == answer:
            return place
    raise QuestionError(f"the answer {answer!r} is none of {', '.join(map(repr, options))}", ("answer",))


def log_probabilities(answer: Answer) -> tuple[float, ...] | None:
    """Return the logarithm of the probability of each option; None for a refusal."""
    if isinstance(answer, PredicateAnswer):
        found = [answer.probability, 1 - answer.probability]
    elif isinstance(answer, ChoiceAnswer | ScoreAnswer):
        found = [each.probability for each in answer.probabilities]
    else:
        return None
    return tuple(math.log(max(probability, sys.float_info.min)) for probability in found)
