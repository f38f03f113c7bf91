"""From answers to what ``generate`` returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

from staticllm.metrics import PerfMetrics
from staticllm.pipelines.text.output_processor import Answer
from staticllm.pipelines.text.tokenization import Form
from staticllm.results import DecodedResults, EncodedResults, GeneratedText


@dataclass(frozen=True)
class Outcome:
    """One prompt and its answer. ``echo`` are the prompt's tokens if they are part of the answer."""

    answer: Answer
    metrics: PerfMetrics
    echo: list[int]


def results_of(form: Form, outcomes: list[Outcome], decode: Callable[[list[int]], str]) -> Any:
    """``GeneratedText`` for a str, ``EncodedResults`` for tokens, else ``DecodedResults``."""
    metrics = reduce(add, (outcome.metrics for outcome in outcomes))
    answers = [outcome.answer for outcome in outcomes]
    tokens = [answer.tokens for answer in answers]
    scores = [answer.score for answer in answers]
    reasons = [answer.finish_reason for answer in answers]
    if form == "tokens":
        return EncodedResults([o.echo + o.answer.tokens for o in outcomes], scores, reasons, metrics)
    texts = [(decode(o.echo) if o.echo else "") + o.answer.text for o in outcomes]
    results = DecodedResults(texts, tokens, scores, reasons, metrics)
    return GeneratedText.of(results) if form == "text" else results
