"""Turns the answers of a call into the result objects that ``generate`` returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add

import openvino_genai as genai

from staticllm.pipelines.text.output_processor import RequestOutput
from staticllm.pipelines.text.tokenization import Form
from staticllm.results import DecodedResults, EncodedResults, GeneratedText

Results = GeneratedText | DecodedResults | EncodedResults


def results_of(
    form: Form,
    outputs: Sequence[RequestOutput],
    decode: Callable[[list[int]], str],
    parsers: Sequence[genai.Parser] = (),
    streamed: dict[str, object] | None = None,
) -> Results:
    """Return ``GeneratedText`` for one answer to a str, ``EncodedResults`` for token ids, else ``DecodedResults``, in order.

    As in GenAI, ``parsers`` run one after the other on each text, and go on from ``streamed``, what a ``TextParserStreamer`` made
    of the only answer; both are for texts only.

    Raises:
        Exception: a parser raised it.
    """
    metrics = reduce(add, (output.metrics for output in outputs))
    scores = [output.score for output in outputs]
    reasons = [output.finish_reason for output in outputs]
    messages = [output.message for output in outputs if output.message is not None]
    if form == "tokens":
        tokens = [output.echo + output.tokens for output in outputs]
        return EncodedResults(tokens, scores, reasons, metrics, messages)
    texts = [(decode(output.echo) if output.echo else "") + output.text for output in outputs]
    parsed = _parsed(texts, parsers, streamed)
    results = DecodedResults(texts, [output.tokens for output in outputs], scores, reasons, metrics, messages, parsed)
    return GeneratedText.of(results) if form == "text" and len(outputs) == 1 else results


def _parsed(
    texts: Sequence[str], parsers: Sequence[genai.Parser], streamed: dict[str, object] | None
) -> list[dict[str, object]]:
    if not parsers:
        return [] if streamed is None else [streamed]
    messages: list[dict[str, object]] = [{"content": text} for text in texts]
    if streamed is not None:
        messages[0] = {"content": texts[0], **streamed}
    for message in messages:
        for parser in parsers:
            parser.parse(message)
    return messages
