"""What answers say about themselves in OpenAI's and llamacpp's forms: usage, reasons, log-probabilities, progress and timings."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import Any

from staticllm.core import FinishReason
from staticllm.pipelines.engine.engine import Engine
from staticllm.pipelines.generation.sampler import TopTokens
from staticllm.pipelines.text.detokenizer import INCOMPLETE
from staticllm.pipelines.text.handle import GenerationHandle
from staticllm.pipelines.text.output_processor import RequestOutput, TextDelta
from staticllm.server.answers.answers import Answers, Part
from staticllm.server.models.served import ServedModel

_NAMES = {FinishReason.STOP: "stop", FinishReason.TOOL_CALL: "tool_calls"}


def finish_reason(reason: FinishReason) -> str:
    """Return the name of a reason. ``length`` is that of every answer that was cut off, also by a server that stops."""
    return next((name for known, name in _NAMES.items() if reason is known), "length")


@dataclass(frozen=True)
class SpelledToken:
    """A token as a part of its answer: its text and bytes, and the number of the answer's characters before it.

    ``is_text``: whether it consists of whole characters. The bytes are None if they are those of another token as well, which are
    a part of a character. ``top``: the most likely tokens at its place.
    """

    text: str
    bytes: bytes | None
    offset: int
    logprob: float
    is_text: bool = True
    top: tuple[SpelledToken, ...] = ()

    def entry(self) -> dict[str, Any]:
        """Return the token as an entry of ``logprobs.content`` of a chat."""
        return {**self._named(), "top_logprobs": [token._named() for token in self.top]}

    def _named(self) -> dict[str, Any]:
        spelled = None if self.bytes is None else list(self.bytes)
        return {"token": self.text, "logprob": self.logprob, "bytes": spelled}


CONTEXT = 8
WINDOW = 64
CONTINUATION, CONTINUES = 0xC0, 0x80
"""The bits by which UTF-8 tells that a byte continues a character, and what they are then."""
LEAST_LOGPROB = -9999.0
"""What OpenAI's API gives for tokens that are less likely; JSON has no infinite numbers."""


class Speller:
    """Spells the tokens of one answer, in their order: their bytes together are those of the text that they make.

    A token may be a part of a character, of which ``decode`` makes no text, and its text may depend on the tokens before it:
    that of a first token has no space before it in vocabularies of SentencePiece. ``tokens`` has the bytes of each token.
    """

    def __init__(self, decode: Callable[[list[int]], str], tokens: Sequence[bytes]) -> None:
        self._decode = decode
        self._tokens = tokens
        self._window: list[int] = []
        self._window_text = ""
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_chars = 0

    def spell(self, delta: TextDelta) -> list[SpelledToken]:
        """Return the tokens of an increment; none for those of the prompt, which have no log-probabilities.

        Of one that a stop string cut, they have the part that is in the text.
        """
        tops = chain(delta.tops, repeat(()))
        found = [
            replace(self._spelled(token, logprob), top=self._alternatives(top))
            for token, logprob, top in zip(delta.tokens, delta.logprobs, tops, strict=False)
        ]
        cut = delta.cut
        if cut is not None:
            logprob = max(cut.logprob, LEAST_LOGPROB)
            found.append(SpelledToken(cut.text, cut.text.encode(), self._num_chars, logprob))
        return found

    def _alternatives(self, top: TopTokens) -> tuple[SpelledToken, ...]:
        """Return the most likely tokens, each spelled by itself."""
        found = []
        for token, logprob in top:
            own = self._tokens[token] if token < len(self._tokens) else b""
            text = own.decode() if own and is_text(own) else self._decode([token])
            found.append(SpelledToken(text, own or None, 0, max(logprob, LEAST_LOGPROB)))
        return tuple(found)

    def _spelled(self, token: int, logprob: float) -> SpelledToken:
        text = self._text_of(token)
        own = self._tokens[token] if token < len(self._tokens) else b""
        is_whole = is_text(own)
        text = text if is_whole else self._decode([token])
        is_known = bool(own) or INCOMPLETE not in text
        if own[:1] and own[0] & CONTINUATION != CONTINUES:  # it begins a character, so the one before is not completed
            self._num_chars += len(self._characters.decode(b"", final=True))
        offset = self._num_chars
        spelled = text.encode() if is_whole else own
        self._num_chars += len(self._characters.decode(spelled))
        return SpelledToken(text, spelled if is_known else None, offset, max(logprob, LEAST_LOGPROB), is_whole)

    def _text_of(self, token: int) -> str:
        self._window.append(token)
        before = self._window_text
        self._window_text = self._decode(self._window)
        found = self._window_text
        text = found[len(before) :] if found.startswith(before) else self._decode([token])
        if len(self._window) > WINDOW:
            self._window = self._window[-CONTEXT:]
            self._window_text = self._decode(self._window)
        return text


def is_text(spelled: bytes) -> bool:
    """Return whether bytes are whole characters."""
    try:
        spelled.decode()
    except UnicodeDecodeError:
        return False
    return True


def speller_of(model: ServedModel) -> Callable[[], Speller]:
    """Return what makes a speller for each answer of a model that is loaded. The first call takes long: use a thread."""
    decode = model.chat.get_tokenizer().decode
    tokens = model.vocabulary.tokens
    return lambda: Speller(decode, tokens)


POLL_SECONDS = 0.05
"""Seconds between two looks at a prompt that runs."""


@dataclass(frozen=True)
class PromptProgress:
    """Of ``total`` tokens of a prompt, ``cached`` were found in the prefix cache, and ``processed``, those included, have run."""

    total: int
    cached: int
    processed: int
    seconds: float

    def as_dict(self) -> dict[str, int]:
        """Return it as llamacpp's ``prompt_progress``."""
        milliseconds = round(self.seconds * 1e3)
        return {"total": self.total, "cache": self.cached, "processed": self.processed, "time_ms": milliseconds}


async def with_progress(
    engine: Engine | None, answers: Answers
) -> AsyncGenerator[Sequence[Part | PromptProgress], None]:
    """Yield the batches of answers, and before the first one the progress of its prompt whenever that has changed, the last time
    when all of it has run."""
    begin = time.perf_counter()
    last = PromptProgress(len(answers.first_handle.prompt_tokens), 0, -1, 0.0)
    async with contextlib.aclosing(answers.batches()) as batches:
        first = asyncio.ensure_future(anext(batches))
        try:
            while not first.done():
                found = _progress_of(engine, answers.first_handle, begin)
                if found is not None and found.processed != last.processed:
                    last = found
                    yield [found]
                await asyncio.wait({first}, timeout=POLL_SECONDS)
        finally:
            first.cancel()
            await asyncio.gather(first, return_exceptions=True)
        batch = first.result()
        if last.processed < last.total:
            cached = answers.first_handle.num_cached or 0
            yield [PromptProgress(last.total, cached, last.total, time.perf_counter() - begin)]
        yield batch
        async for batch in batches:
            yield batch


def _progress_of(engine: Engine | None, handle: GenerationHandle, begin: float) -> PromptProgress | None:
    """Return how far the prompt of a request is; None once it has ended, or if its engine is in another process."""
    for request in () if engine is None else engine.progress().requests:
        if request.id == handle.request_id:
            seconds = time.perf_counter() - begin
            processed = min(max(request.num_computed, request.num_cached), request.num_prompt)
            return PromptProgress(request.num_prompt, request.num_cached, processed, seconds)
    return None


def timings_of(output: RequestOutput) -> dict[str, float]:
    """Return how long the parts of an answer took, as llamacpp's ``timings``.

    ``prompt_n`` counts the tokens of the prompt that ran, ``cache_n`` those that the prefix cache had; ``prompt_ms`` is the time
    of their device calls, which other requests may share. ``predicted_ms`` is the time from the first token to the last.
    """
    num_run = output.metrics.get_num_input_tokens() - output.num_cached
    num_predicted = len(output.token_times)
    prompt_ms = sum(output.device_seconds[:1]) * 1e3
    predicted_ms = (output.token_times[-1] - output.token_times[0]) * 1e3 if output.token_times else 0.0
    return {
        "cache_n": output.num_cached,
        "prompt_n": num_run,
        "prompt_ms": prompt_ms,
        "prompt_per_token_ms": _ratio(prompt_ms, num_run),
        "prompt_per_second": _ratio(num_run * 1e3, prompt_ms),
        "predicted_n": num_predicted,
        "predicted_ms": predicted_ms,
        "predicted_per_token_ms": _ratio(predicted_ms, num_predicted - 1),
        "predicted_per_second": _ratio((num_predicted - 1) * 1e3, predicted_ms),
    }


def _ratio(amount: float, by: float) -> float:
    return amount / by if by > 0 else 0.0
