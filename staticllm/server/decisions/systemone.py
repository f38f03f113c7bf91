"""``/v1/systemone``: TypeSafe's API for typed questions about one state. Its errors have a form of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from staticllm.errors import ConfigError, PromptError
from staticllm.pipelines.decisions.answers import Answer, ChoiceAnswer, PredicateAnswer, Refusal, ScoreAnswer
from staticllm.pipelines.decisions.questions import (
    MAX_LEVELS,
    MAX_OPTIONS,
    MAX_QUESTIONS,
    Choice,
    Level,
    Option,
    Predicate,
    Question,
    QuestionError,
    Score,
)
from staticllm.server.answers.work import is_proactive
from staticllm.server.decisions.run import decided
from staticllm.server.endpoint import Answer as Run
from staticllm.server.endpoint import ApiCall, guarded, parsed_json
from staticllm.server.http.errors import SERVER, ApiError, json_response
from staticllm.server.http.limits import read_body
from staticllm.server.models.served import ServedModel
from staticllm.server.state import ServerState

PATH = "/v1/systemone"
LATEST = "jev-latest"
"""The name for the server's own model, which every client may send."""
Where = tuple[str | int, ...]
_ANY = "Which of them fits best?"
_HOW = "Which level fits best?"


def systemone(state: ServerState) -> Run:
    """Return the function of the route."""

    async def run(request: Request) -> Response:
        return await guarded(state, request, _answer(ApiCall(state, request)))

    run.__name__ = "systemone"
    return run


async def _answer(call: ApiCall) -> Response:
    settings = call.state.settings
    if call.request.headers.get("content-type", "").startswith("multipart/"):
        raise ApiError(415, "this model reads no images: send JSON", code="unsupported_media_type")
    data = await read_body(call.request, settings.max_body, settings.body_seconds)
    try:
        values = await call.state.workers.run(lambda: parsed_json(data))
    except ApiError as error:
        raise _invalid(("body",), error.message, "json_invalid") if error.status == 400 else error from None
    state, questions = _read(values)
    model = _model_of(call, values.get("model"))
    ids = list(questions)
    try:
        found = await decided(call, model, state, list(questions.values()), is_proactive(call, model))
    except QuestionError as error:
        raise _invalid(_where(error.path, values["questions"]), str(error)) from None
    except (PromptError, ConfigError) as error:
        raise ApiError(400, str(error)) from None
    if any(isinstance(answer, Refusal) for answer in found.answers):  # this API has no answer that says so
        raise ApiError(500, "the model's logits are not finite", kind=SERVER, code="numerical_error")
    given = values["questions"]
    answers = {each: _shown(answer, given[each]) for each, answer in zip(ids, found.answers, strict=True)}
    usage = {"input_tokens": found.usage.input_tokens, "output_tokens": 0, "x_cached_tokens": found.usage.cached_tokens}
    return json_response({"model": model.spec.name, "answers": answers, "usage": usage})


def _model_of(call: ApiCall, name: object) -> ServedModel:
    if not isinstance(name, str) or not name:
        raise _invalid(("body", "model"), "must be the name of a model")
    hub = call.state.hub
    return hub.find(None if name == LATEST and LATEST not in hub.models else name, "chat")


def _read(values: Mapping[str, Any]) -> tuple[object, dict[str, Question]]:
    """Return the state and the questions of a body.

    Raises:
        ApiError: one is missing or has a wrong form (422).
    """
    if values.get("assets"):
        raise ApiError(415, "this model reads no images: leave assets out", code="unsupported_media_type")
    state = values.get("state")
    if not isinstance(state, str | dict | list):
        raise _invalid(("body", "state"), "must be a text, an object or a list")
    asked = values.get("questions")
    if not isinstance(asked, dict) or not asked:
        raise _invalid(("body", "questions"), "must be an object with at least one question")
    if len(asked) > MAX_QUESTIONS:
        raise _invalid(("body", "questions"), f"{len(asked)} questions, at most {MAX_QUESTIONS}")
    return state, {name: _question(item, ("body", "questions", name)) for name, item in asked.items()}


def _question(item: Any, where: Where) -> Question:
    if not isinstance(item, dict):
        raise _invalid(where, "must be an object")
    kind = item.get("type")
    criteria = item.get("criteria")
    said = item.get("instructions")
    instructions = None if said is None else _text(said, (*where, "instructions"))
    for key in item:
        if key not in ("type", "instructions", "criteria") and not key.startswith("x_"):
            raise _invalid((*where, key), "unknown field", "extra_forbidden")
    if kind == "noul":
        return _predicate(instructions, criteria, where)
    here = (*where, "criteria")
    if kind == "choice":
        if not isinstance(criteria, dict) or not 1 <= len(criteria) <= MAX_OPTIONS:
            raise _invalid(here, f"must be an object with 2 to {MAX_OPTIONS} options")
        options = [
            Option(name, None if more is None else _text(more, (*here, name))) for name, more in criteria.items()
        ]
        return Choice(instructions or _ANY, options)
    if kind == "score":
        if not isinstance(criteria, list) or not 1 <= len(criteria) <= MAX_LEVELS:
            raise _invalid(here, f"must be a list of 2 to {MAX_LEVELS} levels")
        return Score(instructions or _HOW, [Level(_text(each, (*here, place))) for place, each in enumerate(criteria)])
    raise _invalid((*where, "type"), "must be noul, choice or score; this model reads no images")


def _predicate(instructions: str | None, criteria: Any, where: Where) -> Predicate:
    if criteria is not None and not isinstance(criteria, dict):
        raise _invalid((*where, "criteria"), "must be an object with true, false or both")
    found = {} if criteria is None else criteria
    if set(found) - {"true", "false"}:
        raise _invalid((*where, "criteria"), "has other keys than true and false")
    texts = {key: _text(value, (*where, "criteria", key)) for key, value in found.items() if value is not None}
    if instructions is None and not texts:
        raise _invalid(where, "needs instructions or criteria")
    if instructions is not None:
        return Predicate(instructions, None, texts.get("true"), texts.get("false"))
    if "true" in texts:
        return Predicate(texts["true"], None, None, texts.get("false"))
    return Predicate(f"not: {texts['false']}", None, None, texts["false"])


def _text(value: Any, where: Where) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, dict | list):
        return json.dumps(value, ensure_ascii=False)
    raise _invalid(where, "must be a text, an object or a list")


def _shown(answer: Answer, question: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(answer, PredicateAnswer):
        return {"type": "noul", "noul": answer.probability}
    if isinstance(answer, ChoiceAnswer):
        options = {str(each.value): each.probability for each in answer.probabilities}
        return {"type": "choice", "choice": answer.choice, "probabilities": options, "confidence": answer.confidence}
    assert isinstance(answer, ScoreAnswer)
    return {
        "type": "score",
        "score": answer.score,
        "legend": {str(place): level for place, level in enumerate(question["criteria"])},
        "probabilities": {str(each.value): each.probability for each in answer.probabilities},
        "confidence": answer.confidence,
    }


def _where(path: str, given: Mapping[str, Mapping[str, Any]]) -> Where:
    """Return where a fault is in the body: questions have ids here, and options are criteria by their names."""
    head, *rest = path.split(".")
    if head != "questions" or not rest:
        return ("body", "state" if head == "input" else head)
    name = list(given)[int(rest[0])]
    found: list[str | int] = ["body", "questions", name]
    for part in rest[1:]:
        if part in ("if_true", "if_false"):
            found += ["criteria", part.removeprefix("if_")]
        elif part in ("choices", "levels"):
            found.append("criteria")
        elif part.isdecimal():
            criteria = given[name].get("criteria")
            found.append(list(criteria)[int(part)] if isinstance(criteria, dict) else int(part))
        elif part == "instructions":
            found.append(part)
    return tuple(found)


def _invalid(where: Where, message: str, kind: str = "value_error") -> ApiError:
    return ApiError(422, message, code="invalid_value", where=where, detail_type=kind)
