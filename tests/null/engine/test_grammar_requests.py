"""Tests requests with grammars in the engine: alone, with several answers, and beside others, under every policy."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.engine.grammars import END, OTHER_SPECIAL, compiler_of, mask_for, text_of
from support.engine.limited_grammars import limit_grammars
from support.engine.output_queues import outputs_of
from support.quick import examples

from staticllm.core import FinishReason
from staticllm.errors import GenerationConfigError
from staticllm.pipelines.engine.request import EngineRequest, EngineText, TokenOutput
from staticllm.pipelines.generation.drafts import DraftParams
from staticllm.pipelines.generation.grammar import Grammar
from staticllm.pipelines.generation.grammar_mask import GrammarLimitError
from staticllm.pipelines.generation.options.table import SamplingParams
from staticllm.pipelines.grammars.matcher import Matcher
from staticllm.pipelines.scheduling.planner import POLICIES, make_policy
from staticllm.testing import VOCAB_SIZE, FakeRequest, assert_empty, fake_answer, fake_engine, fake_request, run_to_end

pytest.importorskip("llguidance")
SAMPLING = SamplingParams(do_sample=True, temperature=1.0, rng_seed=1)
COMPILER = compiler_of(VOCAB_SIZE - OTHER_SPECIAL - 1)
PATTERNS = ("[a-c]{2,6}", r"\d{2}-\d{2}", "(yes|no|maybe)(, (yes|no)){0,2}", '{"(name|age)":[0-9]{1,3}}', "日本é?")


def request_of(pattern, prompt=range(9), seed=1, count=1, max_new_tokens=60, sampling=SAMPLING):
    request = EngineRequest(
        tuple(prompt), sampling, seed=seed, num_sequences=count, max_new_tokens=max_new_tokens,
        stop_token_ids=frozenset([END]), grammar=Grammar("regex", pattern),
    )  # fmt: skip
    return FakeRequest(request, VOCAB_SIZE, grammar_mask=mask_for(request, VOCAB_SIZE, COMPILER))


def answers_of(request):
    """Return the texts and the ends of a request's answers."""
    count = request.request.num_sequences
    tokens, ends = [[] for _ in range(count)], [None] * count
    for output in outputs_of(request):
        if isinstance(output, TokenOutput):
            tokens[output.index].append(output.id)
        else:
            ends[output.index] = output
    texts = [text_of(COMPILER, [id for id in answer if id != END]) for answer in tokens]
    return texts, ends


def new_engine(policy="fcfs", **options):
    return fake_engine(make_policy(policy), max_seq_len=100, **options)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_beside_others_every_answer_keeps_its_grammar(policy):
    engine = new_engine(policy)
    asked = [request_of(pattern, range(9 * i, 9 * i + 9), seed=i) for i, pattern in enumerate(PATTERNS)]
    free = [fake_request(range(300 + 20 * i, 310 + 20 * i), 12) for i in range(3)]
    run_to_end(engine, [*asked, *free])
    for request, pattern in zip(asked, PATTERNS, strict=True):
        (text,), (end,) = answers_of(request)
        assert end.reason == FinishReason.STOP
        assert re.fullmatch(pattern, text)
    for i, request in enumerate(free):
        assert request.tokens == fake_answer(range(300 + 20 * i, 310 + 20 * i), 12)
    assert_empty(engine)


def test_several_answers_are_those_of_single_requests():
    engine = new_engine()
    several = request_of(PATTERNS[2], seed=5, count=4)
    run_to_end(engine, [several])
    texts, _ = answers_of(several)
    alone = []
    for index in range(4):
        single = request_of(PATTERNS[2], seed=5 + index)
        run_to_end(new_engine(), [single])
        alone += answers_of(single)[0]
    assert texts == alone
    assert all(re.fullmatch(PATTERNS[2], text) for text in texts)
    assert len(set(texts)) > 1


@settings(deadline=None, max_examples=examples(60))
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 30), st.sampled_from(PATTERNS), st.integers(1, 3)), min_size=1, max_size=5
    ),
    max_num_seqs=st.integers(1, 4),
    host_kv_slots=st.sampled_from([0, 40, 256]),
    gap_ms=st.sampled_from([None, 0.01]),
    policy=st.sampled_from(sorted(POLICIES)),
)
def test_any_schedule_keeps_every_grammar(requests, max_num_seqs, host_kv_slots, gap_ms, policy):
    """Requests are swapped, preempted and run again; what the matcher knows must not depend on it."""
    engine = new_engine(policy, max_num_seqs=max_num_seqs, host_kv_slots=host_kv_slots, gap_ms=gap_ms)
    asked = [
        request_of(pattern, range(9 * i, 9 * i + length), seed=10 * i, count=count)
        for i, (length, pattern, count) in enumerate(requests)
    ]
    run_to_end(engine, asked)
    for request, (_, pattern, _) in zip(asked, requests, strict=True):
        texts, ends = answers_of(request)
        assert all(end.error is None and end.reason == FinishReason.STOP for end in ends)
        assert all(re.fullmatch(pattern, text) for text in texts), texts
    assert_empty(engine)


def test_masks_are_made_while_the_device_runs():
    before = COMPILER.times.num_exposed
    run_to_end(new_engine(), [request_of(pattern, range(9 * i, 9 * i + 9)) for i, pattern in enumerate(PATTERNS)])
    assert COMPILER.times.num_exposed == before
    assert COMPILER.times.num_hidden > len(PATTERNS)


def test_a_failing_matcher_ends_only_its_own_request():
    engine = new_engine()
    broken, whole, free = request_of(PATTERNS[0]), request_of(PATTERNS[1]), fake_request(range(300, 310), 12)
    matcher = broken.state.sampler.processors[-1].matcher
    calls = []

    def allowed():
        calls.append(1)
        if len(calls) == 2:
            raise GenerationConfigError("the grammar cannot go on: too complex")
        return type(matcher).allowed(matcher)

    matcher.allowed = allowed
    run_to_end(engine, [broken, whole, free])
    *_, end = outputs_of(broken)
    assert end.reason == FinishReason.ERROR
    assert str(end.error) == "the grammar cannot go on: too complex"
    (text,), (end,) = answers_of(whole)
    assert end.reason == FinishReason.STOP
    assert re.fullmatch(PATTERNS[1], text)
    assert free.tokens == fake_answer(range(300, 310), 12)
    assert_empty(engine)


def test_a_request_with_a_grammar_survives_json():
    request = request_of(PATTERNS[0]).request
    copy = EngineRequest.from_dict(json.loads(json.dumps(request.to_dict())))
    assert copy.grammar == request.grammar
    assert EngineRequest.from_dict(json.loads(json.dumps(EngineRequest((1,)).to_dict()))).grammar is None


def test_submit_compiles_on_the_callers_thread():
    engine = new_engine(starts_thread=False)
    request = request_of(PATTERNS[0]).request
    with pytest.raises(GenerationConfigError, match="has no tokenizer"):
        engine.submit(request)
    engine = new_engine(starts_thread=False, text=EngineText(lambda tokens: text_of(COMPILER, tokens), COMPILER))
    with pytest.raises(GenerationConfigError, match="cannot be compiled"):
        engine.submit(EngineRequest((1,), stop_token_ids=frozenset([END]), grammar=Grammar("lark", "start: x")))
    assert engine.is_idle
    queue = engine.submit(request)
    run_to_end(engine)
    assert queue is not None


def without_drafts_of(new_sequence, index):
    state = new_sequence(index)
    state.drafts = None
    return state


@pytest.mark.parametrize("policy", sorted(POLICIES))
@pytest.mark.parametrize("count", [1, 3])
def test_forced_tokens_are_checked_together_and_change_nothing(policy, count):
    pattern = '{"name":"(yes|no)","age":[0-9]{2},"city":"function"}'
    results = []
    for drafts in (True, False):
        engine, request = new_engine(policy), request_of(pattern, seed=3, count=count)
        if not drafts:
            request.new_sequence = partial(without_drafts_of, request.new_sequence)
            request.state.drafts = None
        run_to_end(engine, [request])
        results.append((answers_of(request)[0], engine.core.profiler.stats()))
    (texts, with_drafts), (others, without_drafts) = results
    assert texts == others
    assert all(re.fullmatch(pattern, text) for text in texts)
    assert with_drafts.num_tokens == without_drafts.num_tokens
    assert with_drafts.num_steps < without_drafts.num_steps
    assert with_drafts.accepted_tokens == with_drafts.drafted_tokens > 0


def test_max_new_tokens_cuts_a_run_of_forced_tokens():
    whole = request_of("(the city|the name) of maybe function", seed=3)
    run_to_end(new_engine(), [whole])
    ids = [output.id for output in outputs_of(whole) if isinstance(output, TokenOutput)]
    for limit in range(4, len(ids)):
        request = EngineRequest(
            tuple(range(9)),
            replace(SAMPLING, finish_grammar=0),
            seed=3,
            max_new_tokens=limit,
            stop_token_ids=frozenset([END]),
            grammar=Grammar("lark", "start: /(the city|the name) of maybe function/"),
        )
        cut = FakeRequest(request, VOCAB_SIZE, grammar_mask=mask_for(request, VOCAB_SIZE, COMPILER))
        engine = new_engine()
        run_to_end(engine, [cut])
        *tokens, end = outputs_of(cut)
        assert [token.id for token in tokens] == ids[:limit]
        assert end.reason == FinishReason.LENGTH
        assert_empty(engine)


LOOSE = (
    "[a-c]{2,600}x",
    r"\d{2}-\d{2,600}",
    "(yes|no|maybe)(, (yes|no)){0,200}",
    '{"(name|age)":"[^"]*"}',
    "日本é*",
    "(the )+city",
)


@settings(deadline=None, max_examples=examples(60))
@given(
    requests=st.lists(
        st.tuples(st.sampled_from(LOOSE), st.integers(1, 3), st.integers(12, 24), st.integers(0, 99)),
        min_size=1,
        max_size=5,
    ),
    max_num_seqs=st.integers(1, 4),
    host_kv_slots=st.sampled_from([0, 40, 256]),
    policy=st.sampled_from(sorted(POLICIES)),
    drafts=st.sampled_from([None, DraftParams(max_ngram_size=3)]),
)
def test_any_schedule_ends_every_answer_within_its_tokens(requests, max_num_seqs, host_kv_slots, policy, drafts):
    """Requests are swapped, preempted and run again, and drafts propose tokens that would leave no room."""
    engine = new_engine(policy, max_num_seqs=max_num_seqs, host_kv_slots=host_kv_slots)
    asked = []
    for i, (pattern, count, longest, seed) in enumerate(requests):
        request = EngineRequest(
            tuple(range(9 * i, 9 * i + 9)), SAMPLING, seed=seed, num_sequences=count, max_new_tokens=longest,
            stop_token_ids=frozenset([END]), grammar=Grammar("regex", pattern), drafts=drafts,
        )  # fmt: skip
        asked.append(FakeRequest(request, VOCAB_SIZE, grammar_mask=mask_for(request, VOCAB_SIZE, COMPILER)))
    run_to_end(engine, asked)
    for request, (pattern, _, _, _) in zip(asked, requests, strict=True):
        texts, ends = answers_of(request)
        assert [end.reason for end in ends] == [FinishReason.STOP] * len(ends), texts
        assert all(re.fullmatch(pattern, text) for text in texts), texts
    assert_empty(engine)


def test_an_answer_that_fills_its_tokens_and_is_whole_has_stopped():
    """Nothing can follow, so that no end token is needed; with the option off, the answer counts as cut off."""
    for finishes, reason in ((1, FinishReason.STOP), (0, FinishReason.LENGTH)):
        request = request_of("yes|no", max_new_tokens=1, sampling=replace(SAMPLING, finish_grammar=finishes))
        run_to_end(new_engine(), [request])
        (text,), (end,) = answers_of(request)
        assert text in ("yes", "no")
        assert end.reason == reason


@pytest.mark.parametrize("drafts", [None, DraftParams(max_ngram_size=3)])
@pytest.mark.parametrize("count", [1, 3])
def test_an_answer_whose_grammar_becomes_too_complex_is_cut_off(drafts, count, monkeypatch):
    calls = limit_grammars(monkeypatch)
    request = EngineRequest(
        tuple(range(9)), SAMPLING, seed=1, num_sequences=count, max_new_tokens=80, drafts=drafts,
        stop_token_ids=frozenset([END]), grammar=Grammar("regex", "[a-c]{60,600}"),
    )  # fmt: skip
    asked = FakeRequest(request, VOCAB_SIZE, grammar_mask=mask_for(request, VOCAB_SIZE, COMPILER))
    engine = new_engine()
    run_to_end(engine, [asked])
    texts, ends = answers_of(asked)
    for text, end in zip(texts, ends, strict=True):
        assert (end.reason, end.error) == (FinishReason.LENGTH, None)
        assert re.fullmatch("[a-c]+", text), text
    assert next(calls) < 30, "each answer ended where it could not go on"
    assert_empty(engine)


def test_a_grammar_that_is_too_complex_for_its_first_token_is_an_error(monkeypatch):
    request = request_of("[a-c]{2,6}")
    monkeypatch.setattr(Matcher, "allowed", mock.Mock(side_effect=GrammarLimitError("too many expressions")))
    run_to_end(new_engine(), [request])
    (end,) = answers_of(request)[1]
    assert end.reason is FinishReason.ERROR
    assert "too many expressions" in str(end.error)


def test_the_option_survives_json():
    request = EngineRequest((1,), replace(SAMPLING, finish_grammar=0))
    assert EngineRequest.from_dict(json.loads(json.dumps(request.to_dict()))).sampling.finish_grammar == 0
