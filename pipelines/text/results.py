"""Turns the answers of a call into the result objects that ``generate`` returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import add

from staticllm.pipelines.text.output_processor import RequestOutput
from staticllm.pipelines.text.tokenization import Form
from staticllm.results import DecodedResults, EncodedResults, GeneratedText

Results = GeneratedText | DecodedResults | EncodedResults


def results_of(form: Form, outputs: Sequence[RequestOutput], decode: Callable[[list[int]], str]) -> Results:
    """Return ``GeneratedText`` for a str, ``EncodedResults`` for token ids, else ``DecodedResults``; the order is kept."""
    metrics = reduce(add, (output.metrics for output in outputs))
    scores = [output.score for output in outputs]
    reasons = [output.finish_reason for output in outputs]
    if form == "tokens":
        return EncodedResults([output.echo + output.tokens for output in outputs], scores, reasons, metrics)
    texts = [(decode(output.echo) if output.echo else "") + output.text for output in outputs]
    results = DecodedResults(texts, [output.tokens for output in outputs], scores, reasons, metrics)
    return GeneratedText.of(results) if form == "text" else results
