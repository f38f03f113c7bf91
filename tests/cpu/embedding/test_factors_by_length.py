"""Tests embedders whose RoPE factors depend on the length of a text: a vector is that of the original for the text alone."""

import numpy as np
import openvino_genai
import pytest
from openvino import opset13 as ops
from support.models.longrope import make_longrope, stepped

from staticllm import StaticEmbeddingPipeline
from staticllm.compiler_passes.shapes.select_logits import find_head
from staticllm.devices import get_core
from staticllm.pipelines.diagnostics.reference import EXACT

LIMIT = 60
LAST = openvino_genai.TextEmbeddingPipeline.PoolingType.LAST_TOKEN


def original_of(path):
    """Return a function from token ids to the normalised hidden state of the last one in one call of the original."""
    model = get_core().read_model(path / "openvino_model.xml")
    (logits,) = [node for node in model.get_results() if "logits" in node.output(0).get_names()]
    states = ops.result(find_head(logits).input_value(0))
    states.output(0).set_names({"states"})
    model.add_results([states])
    request = get_core().compile_model(model, "CPU", dict(EXACT)).create_infer_request()

    def vector(ids):
        request.reset_state()
        count = len(ids)
        feeds = {"input_ids": np.array([ids]), "attention_mask": np.ones((1, count), np.int64)}
        feeds |= {"position_ids": np.arange(count)[None], "beam_idx": np.zeros(1, np.int32)}
        request.infer(feeds)
        last = request.get_tensor("states").data[0][-1]
        return last / np.linalg.norm(last)

    return vector


@pytest.mark.parametrize("longest", [LIMIT, LIMIT + 1, 100, 160])
@pytest.mark.parametrize("programs", ["shared", "separate"])
def test_texts_of_one_request_do_not_decide_the_factors_of_others(programs, longest, zoo, tmp_path):
    """Short texts follow long ones in the same memory, and many are there at once, for calls of several sequences."""
    path = make_longrope(zoo / "llama", tmp_path / "model", stepped(LIMIT))
    random = np.random.default_rng(longest)
    texts = [" ".join(random.choice(list("abcdefghij"), size)) for size in random.integers(5, min(longest, 128), 80)]
    tokenizer = openvino_genai.Tokenizer(str(path))
    ids = [tokenizer.encode(text).input_ids.data[0].tolist() for text in texts]
    original = original_of(path)
    with StaticEmbeddingPipeline(
        path, "CPU", max_length=longest, pooling_type=LAST, PROGRAMS=programs, INFERENCE_PRECISION_HINT="f32"
    ) as pipe:
        found = np.asarray(pipe.encode(texts))
    wrong = [len(own) for own, vector in zip(ids, found, strict=True) if np.abs(original(own) - vector).max() > 1e-4]
    assert not wrong, f"{len(wrong)} of {len(texts)} vectors differ, of texts with {sorted(set(wrong))} tokens"
