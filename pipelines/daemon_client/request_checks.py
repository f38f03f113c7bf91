"""Checks the requests that come from another process: the daemon trusts no client."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from staticllm.adapters.adapter_set import MAX_ALPHA
from staticllm.errors import ConfigError, shown

from ..engine.request import MAX_PRIORITY, EngineRequest
from ..generation.options.extra import MAX_BIAS, MAX_TOKEN
from ..generation.options.resolve import LONGEST_DRAFT
from ..generation.options.table import MAX_BEAMS, OPTIONS, SAMPLING, SEQUENCES, SamplingParams

MAX_SEQUENCE_TOKENS = 1 << 18
MAX_STOP_CHARACTERS = 1 << 16
MAX_NUMBER = 1 << 64
_OPTIONS = {
    "dry_breakers": "dry_sequence_breakers",
    "logit_bias": "logit_bias",
    "bad_words": "bad_words or bad_words_ids",
}
"""The options of a program that set the sequences of tokens of a request."""
_WHOLE = {
    "seed": ("rng_seed", 0, OPTIONS["rng_seed"].most),
    "num_sequences": ("num_return_sequences or best_of", 1, OPTIONS["num_return_sequences"].most),
    "min_new_tokens": ("min_new_tokens", 0, OPTIONS["min_new_tokens"].most),
    "priority": ("priority", -MAX_PRIORITY, MAX_PRIORITY),
}
"""The whole numbers of a request: the options of a program that set them, and their bounds."""


def check_fields(request: EngineRequest, num_adapters: int) -> None:
    """Check the bounds of a request to a model with ``num_adapters`` adapters that can be chosen; its types are known.

    Raises:
        ConfigError: a field is out of its bounds.
    """
    for name, (option, least, most) in _WHOLE.items():
        value = getattr(request, name)
        if not least <= value <= most:
            raise ConfigError(f"{option}={shown(value)}: must be a whole number from {least} to {most}")
    longest = request.max_new_tokens
    if longest is not None and longest < 1:
        raise ConfigError(f"max_new_tokens={longest!r}: must be a whole number of at least 1")
    if request.grammar is not None:
        request.grammar.check()
    _check_rules(request)
    check_scales(request.adapters, num_adapters)
    _check_stop_strings(request)
    _check_beams(request)
    _check_drafts(request)
    for moment in (request.arrival, request.deadline if request.deadline is not None else 0.0):
        if not math.isfinite(moment):
            raise ConfigError("arrival and deadline must be finite numbers")
    for field in fields(SamplingParams):
        value = getattr(request.sampling, field.name)
        if field.name in SEQUENCES:
            _check_sequences(field.name, value)
        elif not abs(value) <= MAX_NUMBER:
            raise ConfigError(f"{field.name}={shown(value)}: must be at most {MAX_NUMBER}")
    for name, row in SAMPLING.items():
        row.check(name, getattr(request.sampling, name), request.sampling.do_sample)


def check_scales(scales: Sequence[float], num_adapters: int) -> None:
    """Check the factors of the adapters of a request or a snapshot.

    Raises:
        ConfigError: they are not as many as the model has adapters, or one is not a finite number.
    """
    if scales and len(scales) != num_adapters:
        raise ConfigError(f"the factors of {len(scales)} adapters: the model was loaded with {num_adapters}")
    if not all(abs(scale) <= MAX_ALPHA for scale in scales):
        raise ConfigError(f"adapters={scales!r:.200}: must be numbers up to {MAX_ALPHA:g}")


def _check_stop_strings(request: EngineRequest) -> None:
    """Check the texts that end beams; those of other answers are found by the client. Raises ``ConfigError``."""
    texts = request.stop_strings
    if texts and request.beams is None:
        raise ConfigError("stop_strings without num_beams: they are found where the text is, in the program")
    if not all(texts) or sum(map(len, texts)) > MAX_STOP_CHARACTERS:
        raise ConfigError(f"stop_strings must be texts of at most {MAX_STOP_CHARACTERS} characters together")


def _check_beams(request: EngineRequest) -> None:
    """Check the parameters of a beam search. Raises ``ConfigError``."""
    beams = request.beams
    if beams is None:
        return
    if not 2 <= beams.num_beams <= MAX_BEAMS:
        raise ConfigError(f"num_beams={shown(beams.num_beams)}: must be a whole number from 2 to {MAX_BEAMS}")
    if beams.num_beam_groups < 1 or beams.num_beams % beams.num_beam_groups:
        raise ConfigError(f"num_beam_groups={shown(beams.num_beam_groups)}: must divide num_beams={beams.num_beams}")
    size = beams.no_repeat_ngram_size
    if size is not None and size < 1:
        raise ConfigError(f"no_repeat_ngram_size={shown(size)}: must be a whole number of at least 1")
    for name in ("diversity_penalty", "length_penalty"):
        OPTIONS[name].check(name, getattr(beams, name))


def _check_drafts(request: EngineRequest) -> None:
    """Check how the tokens of a request are drafted. Raises ``ConfigError``."""
    drafts = request.drafts
    if drafts is None:
        return
    for name in ("max_ngram_size", "max_tokens"):
        if not 0 <= (value := getattr(drafts, name)) <= LONGEST_DRAFT:
            raise ConfigError(f"{name}={shown(value)}: must be a whole number from 0 to {LONGEST_DRAFT}")
    if not 0 <= drafts.confidence <= 1:
        raise ConfigError(f"confidence={drafts.confidence!r}: must be a number from 0 to 1")


def _check_rules(request: EngineRequest) -> None:
    """Check Whisper's rules. Raises ``ConfigError``."""
    rules = request.rules
    if rules is None:
        return
    for name in ("begin_suppress_tokens", "suppress_tokens", "allowed_tokens"):
        tokens = getattr(rules, name)
        if len(tokens) > MAX_SEQUENCE_TOKENS or not all(0 <= token <= MAX_TOKEN for token in tokens):
            raise ConfigError(
                f"{name}={shown(tokens)}: must be at most {MAX_SEQUENCE_TOKENS} token ids from 0 to {MAX_TOKEN}"
            )
    for name, least in (("eos", 0), ("begin", 1), ("max_initial_index", 0)) if rules.timestamps is not None else ():
        if not least <= (value := getattr(rules.timestamps, name)) <= MAX_TOKEN:
            raise ConfigError(f"timestamps.{name}={shown(value)}: must be a whole number from {least} to {MAX_TOKEN}")


def _check_sequences(name: str, rows: Sequence[tuple[Any, ...]]) -> None:
    """Check rows of token ids, or of a token id and a number.

    Raises:
        ConfigError: one is neither, or there are too many.
    """
    if sum(map(len, rows)) > MAX_SEQUENCE_TOKENS:
        raise ConfigError(f"{_OPTIONS[name]} has more than {MAX_SEQUENCE_TOKENS} tokens")
    for row in rows:
        ids, bias = (row[:1], row[1:]) if name == "logit_bias" else (row, ())
        if not ids or not all(0 <= id <= MAX_TOKEN for id in ids):
            what = ", and a number" if name == "logit_bias" else ""
            raise ConfigError(f"{_OPTIONS[name]}={shown(row)}: must be token ids from 0 to {MAX_TOKEN}{what}")
        if not all(abs(number) <= MAX_BIAS for number in bias):
            raise ConfigError(
                f"logit_bias={shown(row)}: must be a token id and a number from {-MAX_BIAS:g} to {MAX_BIAS:g}"
            )
