"""Tests what a tokenizer that openvino-tokenizers has converted wrongly says: a line of ours, whatever encodes the text."""

from __future__ import annotations

import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest
from openvino_tokenizers import tokenizer_pipeline as steps
from support.helpers import SHORT
from support.models import gguf_texts

import staticllm
from staticllm import ModelError, StaticLLMPipeline
from staticllm.compiler_passes.conversion.gguf_tokenizer import build_tokenizer
from staticllm.errors import encoding
from staticllm.pipelines.embedding.text_tokenizer import TextTokenizer
from staticllm.pipelines.grammars.vocabulary import TokenEncoder
from staticllm.pipelines.text.tokenizer_tools import WordTokens

TEXT = "in 2024"
SAID = (
    r"the tokenizer cannot encode \d \w+ \(.*ragged_offset.*\): it was converted wrongly if `staticllm verify` says so"
)


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A tokenizer whose parts overlap: RegexSplit of openvino-tokenizers 2026.4.1 does not merge with the part before."""
    init = steps.RegexSplitStep.__init__

    def merging(self, *args, **options):
        init(self, *args, **options)
        if self.split_pattern == r"\p{N}":
            self.behaviour = "mergedwithprevious"

    monkeypatch.setattr(steps.RegexSplitStep, "__init__", merging)
    header = gguf_texts.byte_pairs(0, "smollm").write(tmp_path / "model.gguf")
    for name, model in zip(("tokenizer", "detokenizer"), build_tokenizer(header), strict=True):
        ov.save_model(model, tmp_path / f"openvino_{name}.xml")
    return genai.Tokenizer(tmp_path)


def test_a_pipeline_says_it(broken):
    with StaticLLMPipeline(staticllm.demo_model_path(), broken, "CPU", **SHORT) as pipe:
        for ask in (pipe.generate, pipe.submit):
            with pytest.raises(ModelError, match=SAID) as error:
                ask(TEXT, max_new_tokens=1, apply_chat_template=False)
            assert "\n" not in str(error.value)
        assert pipe.generate(np.array([[5, 6]]), max_new_tokens=1)


@pytest.mark.parametrize(
    "encode",
    [
        lambda tokenizer: TextTokenizer(tokenizer, 99, None).encode([TEXT]),
        lambda tokenizer: WordTokens(tokenizer).of_word("2024"),
        lambda tokenizer: TokenEncoder(tokenizer, [b"in"], frozenset())(TEXT),
    ],
)
def test_whatever_encodes_says_it(encode, broken):
    with pytest.raises(ModelError, match=SAID) as error:
        encode(broken)
    assert "\n" not in str(error.value)


def test_errors_of_ours_and_other_errors_stay():
    for kind in (staticllm.PromptError, TypeError):
        with pytest.raises(kind, match=r"^mine$"), encoding("1 text"):
            raise kind("mine")
