"""``/v1/audio/transcriptions`` and ``/v1/audio/translations``: recordings become text or subtitles."""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field
from starlette.datastructures import UploadFile
from starlette.responses import PlainTextResponse, Response

from staticllm.pipelines.speech.subtitles import Layout, word_times, written
from staticllm.pipelines.speech.whisper_config import FALL_BACK
from staticllm.server.answers.fields import IgnoredFields, Text
from staticllm.server.answers.stream import ChunkStream
from staticllm.server.answers.work import TierFields, is_proactive
from staticllm.server.endpoint import ApiCall
from staticllm.server.http.errors import ApiError, json_response
from staticllm.server.models.served import ServedModel
from staticllm.server.openai.speech_turn import Heard, SpeechTurn

Format = Literal["json", "text", "srt", "verbose_json", "vtt"]
TIMED = ("srt", "verbose_json", "vtt")
MAX_PROMPT_CHARS = 1 << 16
ENGLISH = "en"


class TranslationRequest(IgnoredFields, TierFields):
    """The fields of a request to write in English what is said in ``file``. In a form all values are text."""

    model_config = ConfigDict(title="TranslationRequest", strict=False)

    model: Text | None = None
    prompt: str | None = Field(None, max_length=MAX_PROMPT_CHARS)
    response_format: Format = "json"
    temperature: float | None = Field(None, ge=0, le=1)
    temperatures: Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(min_length=1, max_length=16)] | None = (
        Field(None, alias="temperatures[]")
    )
    no_speech_threshold: float | None = Field(None, ge=0, le=1)
    logprob_threshold: float | None = Field(None, ge=-1e6, le=0)
    compression_ratio_threshold: float | None = Field(None, ge=0, le=1e6)


class TranscriptionRequest(TranslationRequest):
    """The fields of a request to write what is said in ``file``. ``chunking_strategy`` has no effect."""

    model_config = ConfigDict(title="TranscriptionRequest", strict=False)

    language: Text | None = None
    timestamp_granularities: Annotated[list[Literal["segment", "word"]], Field(max_length=2)] | None = Field(
        None, alias="timestamp_granularities[]"
    )
    stream: bool = False
    chunking_strategy: Any = None


async def translations(call: ApiCall, body: TranslationRequest, file: UploadFile) -> Response:
    """Write in English what is said."""
    return await _respond(call, body, file, {"task": "translate"})


async def transcriptions(call: ApiCall, body: TranscriptionRequest, file: UploadFile) -> Response:
    """Write what is said."""
    granularities = body.timestamp_granularities or []
    if granularities and body.response_format != "verbose_json":
        raise ApiError(
            400, f"timestamp_granularities with response_format {body.response_format!r}: give verbose_json",
            param="timestamp_granularities",
        )  # fmt: skip
    if body.stream and body.response_format not in ("json", "text"):
        raise ApiError(400, f"stream with response_format {body.response_format!r}: give json", param="response_format")
    asked: dict[str, Any] = {} if body.language is None else {"language": body.language.lower()}
    return await _respond(call, body, file, asked | ({"word_timestamps": True} if "word" in granularities else {}))


async def _respond(call: ApiCall, body: TranslationRequest, file: UploadFile, asked: dict[str, Any]) -> Response:
    """Answer in the request's turn. A turn that is not handed over to a stream ends here, however the request ends."""
    model = call.state.hub.find(body.model, "speech")
    turn = SpeechTurn(call, model, is_proactive(call, model, body.service_tier))
    is_handed_over = False
    try:
        await call.connected(turn.begin())
        if "word_timestamps" in asked:
            _check_has_words(model)
        await call.connected(turn.read(file))
        options = {**_options(body, model), **_of_model(model, asked)}
        if body.response_format == "verbose_json" and model.speech.get_generation_config().no_speech_threshold is None:
            options.setdefault("no_speech_threshold", 1.0)  # no probability is larger; the answer has it
        await turn.submit(options)
        if isinstance(body, TranscriptionRequest) and body.stream:
            response: Response = ChunkStream(call, _events(turn), turn.close)
            is_handed_over = True
            return response
        heard = await call.connected(turn.heard())
        task = "translate" if "task" in asked else "transcribe"
        return await call.state.workers.run(lambda: _answer(body, model, heard, task))
    finally:
        if not is_handed_over:
            await turn.close()


def _check_has_words(model: ServedModel) -> None:
    """Raise ``ApiError`` if the model was loaded without the program that finds words."""
    if not model.speech.has_words:
        name = model.spec.name
        raise ApiError(
            400, f"timestamp_granularities has 'word', and {name!r} was loaded without: serve it with "
            f"-p {name}:WORD_TIMESTAMPS=YES, or leave 'word' out",
            param="timestamp_granularities", code="unsupported_parameter",
        )  # fmt: skip


def _options(body: TranslationRequest, model: ServedModel) -> dict[str, Any]:
    """Return the options of ``StaticWhisperPipeline.submit``. As in OpenAI's API, temperature 0 rises while text is not good."""
    if body.temperature is not None and body.temperatures is not None:
        raise ApiError(400, "temperature and temperatures[] are both given: leave one of them out", param="temperature")
    options: dict[str, Any] = {"return_timestamps": body.response_format in TIMED, "word_timestamps": False}
    if body.prompt:
        options["initial_prompt"] = body.prompt
    given = {name: getattr(body, name) for name in FALL_BACK if getattr(body, name) is not None}
    if body.temperature:
        given["temperatures"] = (body.temperature,)
    elif body.temperature == 0 and not _begins_greedily(model):
        given["temperatures"] = FALL_BACK["temperatures"]
    return options | given


def _begins_greedily(model: ServedModel) -> bool:
    """Return whether the first of the model's own temperatures is 0."""
    config = model.speech.get_generation_config()
    return config.temperatures[0] == 0 if config.temperatures else not config.do_sample


def _of_model(model: ServedModel, asked: dict[str, Any]) -> dict[str, Any]:
    """Return language and task. A model that knows English only takes none; clients that name English get what they ask for."""
    is_multilingual = model.speech.get_generation_config().is_multilingual
    if is_multilingual or asked.get("language") != ENGLISH:
        return asked
    return {name: value for name, value in asked.items() if name != "language"}


async def _events(turn: SpeechTurn) -> AsyncGenerator[list[dict[str, Any]], None]:
    """Yield the events of a stream: text as it is certain, and all of it at the end."""
    has_text = False
    async for text in turn.texts():
        delta = text if has_text else text.lstrip()
        has_text = has_text or bool(delta)
        if delta:
            yield [{"type": "transcript.text.delta", "delta": delta}]
    heard = await turn.heard()
    yield [{"type": "transcript.text.done", "text": _text_of(heard), "usage": _usage(heard)}]


def _answer(body: TranslationRequest, model: ServedModel, heard: Heard, task: str) -> Response:
    if body.response_format == "text":
        return PlainTextResponse(_text_of(heard) + "\n")
    if body.response_format in ("srt", "vtt"):
        return PlainTextResponse(written(heard.results, body.response_format, Layout(duration=heard.end)))
    if body.response_format == "json":
        return json_response({"text": _text_of(heard), "usage": _usage(heard)})
    parts: dict[str, Any] = {
        "task": task,
        "language": heard.results.language,
        "duration": round(heard.end, 3),
        "text": _text_of(heard),
    }
    granularities = (isinstance(body, TranscriptionRequest) and body.timestamp_granularities) or ["segment"]
    if "word" in granularities:
        parts["words"] = word_times(heard.results.words or [])
    if "segment" in granularities:
        parts["segments"] = _segments(model, heard)
    return json_response({**parts, "usage": _usage(heard)})


def _text_of(heard: Heard) -> str:
    return str(heard.results).strip()


def _usage(heard: Heard) -> dict[str, Any]:
    return {"type": "duration", "seconds": round(heard.seconds, 3)}


def _segments(model: ServedModel, heard: Heard) -> list[dict[str, Any]]:
    """Return the segments as OpenAI has them. ``seek`` is that of the window, in hundredths of a second; temperature, mean
    log-probability and the probability of no speech are the window's, too."""
    found: list[dict[str, Any]] = []
    for window in heard.windows:
        for segment in window.segments:
            text = model.speech.decode(segment.tokens)
            data = text.encode()
            found.append(
                {
                    "id": len(found),
                    "seek": round(window.start * 100),
                    "start": round(segment.start, 3),
                    "end": round(window.seconds if segment.end is None else segment.end, 3),
                    "text": text,
                    "tokens": list(segment.tokens),
                    "temperature": window.temperature,
                    "avg_logprob": window.avg_logprob,
                    "compression_ratio": len(data) / len(zlib.compress(data)) if data else 0.0,
                    "no_speech_prob": window.no_speech_prob,
                }
            )
    return found
