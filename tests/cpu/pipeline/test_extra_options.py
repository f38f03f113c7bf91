"""Tests options beyond GenAI's through a whole pipeline: samplers, and logits processors of the user."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import openvino_genai as genai
import pytest
from support.helpers import one_line

from staticllm import GenerationConfigError, LogitsProcessor, StaticLLMPipeline, demo_model_path
from staticllm.testing import fake_pipeline

pytestmark = pytest.mark.usefixtures("shared_programs")
OPTIONS = {"MAX_PROMPT_LEN": 128, "MIN_RESPONSE_LEN": 64, "INFERENCE_PRECISION_HINT": "f32"}
PROMPT = "Once upon a time"


def print_nothing(input_ids, scores):
    scores[input_ids[-1]] -= 1.0


@pytest.fixture(scope="module")
def pipe():
    with StaticLLMPipeline(demo_model_path(), "CPU", **OPTIONS) as pipe:
        yield pipe


def tokens_of(pipe, prompt=PROMPT, **options):
    return pipe.generate([prompt], max_new_tokens=24, ignore_eos=True, **options).tokens[0]


def test_logit_bias_forbids_and_prefers_tokens(pipe):
    plain = tokens_of(pipe)
    assert plain[0] not in tokens_of(pipe, logit_bias={plain[0]: False})
    assert plain[0] not in tokens_of(pipe, logit_bias={str(plain[0]): -np.inf})
    assert tokens_of(pipe, logit_bias={7: 1000}) == [7] * 24
    assert tokens_of(pipe, logit_bias={}) == plain


def test_bad_words_do_not_appear(pipe):
    words = [word for word in pipe.generate(PROMPT, max_new_tokens=24).split() if word.isalpha()]
    text = pipe.generate(PROMPT, max_new_tokens=24, bad_words=words[:2])
    assert all(f" {word} " not in f" {text} " for word in words[:2])
    plain = tokens_of(pipe)
    pair = plain[3:5]
    found = tokens_of(pipe, bad_words_ids=[pair])
    assert found[:4] == plain[:4]
    assert pair not in [found[start : start + 2] for start in range(23)]


def test_no_repeat_ngram_size_works_as_a_keyword_and_not_in_genais_config(pipe):
    ids = pipe.get_tokenizer().encode(PROMPT).input_ids.data[0].tolist()
    prompt = np.array([ids * 3])
    options = {"max_new_tokens": 40, "ignore_eos": True}
    plain = pipe.generate(prompt, **options).tokens[0]
    config = genai.GenerationConfig(no_repeat_ngram_size=2, **options)
    assert pipe.generate(prompt, config).tokens[0] == plain
    text = [*prompt[0].tolist(), *pipe.generate(prompt, no_repeat_ngram_size=2, **options).tokens[0]]
    pairs = list(pairwise(text))
    new, old = pairs[len(prompt[0]) - 1 :], set(pairs[: len(prompt[0]) - 1])
    assert len(set(new)) == len(new)
    assert not old & set(new)


def test_samplers_change_what_is_drawn_and_a_seed_repeats_it(pipe):
    seen = set()
    xtc, mirostat = {"xtc_probability": 1.0, "xtc_threshold": 0.05}, {"mirostat": 2, "mirostat_tau": 2.0}
    for options in ({}, {"typical_p": 0.3}, xtc, mirostat):
        drawn = [tokens_of(pipe, do_sample=True, temperature=1.5, rng_seed=5, **options) for _ in range(2)]
        assert drawn[0] == drawn[1]
        seen.add(tuple(drawn[0]))
    assert len(seen) == 4


def test_dry_reads_its_breakers_as_text(pipe):
    """After a breaker a repetition begins anew; the tokens of breakers are those whose text contains one."""
    words = pipe._tools.word_tokens
    texts = words._token_texts()
    for breaker in ("\n", ".", "the"):
        sequences = words.of_breaker(breaker)
        single = {sequence[0] for sequence in sequences if len(sequence) == 1}
        assert single == {token for token, text in enumerate(texts) if breaker in text}
        assert all(breaker in pipe._tools.decode(list(sequence)) for sequence in sequences)
    repeated = " ".join(["one two three four five six"] * 6)
    plain = tokens_of(pipe, repeated, apply_chat_template=False)
    assert tokens_of(pipe, repeated, apply_chat_template=False, dry_multiplier=5.0) != plain
    every = {"dry_multiplier": 5.0, "dry_sequence_breakers": [" ", *"abcdefghijklmnopqrstuvwxyz"]}
    assert tokens_of(pipe, repeated, apply_chat_template=False, **every) == plain


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"typical_q": 0.5}, "unknown option 'typical_q': did you mean 'typical_p'"),
        ({"dry_multiplyer": 0.5}, "did you mean 'dry_multiplier'"),
        ({"typical_p": 0.0, "do_sample": True}, "typical_p=0.0: must be a number more than 0, up to 1"),
        ({"typical_p": 0.5}, "typical_p=0.5 with do_sample=False"),
        ({"mirostat": 1, "do_sample": True}, "mirostat=1: only version 2"),
        ({"mirostat": 2}, "mirostat=2 with do_sample=False"),
        ({"mirostat": 2, "xtc_probability": 0.5, "do_sample": True}, "mirostat=2 with xtc_probability=0.5"),
        ({"mirostat": "2", "do_sample": True}, "mirostat='2': must be a whole number from 0 to 2"),
        ({"xtc_probability": 2, "do_sample": True}, "xtc_probability=2: must be a number from 0, up to 1"),
        ({"dry_base": 0.5}, "dry_base=0.5: must be a number from 1, up to 1000"),
        ({"dry_allowed_length": 0}, "dry_allowed_length=0: must be a whole number from 1"),
        ({"dry_penalty_last_n": -2}, "dry_penalty_last_n=-2"),
        ({"dry_sequence_breakers": [""]}, "must be a list of non-empty strings"),
        ({"logit_bias": [1, 2]}, r"logit_bias=\[1, 2\]: must be a dict"),
        ({"logit_bias": {"x": 1}}, "a token of logit_bias='x'"),
        ({"logit_bias": {1: "a lot"}}, r"logit_bias\[1\]='a lot'"),
        ({"logit_bias": {1: float("nan")}}, r"logit_bias\[1\]=nan"),
        ({"logit_bias": {10**6: 1}}, "names token 1000000: ids go from 0 to"),
        ({"bad_words_ids": [[10**6]]}, "names token 1000000: ids go from 0 to"),
        ({"bad_words": [3]}, r"bad_words=\[3\]"),
        ({"bad_words_ids": [1, 2]}, "must be a list of non-empty lists of token ids"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size=-1"),
        ({"logits_processor": 3}, r"logits_processor=3: must be an object with process\(logits\), or a callable"),
        ({"logits_processor": LogitsProcessor}, "logits_processor=<class"),
        ({"dry_multiplier": 0.8, "num_beams": 2}, "dry_multiplier with num_beams=2"),
        ({"logit_bias": {5: False}, "num_beams": 2}, "logit_bias with num_beams=2"),
        ({"logits_processor": print, "num_beams": 2}, "logits_processor with num_beams=2"),
        ({"parsers": ["x"]}, r"parsers=\['x'\]: must be a list of openvino_genai.Parser"),
    ],
)
def test_wrong_values_are_one_line(pipe, options, said):
    with pytest.raises(GenerationConfigError, match=said) as error:
        pipe.generate(PROMPT, max_new_tokens=4, **options)
    one_line(error)


def test_defaults_go_with_beams(pipe):
    expected = tokens_of(pipe, num_beams=2)
    assert tokens_of(pipe, num_beams=2, typical_p=1.0, logit_bias=None, bad_words=[], dry_multiplier=0.0) == expected


@pytest.mark.parametrize(
    "options",
    [
        {"dry_multiplier": 1.0},
        {"no_repeat_ngram_size": 4},
        {"do_sample": True, "temperature": 0.7, "rng_seed": 4, "xtc_probability": 0.5},
        {"do_sample": True, "temperature": 0.7, "rng_seed": 4, "mirostat": 2, "mirostat_tau": 3.0},
        {"do_sample": True, "temperature": 0.7, "rng_seed": 4, "typical_p": 0.8, "logits_processor": print_nothing},
    ],
)
def test_drafts_do_not_change_what_is_chosen(pipe, options):
    prompt = "the fox and the dog and the fox and the dog and the fox and the"
    drafts = {"max_ngram_size": 3, "num_assistant_tokens": 4}
    assert tokens_of(pipe, prompt, **drafts, **options) == tokens_of(pipe, prompt, **options)


def test_a_users_processor_works_with_generate_and_submit(pipe):
    plain = tokens_of(pipe)

    def forbid_first(input_ids, scores):
        scores[plain[0]] = -np.inf
        return scores

    assert plain[0] not in tokens_of(pipe, logits_processor=forbid_first)
    handle = pipe.submit(PROMPT, max_new_tokens=8, ignore_eos=True, logits_processor=[forbid_first])
    other = pipe.submit(PROMPT, max_new_tokens=24, ignore_eos=True)
    assert plain[0] not in handle.result().tokens[0]
    assert other.result().tokens[0] == plain


def test_a_failing_processor_ends_only_its_request(pipe):
    def fail(input_ids, scores):
        raise ValueError("no such thing")

    other = pipe.submit(PROMPT, max_new_tokens=24, ignore_eos=True)
    with pytest.raises(GenerationConfigError, match=r"fail failed: ValueError: no such thing") as error:
        pipe.generate(PROMPT, max_new_tokens=8, logits_processor=fail)
    one_line(error)
    assert isinstance(error.value.__cause__, ValueError)
    assert other.result().tokens[0] == tokens_of(pipe)


def test_options_also_come_in_a_dict():
    with fake_pipeline("It is sunny.", MAX_PROMPT_LEN=64, MIN_RESPONSE_LEN=64) as pipe:
        assert "sunny" in pipe.generate("How is it?", {"dry_multiplier": 0.5, "max_new_tokens": 30})


def test_a_processor_that_waits_for_its_own_pipeline_ends_its_request_and_hangs_nothing(pipe):
    plain = tokens_of(pipe)

    def asks(input_ids, scores):
        pipe.generate("a", max_new_tokens=1)

    def waits(input_ids, scores):
        pipe.submit("a", max_new_tokens=1).result(20)

    def saves(input_ids, scores):
        pipe.engine.run_between_steps(lambda: None)

    for processor in (asks, waits, saves):
        other = pipe.submit(PROMPT, max_new_tokens=24, ignore_eos=True)
        with pytest.raises(GenerationConfigError, match="would wait for itself") as caught:
            pipe.submit(PROMPT, max_new_tokens=3, logits_processor=processor).result(20)
        one_line(caught)
        assert other.output(20).tokens == plain
