"""Tests requests with wrong values from another process: each is refused, and the requests of others go on."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest

from staticllm.daemon.models.language_model import LanguageModel
from staticllm.errors import GenerationConfigError, StaticLLMError
from staticllm.pipelines.engine.request import EngineRequest
from staticllm.pipelines.generation.beam_search import BeamParams
from staticllm.pipelines.generation.drafts import DraftParams
from staticllm.pipelines.generation.grammar import Grammar
from staticllm.pipelines.generation.speech_rules import SpeechRules, TimestampParams
from staticllm.testing import fake_pipeline
from tests.support.inside import engine_of, launched_of

PROMPT = tuple(range(5, 25))
HOSTILE = (
    None, True, -1, 0, 1.5, 1e308, 10**400, 1 << 64, math.nan, math.inf, "x", "", [], [1], [None], [[1]], [["x"]],
    [[1, math.nan]], {}, {"a": 1}, {"kind": "regex", "text": "a"},
)  # fmt: skip
NESTED = {
    "sampling": EngineRequest(PROMPT).to_dict()["sampling"],
    "beams": EngineRequest(PROMPT, beams=BeamParams(3)).to_dict()["beams"],
    "drafts": EngineRequest(PROMPT, drafts=DraftParams(3, 5)).to_dict()["drafts"],
    "rules": EngineRequest(PROMPT, rules=SpeechRules((1,), (2,), (3, 4))).to_dict()["rules"],
    "timestamps": asdict(TimestampParams(2, 20, 5)),
    "grammar": EngineRequest(PROMPT, grammar=Grammar("regex", "[0-9]{2}")).to_dict()["grammar"],
}


@pytest.fixture(scope="module")
def model():
    with fake_pipeline(MAX_NUM_SEQS=3) as pipe:
        model = object.__new__(LanguageModel)  # without the turns of a daemon's devices
        model.launched, model.engine = launched_of(pipe), pipe.engine
        yield model


def plain(**changes):
    request = EngineRequest(PROMPT, max_new_tokens=6, stop_token_ids=frozenset({1})).to_dict()
    return {**request, **changes}


def run(model, values):
    """Run a request as the daemon does, if it is not refused, until it ends."""
    try:
        request = model.request_of(json.loads(json.dumps(values)))
        queue = model.engine.submit(request)
    except StaticLLMError as error:
        assert "\n" not in str(error)
        return
    ends = 0
    while ends < request.num_sequences:
        ends += type(queue.get(30)).__name__ == "Finished"


def check(model, values):
    other = EngineRequest(PROMPT, max_new_tokens=40)
    queue = model.engine.submit(other)
    queue.get(30)
    run(model, values)
    while type(output := queue.get(30)).__name__ != "Finished":
        pass
    assert output.error is None, values


@pytest.mark.parametrize("name", [*plain(), "id", "unknown"])
def test_a_wrong_field_ends_no_other_request(model, name):
    for value in HOSTILE:
        check(model, plain(**{name: value}))


@pytest.mark.parametrize("part", sorted(NESTED))
def test_a_wrong_part_of_a_field_ends_no_other_request(model, part):
    for name in NESTED[part]:
        for value in HOSTILE:
            changed = {part: {**NESTED[part], name: value}}
            check(model, plain(**({"rules": changed} if part == "timestamps" else changed)))


def test_a_client_cannot_choose_the_id_of_its_request(model):
    """With the id of another request it would take that request's place, whose reader would wait forever."""
    other = EngineRequest(PROMPT)
    assert model.request_of(plain(id=other.id)).id != other.id


@pytest.mark.parametrize(
    "wrong",
    [
        {"repetition_penalty": 0}, {"repetition_penalty": -1.0}, {"repetition_penalty": 1e30}, {"presence_penalty": 1e10},
        {"frequency_penalty": -3}, {"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0, "do_sample": True}, {"top_p": 2},
        {"min_p": -0.5}, {"typical_p": 0, "do_sample": True}, {"dry_base": 0}, {"xtc_threshold": -1},
        {"dry_allowed_length": 0}, {"mirostat": 3}, {"no_repeat_ngram_size": -1},
    ],
)  # fmt: skip
def test_numbers_that_logits_cannot_be_changed_by_are_refused_before_the_engine(model, wrong):
    sampling = {**NESTED["sampling"], **wrong}
    with pytest.raises(StaticLLMError, match=next(iter(wrong))) as caught:
        model.request_of(json.loads(json.dumps(plain(sampling=sampling))))
    assert "\n" not in str(caught.value)


EDGES = {
    "num_return_sequences": ({"do_sample": True}, 128, 129),
    "best_of": ({"do_sample": True}, 128, 129),
    "rng_seed": ({"do_sample": True}, (1 << 64) - 1, 1 << 64),
    "temperature": ({"do_sample": True}, 1e6, 1.1e6),
    "top_k": ({"do_sample": True}, (1 << 64) - 2, 1 << 64),
    "logit_bias": ({}, {2047: 1e4}, {7: 1.1e4}),
    "bad_words_ids": ({}, [[2047]], [[1 << 31]]),
    "repetition_penalty": ({}, 1e3, 1.1e3),
    "dry_penalty_last_n": ({}, 1 << 31, (1 << 31) + 1),
    "min_new_tokens": ({"max_new_tokens": 1 << 20}, 1 << 20, (1 << 20) + 1),
    "num_beams": ({}, 64, 65),
    "length_penalty": ({"num_beams": 2}, 1e3, 1.1e3),
    "diversity_penalty": ({"num_beams": 2, "num_beam_groups": 2}, 1e6, 1.1e6),
    "priority": ({}, 1 << 31, (1 << 31) + 1),
    "deadline_ms": ({}, math.inf, -1),
}
"""Options, what each of them needs, its greatest value, and one that is too great."""


@pytest.mark.parametrize("name", EDGES)
def test_the_daemon_takes_what_a_program_takes(model, monkeypatch, name):
    needed, most, beyond = EDGES[name]
    with fake_pipeline() as pipe:
        sent, submit = [], engine_of(pipe).submit
        monkeypatch.setattr(
            engine_of(pipe), "submit", lambda request, *rest: (sent.append(request), submit(request, *rest))[1]
        )
        pipe.submit("?", **needed, **{name: most}).cancel()
        received = model.request_of(json.loads(json.dumps(sent[0].to_dict())))
        assert received.sampling == sent[0].sampling
        assert (received.seed, received.num_sequences, received.priority) == (
            sent[0].seed, sent[0].num_sequences, sent[0].priority,
        )  # fmt: skip
        with pytest.raises(GenerationConfigError, match=name):
            pipe.submit("?", **needed, **{name: beyond})


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_sequences": 129}, "^num_return_sequences or best_of=129: must be a whole number from 1 to 128$"),
        ({"seed": 1 << 64}, "^rng_seed=18446744073709551616: must be a whole number from 0 to 18446744073709551615$"),
        ({"priority": -(1 << 31) - 1}, "^priority=-2147483649: must be"),
        ({"min_new_tokens": (1 << 20) + 1}, "^min_new_tokens=1048577: must be"),
        ({"sampling": {**NESTED["sampling"], "temperature": 1.1e6}}, "^temperature=1100000.0: must be"),
        (
            {"sampling": {**NESTED["sampling"], "logit_bias": [[7, 1.1e4]]}},
            "^logit_bias=.*must be a token id and a number",
        ),
        (
            {"sampling": {**NESTED["sampling"], "dry_breakers": [[1 << 31]]}},
            "^dry_sequence_breakers=.*must be token ids",
        ),
        ({"rules": {"suppress_tokens": [-1]}}, "^suppress_tokens=.*must be at most 262144 token ids from 0"),
        ({"rules": {"allowed_tokens": [1 << 31]}}, "^allowed_tokens=.*must be at most 262144 token ids from 0"),
        (
            {"rules": {"begin_suppress_tokens": [1] * 262145}},
            "^begin_suppress_tokens=.*must be at most 262144 token ids",
        ),
        ({"rules": {"timestamps": {"eos": 5, "begin": 0}}}, "^timestamps.begin=0: must be a whole number from 1 to"),
        ({"rules": {"timestamps": {"eos": -1, "begin": 9}}}, "^timestamps.eos=-1: must be a whole number from 0 to"),
        (
            {"beams": {**NESTED["beams"], "length_penalty": 1.1e3}},
            "^length_penalty=1100.0: must be a number from -1000",
        ),
    ],
)
def test_the_daemon_names_the_option_that_is_beyond_the_bound_of_a_program(model, wrong, message):
    with pytest.raises(StaticLLMError, match=message):
        model.request_of(plain(**wrong))
