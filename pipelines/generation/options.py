"""Turns an ``openvino_genai.GenerationConfig`` and keyword overrides into checked options."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import openvino_genai as genai

from staticllm.adapters.adapter_set import AdapterUse
from staticllm.config import whole
from staticllm.errors import ConfigError, GenerationConfigError
from staticllm.pipelines.generation.genai_adapters import adapter_uses
from staticllm.pipelines.generation.sampling_params import SamplingParams

UNLIMITED = 2**64 - 1
MAX_SEQUENCES = 128
_NAMES = tuple(
    name
    for name in dir(genai.GenerationConfig)
    if not name.startswith(("_", "is_")) and not callable(getattr(genai.GenerationConfig, name))
)
_SUPPORTED = frozenset(
    [
        "max_new_tokens",
        "max_length",
        "min_new_tokens",
        "eos_token_id",
        "stop_token_ids",
        "stop_strings",
        "include_stop_str_in_output",
        "ignore_eos",
        "echo",
        "apply_chat_template",
        "logprobs",
        "do_sample",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "repetition_penalty",
        "presence_penalty",
        "frequency_penalty",
        "rng_seed",
        "num_return_sequences",
        "adapters",
    ]
)
_INERT_WITHOUT_BEAMS = frozenset(
    ["num_beam_groups", "diversity_penalty", "length_penalty", "no_repeat_ngram_size", "stop_criteria"]
)
"""Options of beam search. Without beams they have no effect, here as in GenAI."""
_DEFAULTS = genai.GenerationConfig()
"""Every option that is neither supported nor inert belongs to another decoding method and must have its default."""


@dataclass(frozen=True)
class GenerationOptions:
    """The checked options of one request, with the names and meanings of ``openvino_genai.GenerationConfig``.

    ``max_new_tokens`` and ``max_length`` are None if they do not limit the answer. ``stop_token_ids`` includes the
    ``eos_token_id``; with ``ignore_eos`` it is empty. ``adapters`` are None for those of the pipeline.
    """

    sampling: SamplingParams
    max_new_tokens: int | None
    max_length: int | None
    min_new_tokens: int
    stop_token_ids: frozenset[int]
    stop_strings: frozenset[str]
    include_stop_str_in_output: bool
    echo: bool
    apply_chat_template: bool
    num_return_sequences: int = 1
    adapters: tuple[AdapterUse, ...] | None = None

    def max_tokens_after(self, prompt_len: int) -> int | None:
        """Return how many tokens these options allow after a prompt of ``prompt_len`` tokens; None if they set no limit."""
        if self.max_new_tokens is not None:
            return self.max_new_tokens
        return None if self.max_length is None else self.max_length - prompt_len

    def check_room(self, prompt_len: int) -> None:
        """Check that ``max_length`` leaves room after a prompt of ``prompt_len`` tokens.

        Raises:
            GenerationConfigError: it leaves none.
        """
        if self.max_length is not None and self.max_length <= prompt_len:
            raise GenerationConfigError(
                f"max_length={self.max_length} leaves no room after a prompt of {prompt_len} tokens: "
                "raise it, or leave it out and set max_new_tokens"
            )


def limit_of(options: GenerationOptions, prompt_len: int, max_seq_len: int | None) -> int | None:
    """Return how many tokens may be generated after a prompt of ``prompt_len`` tokens; None without a limit.

    ``max_seq_len`` limits the tokens of prompt and answer together, as in NPUW; None if a longer sequence does not end an answer.
    """
    asked = options.max_tokens_after(prompt_len)
    if max_seq_len is None:
        return asked
    return max_seq_len - prompt_len if asked is None else min(asked, max_seq_len - prompt_len)


def copy_config(config: genai.GenerationConfig) -> genai.GenerationConfig:
    """Return a copy of ``config``; the ``copy`` module cannot copy GenAI's class."""
    copied = genai.GenerationConfig()
    for name in _NAMES:
        setattr(copied, name, getattr(config, name))
    return copied


def resolve(config: genai.GenerationConfig, overrides: Mapping[str, Any]) -> GenerationOptions:
    """Return the checked options of a request: those of ``config``, overridden by the keyword arguments of ``generate``.

    Raises:
        GenerationConfigError: a name is unknown, a value is impossible, or the decoding method is not supported.
        AdapterError: an adapter is unknown, or its file is missing or damaged.
    """
    for name in overrides:
        if name not in _NAMES:
            near = difflib.get_close_matches(str(name), _NAMES, n=1)
            raise GenerationConfigError(f"unknown option {name!r}" + (f": did you mean {near[0]!r}?" if near else ""))
    merged = {name: overrides.get(name, getattr(config, name)) for name in _NAMES}
    try:
        return _checked(merged)
    except GenerationConfigError:
        raise
    except ConfigError as error:
        raise GenerationConfigError(str(error)) from None


def _checked(options: Mapping[str, Any]) -> GenerationOptions:
    # num_beams comes first, because it may be the cause of other options' errors
    num_beams_first = sorted(options.items(), key=lambda item: item[0] != "num_beams")
    for name, value in num_beams_first:
        if name in _SUPPORTED or (name in _INERT_WITHOUT_BEAMS and options["num_beams"] == 1):
            continue
        is_off = name == "num_assistant_tokens" and value in (None, 0)
        if not is_off and value != getattr(_DEFAULTS, name):
            raise GenerationConfigError(
                f"{name}={value!r} is not supported: decoding is greedy or multinomial; "
                f"leave {name} at {getattr(_DEFAULTS, name)!r}"
            )
    if not isinstance(options["stop_token_ids"], (set, frozenset, list, tuple)):
        raise GenerationConfigError(f"stop_token_ids={options['stop_token_ids']!r}: must be a set of token ids")
    stop_ids = {whole("stop_token_ids", token, 0) for token in options["stop_token_ids"]}
    if options["eos_token_id"] != -1:
        stop_ids.add(whole("eos_token_id", options["eos_token_id"], 0))
    max_new_tokens = _limit(options, "max_new_tokens", 0 if options["echo"] else 1)
    min_new_tokens = whole("min_new_tokens", options["min_new_tokens"], 0)
    if max_new_tokens is not None and min_new_tokens > max_new_tokens:
        raise GenerationConfigError(f"min_new_tokens={min_new_tokens} is more than max_new_tokens={max_new_tokens}")
    return GenerationOptions(
        sampling=_sampling(options),
        max_new_tokens=max_new_tokens,
        max_length=_limit(options, "max_length", 1),
        min_new_tokens=min_new_tokens,
        stop_token_ids=frozenset() if options["ignore_eos"] else frozenset(stop_ids),
        stop_strings=_stop_strings(options["stop_strings"]),
        include_stop_str_in_output=bool(options["include_stop_str_in_output"]),
        echo=bool(options["echo"]),
        apply_chat_template=bool(options["apply_chat_template"]),
        num_return_sequences=_num_sequences(options),
        adapters=adapter_uses(options["adapters"]),
    )


def _num_sequences(options: Mapping[str, Any]) -> int:
    count = whole("num_return_sequences", options["num_return_sequences"], 1, MAX_SEQUENCES)
    if count > 1 and not options["do_sample"]:
        raise GenerationConfigError(
            f"num_return_sequences={count} with do_sample=False: greedy answers are all the same; set do_sample=True"
        )
    return count


def _sampling(options: Mapping[str, Any]) -> SamplingParams:
    do_sample = bool(options["do_sample"])
    top_k = options["top_k"]
    return SamplingParams(
        do_sample=do_sample,
        temperature=_number(options, "temperature", 0.0, 1e6, least_allowed=not do_sample),
        top_k=whole("top_k", top_k, 0, UNLIMITED) % UNLIMITED,
        top_p=_number(options, "top_p", 0.0, 1.0, least_allowed=not do_sample),
        min_p=_number(options, "min_p", 0.0, 1.0, most_allowed=not do_sample),
        repetition_penalty=_number(options, "repetition_penalty", 1e-3, 1e3),
        presence_penalty=_number(options, "presence_penalty", -2.0, 2.0),
        frequency_penalty=_number(options, "frequency_penalty", -2.0, 2.0),
        rng_seed=whole("rng_seed", options["rng_seed"], 0, UNLIMITED),
        wants_logprobs=bool(options["logprobs"]),
    )


def _number(
    options: Mapping[str, Any],
    name: str,
    least: float,
    most: float,
    least_allowed: bool = True,
    most_allowed: bool = True,
) -> float:
    value = options[name]
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    is_edge = (number == least and not least_allowed) or (number == most and not most_allowed)
    if not least <= number <= most or is_edge:
        bounds = (
            f"{'from' if least_allowed else 'more than'} {least:g}, {'up to' if most_allowed else 'less than'} {most:g}"
        )
        raise GenerationConfigError(f"{name}={value!r}: must be a number {bounds}")
    return number


def _limit(options: Mapping[str, Any], name: str, least: int) -> int | None:
    number = whole(name, options[name], least, UNLIMITED)
    return None if number == UNLIMITED else number


def _stop_strings(value: object) -> frozenset[str]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, (list, tuple, set, frozenset)) or not all(isinstance(s, str) and s for s in strings):
        raise GenerationConfigError(f"stop_strings={value!r}: must be a set of non-empty strings")
    return frozenset(strings)
