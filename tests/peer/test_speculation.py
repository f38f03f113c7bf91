"""Compares prompt lookup and draft models with GenAI's CPU pipeline: the tokens are the same."""

from __future__ import annotations

import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest
from support.engine.engine_drafters import always_drafting

import staticllm
from staticllm import StaticLLMPipeline
from staticllm.pipelines.diagnostics.reference import EXACT

pytestmark = pytest.mark.usefixtures("shared_programs")

OPTIONS = {"max_new_tokens": 40, "ignore_eos": True, "do_sample": False}
MODELS = ["llama", "qwen2", pytest.param("gemma2", marks=pytest.mark.slow)]


@pytest.fixture
def _always():
    with always_drafting():
        yield


in_every_call = pytest.mark.usefixtures("_always")
"""Drafts at every step, so that the figures of drafts do not depend on what a call costs here."""


def repeating(prompt_of, length):
    part = prompt_of(length // 3)
    return np.array([[*part, *part, *part]])


@in_every_call
@pytest.mark.parametrize("name", MODELS)
def test_prompt_lookup_gives_genais_tokens(name, model_path, prompt_of):
    options = {**OPTIONS, "num_assistant_tokens": 5, "max_ngram_size": 3}
    theirs = genai.LLMPipeline(model_path(name), "CPU", prompt_lookup=True, **EXACT)
    with StaticLLMPipeline(model_path(name), "CPU", prompt_lookup=True, **EXACT) as ours:
        for length in (9, 60, 240):
            ids = repeating(prompt_of, length)
            found = ours.generate(ids, **options)
            assert found.perf_metrics.get_num_draft_tokens() > 0
            assert found.tokens == theirs.generate(ov.Tensor(ids), **options).tokens, length
        text = "one two three one two three one two three"
        assert ours.generate(text, **options) == theirs.generate(text, **options)


@in_every_call
@pytest.mark.parametrize("name", MODELS)
def test_a_draft_model_gives_genais_tokens(name, model_path, prompt_of):
    options = {**OPTIONS, "num_assistant_tokens": 4}
    theirs = genai.LLMPipeline(
        model_path(name), "CPU", draft_model=genai.draft_model(model_path(name), "CPU", **EXACT), **EXACT
    )
    draft = staticllm.draft_model(model_path(name), "CPU", **EXACT)
    with StaticLLMPipeline(model_path(name), "CPU", draft_model=draft, **EXACT) as ours:
        for length in (9, 60):
            ids = repeating(prompt_of, length)
            expected = theirs.generate(ov.Tensor(ids), **options)
            assert ours.generate(ids, **options).tokens == expected.tokens, length


@in_every_call
def test_extended_metrics_have_the_members_of_genai(model_path, prompt_of):
    path, options = model_path("llama"), {**OPTIONS, "num_assistant_tokens": 4}
    theirs = genai.LLMPipeline(path, "CPU", draft_model=genai.draft_model(path, "CPU", **EXACT), **EXACT)
    with StaticLLMPipeline(path, "CPU", draft_model=staticllm.draft_model(path, "CPU")) as ours:
        texts = ["one two one two one two"]
        mine, other = (pipe.generate(texts, **options).extended_perf_metrics for pipe in (ours, theirs))
        for pipe in (ours, theirs):  # also where nothing was drafted
            assert pipe.generate(texts, max_new_tokens=1, num_assistant_tokens=4).extended_perf_metrics is not None
    pairs = [(mine, other), (mine.main_model_metrics, other.main_model_metrics)]
    for own, reference in [*pairs, (mine.draft_model_metrics, other.draft_model_metrics)]:
        for member in (member for member in dir(reference) if not member.startswith("_")):
            assert hasattr(own, member), member
            if member.startswith("get_"):
                getattr(own, member)()
    assert 0 <= mine.get_num_accepted_tokens() <= mine.draft_model_metrics.get_num_generated_tokens()


@pytest.fixture(scope="module")
def prompts_and_tokens(model_path, prompt_of):
    """A function from a name to prompts and GenAI's tokens after them, which are found once."""
    known, prompts = {}, [repeating(prompt_of, length) for length in (9, 60, 150)]

    def of(name):
        if name not in known:
            theirs = genai.LLMPipeline(model_path(name), "CPU", **EXACT)
            known[name] = [theirs.generate(ov.Tensor(ids), **OPTIONS).tokens[0] for ids in prompts]
        return prompts, known[name]

    return of


@pytest.mark.parametrize("kind", ["lookup", "model"])
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_genais_whatever_the_planner_does(name, kind, model_path, prompts_and_tokens):
    """The planner drafts where it pays, by costs that it measures; with others, all requests draft at once."""
    path = model_path(name)
    options = {**OPTIONS, "num_assistant_tokens": 4, **({"max_ngram_size": 3} if kind == "lookup" else {})}
    drafting = (
        {"prompt_lookup": True} if kind == "lookup" else {"draft_model": staticllm.draft_model(path, "CPU", **EXACT)}
    )
    prompts, expected = prompts_and_tokens(name)
    with StaticLLMPipeline(path, "CPU", **drafting, **EXACT) as ours:
        for ids, tokens in zip(prompts, expected, strict=True):
            assert ours.generate(ids, **options).tokens == [tokens]
        handles = [ours.submit(ids, **options) for ids in prompts * 2]
        assert [handle.result().tokens[0] for handle in handles] == expected * 2
