"""Tests beams with a grammar: they are the best answers of the grammar, whatever runs beside them."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.beam_steps import advanced
from support.engine.grammars import END, OTHER_SPECIAL, compiler_of, mask_for, text_of
from support.engine.limited_grammars import limit_grammars
from support.engine.output_queues import outputs_of
from support.quick import examples

from staticllm.core import FinishReason
from staticllm.errors import GenerationConfigError
from staticllm.pipelines.engine.beams import BeamRequest
from staticllm.pipelines.engine.request import EngineRequest, TokenOutput
from staticllm.pipelines.generation.beam_search import BeamLimits, BeamParams, BeamSearch
from staticllm.pipelines.generation.grammar import Grammar
from staticllm.pipelines.scheduling.planner import POLICIES, make_policy
from staticllm.testing import VOCAB_SIZE, assert_empty, fake_answer, fake_engine, fake_request, run_to_end

pytest.importorskip("llguidance")
COMPILER = compiler_of(VOCAB_SIZE - OTHER_SPECIAL - 1)
PATTERN = "[ab]{1,3}(yes|no)?"


def texts_of(pattern, most):
    """Return all texts of at most ``most`` of the letters and words that match."""
    parts = ("a", "b", "yes", "no", "ab")
    found = {"".join(chosen) for count in range(1, most + 1) for chosen in itertools.product(parts, repeat=count)}
    return {text for text in found if re.fullmatch(pattern, text)}


def logprobs_after(tokens, seed):
    logits = np.random.default_rng([seed, len(tokens), *tokens]).normal(size=VOCAB_SIZE) * 3
    return logits, logits - np.log(np.exp(logits).sum())


def beam_of(request):
    return BeamRequest(request, VOCAB_SIZE, mask=mask_for(request, VOCAB_SIZE, COMPILER))


def request_of(pattern, num_beams=3, count=2, max_new_tokens=20, prompt=range(9), **options):
    return EngineRequest(
        tuple(prompt), num_sequences=count, max_new_tokens=max_new_tokens, stop_token_ids=frozenset([END]),
        grammar=Grammar("regex", pattern), beams=BeamParams(num_beams, stop_criteria="never"), **options,
    )  # fmt: skip


def search(request, seed):
    limits = BeamLimits(request.max_new_tokens, request.stop_token_ids)
    found, beams = BeamSearch(request.beams, request.prompt, limits), [((), mask_for(request, VOCAB_SIZE, COMPILER))]
    while beams:
        logits = [logprobs_after(tokens, seed)[0].astype(np.float32) for tokens, _ in beams]
        successors, before, beams = advanced(found, logits, [mask for _, mask in beams]), beams, []
        for successor in successors:
            tokens, mask = before[successor.parent]
            beams.append(((*tokens, successor.token), mask.clone()))
            beams[-1][1].accept(successor.token)
    return found.hypotheses()


@settings(max_examples=examples(20), deadline=None)
@given(st.integers(0, 10_000))
def test_with_enough_beams_the_best_answers_of_the_grammar_are_found(seed):
    """Scores are the model's own log-probabilities: those of forbidden tokens are not shared out among the others."""
    request = request_of(PATTERN, num_beams=500, count=1)
    hypotheses = search(request, seed)
    texts = {text_of(COMPILER, hypothesis.tokens[:-1]) for hypothesis in hypotheses}
    assert texts == texts_of(PATTERN, 4)
    for hypothesis in hypotheses:
        assert hypothesis.tokens[-1] == END
        total = sum(
            logprobs_after(hypothesis.tokens[:place], seed)[1][token] for place, token in enumerate(hypothesis.tokens)
        )
        assert hypothesis.score == pytest.approx(total / len(hypothesis.tokens), abs=1e-3)
    assert [h.score for h in hypotheses] == sorted((h.score for h in hypotheses), reverse=True)


def answers_of(request):
    found, ends = [[] for _ in range(request.request.num_sequences)], {}
    for output in outputs_of(request):
        if isinstance(output, TokenOutput):
            found[output.index].append(output.id)
        else:
            ends[output.index] = output
    return [text_of(COMPILER, [id for id in tokens if id != END]) for tokens in found], ends


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("places", [1, 2, 6])
def test_beside_others_beams_keep_their_grammar(policy, places):
    alone = fake_engine(make_policy("fcfs"), max_seq_len=100)
    expected = beam_of(request_of("[a-c]{2,6}"))
    run_to_end(alone, [expected])
    engine = fake_engine(make_policy(policy), places, max_seq_len=100)
    found, other = beam_of(request_of("[a-c]{2,6}")), beam_of(request_of("(yes|no){2}", prompt=range(40, 60)))
    free = [fake_request(range(300 + 20 * i, 310 + 20 * i), 12) for i in range(3)]
    run_to_end(engine, [found, free[0], other, *free[1:]])
    texts, ends = answers_of(found)
    assert texts == answers_of(expected)[0]
    assert all(re.fullmatch("[a-c]{2,6}", text) for text in texts)
    assert all(end.reason == FinishReason.STOP for end in ends.values())
    assert all(re.fullmatch("(yes|no){2}", text) for text in answers_of(other)[0])
    for i, request in enumerate(free):
        assert request.tokens == fake_answer(range(300 + 20 * i, 310 + 20 * i), 12)
    assert_empty(engine)
    assert COMPILER.times.num_hidden


def test_fewer_answers_than_asked_for_are_an_error_of_the_others():
    engine = fake_engine(make_policy("fcfs"), max_seq_len=100)
    request = beam_of(request_of("yes", num_beams=9, count=9))
    run_to_end(engine, [request])
    texts, ends = answers_of(request)
    num_found = sum(end.error is None for end in ends.values())
    assert 0 < num_found < 9
    assert set(texts[:num_found]) == {"yes"}
    for index in range(num_found, 9):
        assert isinstance(ends[index].error, GenerationConfigError)
        assert "num_return_sequences is 9" in str(ends[index].error)
    cancelled = beam_of(request_of("[ab]{30,40}", max_new_tokens=60))
    cancelled.cancel()
    run_to_end(engine, [cancelled])
    assert all(end.error is None and end.reason == "cancelled" for end in answers_of(cancelled)[1].values())
    assert_empty(engine)


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("longest", [3, 8, 16])
@pytest.mark.parametrize("pattern", ["[a-c]{2,600}x", "(yes|no|maybe)(, (yes|no)){0,200}", '"[^"]*"'])
def test_every_beam_ends_within_its_tokens(pattern, longest, groups):
    for seed in range(4):
        beams = BeamParams(4, groups, 0.5 * (groups > 1), stop_criteria="never")
        request = replace(request_of(pattern, count=2, max_new_tokens=longest), beams=beams)
        hypotheses = search(request, seed)
        assert hypotheses
        for hypothesis in hypotheses:
            assert len(hypothesis.tokens) <= longest
            assert re.fullmatch(pattern, text_of(COMPILER, [token for token in hypothesis.tokens if token != END]))
        beam = beam_of(request)
        run_to_end(fake_engine(make_policy("fcfs"), max_seq_len=100), [beam])
        ends = [output for output in outputs_of(beam) if not isinstance(output, TokenOutput)]
        assert [end.reason for end in ends] == [FinishReason.STOP] * 2


def test_a_beam_that_fills_its_tokens_and_is_whole_has_stopped():
    engine = fake_engine(make_policy("fcfs"), max_seq_len=100)
    beam = beam_of(request_of("yes|no|maybe", num_beams=2, max_new_tokens=1))
    run_to_end(engine, [beam])
    ends = [output for output in outputs_of(beam) if not isinstance(output, TokenOutput)]
    assert [end.reason for end in ends] == [FinishReason.STOP] * 2


def test_beams_whose_grammar_becomes_too_complex_are_cut_off(monkeypatch):
    """The beams of the step before are the answers: a step that one beam cannot take is none."""
    limit_grammars(monkeypatch)
    asked = beam_of(request_of("[a-c]{16,40}", max_new_tokens=40))
    engine = fake_engine(make_policy("fcfs"), max_seq_len=100)
    run_to_end(engine, [asked])
    outputs = outputs_of(asked)
    ends = [output for output in outputs if not isinstance(output, TokenOutput)]
    assert [(end.reason, end.error) for end in ends] == [(FinishReason.LENGTH, None)] * 2
    for index in range(2):
        tokens = [output.id for output in outputs if isinstance(output, TokenOutput) and output.index == index]
        assert re.fullmatch("[a-c]{1,15}", text_of(COMPILER, tokens))
    assert_empty(engine)
