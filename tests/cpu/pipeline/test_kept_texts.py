"""What is kept of the texts that requests choose (words that are forbidden, breakers of DRY) is bounded by counts."""

import random

import openvino_genai as genai
import pytest

from staticllm import demo_model_path
from staticllm.pipelines.text import tokenizer_tools
from staticllm.pipelines.text.tokenizer_tools import WordTokens


@pytest.fixture(scope="module")
def tokenizer():
    return genai.Tokenizer(str(demo_model_path()))


def random_word(seed):
    drawn = random.Random(seed)
    return "".join(drawn.choice("abcdefgh ijkäö🦊") for _ in range(drawn.randint(1, 3)))


def test_texts_of_requests_leave_no_more_than_the_last(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizer_tools, "MAX_TEXTS", 8)
    monkeypatch.setattr(tokenizer_tools, "MAX_SEQUENCES", 500)
    kept = WordTokens(tokenizer)
    num_dropped = 0
    for seed in range(200):
        word = random_word(seed)
        fresh = WordTokens(tokenizer)
        fresh._texts = kept._texts
        before = len(kept.breakers)
        assert kept.of_breaker(word) == fresh.of_breaker(word)
        assert kept.of_word(word) == fresh.of_word(word)
        assert kept.of_breaker(word) == fresh.of_breaker(word)
        for texts in (kept.words, kept.breakers):
            assert 1 <= len(texts) <= 8
            assert texts.num_sequences == sum(map(len, texts._kept.values()))
            assert texts.num_sequences <= 500 or len(texts) == 1
        num_dropped += len(kept.breakers) <= before
    assert num_dropped > 50
