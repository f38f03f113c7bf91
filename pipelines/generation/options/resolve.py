"""Turns an ``openvino_genai.GenerationConfig`` and keyword overrides into checked options.

A config comes from the model's own file, or was derived from one. A keyword is what this request asks for, so its value is
always checked; a value of the config is checked only if it has an effect, as in GenAI.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import openvino_genai as genai

from staticllm.adapters.adapter_set import AdapterUse
from staticllm.config import whole
from staticllm.errors import ConfigError, GenerationConfigError, shown

from ..beam_search import BeamParams, StopCriteria
from ..drafts import DraftParams
from ..genai_adapters import adapter_uses
from ..grammar import Grammar
from .extra import EXTRA_NAMES, ExtraOptions, check_characters, extra_options
from .requested_grammar import CONFIG, KEYWORDS, requested_grammar
from .table import OPTIONS, SAMPLING, UNLIMITED, OptionRow, SamplingParams, read_by, readings

NAMES = tuple(
    name
    for name in dir(genai.GenerationConfig)
    if not name.startswith(("_", "is_")) and not callable(getattr(genai.GenerationConfig, name))
)
DEFAULTS = genai.GenerationConfig()
WIDE = ("temperature", "repetition_penalty", "diversity_penalty", "length_penalty")
"""Numbers that GenAI does not bound on one side or on both. Beyond the bounds of the table no token changes."""
DRAFTING = ("max_ngram_size", "num_assistant_tokens", "assistant_confidence_threshold")
DRAWING = ("temperature", "top_k", "top_p", "min_p")
MAX_STOP_TOKEN = 2**63 - 1
"""GenAI's type of a token id. An id that the model does not have ends nothing."""
LONGEST_DRAFT = 64
"""Larger values of the options of drafts count as this one: no call checks more."""
_STOP_CRITERIA: dict[str, StopCriteria] = {"early": "early", "heuristic": "heuristic", "never": "never"}
_APART = ("rng_seed", "no_repeat_ngram_size")
"""Rows of ``SamplingParams`` whose values mean something else in GenAI's config."""
_SAMPLED = tuple(name for name in SAMPLING if name in NAMES and name not in _APART)
_BEAMS = ("num_beam_groups", "diversity_penalty", "length_penalty", "no_repeat_ngram_size", "stop_criteria")
"""Options of beam search. Without beams they have no effect, here as in GenAI, except ``no_repeat_ngram_size`` as a keyword."""
_WITHOUT_BEAMS = {"do_sample": False, "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1}
"""The values that beam search needs of other options."""
_SINGLE = ("num_beams", "num_return_sequences")
"""Options that are 1 where tokens are drafted."""


def _count(name: str, value: object) -> int:
    return int(OPTIONS[name].check(name, value))


def _flag(name: str, value: object) -> bool:
    """Return a flag. As in GenAI, a whole number and None count as one, and text does not: "no" would be true."""
    if value is not None and not isinstance(value, (bool, int, np.bool_)):
        raise GenerationConfigError(f"{name}={shown(value)}: must be True or False")
    return bool(value)


def _limit(name: str, value: object, least: int = 1) -> int | None:
    number = whole(name, value, least, UNLIMITED)
    return None if number == UNLIMITED else number


def _new_tokens(name: str, value: object, others: Mapping[str, Any]) -> int | None:
    return _limit(name, value, 0 if _flag("echo", others["echo"]) else 1)


def _stop_ids(name: str, value: object, others: Mapping[str, Any]) -> frozenset[int]:
    found = _named_ids(name, value, others)
    return frozenset() if _flag("ignore_eos", others["ignore_eos"]) else found


def _ignored_ids(name: str, value: object, others: Mapping[str, Any]) -> frozenset[int]:
    return _named_ids(name, value, others) if others["ignore_eos"] else frozenset()


def _named_ids(name: str, value: object, others: Mapping[str, Any]) -> frozenset[int]:
    if not isinstance(value, (set, frozenset, list, tuple)):
        raise GenerationConfigError(f"{name}={shown(value)}: must be a set of token ids")
    found = {whole(name, token, 0, MAX_STOP_TOKEN) for token in value}
    eos = others["eos_token_id"]
    return frozenset(found if eos == -1 else {*found, whole("eos_token_id", eos, 0, MAX_STOP_TOKEN)})


def _stop_strings(name: str, value: object) -> frozenset[str]:
    strings = [value] if isinstance(value, str) else value
    if not isinstance(strings, (list, tuple, set, frozenset)) or not all(isinstance(s, str) and s for s in strings):
        raise GenerationConfigError(f"{name}={shown(value)}: must be a set of non-empty strings")
    check_characters(name, strings)
    return frozenset(strings)


def _sampling(name: str, value: object, others: Mapping[str, Any]) -> SamplingParams:
    do_sample = _flag(name, value)
    numbers = {each: SAMPLING[each].check(each, others[each], do_sample) for each in _SAMPLED}
    seed = others["rng_seed"]
    logprobs = others["logprobs"]
    return SamplingParams(
        do_sample=do_sample,
        rng_seed=0 if isinstance(seed, int) and seed < 0 else whole("rng_seed", seed, 0, UNLIMITED),  # random, like 0
        wants_logprobs=logprobs is True or (logprobs is not False and whole("logprobs", logprobs, 0, UNLIMITED) > 0),
        **cast(dict[str, Any], {**numbers, "top_k": int(numbers["top_k"]) % UNLIMITED}),
    )


def _num_sequences(name: str, value: object, others: Mapping[str, Any]) -> int:
    count = _count(name, value)
    best_of = others["best_of"]
    if best_of and (best_of < count or not others["do_sample"]):
        remedy = f"raise it to {count}" if best_of < count else "set do_sample=True"
        wrong = f"{name}={count}" if best_of < count else "do_sample=False"
        raise GenerationConfigError(
            f"best_of={best_of} with {wrong}: it samples at least as many answers as it returns; {remedy}"
        )
    num_beams = _count("num_beams", others["num_beams"])
    if num_beams > 1 and count > num_beams:
        raise GenerationConfigError(f"{name}={count} is more than num_beams={num_beams}: lower it")
    if count > 1 and num_beams == 1 and not others["do_sample"]:
        raise GenerationConfigError(
            f"{name}={count} with do_sample=False: greedy answers are all the same; set do_sample=True, or num_beams"
        )
    return count


def _beams(name: str, value: object, others: Mapping[str, Any]) -> BeamParams | None:
    """Return the parameters of a beam search, with GenAI's rules; None without one."""
    num_beams = _count(name, value)
    if num_beams == 1:
        return None
    groups = whole("num_beam_groups", others["num_beam_groups"], 1, num_beams)
    if num_beams % groups:
        raise GenerationConfigError(
            f"num_beams={num_beams} cannot be divided into num_beam_groups={groups} equal groups"
        )
    for other, needed in _WITHOUT_BEAMS.items():
        if others[other] != needed:
            raise GenerationConfigError(
                f"{other}={shown(others[other])} with num_beams={num_beams}: leave one of them out"
            )
    diversity = OPTIONS["diversity_penalty"].check("diversity_penalty", others["diversity_penalty"])
    if (diversity != 0.0) != (groups > 1):
        remedy = "set a penalty" if groups > 1 else "raise num_beam_groups"
        raise GenerationConfigError(f"diversity_penalty={diversity:g} with num_beam_groups={groups}: {remedy}")
    ngram = _limit("no_repeat_ngram_size", others["no_repeat_ngram_size"])
    criteria = getattr(others["stop_criteria"], "name", others["stop_criteria"])
    if not isinstance(criteria, str) or criteria.lower() not in _STOP_CRITERIA:
        raise GenerationConfigError(f"stop_criteria={shown(criteria)}: must be EARLY, HEURISTIC or NEVER")
    length_penalty = OPTIONS["length_penalty"].check("length_penalty", others["length_penalty"])
    return BeamParams(num_beams, groups, diversity, length_penalty, ngram, _STOP_CRITERIA[criteria.lower()])


def _drafts(name: str, value: object, others: Mapping[str, Any]) -> DraftParams | None:
    """Return how tokens are drafted, without what the pipeline adds; None if no option asks for drafts."""
    ngram_size = _count(name, value)
    max_tokens = _count("num_assistant_tokens", others["num_assistant_tokens"] or 0)  # may be None
    threshold = others["assistant_confidence_threshold"]
    confidence = OPTIONS["assistant_confidence_threshold"].check("assistant_confidence_threshold", threshold)
    asked = {each: given for each, given in ((name, value), *others.items()) if each in DRAFTING and given}
    for first, given in list(asked.items())[:1]:
        for single in _SINGLE:
            if others[single] != 1:
                raise GenerationConfigError(
                    f"{first}={shown(given)} with {single}={shown(others[single])}: drafts are for single answers; "
                    "leave one out"
                )
    if max_tokens and confidence:
        raise GenerationConfigError(
            f"num_assistant_tokens={max_tokens} with assistant_confidence_threshold={confidence:g}: a draft ends by its length "
            "or by its confidence; leave one out"
        )
    if asked and others["best_of"] > 1:
        raise GenerationConfigError(
            f"best_of={others['best_of']} with drafts: they are for single answers; leave one of them out"
        )
    found = DraftParams(min(ngram_size, LONGEST_DRAFT), min(max_tokens, LONGEST_DRAFT), confidence=confidence)
    return found if asked else None


def _parsers(name: str, value: object) -> tuple[genai.Parser, ...]:
    parsers = () if value is None else value
    if not isinstance(parsers, (list, tuple)) or not all(isinstance(parser, genai.Parser) for parser in parsers):
        raise GenerationConfigError(f"{name}={shown(value)}: must be a list of openvino_genai.Parser objects")
    return tuple(parsers)


def _adapters(name: str, value: Any) -> tuple[AdapterUse, ...] | None:
    return None if value is None else adapter_uses(value)


@dataclass(frozen=True)
class GenerationOptions:
    """The checked options of one request, with the names and meanings of ``openvino_genai.GenerationConfig``."""

    stop_token_ids: frozenset[int] = read_by(_stop_ids, reads=("eos_token_id", "ignore_eos"))
    """Include the ``eos_token_id``; with ``ignore_eos`` they end nothing, and are in ``ignored_token_ids``."""
    ignored_token_ids: frozenset[int] = read_by(
        _ignored_ids, option="stop_token_ids", reads=("eos_token_id", "ignore_eos")
    )
    drafts: DraftParams | None = read_by(_drafts, option=DRAFTING[0], reads=(*DRAFTING[1:], *_SINGLE, "best_of"))
    """None without drafts."""
    echo: bool = read_by(_flag)
    max_new_tokens: int | None = read_by(_new_tokens, reads=("echo",))
    """None if it does not limit the answer; so is ``max_length``."""
    min_new_tokens: int = read_by(_count)
    sampling: SamplingParams = read_by(_sampling, option="do_sample", reads=(*_SAMPLED, "rng_seed", "logprobs"))
    max_length: int | None = read_by(_limit)
    stop_strings: frozenset[str] = read_by(_stop_strings)
    include_stop_str_in_output: bool = read_by(_flag)
    apply_chat_template: bool = read_by(_flag)
    num_return_sequences: int = read_by(_num_sequences, reads=("num_beams", "do_sample", "best_of"))
    beams: BeamParams | None = read_by(_beams, option="num_beams", reads=(*_BEAMS, *_WITHOUT_BEAMS))
    """None without beam search."""
    parsers: tuple[genai.Parser, ...] = read_by(_parsers)
    adapters: tuple[AdapterUse, ...] | None = read_by(_adapters)
    """None for those of the pipeline."""
    grammar: Grammar | None = None
    """From a keyword (``KEYWORDS``) or ``structured_output_config``."""
    asks_for_drafts: bool = False
    """Whether a keyword asked for drafts."""
    extra: ExtraOptions = field(default_factory=ExtraOptions)
    """Options that GenAI does not have; those that choose tokens are also in ``sampling``, except texts, which have no token
    ids yet."""

    @property
    def num_sequences(self) -> int:
        """The number of answers that are generated; of ``best_of`` the ``num_return_sequences`` most likely are returned."""
        return max(self.num_return_sequences, self.extra.best_of)

    def max_tokens_after(self, prompt_len: int, max_seq_len: int | None) -> int | None:
        """Return how many tokens may be generated after a prompt of ``prompt_len`` tokens; None without a limit.

        ``max_seq_len`` limits prompt and answer together, as in NPUW; None if a longer sequence does not end an answer.

        Raises:
            GenerationConfigError: ``max_length`` leaves no room.
        """
        if self.max_length is not None and self.max_length <= prompt_len:
            raise GenerationConfigError(
                f"max_length={self.max_length} leaves no room after a prompt of {prompt_len} tokens: "
                "raise it, or leave it out and set max_new_tokens"
            )
        asked = self.max_new_tokens
        if asked is None and self.max_length is not None:
            asked = self.max_length - prompt_len
        room = None if max_seq_len is None else max_seq_len - prompt_len
        return min((limit for limit in (asked, room) if limit is not None), default=None)


@dataclass(frozen=True)
class FileOptions:
    """The options that a model's own ``generation_config.json`` sets, as the file at ``path`` was read. Others have defaults."""

    path: str
    values: Mapping[str, Any]

    def names_in(self, values: Mapping[str, Any]) -> list[str]:
        """Return the options that still have the file's values, which no default is."""
        return [name for name in NAMES if values[name] == self.values[name] != getattr(DEFAULTS, name)]


def values_of(config: genai.GenerationConfig) -> dict[str, Any]:
    """Return the value of each option of a config."""
    return {name: getattr(config, name) for name in NAMES}


def unreadable_field(text: str) -> str:
    """Return what is wrong with the field of a ``generation_config.json`` that GenAI cannot read; "" if none is found."""
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return ""
    for name, value in fields.items() if isinstance(fields, dict) else ():
        needed = _needed_type(name, value) if name in NAMES and value is not None else ""
        if needed:
            return f"{name}={shown(value)}: must be {needed}"
    return ""


def _needed_type(name: str, value: Any) -> str:
    """Return of which type a field must be, if ``value`` is of none that GenAI reads; it ignores most lists."""
    values = value if isinstance(value, list) else [value]
    are_whole = all(type(item) is int for item in values)
    is_list = isinstance(value, list)
    default = getattr(DEFAULTS, name)
    if name == "eos_token_id":
        return "" if are_whole else "a token id, or a list of them"
    if name == "num_assistant_tokens":
        return "" if are_whole and not is_list else "a whole number"
    if name == "stop_strings":
        return "a list of str" if is_list and not all(isinstance(item, str) for item in values) else ""
    if isinstance(default, bool):
        return "" if is_list or isinstance(value, bool) else "true or false"
    is_read = isinstance(value, (int, float)) and (isinstance(default, float) or not isinstance(value, bool))
    return "" if is_list or is_read or not isinstance(default, (int, float)) else "a number"


def in_effect(given: Mapping[str, Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the value of each option of a request, before it is checked.

    A value ``given`` by a config without effect in this request is replaced by the default, and one that a value of
    ``keywords`` leaves no room for is adapted to it.
    """
    merged = {name: keywords.get(name, value) for name, value in given.items()}

    def adapt(values: Mapping[str, Any]) -> None:
        merged.update({name: value for name, value in values.items() if name not in keywords})

    if _is_plainly(merged["num_beams"], 0):
        adapt({"num_beams": 1})
    if not merged["do_sample"]:
        adapt(defaults_of(DRAWING))
    if not merged["tree_depth"]:  # GenAI reads the width of a tree of drafts only with its depth
        adapt(defaults_of(["branching_factor"]))
    confidence = merged["assistant_confidence_threshold"]
    if not (_is_plainly(merged["num_beams"], 1) and _is_plainly(merged["num_return_sequences"], 1)):
        adapt(defaults_of(DRAFTING))
    elif merged["num_assistant_tokens"] or not (isinstance(confidence, (int, float)) and 0 <= confidence <= 1):
        adapt({"assistant_confidence_threshold": 0.0})
    if not _is_plainly(merged["max_new_tokens"], DEFAULTS.max_new_tokens):  # it has priority
        adapt(defaults_of(["max_length"]))
    adapt({name: _nearest(merged[name], OPTIONS[name]) for name in WIDE})
    if isinstance(merged["logprobs"], int):
        adapt({"logprobs": min(merged["logprobs"], 1)})
    if "min_new_tokens" not in keywords and isinstance(most := keywords.get("max_new_tokens"), int):
        merged["min_new_tokens"] = max(0, min(merged["min_new_tokens"], most))
    return merged


def _nearest(value: Any, bounds: OptionRow) -> Any:
    """Return a number within bounds. 0 and negative ones stay where only positive ones are possible, to be refused."""
    if not isinstance(value, (int, float)):
        return value
    if value > bounds.most:
        return bounds.most
    return bounds.least if value < bounds.least and (value > 0 or bounds.least < 0) else value


def defaults_of(names: Iterable[str]) -> dict[str, Any]:
    """Return the default of each of some options."""
    return {name: getattr(DEFAULTS, name) for name in names}


def _is_plainly(value: Any, number: int) -> bool:
    return isinstance(value, int) and value == number


def copy_config(config: genai.GenerationConfig) -> genai.GenerationConfig:
    """Return a copy of ``config``; the ``copy`` module cannot copy GenAI's class."""
    copied = genai.GenerationConfig()
    for name in NAMES:
        setattr(copied, name, getattr(config, name))
    return copied


def resolve(
    config: genai.GenerationConfig, overrides: Mapping[str, Any], file: FileOptions | None = None
) -> GenerationOptions:
    """Return the checked options of a request: those of ``config``, overridden by the keyword arguments of ``generate``.

    A value of ``config`` that has no effect in this request is not checked, as in GenAI; one of ``overrides`` always is.
    ``no_repeat_ngram_size`` in ``config`` has an effect only with beams, in ``overrides`` always. ``file`` holds the options that
    ``config`` has from the model's own file: those that contradict the others are left out.

    Raises:
        GenerationConfigError: a name is unknown, a value is impossible, or the decoding method is not supported.
        AdapterError: an adapter is unknown, or its file is missing or damaged.
    """
    for name, value in overrides.items():
        if name not in NAMES and name not in EXTRA_NAMES and name not in KEYWORDS:
            near = difflib.get_close_matches(str(name), (*NAMES, *EXTRA_NAMES, *KEYWORDS), n=1)
            raise GenerationConfigError(
                f"unknown option {shown(name)}" + (f": did you mean {near[0]!r}?" if near else "")
            )
        _check_plain(name, value)
    values = values_of(config)
    try:
        return _resolved(values, overrides)
    except GenerationConfigError as error:
        if file is None:
            raise
        wrong = error
    clashing = _clashing(values, overrides, file)
    if not clashing:
        raise wrong
    if _is_at_fault(file, clashing, overrides):
        raise GenerationConfigError(f"{file.path!r}: {wrong}; correct {' and '.join(clashing)} in this file")
    adapted = defaults_of(clashing)
    if "max_new_tokens" in clashing:  # without a limit it would be as wrong
        adapted["max_new_tokens"] = max(values["max_new_tokens"], overrides.get("min_new_tokens", 1))
    return _resolved({**values, **adapted}, overrides)


def _resolved(values: Mapping[str, Any], overrides: Mapping[str, Any], has_grammar: bool = True) -> GenerationOptions:
    """Return the checked options; without ``has_grammar`` without the grammar, which contradicts no other one."""
    merged = in_effect(values, overrides)
    given = {name: overrides[name] for name in EXTRA_NAMES if name in overrides}
    try:
        extra = extra_options(given, merged["do_sample"]) if given else ExtraOptions()
        options = _checked(merged, extra, _ngram_size(overrides, merged))
        is_asked = has_grammar and (merged[CONFIG] is not None or not KEYWORDS.keys().isdisjoint(overrides))
        return replace(
            options,
            grammar=requested_grammar(overrides, merged) if is_asked else None,
            asks_for_drafts=any(overrides.get(name) for name in DRAFTING),
        )
    except GenerationConfigError:
        raise
    except ConfigError as error:
        raise GenerationConfigError(str(error)) from None


def _is_possible(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> bool:
    """Return whether options can be had together."""
    try:
        _resolved(values, overrides, has_grammar=False)
    except ConfigError:
        return False
    return True


def _clashing(values: Mapping[str, Any], overrides: Mapping[str, Any], file: FileOptions) -> list[str]:
    """Return the options of a model's file that must be left out for the others. Raises if these are impossible anyway."""
    names = [name for name in file.names_in(values) if name not in overrides]
    kept = {**values, **defaults_of(names)}
    _resolved(kept, overrides)
    clashing = []
    for name in names:
        if _is_possible({**kept, name: values[name]}, overrides):
            kept[name] = values[name]
        else:
            clashing.append(name)
    return clashing


def _is_at_fault(file: FileOptions, clashing: Sequence[str], overrides: Mapping[str, Any]) -> bool:
    """Return whether options are impossible whatever a request says, because of one value or of several in the file."""
    sampling = {**defaults_of(NAMES), "do_sample": True}
    drawing = [name for name in clashing if name in DRAWING]
    if any(not _is_possible({**sampling, name: file.values[name]}, {}) for name in drawing):
        return True
    others = {**file.values, **defaults_of(name for name in overrides if name in NAMES)}
    return not _is_possible(file.values, {}) and not _is_possible(others, {})


def _check_plain(name: str, value: object) -> None:
    """Check that a value can be compared with others, which an array cannot."""
    try:
        is_plain = not getattr(value, "ndim", 0) and (value == 0) in (True, False) and bool(value) in (True, False)
    except Exception:  # of a caller's class
        is_plain = False
    if not is_plain:
        kind = type(value).__name__
        raise GenerationConfigError(f"{name}={shown(value)}: is a {kind}; pass a number, a str, a list or a dict")


def _ngram_size(overrides: Mapping[str, Any], options: Mapping[str, Any]) -> int:
    """Return the ``no_repeat_ngram_size`` of plain decoding; 0 for none."""
    if options["num_beams"] != 1:
        return 0
    return whole("no_repeat_ngram_size", overrides.get("no_repeat_ngram_size", 0), 0, UNLIMITED) % UNLIMITED


_ROWS = readings(GenerationOptions)
_SUPPORTED = {CONFIG, *(name for row in _ROWS.values() for name in row.options)}


def _checked(options: Mapping[str, Any], extra: ExtraOptions, ngram_size: int) -> GenerationOptions:
    if options["num_beams"] != 1 and extra.choosing:
        raise GenerationConfigError(
            f"{extra.choosing[0]} with num_beams={shown(options['num_beams'])}: beams are chosen by the model's own "
            "probabilities; leave one of them out"
        )
    for name, value in options.items():
        if name not in _SUPPORTED and value != getattr(DEFAULTS, name):
            raise GenerationConfigError(
                f"{name}={shown(value)} is not supported: decoding is greedy, multinomial or beam search; "
                f"leave {name} at {getattr(DEFAULTS, name)!r}"
            )
    given = {**options, "best_of": extra.best_of}
    found = GenerationOptions(**{name: row.value(given) for name, row in _ROWS.items()}, extra=extra)
    sampling = replace(
        found.sampling,
        wants_logprobs=found.sampling.wants_logprobs or extra.best_of > 0 or extra.top_logprobs > 0,
        num_top_logprobs=extra.top_logprobs,
        no_repeat_ngram_size=ngram_size,
        logit_bias=extra.logit_bias,
        bad_words=extra.bad_words_ids,
        **cast(dict[str, Any], extra.numbers),
    )
    if found.max_new_tokens is not None and found.min_new_tokens > found.max_new_tokens:
        raise GenerationConfigError(
            f"min_new_tokens={found.min_new_tokens} is more than max_new_tokens={found.max_new_tokens}"
        )
    return replace(found, sampling=sampling)
