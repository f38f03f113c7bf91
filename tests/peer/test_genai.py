"""Compares the tokens of the same calls with ``openvino_genai.LLMPipeline``."""

from __future__ import annotations

import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest

from staticllm import StaticLLMPipeline
from staticllm.pipelines.diagnostics.reference import EXACT

pytestmark = pytest.mark.usefixtures("shared_programs")

MODELS = ["llama", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen2", "qwen3", "mistral", "demo"))]


@pytest.fixture(scope="module")
def pair(zoo):
    return StaticLLMPipeline(zoo / "llama", "CPU", **EXACT), genai.LLMPipeline(zoo / "llama", "CPU", **EXACT)


def both(pair, ids, **options):
    ours, theirs = pair
    ids = np.array([ids])
    return ours.generate(ids, **options), theirs.generate(ov.Tensor(ids), **options)


@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_equal_on_the_cpu(name, model_path, prompt_of, in_full):
    pair = (
        StaticLLMPipeline(model_path(name), "CPU", **EXACT),
        genai.LLMPipeline(model_path(name), "CPU", **EXACT),
    )
    lengths, num_new = ((1, 5, 40, 300, 900), 64) if in_full else ((1, 40, 300), 24)
    for length in lengths:
        ours, theirs = both(pair, prompt_of(length), max_new_tokens=num_new, ignore_eos=True)
        assert ours.tokens == theirs.tokens, f"prompt of {length} tokens"


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.2},
        {"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.7},
        {"min_new_tokens": 9, "stop_token_ids": {353}},
        {"stop_token_ids": {353}},
        {"stop_token_ids": {353}, "ignore_eos": True},
    ],
)
def test_options_have_the_same_meaning(pair, options):
    ours, theirs = both(pair, [5, 6, 7], max_new_tokens=24, logprobs=1, **options)
    assert ours.tokens == theirs.tokens
    assert ours.scores == [pytest.approx(theirs.scores[0], abs=1e-2)]
    assert ours.finish_reasons == theirs.finish_reasons


def test_results_have_the_attributes_of_genai(pair):
    """Every attribute and getter of GenAI's results and metrics exists and can be called."""
    for ours, theirs in (
        both(pair, [5, 6, 7], max_new_tokens=4),
        [pipe.generate(["hello"], max_new_tokens=4) for pipe in pair],
    ):
        for name in (name for name in dir(theirs) if not name.startswith("_")):
            assert hasattr(ours, name), name
        for name in (name for name in dir(theirs.perf_metrics) if name.startswith("get_")):
            getattr(ours.perf_metrics, name)()
        for name in (name for name in dir(theirs.perf_metrics.raw_metrics) if not name.startswith("_")):
            assert hasattr(ours.perf_metrics.raw_metrics, name), name


def test_pipelines_have_the_methods_of_genai(pair):
    ours, theirs = pair
    assert {name for name in dir(theirs) if not name.startswith("_")} <= set(dir(ours))


def test_sampling_draws_from_the_same_tokens(pair):
    """Over many draws of one token, both pipelines draw the same set of tokens with about the same shares."""
    options = {"do_sample": True, "temperature": 1.2, "top_k": 6, "top_p": 0.6, "max_new_tokens": 1, "ignore_eos": True}
    shares = []
    for pipe, ids in zip(pair, (np.array([[5, 6, 7]]), ov.Tensor(np.array([[5, 6, 7]]))), strict=True):
        draws = [pipe.generate(ids, rng_seed=seed, **options).tokens[0][0] for seed in range(1, 401)]
        shares.append(np.bincount(draws, minlength=1024) / len(draws))
    assert np.array_equal(shares[0] > 0, shares[1] > 0)
    assert np.abs(shares[0] - shares[1]).sum() / 2 < 0.12


@pytest.mark.slow
def test_stop_ids_of_the_model_hold_for_configs_of_the_user(zoo, tmp_path):
    for path in (zoo / "llama").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 740], "pad_token_id": 2}')
    config = genai.GenerationConfig()
    config.max_new_tokens = 20
    pipes = StaticLLMPipeline(tmp_path, "CPU", **EXACT), genai.LLMPipeline(tmp_path, "CPU", **EXACT)
    for keywords in ({"max_new_tokens": 20}, {"generation_config": config}):
        ours, theirs = both(pipes, [5, 6, 7], **keywords)
        assert ours.tokens == theirs.tokens
        assert ours.finish_reasons == ["stop"]
    for pipe in pipes:
        pipe.set_generation_config(config)
        assert pipe.get_generation_config().stop_token_ids == {1, 740}
    assert both(pipes, [5, 6, 7])[0].tokens == both(pipes, [5, 6, 7])[1].tokens


def test_every_form_of_text_gives_the_same_answer(pair):
    ours, theirs = pair
    for prompt in ("hello world", "One, two", "naïve café"):
        for options in ({}, {"apply_chat_template": False}):
            assert ours.generate(prompt, max_new_tokens=16, **options) == theirs.generate(
                prompt, max_new_tokens=16, **options
            )


def test_a_conversation_has_the_same_answers():
    """The embedded model has a conversation of three turns, each built on the previous answer."""
    from staticllm import demo_model_path

    ours = StaticLLMPipeline(demo_model_path(), "CPU", **EXACT)
    theirs = genai.LLMPipeline(demo_model_path(), "CPU", **EXACT)
    histories = genai.ChatHistory(), genai.ChatHistory()
    for question in ("Hello!", "What is an NPU?", "Tell me a story about a fox."):
        answers = []
        for pipe, history in zip((ours, theirs), histories, strict=True):
            history.append({"role": "user", "content": question})
            answers.append(pipe.generate(history, max_new_tokens=48).texts[0])
            history.append({"role": "assistant", "content": answers[-1]})
        assert answers[0] == answers[1]


@pytest.mark.slow
def test_static_programs_generate_the_tokens_of_npuw(zoo, prompt_of):
    """Our separate programs are compared with NPUW's prefill and generate models, on the CPU."""
    lengths = {"MAX_PROMPT_LEN": 128, "MIN_RESPONSE_LEN": 64}
    on_cpu = {"NPUW_DEVICES": "CPU", "NPUW_ONLINE_PIPELINE": "NONE", "INFERENCE_PRECISION_HINT": "f32"}
    npuw = genai.LLMPipeline(zoo / "llama", "NPU", **lengths, **on_cpu)
    ours = StaticLLMPipeline(zoo / "llama", "CPU", PROGRAMS="separate", **lengths, **EXACT)
    for length in (5, 40, 100):
        first, second = both((ours, npuw), prompt_of(length), max_new_tokens=16, ignore_eos=True)
        assert first.tokens == second.tokens
