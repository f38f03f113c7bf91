"""What a request asks of a model, as options of ``StaticLLMPipeline.submit``."""

from __future__ import annotations

from typing import Any

from staticllm.server.answers.fields import SamplingFields
from staticllm.server.http.errors import ApiError

UNLIMITED = 2**64 - 1
MAX_ID_DIGITS = 10
"""Digits of a token id; Python refuses to read numbers with thousands of them."""
_SAME = ("presence_penalty", "frequency_penalty", "repetition_penalty", "dry_multiplier", "dry_base", "dry_allowed_length",
         "dry_penalty_last_n", "dry_sequence_breakers", "ignore_eos")  # fmt: skip
_DRAWING = ("top_p", "top_k", "min_p", "typical_p", "xtc_probability", "xtc_threshold", "mirostat", "mirostat_tau",
            "mirostat_eta")  # fmt: skip
_NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "typical_p": 1.0, "xtc_probability": 0.0, "mirostat": 0}
_ALONE = ("xtc_threshold", "mirostat_tau", "mirostat_eta")
"""Fields that say how another one works, and nothing by themselves."""


def sampling_options(body: SamplingFields, index: int = 0) -> dict[str, Any]:
    """Return the options of answer ``index``, without the number of tokens.

    ``temperature`` 0 is greedy. Without it the model's own config decides, unless another field asks for sampling.

    The number and the form of the answers are those of the request, whatever the model's own config has.

    Raises:
        ApiError: fields contradict each other.
    """
    if body.repeat_penalty is not None and body.repetition_penalty is not None:
        raise ApiError(400, "repeat_penalty and repetition_penalty are the same: give one", param="repeat_penalty")
    if body.is_search and body.stream:
        raise ApiError(
            400, "num_beams with stream: the best beam is known at the end; leave one out", param="num_beams"
        )
    if body.has_usage_chunk and not body.stream:
        raise ApiError(400, "stream_options.include_usage without stream: leave it out", param="stream_options")
    options: dict[str, Any] = {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    if body.repeat_penalty is not None:
        options["repetition_penalty"] = body.repeat_penalty
    if body.stop:
        texts = {body.stop} if isinstance(body.stop, str) else set(body.stop) - {""}
        options |= {"stop_strings": texts} if texts else {}
    if body.logit_bias:
        options["logit_bias"] = _bias(body.logit_bias)
    if body.min_tokens is not None:
        options["min_new_tokens"] = body.min_tokens
    options |= {
        "num_beams": body.num_beams or 1,
        "num_return_sequences": body.n if body.is_search else 1,
        "echo": False,
    }
    return {**options, **_drawing(body, index), "priority": body.priority}


def _drawing(body: SamplingFields, index: int) -> dict[str, Any]:
    """Return the options that draw tokens; none of them if the answer is greedy."""
    given = {name: value for name in _DRAWING if (value := getattr(body, name)) is not None}
    if given.get("top_k") == -1:  # as other servers: all tokens
        given["top_k"] = 0
    for name, value in (("top_p", 0), ("min_p", 1)):
        if given.get(name) == value:  # only the most likely token is left, which the engine calls top_k=1
            del given[name]
            given["top_k"] = 1
    options: dict[str, Any] = {} if body.seed is None else {"rng_seed": _seed(body.seed, index)}
    if body.temperature == 0 or body.is_search:
        return {**options, "do_sample": False}
    asks = any(name not in _ALONE and value != _NEUTRAL[name] for name, value in given.items())
    if body.temperature is None and not asks:
        return options
    if body.temperature is not None:
        options["temperature"] = body.temperature
    return {**options, **given, "do_sample": True}


def _seed(seed: int, index: int) -> int:
    """Return the seed of answer ``index``. A negative one is random, as in llamacpp; 0 is for the engine."""
    return 0 if seed < 0 else (seed or 2**63) + index


def _bias(given: dict[str, float]) -> dict[int, float]:
    if not all(key.isdecimal() and len(key) <= MAX_ID_DIGITS for key in given):
        raise ApiError(400, "the keys of logit_bias are token ids, as text", param="logit_bias")
    return {int(key): value for key, value in given.items()}


def max_new_tokens(limit: int | None) -> dict[str, Any]:
    """Return the option of a number of tokens: None for the model's own, -1 for as many as fit."""
    if limit is None:
        return {}
    return {"max_new_tokens": UNLIMITED if limit == -1 else limit}
