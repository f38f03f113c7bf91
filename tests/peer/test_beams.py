"""Compares beam search with ``openvino_genai.LLMPipeline``: the same sequences and scores."""

from __future__ import annotations

import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest

from staticllm import StaticLLMPipeline
from staticllm.pipelines.diagnostics.reference import EXACT

pytestmark = pytest.mark.usefixtures("shared_programs")

MODELS = ["llama", "qwen2", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma2", "phi3", "demo"))]
CASES = {
    "beams": {"num_beams": 4, "num_return_sequences": 4},
    "early": {"num_beams": 3, "num_return_sequences": 3, "stop_criteria": genai.StopCriteria.EARLY},
    "never": {"num_beams": 3, "num_return_sequences": 2, "stop_criteria": genai.StopCriteria.NEVER},
    "groups": {"num_beams": 6, "num_beam_groups": 3, "diversity_penalty": 1.0, "num_return_sequences": 6},
    "n-grams": {"num_beams": 3, "no_repeat_ngram_size": 2, "num_return_sequences": 3},
    "long": {"num_beams": 3, "length_penalty": 2.0, "num_return_sequences": 3},
    "short": {"num_beams": 3, "length_penalty": -0.5, "num_return_sequences": 3},
}


@pytest.fixture(scope="module")
def pipelines(model_path):
    """A function from a name to both pipelines. Those of one model are kept at a time."""
    known = {}

    def of(name):
        if name not in known:
            for ours, _ in known.values():
                ours.close()
            known.clear()
            path = model_path(name)
            known[name] = StaticLLMPipeline(path, "CPU", **EXACT), genai.LLMPipeline(path, "CPU", **EXACT)
        return known[name]

    yield of
    for ours, _ in known.values():
        ours.close()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", MODELS)
def test_sequences_and_scores_equal(name, case, pipelines, prompt_of):
    options = {"max_new_tokens": 16, **CASES[case]}
    ours, theirs = pipelines(name)
    for length in (1, 7, 40):
        ids = np.array([prompt_of(length)])
        # tokens that a search of ours found become stop tokens, so that beams end in the middle
        found = ours.generate(ids, **options)
        stops = {tokens[len(tokens) // 2] for tokens in found.tokens[:2]}
        for more in ({}, {"stop_token_ids": stops}):
            mine = ours.generate(ids, **options, **more)
            other = theirs.generate(ov.Tensor(ids), **options, **more)
            assert mine.tokens == other.tokens, (length, more)
            scale = max(1.0, 16 ** -CASES[case].get("length_penalty", 1.0))  # a negative penalty multiplies the sum
            assert mine.scores == pytest.approx(other.scores, abs=1e-4 * scale, rel=1e-5 * scale)  # GenAI adds in f32
            assert list(map(str, mine.finish_reasons)) == [str(r.name).lower() for r in other.finish_reasons]
