"""Gives each option of a generation: it changes the answer, or what the engine gets, or it is refused. None is ignored.

The names come from the tables of options, so that a new option without a case here fails.
"""

from __future__ import annotations

import queue
from dataclasses import asdict, dataclass, field, replace
from inspect import signature
from typing import Any, Literal

import numpy as np
import openvino_genai as genai
import pytest
from support.helpers import PROMPT as PROMPT_IDS
from support.helpers import one_line

from staticllm import AdapterConfig, GenerationConfigError, StaticLLMPipeline, demo_model_path, draft_model
from staticllm.pipelines.generation.options.extra import EXTRA_NAMES
from staticllm.pipelines.generation.options.requested_grammar import KEYWORDS
from staticllm.pipelines.generation.options.resolve import DEFAULTS, NAMES
from staticllm.pipelines.text import infill
from tests.support.inside import inputs_of, launched_of

pytestmark = pytest.mark.usefixtures("shared_programs")

ABSENT, THIRD, FIRST_ADAPTER = object(), object(), object()
PROPERTIES = {"MAX_PROMPT_LEN": 512, "MIN_RESPONSE_LEN": 64, "INFERENCE_PRECISION_HINT": "f32"}
PROMPT = "Once upon a time"
REPEATED = " ".join(["one two three four five six"] * 6)
DRAWN = {"do_sample": True, "temperature": 1.5, "rng_seed": 5}
BEAMS = {"num_beams": 4, "max_new_tokens": 12}
LONG = {"max_new_tokens": 24, "ignore_eos": True}
DRY = {**LONG, "dry_multiplier": 5.0}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}


@dataclass(frozen=True)
class Case:
    """A ``value`` that changes something beside the options ``more``; ``other`` is the value that it is compared with."""

    value: Any
    more: dict[str, Any] = field(default_factory=dict)
    other: Any = ABSENT
    prompt: Any = PROMPT
    pipe: Literal["plain", "drafting", "adapted", "moody", "infilling"] = "plain"
    seen: Literal["answer", "request", "submitted", "callback"] = "answer"


class Reverse:
    """A logits processor that makes the least likely token the most likely one."""

    def process(self, logits):
        logits *= -1


class Shout(genai.Parser):
    def parse(self, message):
        message["shout"] = message["content"].upper()


def a_grammar():
    config = genai.StructuredOutputConfig()
    config.regex = "[xyz]{3}"
    return config


REFUSED = {
    "branching_factor": 4,
    "tree_depth": 2,
    "pruning_ratio": 50,
    "relevance_weight": 0.9,
    "return_omni_outputs": True,
}
"""What decoding is not here, and a value of each."""
TREE = {"branching_factor": {"tree_depth": 2}, "tree_depth": {"branching_factor": 4}}
CASES = {
    "adapters": Case(FIRST_ADAPTER, {"ignore_eos": True}, prompt=np.array(PROMPT_IDS), pipe="adapted"),
    "apply_chat_template": Case(False),
    "assistant_confidence_threshold": Case(0.75, pipe="drafting", seen="request"),
    "diversity_penalty": Case(50.0, {**BEAMS, "num_beam_groups": 2, "num_return_sequences": 4}, other=0.01),
    "do_sample": Case(True, {"temperature": 1.5, "rng_seed": 5}, other=False),
    "echo": Case(True),
    "eos_token_id": Case(THIRD),
    "frequency_penalty": Case(2.0, prompt=REPEATED),
    "ignore_eos": Case(True, {"max_new_tokens": 60, "stop_token_ids": {THIRD}}),
    "include_stop_str_in_output": Case(True, {"stop_strings": {"e"}}, other=False),
    "length_penalty": Case(-5.0, {**BEAMS, "num_return_sequences": 4, "stop_criteria": "NEVER"}),
    "logprobs": Case(1),
    "max_length": Case(16, {"max_new_tokens": DEFAULTS.max_new_tokens}),
    "max_new_tokens": Case(4),
    "max_ngram_size": Case(3, seen="request"),
    "min_new_tokens": Case(9, {"eos_token_id": THIRD}),
    "min_p": Case(0.9, DRAWN),
    "no_repeat_ngram_size": Case(1, prompt=REPEATED),
    "num_assistant_tokens": Case(7, pipe="drafting", seen="request"),
    "num_beam_groups": Case(2, {**BEAMS, "num_return_sequences": 4, "diversity_penalty": 1.0}, other=4),
    "num_beams": Case(4, {"max_new_tokens": 12}),
    "num_return_sequences": Case(3, DRAWN),
    "parsers": Case([Shout()]),
    "presence_penalty": Case(2.0, prompt=REPEATED),
    "repetition_penalty": Case(9.0, prompt=REPEATED),
    "rng_seed": Case(6, DRAWN, other=5),
    "stop_criteria": Case("EARLY", {**BEAMS, "num_return_sequences": 4, "max_new_tokens": 40}, other="NEVER"),
    "stop_strings": Case({"e"}),
    "stop_token_ids": Case({THIRD}),
    "structured_output_config": Case(a_grammar()),
    "temperature": Case(0.01, DRAWN, other=3.0),
    "top_k": Case(1, DRAWN),
    "top_p": Case(0.01, DRAWN),
    "typical_p": Case(0.05, DRAWN),
    "xtc_probability": Case(1.0, {**DRAWN, "xtc_threshold": 0.02}),
    "xtc_threshold": Case(0.5, {**DRAWN, "xtc_probability": 1.0}, other=0.01),
    "mirostat": Case(2, {**DRAWN, "mirostat_tau": 1.0}),
    "mirostat_tau": Case(0.1, {**DRAWN, "mirostat": 2}),
    "mirostat_eta": Case(9.0, {**DRAWN, "mirostat": 2, "max_new_tokens": 40}, other=0.001),
    "dry_multiplier": Case(5.0, LONG, prompt=REPEATED),
    "dry_base": Case(4.0, {**DRY, "dry_multiplier": 0.1, "dry_allowed_length": 1}, other=1.0, prompt=REPEATED),
    "dry_allowed_length": Case(1000, DRY, prompt=REPEATED),
    "dry_penalty_last_n": Case(0, DRY, prompt=REPEATED),
    "dry_sequence_breakers": Case([" ", *"abcdefghijklmnopqrstuvwxyz"], DRY, prompt=REPEATED),
    "finish_grammar": Case(0, {"regex": "[a-z]+!", "max_new_tokens": 4}, other=1),
    "logit_bias": Case({7: 1000}),
    "bad_words": Case(["friend"]),
    "bad_words_ids": Case([[THIRD]]),
    "logits_processor": Case(Reverse()),
    "tools": Case([TOOL]),
    "tool_choice": Case("required", {"tools": [TOOL], "max_new_tokens": 60}),
    "parallel_tool_calls": Case(False, {"tools": [TOOL], "tool_choice": "required", "max_new_tokens": 60}, seen="request"),
    "parse_tools": Case(True),
    "extra_context": Case({"mood": "sad"}, pipe="moody", seen="request"),
    "best_of": Case(4, DRAWN),
    "suffix": Case(" and they were friends.", pipe="infilling"),
    "top_logprobs": Case(3, seen="request"),
    "json_schema": Case(SCHEMA),
    "regex": Case("[xyz]{3}"),
    "choice": Case(["left", "right"]),
    "grammar": Case('root ::= "left" | "right"'),
}  # fmt: skip


CALLS = {
    "overflow": Case("shift", {"max_new_tokens": DEFAULTS.max_new_tokens}, seen="request"),
    "priority": Case(3, seen="request"),
    "deadline_ms": Case(0.001, {"ignore_eos": True, "max_new_tokens": 60}, seen="submitted"),
    "callback": Case(None, seen="callback"),
    "streamer": Case(None, seen="callback"),
    "generation_config": Case(genai.GenerationConfig(stop_strings={"e"})),
}
"""The arguments of ``generate`` and ``submit`` beside the inputs and the options."""
AS_A_CONFIG = set(NAMES) - {"adapters", "no_repeat_ngram_size", *REFUSED}
"""Options that mean the same in a ``GenerationConfig``. ``no_repeat_ngram_size`` needs beams there (docs/reference/options.md);
of ``adapters`` tests/cpu/pipeline/test_adapter_requests.py tries configs."""


@pytest.fixture(scope="module")
def plain():
    with StaticLLMPipeline(demo_model_path(), "CPU", **PROPERTIES) as pipe:
        yield pipe


@pytest.fixture(scope="module")
def drafting():
    drafts = draft_model(demo_model_path(), "CPU", INFERENCE_PRECISION_HINT="f32")
    with StaticLLMPipeline(demo_model_path(), "CPU", draft_model=drafts, **PROPERTIES) as pipe:
        yield pipe


@pytest.fixture(scope="module")
def moody():
    """A pipeline whose chat template reads a variable."""
    tokenizer = genai.Tokenizer(demo_model_path())
    tokenizer.set_chat_template("{{ mood }}{% for message in messages %}{{ message['content'] }}{% endfor %}")
    with StaticLLMPipeline(demo_model_path(), "CPU", tokenizer=tokenizer, **PROPERTIES) as pipe:
        yield pipe


@pytest.fixture(scope="module")
def infilling(plain):
    """A pipeline three of whose tokens are taken for markers of text between two others."""
    names = {token: name for name, token in plain.get_tokenizer().get_vocab().items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(infill, "MARKERS", (tuple(names[token] for token in (300, 301, 302)),))
        yield plain


@pytest.fixture
def pipes(request):
    """A function from the name of a pipeline to it."""
    return lambda name: request.getfixturevalue("adapted_pipe" if name == "adapted" else name)


@pytest.fixture
def filled(plain, request):
    """A function from options of a case to those with what only the model knows in them."""
    third = plain.generate([PROMPT], max_new_tokens=3).tokens[0][2]

    def fill(value):
        if value is FIRST_ADAPTER:
            return AdapterConfig(request.getfixturevalue("handles")[0], 1.0)
        if isinstance(value, (list, set)):
            return type(value)(map(fill, value))
        return third if value is THIRD else value

    return lambda options: {name: fill(value) for name, value in options.items()}


def answer_of(pipe, prompt, options):
    found = pipe.generate(prompt if isinstance(prompt, np.ndarray) else [prompt], **options)
    names = ("texts", "tokens", "scores", "finish_reasons", "parsed", "messages")
    return {name: getattr(found, name) for name in names if hasattr(found, name)}


def request_of(pipe, prompt, options):
    """Return what the engine gets."""
    arguments = {name: options.pop(name) for name in CALLS if name in options}
    call = inputs_of(pipe).call("text", arguments.pop("generation_config", None), options, **arguments)
    encoded = inputs_of(pipe).encode(prompt, call)[0]
    prepared = inputs_of(pipe).prepare(encoded, call, pipe.config, launched_of(pipe).vocab_size)
    return asdict(replace(prepared.request, id=0, arrival=0.0, seed=0))


def submitted(pipe, prompt, options):
    return str(pipe.submit(prompt, **options).result())


SEEN = {"answer": answer_of, "request": request_of, "submitted": submitted}


def is_seen(case, name, pipe, filled):
    more = {"max_new_tokens": 16, "apply_chat_template": case.prompt is not REPEATED, **filled(case.more)}
    other = {} if case.other is ABSENT else {name: case.other}
    found = SEEN[case.seen]
    return found(pipe, case.prompt, {**more, **other}) != found(
        pipe, case.prompt, {**more, **filled({name: case.value})}
    )


@pytest.mark.parametrize("name", [*NAMES, *EXTRA_NAMES, *KEYWORDS])
def test_an_option_changes_something_or_is_refused(name, pipes, filled):
    if name not in REFUSED:
        assert is_seen(CASES[name], name, pipes(CASES[name].pipe), filled)
        return
    with pytest.raises(GenerationConfigError, match=f"^{name}=") as error:
        pipes("plain").generate(PROMPT, **{name: REFUSED[name]})
    one_line(error)
    with pytest.raises(GenerationConfigError, match=" is not supported: "):
        pipes("plain").generate(PROMPT, genai.GenerationConfig(**{name: REFUSED[name], **TREE.get(name, {})}))


@pytest.mark.parametrize("name", sorted(AS_A_CONFIG))
def test_an_option_in_a_config_is_the_same_as_the_keyword(name, pipes, filled):
    case = CASES[name]
    options = {"max_new_tokens": 16, "apply_chat_template": case.prompt is not REPEATED, **filled(case.more)}
    options |= filled({name: case.value})
    config = genai.GenerationConfig()
    for key, value in options.items():
        setattr(config, key, getattr(genai.StopCriteria, value) if key == "stop_criteria" else value)
    pipe = pipes(case.pipe)
    found = SEEN[case.seen]
    assert found(pipe, case.prompt, {"generation_config": config}) == found(pipe, case.prompt, options)


@pytest.mark.parametrize("method", ["generate", "submit"])
def test_an_argument_of_a_call_changes_something(method, pipes, filled):
    pipe = pipes("plain")
    for name in signature(getattr(pipe, method)).parameters:
        if name in ("inputs", "kwargs"):
            continue
        case = CALLS[name]
        if case.seen == "callback":
            heard: queue.SimpleQueue[str] = queue.SimpleQueue()
            answer = getattr(pipe, method)(PROMPT, max_new_tokens=5, **{name: heard.put})
            text = str(answer if method == "generate" else answer.result())
            while text:
                part = heard.get(timeout=60)
                assert text.startswith(part), name
                text = text[len(part) :]
        else:
            assert is_seen(case, name, pipe, filled), name
