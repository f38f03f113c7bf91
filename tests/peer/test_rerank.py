"""Compares rankings with GenAI's class in its own calls: truncated pairs, its Config, any number of texts, and waiting."""

from __future__ import annotations

import zipfile

import numpy as np
import openvino_genai as genai
import pytest
from support.encoders.encoder_models import ARCHIVES, unpack

from staticllm import StaticRerankPipeline
from staticllm.errors import PromptError

EXACT = {"INFERENCE_PRECISION_HINT": "f32"}
SHORT, LONG = "what is a fox?", "what is a fox, and why is the sun hot? " * 2
TEXTS = ["yes", "a fox is an animal, 12 of them.", "no", "the sun is hot; the moon is not." * 3, "what?", "fox fox"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reranker")
    unpack("bert_scores", folder)
    with zipfile.ZipFile(ARCHIVES / "bert_tokenizer.zip") as archive:
        archive.extractall(folder)
    return folder


def same(found, expected):
    assert len(found) == len(expected)
    np.testing.assert_allclose([score for _, score in found], [score for _, score in expected], atol=1e-6, rtol=0)
    theirs = dict(expected)  # texts whose scores are equal may change places, also at the end of the ranking
    others = [score for index, score in found if index not in theirs]
    assert all(score == pytest.approx(expected[-1][1], abs=1e-6) for score in others)
    assert all(theirs.get(index, score) == pytest.approx(score, abs=1e-6) for index, score in found)


@pytest.mark.parametrize("max_length", [None, 5, 6, 11, 12, 24, 33])
def test_truncated_pairs_have_the_same_scores(directory, max_length):
    """GenAI 2026.4 may crash where a long pair is truncated at more tokens."""
    options = {"top_n": 100} | ({} if max_length is None else {"max_length": max_length})
    peer = genai.TextRerankPipeline(directory, "CPU", **options, **EXACT)
    with StaticRerankPipeline(directory, "CPU", **options, **EXACT) as pipe:
        for query in (SHORT,) if max_length is None else (SHORT, LONG, LONG + LONG):
            same(pipe.rerank(query, TEXTS), peer.rerank(query, TEXTS))


@pytest.mark.parametrize("top_n", [1, 3, 100])
def test_a_config_of_genai_gives_the_same_ranking(directory, top_n):
    config = genai.TextRerankPipeline.Config(top_n=top_n)
    peer = genai.TextRerankPipeline(directory, "CPU", config, **EXACT)
    with StaticRerankPipeline(directory, "CPU", config, **EXACT) as pipe:
        for count in (1, 2, 40):
            texts = [f"{TEXTS[index % len(TEXTS)]} {index}" for index in range(count)]
            expected = peer.rerank(SHORT, texts)
            assert len(expected) == min(top_n, count)
            same(pipe.rerank(SHORT, texts), expected)
            for each in (pipe, peer):
                each.start_rerank_async(SHORT, texts)
            same(pipe.wait_rerank(), peer.wait_rerank())


def test_the_default_config_is_genais():
    theirs, ours = genai.TextRerankPipeline.Config(), StaticRerankPipeline.Config()
    assert {name: getattr(theirs, name) for name in vars(ours)} == vars(ours)


def test_a_length_for_special_tokens_alone_is_refused_in_one_line(directory):
    with (
        StaticRerankPipeline(directory, "CPU", max_length=2, **EXACT) as pipe,
        pytest.raises(PromptError, match="max_length=2: a query and a text need 3 special tokens"),
    ):
        pipe.rerank(SHORT, TEXTS)


def test_pairs_that_crash_the_tokenizer_are_truncated(directory):
    with StaticRerankPipeline(directory, "CPU", **EXACT) as pipe:
        for _ in range(20):
            assert np.isfinite(pipe.scores(LONG * 4, TEXTS)).all()
