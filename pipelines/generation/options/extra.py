"""The options of ``generate`` beyond ``GenerationConfig``: their names, defaults and checks, with those of tools."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import openvino_genai as genai

from staticllm.config import whole
from staticllm.errors import GenerationConfigError, shown

from .table import OPTIONS, SAMPLING, TokenSequences, read_by, readings

DRY_SEQUENCE_BREAKERS = ("\n", ":", '"', "*")
"""The breakers of llamacpp."""
MAX_BIAS = 1e4
MAX_TOP_LOGPROBS = 20
"""OpenAI's limit."""
MAX_TOKEN = (1 << 31) - 1
NUMBERS = tuple(name for name in SAMPLING if not hasattr(genai.GenerationConfig, name))
"""The options that are numbers; the fields of ``SamplingParams`` that GenAI does not have."""


def _bias(name: str, value: object) -> list[tuple[int, float]]:
    """Return the bias of each token; that of one which ``False`` or -inf forbids is -inf."""
    if value is None:
        return []
    if not isinstance(value, Mapping):
        raise GenerationConfigError(f"logit_bias={shown(value)}: must be a dict from token id to number")
    bias: list[tuple[int, float]] = []
    for key, amount in value.items():
        token = whole(
            "a token of logit_bias", int(key) if isinstance(key, str) and key.isdecimal() else key, 0, MAX_TOKEN
        )
        if amount is False or amount == -math.inf:
            bias.append((token, -math.inf))
        elif isinstance(amount, bool) or not isinstance(amount, (int, float)) or not abs(amount) <= MAX_BIAS:
            raise GenerationConfigError(
                f"logit_bias[{token}]={shown(amount)}: must be a number from {-MAX_BIAS:g} to {MAX_BIAS:g}, "
                "or False to forbid the token"
            )
        else:
            bias.append((token, float(amount)))
    return bias


def _finite_bias(name: str, value: object) -> tuple[tuple[int, float], ...]:
    return tuple((token, amount) for token, amount in _bias(name, value) if amount != -math.inf)


def _texts(name: str, value: object) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(texts, (list, tuple, set, frozenset)) or not all(
        isinstance(text, str) and text for text in texts
    ):
        raise GenerationConfigError(f"{name}={shown(value)}: must be a list of non-empty strings")
    check_characters(name, texts)
    return tuple(sorted(set(texts)))


def check_characters(name: str, texts: Iterable[str]) -> None:
    """Check that the texts of an option consist of whole characters, since no answer has halves.

    Raises:
        GenerationConfigError: one has half of a surrogate pair.
    """
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = text[error.start]
            raise GenerationConfigError(f"{name} has half of a surrogate pair, {half!r}: leave it out") from None


def _suffix(name: str, value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise GenerationConfigError(f"{name}={shown(value)}: must be a text, or None")
    check_characters(name, () if value is None else (value,))
    return value


def _sequences(name: str, value: object) -> TokenSequences:
    rows = [] if value is None else value
    if not isinstance(rows, (list, tuple)) or not all(isinstance(row, (list, tuple)) and row for row in rows):
        raise GenerationConfigError(f"{name}={shown(value)}: must be a list of non-empty lists of token ids")
    return tuple(tuple(whole(f"a token of {name}", token, 0, MAX_TOKEN) for token in row) for row in rows)


def _forbidden(name: str, value: object, others: Mapping[str, Any]) -> TokenSequences:
    """Return the sequences that cannot be chosen; a token that ``logit_bias`` forbids is one of them."""
    tokens = [token for token, amount in _bias("logit_bias", others["logit_bias"]) if amount == -math.inf]
    return (*((token,) for token in tokens), *_sequences(name, value))


def _processors(name: str, value: object) -> tuple[Any, ...]:
    found = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for each in found:
        if isinstance(each, type) or not (callable(each) or callable(getattr(each, "process", None))):
            raise GenerationConfigError(
                f"{name}={shown(each)}: must be an object with process(logits), or a callable "
                "(input_ids, scores) -> scores, or a list of them"
            )
    return found


@dataclass(frozen=True)
class ToolOptions:
    """What a request says about tools."""

    tools: tuple[Mapping[str, Any], ...] = ()
    """Definitions of functions as OpenAI's API takes them."""
    choice: str = "auto"
    """``auto``, ``none``, ``required`` or ``function``; then ``name`` is the function that must be called."""
    name: str = ""
    parse: bool | None = None
    """None where the tools decide."""
    extra_context: Mapping[str, Any] = field(default_factory=dict)
    """More variables of the template."""
    is_parallel: bool = True
    """Whether an answer may have several calls; else it ends with its first one."""

    @property
    def is_call_required(self) -> bool:
        """Whether the answer must be a call."""
        return self.choice in ("required", "function")


def _tool_options(name: str, value: Any, given: Mapping[str, Any]) -> ToolOptions:
    tools = value or ()
    parse = given["parse_tools"]
    context = given["extra_context"] or {}
    if not isinstance(tools, (list, tuple)) or not all(map(is_tool, tools)):
        raise GenerationConfigError(
            f"{name}={shown(tools)}: must be a list of {{'type': 'function', 'function': {{'name': …, 'parameters': …}}}}"
        )
    if parse not in (None, True, False):
        raise GenerationConfigError(f"parse_tools={shown(parse)}: must be True, False or None")
    parallel = given["parallel_tool_calls"]
    if parallel not in (None, True, False):
        raise GenerationConfigError(f"parallel_tool_calls={shown(parallel)}: must be True, False or None")
    if not isinstance(context, Mapping):
        raise GenerationConfigError(
            f"extra_context={shown(context)}: must be a dict of variables for the chat template"
        )
    names = [str(function_of(tool)["name"]) for tool in tools]
    if twice := [name for index, name in enumerate(names) if name in names[:index]]:
        raise GenerationConfigError(
            f"tools has two functions named {shown(twice[0])}: a call says the name only; leave one out, or rename it"
        )
    choice, called = _tool_choice(given["tool_choice"], names)
    is_parallel = parallel is None or bool(parallel)  # 0 is False, too
    return ToolOptions(tuple(tools), choice, called, None if parse is None else bool(parse), dict(context), is_parallel)


def _tool_choice(value: object, names: Sequence[str]) -> tuple[str, str]:
    if value is None or value in ("auto", "none"):
        return str(value or "auto"), ""
    wanted = value.get("function") if isinstance(value, Mapping) else None
    name = wanted.get("name") if isinstance(wanted, Mapping) else None
    is_other = isinstance(value, Mapping) and value.get("type", "function") != "function"
    if value != "required" and (is_other or not isinstance(name, str)):
        raise GenerationConfigError(
            f"tool_choice={shown(value)}: must be 'auto', 'none', 'required' or "
            "{'type': 'function', 'function': {'name': …}}"
        )
    if not names:
        raise GenerationConfigError(f"tool_choice={shown(value)} without tools: pass the functions as tools=[…]")
    if isinstance(name, str) and name not in names:
        raise GenerationConfigError(f"tool_choice names {shown(name)}: the tools are {', '.join(names)}")
    return ("function", name) if isinstance(name, str) else ("required", "")


@dataclass(frozen=True)
class ExtraOptions:
    """The checked options beyond GenAI's. ``bad_words`` and ``dry_sequence_breakers`` are texts, to be made tokens of."""

    numbers: Mapping[str, float] = field(default_factory=dict)
    """Fields of ``SamplingParams`` that were given."""
    logit_bias: tuple[tuple[int, float], ...] = read_by(_finite_bias, (), chooses=True)
    bad_words: tuple[str, ...] = read_by(_texts, (), chooses=True)
    bad_words_ids: TokenSequences = read_by(_forbidden, (), reads=("logit_bias",), chooses=True)
    dry_sequence_breakers: tuple[str, ...] = read_by(_texts, DRY_SEQUENCE_BREAKERS)
    logits_processors: tuple[Any, ...] = read_by(_processors, (), "logits_processor", chooses=True)
    choosing: tuple[str, ...] = ()
    """The names of all options that were given and change which token is chosen."""
    tool_options: ToolOptions = read_by(
        _tool_options,
        option="tools",
        reads=("tool_choice", "parallel_tool_calls", "parse_tools", "extra_context"),
        default_factory=ToolOptions,
    )
    suffix: str | None = read_by(_suffix, None)
    """The text after the answer, which a model with tokens for it fills in."""
    top_logprobs: int = read_by(lambda name, value: whole(name, value or 0, 0, MAX_TOP_LOGPROBS), 0)
    """The most likely tokens whose log-probabilities are told with each chosen one."""
    best_of: int = read_by(lambda name, value: OPTIONS[name].check(name, value or 0), 0)
    """The number of answers that are sampled, of which the most likely are returned; 0 for those that are returned."""


_ROWS = readings(ExtraOptions)
EXTRA_NAMES = tuple(dict.fromkeys((*NUMBERS, *(name for row in _ROWS.values() for name in row.options))))


def extra_options(given: Mapping[str, Any], do_sample: bool) -> ExtraOptions:
    """Return the checked options of ``given``, whose names are all in ``EXTRA_NAMES``.

    Raises:
        GenerationConfigError: a value is impossible, or options contradict each other.
    """
    numbers = {name: SAMPLING[name].check(name, given[name]) for name in NUMBERS if name in given}
    if numbers.get("mirostat") == 1:
        raise GenerationConfigError("mirostat=1: only version 2 is there; pass 2, or 0 to turn it off")
    _check_sampling(numbers, do_sample)
    found = {name: row.value(given) for name, row in _ROWS.items() if not given.keys().isdisjoint(row.options)}
    choosing = dict.fromkeys(name for row in _ROWS.values() if row.chooses for name in row.options)
    return ExtraOptions(
        numbers=numbers,
        choosing=(
            *(name for name in numbers if _is_changed(numbers, name) and not SAMPLING[name].has_beams),
            *(name for name in choosing if given.get(name) not in (None, {}, (), [])),
        ),
        **found,
    )


def _check_sampling(numbers: Mapping[str, float], do_sample: bool) -> None:
    changed = [name for name in numbers if _is_changed(numbers, name) and not SAMPLING[name].part_of]
    changed = [name for name in changed if SAMPLING[name].draws]
    if changed and not do_sample:
        name = changed[0]
        raise GenerationConfigError(
            f"{name}={shown(numbers[name])} with do_sample=False: greedy decoding draws nothing; set do_sample=True"
        )
    if "mirostat" in changed and len(changed) > 1:
        raise GenerationConfigError(
            f"mirostat=2 with {changed[0]}={shown(numbers[changed[0]])}: mirostat takes the place of other filters; "
            f"leave {changed[0]} out"
        )


def _is_changed(numbers: Mapping[str, float], name: str) -> bool:
    return name in numbers and numbers[name] != SAMPLING[name].default


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the function of a tool, which has the keys ``name``, ``description`` and ``parameters`` (a JSON schema)."""
    inner = tool.get("function")
    return inner if isinstance(inner, Mapping) else tool


def is_tool(value: object) -> bool:
    """Return whether ``value`` is the definition of a function: a mapping with a name, as it is or below ``function``."""
    if not isinstance(value, Mapping):
        return False
    function = function_of(value)
    parameters = function.get("parameters")
    name = function.get("name")
    return isinstance(name, str) and bool(name) and (parameters is None or isinstance(parameters, Mapping))
