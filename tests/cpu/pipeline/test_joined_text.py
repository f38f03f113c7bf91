"""Tests that the joined texts of tokens are those of the tokenizer, and that only detokenizers that join tokens are used so."""

import shutil

import openvino_genai as genai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quick import examples

from staticllm import ModelError, demo_model_path
from staticllm.model_dir import joins_tokens
from staticllm.pipelines.text.tokenizer_tools import SpecialTokens, decoder_of

MARKERS = ["<|user|>", "<|system|>"]


@pytest.fixture(scope="module")
def tokenizer():
    return genai.Tokenizer(str(demo_model_path()))


@pytest.fixture(scope="module")
def rows(tokenizer):
    """Random ids, with many of those that are special or parts of characters."""
    ids = range(len(tokenizer.get_vocab()))
    odd = [id for id, text in enumerate(tokenizer.decode([[id] for id in ids])) if not text or "\ufffd" in text]
    return st.lists(st.sampled_from(ids) | st.sampled_from(odd), max_size=40)


@pytest.fixture(scope="module")
def decoders(tokenizer):
    """Pairs of a function that joins texts, and one that decodes all tokens together."""
    return [
        (decoder_of(tokenizer, joins_tokens=True), tokenizer.decode),
        (
            SpecialTokens(tokenizer, joins_tokens=True).decoder(MARKERS, tokenizer.decode),
            SpecialTokens(tokenizer).decoder(MARKERS, tokenizer.decode),
        ),
    ]


@pytest.mark.parametrize("index", [0, 1], ids=["plain", "with markers"])
def test_joined_text_is_that_of_the_tokenizer(decoders, rows, index):
    joined, together = decoders[index]

    @settings(max_examples=examples(300), deadline=None)
    @given(rows)
    def check(tokens):
        assert joined(tokens) == together(tokens)

    check()


def test_a_detokenizer_that_changes_the_text_is_not_used_so(tmp_path):
    assert joins_tokens(demo_model_path())
    model = shutil.copytree(demo_model_path(), tmp_path / "model")
    xml = model / "openvino_detokenizer.xml"
    layer = '<layer id="99" name="clean_up" type="RegexNormalization" version="extension"/></layers>'
    xml.write_text(xml.read_text().replace("</layers>", layer))
    assert not joins_tokens(model)
    xml.unlink()
    with pytest.raises(ModelError, match=r"openvino_detokenizer\.xml is missing"):
        joins_tokens(model)
