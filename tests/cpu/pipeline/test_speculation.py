"""Tests prompt lookup and draft models in pipelines: tokens are those without drafts, and samples have the same distribution."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter

import gguf
import numpy as np
import openvino_genai as genai
import pytest
from support.engine.engine_drafters import always_drafting
from support.models import gguf_files

import staticllm
from staticllm import ConfigError, GenerationConfigError, StaticLLMPipeline
from staticllm.pipelines.engine.speculation.draft_model import DraftModel
from staticllm.pipelines.launch.draft_origin import check_tokenizers
from staticllm.system.long_calls import wait_for_left

pytestmark = pytest.mark.usefixtures("shared_programs")

EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
SIZES = {"MAX_PROMPT_LEN": 256, "MIN_RESPONSE_LEN": 128}
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.1}


@pytest.fixture(autouse=True)
def _always():
    with always_drafting():
        yield


@pytest.fixture(scope="module", params=["demo", "llama", "gemma2", pytest.param("qwen2", marks=pytest.mark.slow)])
def name(request):
    return request.param


@pytest.fixture(scope="module")
def pipe(name, model_path):
    with StaticLLMPipeline(model_path(name), "CPU", **SIZES, **EXACT) as pipe:
        yield pipe


def repeating(prompt_of, length=100, seed=0):
    """A prompt that repeats itself three times, so that its n-grams are found."""
    part = prompt_of(length // 3, seed)
    return [*part, *part, *part]


def test_greedy_tokens_are_those_of_the_original(pipe, name, model_path, prompt_of, original):
    for prompt in (repeating(prompt_of), prompt_of(40)):
        expected = original(model_path(name)).greedy(prompt, 60)
        for options in ({"max_ngram_size": 3, "num_assistant_tokens": 5}, {"max_ngram_size": 2}):
            found = pipe.generate(np.array([prompt]), max_new_tokens=60, ignore_eos=True, **options)
            assert found.tokens == [expected], options
            assert found.perf_metrics.get_num_draft_tokens() > 0
            assert found.perf_metrics.get_num_generated_tokens() == 60


def test_sampled_tokens_are_those_without_drafts(pipe, prompt_of):
    num_drafted = 0
    for seed in range(1, 6):
        options = {"max_new_tokens": 50, "ignore_eos": True, "rng_seed": seed, "logprobs": 1, **SAMPLING}
        prompt = np.array([repeating(prompt_of, seed=seed)])
        plain, drafted = pipe.generate(prompt, **options), pipe.generate(prompt, max_ngram_size=3, **options)
        assert drafted.tokens == plain.tokens
        assert drafted.scores == pytest.approx(plain.scores, abs=1e-2)
        num_drafted += drafted.perf_metrics.get_num_draft_tokens()
    assert num_drafted > 0


def test_requests_with_and_without_drafts_share_calls(pipe, prompt_of):
    prompts = [repeating(prompt_of, 30 + 9 * i, i) for i in range(6)]
    options = [{"max_ngram_size": 3} if i % 3 else {} for i in range(6)]
    alone = [pipe.generate(np.array([p]), max_new_tokens=40, ignore_eos=True).tokens[0] for p in prompts]
    handles = [
        pipe.submit(np.array([p]), max_new_tokens=40, ignore_eos=True, **each)
        for p, each in zip(prompts, options, strict=True)
    ]
    assert [handle.result().tokens[0] for handle in handles] == alone


def test_stops_and_streams_are_those_without_drafts(pipe, prompt_of):
    prompt = np.array([repeating(prompt_of)])
    whole = pipe.generate(prompt, max_new_tokens=40, ignore_eos=True).tokens[0]
    stop = whole[17]
    for options in ({}, {"max_ngram_size": 3}):
        found = pipe.generate(prompt, max_new_tokens=40, stop_token_ids={stop}, min_new_tokens=3, **options)
        plain = pipe.generate(prompt, max_new_tokens=40, stop_token_ids={stop}, min_new_tokens=3)
        assert (found.tokens, found.finish_reasons) == (plain.tokens, plain.finish_reasons)
    texts = []
    for options in ({}, {"max_ngram_size": 3}):
        parts = []
        text = pipe.generate("a b a b a b a b", streamer=parts.append, max_new_tokens=30, ignore_eos=True, **options)
        assert "".join(parts) == text
        texts.append(str(text))
    assert texts[0] == texts[1]
    stop_string = texts[0][5:9]
    cut = pipe.generate(
        "a b a b a b a b", max_new_tokens=30, ignore_eos=True, stop_strings={stop_string}, max_ngram_size=3
    )
    assert str(cut) == texts[0][: texts[0].index(stop_string)]


def test_prompt_lookup_for_all_requests(zoo, prompt_of):
    prompt = np.array([repeating(prompt_of)])
    with StaticLLMPipeline(zoo / "llama", "CPU", prompt_lookup=True, MAX_NUM_SEQS=1, **SIZES, **EXACT) as pipe:
        assert pipe.config.prompt_lookup
        found = pipe.generate(prompt, max_new_tokens=40, ignore_eos=True)
        assert found.perf_metrics.get_num_accepted_tokens() > 0, "with one request at once, too"
        assert pipe.stats().drafted_tokens >= pipe.stats().accepted_tokens > 0
        two = pipe.generate(prompt, max_new_tokens=9, do_sample=True, num_return_sequences=2, rng_seed=3)
        assert two.perf_metrics.get_num_draft_tokens() == 0
    with StaticLLMPipeline(zoo / "llama", "CPU", **SIZES, **EXACT) as pipe:
        assert found.tokens == pipe.generate(prompt, max_new_tokens=40, ignore_eos=True).tokens


@pytest.mark.parametrize("layout", ["separate", "blocks"])
def test_separate_programs_check_drafts_in_the_program_for_several_requests(zoo, prompt_of, layout):
    sizes = {"PROGRAMS": layout, "MAX_PROMPT_LEN": 64, "MIN_RESPONSE_LEN": 64, "MAX_NUM_SEQS": 4}
    prompt = np.array([repeating(prompt_of, 30)])
    with StaticLLMPipeline(zoo / "llama", "CPU", **sizes, **EXACT) as pipe:
        plain = pipe.generate(prompt, max_new_tokens=40, ignore_eos=True)
        found = pipe.generate(prompt, max_new_tokens=40, ignore_eos=True, max_ngram_size=3)
        assert found.tokens == plain.tokens
        assert found.perf_metrics.get_num_draft_tokens() > 0


def test_a_recurrent_model_ignores_prompt_lookup(zoo, prompt_of):
    prompt = np.array([repeating(prompt_of, 30)])
    with StaticLLMPipeline(zoo / "lfm2", "CPU", MAX_PROMPT_LEN=64, MIN_RESPONSE_LEN=64, **EXACT) as pipe:
        plain = pipe.generate(prompt, max_new_tokens=20, ignore_eos=True)
        found = pipe.generate(prompt, max_new_tokens=20, ignore_eos=True, max_ngram_size=3)
        assert found.tokens == plain.tokens
        assert found.perf_metrics.get_num_draft_tokens() == 0
    with pytest.raises(ConfigError, match="recurrent states"):
        StaticLLMPipeline(zoo / "lfm2", "CPU", draft_model=staticllm.draft_model(zoo / "llama"))


def chi_square(observed: Counter, shares: np.ndarray) -> tuple[float, int]:
    """Return the statistic and the degrees of freedom; tokens that are expected fewer than five times count as one."""
    total = sum(observed.values())
    counts = np.array([observed.get(token, 0) for token in range(len(shares))], float)
    common = shares * total >= 5
    expected = np.append(shares[common], shares[~common].sum()) * total
    found = np.append(counts[common], counts[~common].sum())
    kept = expected > 0
    return float(((found - expected)[kept] ** 2 / expected[kept]).sum()), int(kept.sum()) - 1


def test_samples_with_drafts_have_the_distribution_of_the_model(zoo, prompt_of, original):
    """The draft model is the model itself, so that the most likely token is drafted, and about half of the drafts are accepted.

    The reference are the original's own logits after each beginning that was drawn often. With n degrees of freedom, the
    99.9 % quantile of chi-square is below n + 3.3 sqrt(2n) + 7.
    """
    prompt, count = prompt_of(30), 1500
    options = {"do_sample": True, "temperature": 0.08, "top_k": 6, "max_new_tokens": 4, "ignore_eos": True}
    draft = staticllm.draft_model(zoo / "llama", **EXACT)
    with StaticLLMPipeline(
        zoo / "llama",
        "CPU",
        draft_model=draft,
        MAX_PROMPT_LEN=64,
        MIN_RESPONSE_LEN=64,
        MAX_NUM_SEQS=4,
        KV_SLOTS=4096,
        **EXACT,
    ) as pipe:
        answers = []
        for seed in range(1, count + 1, 100):
            handles = [pipe.submit(np.array([prompt]), rng_seed=n, **options) for n in range(seed, seed + 100)]
            answers += [tuple(handle.result().tokens[0]) for handle in handles]
        stats = pipe.stats()
    assert count / 4 < stats.accepted_tokens < 0.9 * stats.drafted_tokens
    reference = original(zoo / "llama")
    for place in range(4):
        for before, times in Counter(answer[:place] for answer in answers).items():
            if times < 100:
                continue
            logits = logits_after(reference, [*prompt, *before])
            best = np.argsort(-logits, kind="stable")[:6]
            weights = np.exp((logits[best] - logits[best[0]]) / 0.08)
            shares = np.zeros(len(logits))
            shares[best] = weights / weights.sum()
            observed = Counter(answer[place] for answer in answers if answer[:place] == before)
            statistic, freedom = chi_square(observed, shares)
            assert set(observed) <= set(best.tolist())
            assert statistic < freedom + 3.3 * (2 * freedom) ** 0.5 + 7, (place, before, observed)


def logits_after(reference, tokens):
    reference.reset()
    return reference.logits(tokens)[-1]


# -- draft models


@pytest.fixture(scope="module")
def drafted(zoo):
    """A model with itself as its draft model: every token that it drafts is right, in f32 on both sides."""
    draft = staticllm.draft_model(zoo / "llama", "CPU", **EXACT)
    with StaticLLMPipeline(zoo / "llama", "CPU", draft_model=draft, **SIZES, **EXACT) as pipe:
        yield pipe


def test_a_draft_model_changes_no_token(drafted, zoo, prompt_of, original):
    for length in (1, 40, 200):
        prompt = prompt_of(length)
        found = drafted.generate(np.array([prompt]), max_new_tokens=50, ignore_eos=True, num_assistant_tokens=4)
        assert found.tokens == [original(zoo / "llama").greedy(prompt, 50)]
        metrics = found.perf_metrics
        assert metrics.get_num_accepted_tokens() > 0.8 * metrics.get_num_draft_tokens() > 10, (
            "at least one in each step"
        )


def test_sampling_with_a_draft_model_draws_the_same_tokens(drafted, zoo, prompt_of):
    with StaticLLMPipeline(zoo / "llama", "CPU", **SIZES, **EXACT) as plain:
        for seed in range(1, 5):
            options = {"max_new_tokens": 40, "ignore_eos": True, "rng_seed": seed, **SAMPLING}
            prompt = np.array([prompt_of(20, seed)])
            assert drafted.generate(prompt, **options).tokens == plain.generate(prompt, **options).tokens


def test_many_requests_draft_together(drafted, zoo, prompt_of, original):
    prompts = [prompt_of(10 + 7 * i, i) for i in range(9)]
    handles = [drafted.submit(np.array([p]), max_new_tokens=30, ignore_eos=True) for p in prompts]
    found = [handle.result().tokens[0] for handle in handles]
    assert found == [original(zoo / "llama").greedy(prompt, 30) for prompt in prompts]
    assert drafted.engine.core.device.draft_planner.model.runner.cache.slots.num_used == 0


def test_another_model_of_the_same_tokenizer_drafts(zoo, prompt_of, original):
    """Its guesses are random, and so are most of the main model's tokens: nearly all are rejected."""
    with StaticLLMPipeline(
        zoo / "llama", "CPU", {"draft_model": staticllm.draft_model(zoo / "mistral")}, **SIZES, **EXACT
    ) as pipe:
        prompt = prompt_of(60)
        found = pipe.generate(np.array([prompt]), max_new_tokens=40, ignore_eos=True)
        assert found.tokens == [original(zoo / "llama").greedy(prompt, 40)]
        assert found.perf_metrics.get_num_draft_tokens() > 0
        unsure = pipe.generate(
            np.array([prompt]), max_new_tokens=20, ignore_eos=True, assistant_confidence_threshold=1.0
        )
        assert unsure.perf_metrics.get_num_draft_tokens() == 0
        with pytest.raises(GenerationConfigError, match="drafts are for single answers"):
            pipe.generate("a", do_sample=True, num_return_sequences=2, num_assistant_tokens=3)


def test_the_draft_model_of_genai_is_taken(zoo, prompt_of):
    draft = genai.draft_model(str(zoo / "llama"), "CPU", **EXACT)
    with StaticLLMPipeline(zoo / "llama", "CPU", draft_model=draft, **SIZES, **EXACT) as pipe:
        result = pipe.generate(np.array([prompt_of(20)]), max_new_tokens=20, ignore_eos=True)
        assert result.perf_metrics.get_num_accepted_tokens() > 0


def test_impossible_draft_models_are_one_line_errors(zoo):
    threads = threading.active_count()
    for draft, message in (
        (genai.draft_model.__wrapped__(zoo / "llama", "CPU"), "use staticllm.draft_model"),
        (5, "draft_model is a int"),
        (staticllm.draft_model(staticllm.demo_model_path(), "CPU"), "another tokenizer"),
    ):
        with pytest.raises(ConfigError, match=message) as error:
            StaticLLMPipeline(zoo / "llama", "CPU", draft_model=draft, MAX_PROMPT_LEN=64)
        assert "\n" not in str(error.value)
    wait_for_left()  # the compiler runs to its end alone
    end = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < end:
        time.sleep(0.02)
    assert threading.active_count() == threads
    with pytest.raises(staticllm.ModelError):
        StaticLLMPipeline(zoo / "llama", "CPU", draft_model=staticllm.draft_model(zoo / "nothing"))
    with pytest.raises(ConfigError, match="unknown property 'MAX_PROMT_LEN'"):
        StaticLLMPipeline(zoo / "llama", "CPU", draft_model=staticllm.draft_model(zoo / "llama", MAX_PROMT_LEN=3))


MORE = 64
"""The unused tokens that one of two models of a family has at its end, and the other has not."""


def write_with_more(monkeypatch, path, model, num_more):
    """Write a GGUF file with unused tokens at the end of its vocabulary, which are nearly always the most likely ones."""
    add_tensor, add_size = gguf.GGUFWriter.add_tensor, gguf.GGUFWriter.add_vocab_size
    add_vocabulary = gguf_files.add_vocabulary

    def adding(writer, name, values, **more):
        if name in ("token_embd.weight", "output.weight"):
            rows = values.shape[0] // 2
            values = np.concatenate([values, 1.02 * values[rows : rows + num_more]]).astype(values.dtype)
        add_tensor(writer, name, values, **more)

    with monkeypatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", adding)
        patch.setattr(gguf.GGUFWriter, "add_vocab_size", lambda writer, size: add_size(writer, size + num_more))
        patch.setattr(gguf_files, "add_vocabulary", lambda writer, size: add_vocabulary(writer, size + num_more))
        return gguf_files.write(model, path, "llama", "F32").path


@pytest.mark.parametrize("num_more,num_drafted", [(0, MORE), (MORE, 0), (MORE, 2 * MORE)])
def test_a_draft_model_may_have_other_unused_tokens_at_its_end(
    num_more, num_drafted, zoo, prompt_of, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    main = write_with_more(monkeypatch, tmp_path / "main.gguf", zoo / "llama", num_more)
    draft = write_with_more(monkeypatch, tmp_path / "draft.gguf", zoo / "llama", num_drafted)
    draft_model = staticllm.draft_model(draft, "CPU", **EXACT)
    with (
        StaticLLMPipeline(main, "CPU", **SIZES, **EXACT) as plain,
        StaticLLMPipeline(main, "CPU", draft_model=draft_model, **SIZES, **EXACT) as drafted,
    ):
        prompts = [prompt_of(60), prompt_of(20, 1)]
        last = len(plain.get_tokenizer().get_vocab()) - 1
        prompts += [[*prompt, last, *prompt[:9]] for prompt in prompts]
        proposed = []
        propose = DraftModel.propose

        def noting(self, wanted):
            drafts = propose(self, wanted)
            proposed.extend(token for draft in drafts for token in draft.tokens)
            return drafts

        monkeypatch.setattr(DraftModel, "propose", noting)
        for options in (
            {},
            {"do_sample": True, "temperature": 1.0, "rng_seed": 3},
            {"do_sample": True, "rng_seed": 4, "top_k": 5},
        ):
            alone = [plain.generate(np.array([p]), max_new_tokens=40, ignore_eos=True, **options) for p in prompts]
            handles = [drafted.submit(np.array([p]), max_new_tokens=40, ignore_eos=True, **options) for p in prompts]
            found = [handle.result() for handle in handles]
            assert [each.tokens for each in found] == [each.tokens for each in alone]
            if num_drafted < num_more:
                assert not any(each.perf_metrics.get_num_draft_tokens() for each in found[2:])
        assert proposed
        assert max(proposed) <= last
        model = drafted.engine.core.device.draft_planner.model
        assert model.is_usable and not model.num_failures


class Vocabulary:
    def __init__(self, *texts):
        self.texts = texts

    def get_vocab(self):
        return {text.encode(): place for place, text in enumerate(self.texts)}


@pytest.mark.parametrize(
    "mine,other,wrong",
    [
        (["a", "b", "[PAD2]"], ["a", "b"], None),
        (["a", "b"], ["a", "b", "<unused7>", "c"], None),
        (["a", "b", "[PAD2]"], ["a", "b", "<tool>"], None),
        (["a", "b", "<|reserved_special_token_9|>"], ["a", "b", "<|eot|>"], None),
        (["a", "b", "c"], ["a", "c"], "token 1 is b'c' there and b'b' here"),
        (["a", "[1]"], ["a", "[2]"], "token 1 is"),
        (["pad1", "b"], ["b", "pad1"], "token 0 is"),
    ],
)
def test_tokenizers_are_compared_where_both_have_tokens_in_use(mine, other, wrong, tmp_path, monkeypatch):
    (tmp_path / "openvino_tokenizer.xml").touch()
    monkeypatch.setattr("staticllm.pipelines.launch.draft_origin.read_tokenizer", lambda path: Vocabulary(*other))
    if wrong is None:
        check_tokenizers(Vocabulary(*mine), tmp_path)
    else:
        with pytest.raises(ConfigError, match=re.escape(wrong)):
            check_tokenizers(Vocabulary(*mine), tmp_path)
