"""What a request asks of a model: the fields that all APIs fill, and the options of ``StaticLLMPipeline.submit`` made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel

from staticllm.errors import ConfigError, shown
from staticllm.pipelines.generation.options.table import SAMPLING, UNLIMITED, ZERO_SEED, Api, http_fields
from staticllm.pipelines.scheduling.interface import PROACTIVE_PRIORITY
from staticllm.server.http.errors import ApiError
from staticllm.server.models.served import ModelSpec

MAX_ID_DIGITS = 10
"""Digits of a token id; Python refuses to read numbers with thousands of them."""
_GREEDY = {"top_p": 0, "min_p": 1}
"""Values with which only the most likely token is left, which the engine calls ``top_k=1``."""


@dataclass(frozen=True)
class AnswerFields:
    """What a request says about its answers, whatever its API calls it.

    Attributes:
        numbers: The rows of the table of options that it has.
        stop: Texts that end an answer.
        logit_bias: Numbers by token id, as text.
        more: Other options by the pipeline's names.
        num_answers: How many answers are returned.
        num_beams: The beams that find them; 1 for none.
        max_tokens: Tokens of an answer: None for the model's own number, -1 for as many as fit.
        json_schema: What the answer must satisfy.
        wants_logprobs: Whether each token has its log-probability.
        num_top_logprobs: The most likely tokens whose log-probabilities each token has.
        is_chat: Whether the chat template applies and the answer is parsed.
        tools: Functions that the model may call.
        tool_choice: ``auto``, ``none``, ``required`` or a function, as OpenAI's API has it.
        parallel_tool_calls: Whether an answer may have several calls; None for the default.
        context: Variables of the chat template.
        is_truncated: Whether a prompt that is too long loses its middle.
    """

    numbers: Mapping[str, float] = field(default_factory=dict)
    stop: str | Sequence[str] | None = None
    logit_bias: Mapping[str, float] = field(default_factory=dict)
    more: Mapping[str, Any] = field(default_factory=dict)
    num_answers: int = 1
    num_beams: int = 1
    max_tokens: int | None = None
    json_schema: Mapping[str, Any] | None = None
    wants_logprobs: bool = False
    num_top_logprobs: int = 0
    is_chat: bool = True
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    context: Mapping[str, Any] = field(default_factory=dict)
    is_truncated: bool = False


@dataclass(frozen=True)
class Ask:
    """One handle that a request asks for: a prompt with its options.

    ``priority`` orders the requests of its client. ``is_proactive``: its class of work. ``num_beams``: the sequences of the
    answer, for which it needs places; more than one is a beam search, whose tokens come at its end, and which finds up to
    ``num_outputs`` answers. ``is_by_token``: each token is an increment of its own, also if several are ready, because their
    texts have places in the answer.
    """

    prompt: Any
    options: Mapping[str, Any]
    priority: int = 0
    num_beams: int = 1
    is_by_token: bool = False
    is_proactive: bool = False
    num_outputs: int = 1

    @classmethod
    def of(cls, prompt: Any, asked: AnswerFields, index: int = 0, priority: int = 0, is_proactive: bool = False) -> Ask:
        """Return the ask for answer ``index``.

        Raises:
            ApiError: fields contradict each other.
        """
        num_outputs = asked.num_answers if asked.num_beams > 1 else 1
        options = options_of(asked, index)
        return cls(prompt, options, priority, asked.num_beams, asked.wants_logprobs, is_proactive, num_outputs)

    @property
    def engine_priority(self) -> int:
        """The priority in the engine, where all clients are: below 0 for proactive requests, else 0."""
        return min(PROACTIVE_PRIORITY, self.priority) if self.is_proactive else 0

    @property
    def is_search(self) -> bool:
        """Whether the answer is found by beam search."""
        return self.num_beams > 1


def schema_of(kind: str, schema: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return what a ``response_format`` of OpenAI's kinds demands of an answer; None for any text.

    Raises:
        ApiError: it is ``json_schema`` without a schema.
    """
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if schema is None:
        raise ApiError(
            400, "response_format of type json_schema needs json_schema.schema", param="response_format.json_schema"
        )
    return schema


def numbers_of(body: BaseModel, api: Api) -> dict[str, float]:
    """Return the rows of the table of options that a body has.

    Raises:
        ApiError: it has one by two names.
    """
    found: dict[str, float] = {}
    names: dict[str, str] = {}
    for name, option in http_fields(api).items():
        value = getattr(body, name)
        if value is None:
            continue
        if option in found:
            raise ApiError(400, f"{name} and {names[option]} are the same: give one", param=name)
        found[option] = value
        names[option] = name
    return found


def options_of(asked: AnswerFields, index: int = 0) -> dict[str, Any]:
    """Return the options of answer ``index`` for ``StaticLLMPipeline.submit``.

    The number and the form of the answers are those of the request, whatever the model's own config has.

    Raises:
        ApiError: fields contradict each other.
    """
    is_search = asked.num_beams > 1
    options = {
        **asked.more,
        **_numbers(asked, index),
        "num_beams": asked.num_beams,
        "num_return_sequences": asked.num_answers if is_search else 1,
        "echo": asked.more.get("echo", False),
        "apply_chat_template": asked.is_chat,
        **_chat(asked),
    }
    texts = {asked.stop} if isinstance(asked.stop, str) else set(asked.stop or ())
    if texts - {""}:
        options["stop_strings"] = texts - {""}
    if asked.logit_bias:
        options["logit_bias"] = _bias(asked.logit_bias)
    if asked.json_schema is not None:
        options["json_schema"] = asked.json_schema
    if asked.wants_logprobs:
        options["logprobs"] = 1
        if asked.num_top_logprobs:
            options["top_logprobs"] = asked.num_top_logprobs
    if asked.max_tokens is not None:
        options["max_new_tokens"] = UNLIMITED if asked.max_tokens == -1 else asked.max_tokens
    if asked.is_truncated:
        options["overflow"] = "truncate_middle"
    return options


def sampling_of(given: Mapping[str, object]) -> dict[str, Any]:
    """Return the options of ``StaticLLMPipeline.submit`` for rows of the table of options, as a file gives them to a model.

    Raises:
        ConfigError: a name is unknown or that of the seed, which requests have; a number is outside of its bounds.
    """
    known = [name for name in SAMPLING if name != "rng_seed"]
    for name in given:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else f"the options are {', '.join(known)}"
            raise ConfigError(f"unknown option sampling.{shown(name)}: {remedy}")
    edges = ("temperature", *_GREEDY)  # whose excluded values mean greedy here
    numbers = {
        name: SAMPLING[name].check(f"sampling.{name}", value, is_drawn=name not in edges)
        for name, value in given.items()
    }
    return _numbers(AnswerFields(numbers=numbers), 0)


def with_defaults(asks: Sequence[Ask], spec: ModelSpec) -> list[Ask]:
    """Return the asks of a request with what the model has for those that do not say it: a system message, and sampling.

    Asks that share a prompt still do. A beam search gets only what it can have.
    """
    prompts: dict[int, Any] = {}
    found = []
    for ask in asks:
        if id(ask.prompt) not in prompts:
            is_conversation = ask.options.get("apply_chat_template", True) and isinstance(ask.prompt, list)
            prompts[id(ask.prompt)] = spec.conversation(ask.prompt) if is_conversation else ask.prompt
        own = {name: value for name, value in spec.sampling.items() if not ask.is_search or _has_beams(name)}
        found.append(replace(ask, prompt=prompts[id(ask.prompt)], options={**own, **ask.options}))
    return found


def _has_beams(name: str) -> bool:
    return name in SAMPLING and SAMPLING[name].has_beams


def _numbers(asked: AnswerFields, index: int) -> dict[str, Any]:
    """Return the options that are numbers of the table."""
    others = {name: value for name, value in asked.numbers.items() if name != "rng_seed" and not SAMPLING[name].draws}
    return {**others, **_drawing(asked, index)}


def _drawing(asked: AnswerFields, index: int) -> dict[str, Any]:
    """Return the options that draw tokens. ``temperature`` 0 is greedy; without it the model's own config decides, unless another
    field asks for sampling."""
    given = {name: value for name, value in asked.numbers.items() if SAMPLING[name].draws}
    temperature = given.pop("temperature", None)
    seed = asked.numbers.get("rng_seed")
    options: dict[str, Any] = {} if seed is None else {"rng_seed": _seed(int(seed), index)}
    if temperature == 0 or asked.num_beams > 1:
        return {**options, "do_sample": False}
    if given.get("top_k") == -1:  # as other servers: all tokens
        given["top_k"] = 0
    for name, value in _GREEDY.items():
        if given.get(name) == value:
            del given[name]
            given["top_k"] = 1
    asks = any(not SAMPLING[name].part_of and value != SAMPLING[name].default for name, value in given.items())
    if temperature is None and not asks:
        return options
    if temperature is not None:
        options["temperature"] = temperature
    return {**options, **given, "do_sample": True}


def _chat(asked: AnswerFields) -> dict[str, Any]:
    """Return the options of an answer in a conversation: without tools nothing is a call, whatever it looks like."""
    if not asked.is_chat:
        return {}
    options: dict[str, Any] = {} if asked.num_beams > 1 else {"parse_tools": True}
    if asked.context:
        options["extra_context"] = dict(asked.context)
    if asked.tools:
        if asked.parallel_tool_calls is not None:
            options["parallel_tool_calls"] = asked.parallel_tool_calls
        return {
            **options,
            "tools": list(asked.tools),
            "tool_choice": "auto" if asked.tool_choice is None else asked.tool_choice,
        }
    if asked.tool_choice not in (None, "none", "auto"):
        raise ApiError(400, "tool_choice without tools: pass the functions as tools", param="tool_choice")
    return {**options, "tool_choice": "none"}


def _seed(seed: int, index: int) -> int:
    """Return the seed of answer ``index``. A negative one is random, as in llamacpp; 0 is for the engine."""
    return 0 if seed < 0 else (seed or ZERO_SEED) + index


def _bias(given: Mapping[str, float]) -> dict[int, float]:
    if not all(key.isdecimal() and len(key) <= MAX_ID_DIGITS for key in given):
        raise ApiError(400, "the keys of logit_bias are token ids, as text", param="logit_bias")
    return {int(key): value for key, value in given.items()}
