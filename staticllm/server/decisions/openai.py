"""``/v1/decisions``: OpenAI's API for typed questions about one state."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field
from starlette.responses import Response

from staticllm.errors import PromptTooLongError
from staticllm.pipelines.decisions.answers import Decision
from staticllm.pipelines.decisions.questions import MAX_QUESTIONS, QuestionError
from staticllm.pipelines.decisions.written import questions_of, state_of, written
from staticllm.server.answers.fields import IgnoredFields, Text
from staticllm.server.answers.work import TierFields, is_proactive
from staticllm.server.decisions.run import decided
from staticllm.server.endpoint import ApiCall
from staticllm.server.http.errors import ApiError, json_response, prompt_too_long


class DecisionsRequest(IgnoredFields, TierFields):
    """The body of a request for decisions. ``questions`` are of the types ``predicate``, ``choice`` and ``score``."""

    model_config = ConfigDict(title="DecisionsRequest")

    model: Text
    input: Any = None
    questions: Annotated[list[Any], Field(fail_fast=True, min_length=1, max_length=MAX_QUESTIONS)]
    prompt_cache_options: Any = None


async def decisions(call: ApiCall, body: DecisionsRequest) -> Response:
    """Answer typed questions about one state."""
    model = call.state.hub.find(body.model, "chat")
    try:
        state = state_of(body.input)
        questions = questions_of(body.questions)
        found = await decided(call, model, state, questions, is_proactive(call, model, body.service_tier))
    except QuestionError as error:
        raise ApiError(400, str(error), param=error.path or None, code="invalid_value") from None
    except PromptTooLongError as error:
        raise prompt_too_long(error, "input") from None
    return json_response(
        {"answers": [written(answer) for answer in found.answers], "model": model.spec.name, "usage": _usage(found)}
    )


def _usage(found: Decision) -> dict[str, Any]:
    usage = found.usage
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {
            "cached_tokens": usage.cached_tokens,
            "cache_write_tokens": usage.state_tokens - usage.cached_tokens,
        },
        "output_tokens": 0,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.input_tokens,
    }
