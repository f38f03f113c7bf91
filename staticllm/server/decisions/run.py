"""Runs a decision on a served model: in its turn, cancelled with its client."""

from __future__ import annotations

from collections.abc import Sequence

from staticllm.pipelines.decisions.answers import Decision
from staticllm.pipelines.decisions.questions import Question
from staticllm.server.endpoint import ApiCall
from staticllm.server.http.errors import ApiError
from staticllm.server.models.served import ServedModel
from staticllm.server.telemetry import current_record


async def decided(
    call: ApiCall, model: ServedModel, state: object, questions: Sequence[Question], is_proactive: bool
) -> Decision:
    """Return the answers of a model, which is loaded for them if necessary. If the client goes, the rest does not run.

    Raises:
        ApiError: too many requests wait (429), or the model is in another process (400).
        QuestionError, PromptError: as for ``StaticLLMPipeline.decide``.
    """
    priority = -1 if is_proactive else 0

    async def admitted() -> Decision:
        async with call.state.hub.using(model):
            if model.local_engine is None:
                raise ApiError(
                    400, f"the model {model.spec.name!r} runs in another process, which answers no questions"
                )
            admission = model.admission_of(is_proactive)
            await admission.enter(call.client, priority=priority)
            try:
                with call.state.metrics.running.labels(model.spec.name).track_inprogress():
                    handle = await call.state.workers.run(
                        lambda: model.chat.submit_decision(state, questions, priority=priority),  # type: ignore[arg-type]
                        lambda handle: handle.cancel(),
                        owner=model.spec.name,
                    )
                    try:
                        found = await handle
                    finally:
                        handle.cancel()
            finally:
                admission.leave(call.client)
            current_record().prompt_tokens += found.usage.input_tokens
            call.state.metrics.prompt_tokens.labels(model.spec.name).inc(found.usage.input_tokens)
            return found

    return await call.connected(admitted())
