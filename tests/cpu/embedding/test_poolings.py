"""Tests the poolings of sentence-transformers' files against the original model, one text per call, pooled by numpy."""

import json

import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest
from openvino import opset13 as ops
from support.encoders.encoder_models import Alone, encoder_directory, write
from support.helpers import one_line

from staticllm import StaticEmbeddingPipeline
from staticllm.devices import get_core
from staticllm.errors import ConfigError, ModelError
from staticllm.pipelines.embedding.windve.affinity import unsupported

pytestmark = pytest.mark.usefixtures("shared_lowering")

F32 = {"INFERENCE_PRECISION_HINT": "f32"}
TEXTS = ["a", "What is an NPU?", "Tell me a story about a fox. " * 6, "the", "Ein Satz mit Umlauten: äöü."]
PROMPT = "find the answer:"


def summed(states):
    return states.sum(axis=0) / np.sqrt(len(states))


def weighted(states):
    return np.average(states, axis=0, weights=np.arange(1, len(states) + 1))


KINDS = {
    "pooling_mode_mean_sqrt_len_tokens": summed,
    "pooling_mode_weightedmean_tokens": weighted,
    "pooling_mode_mean_tokens": lambda states: states.mean(axis=0),
    "pooling_mode_cls_token": lambda states: states[0],
    "pooling_mode_lasttoken": lambda states: states[-1],
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return encoder_directory(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def states_of(directory):
    """The hidden states of a text, from the original alone."""
    alone, tokenizer = Alone(get_core().read_model(directory / "openvino_model.xml")), genai.Tokenizer(directory)

    def states(text):
        ids = tokenizer.encode(text).input_ids.data
        feeds = {"input_ids": ids, "attention_mask": np.ones_like(ids)}
        return np.array(alone.program_of(ids.shape[1])(feeds)[0])[0]

    return states


@pytest.mark.parametrize("mode", list(KINDS))
@pytest.mark.parametrize("is_normalised", [True, False])
def test_texts_are_pooled_as_the_file_says(directory, states_of, mode, is_normalised):
    write(directory / "1_Pooling" / "config.json", {"word_embedding_dimension": 32, mode: True})
    expected = [KINDS[mode](states_of(text)) for text in TEXTS]
    if is_normalised:
        expected = [vector / np.linalg.norm(vector) for vector in expected]
    with StaticEmbeddingPipeline(directory, "CPU", normalize=is_normalised, **F32) as pipe:
        np.testing.assert_allclose(pipe.encode(TEXTS), expected, atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("mode", "device"), [*((mode, "CPU") for mode in KINDS), ("pooling_mode_mean_tokens", "CPU#0")]
)
def test_the_tokens_of_a_prompt_do_not_count_if_the_file_says_so(directory, states_of, mode, device):
    if unsupported() and "#" in device:
        pytest.skip("threads cannot be bound to cores here")
    write(directory / "1_Pooling" / "config.json", {mode: True, "include_prompt": False})
    length, texts = len(states_of(PROMPT)), [f" {text}" for text in TEXTS]
    expected = []
    for text in texts:
        states = states_of(PROMPT + text)
        if mode == "pooling_mode_weightedmean_tokens":
            places = np.arange(length + 1, len(states) + 1)
            expected.append(np.average(states[length:], axis=0, weights=places))
        else:
            expected.append(KINDS[mode](states[length:]))
    with StaticEmbeddingPipeline(directory, device, normalize=False, **F32) as pipe:
        np.testing.assert_allclose(pipe.encode(texts, prompt=PROMPT), expected, atol=5e-6, rtol=1e-5)
        with_prompt = pipe.encode([PROMPT + text for text in texts])
        if mode != "pooling_mode_lasttoken":
            assert np.abs(with_prompt - expected).max() > 0.01, "without prompt= nothing is left out"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"pooling_mode_max_tokens": True}, "pooling pooling_mode_max_tokens: must be one of cls, mean"),
        ({"pooling_mode": "max"}, "pooling max: must be one of"),
        (
            {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
            "pooling_mode_mean_tokens, pooling_mode_cls_token: several poolings at once are not supported",
        ),
        ({"pooling_mode": ["mean", "cls"]}, "pooling mean, cls: several poolings"),
        ({"pooling_mode": 3}, "pooling 3: must be one of"),
        ({}, "pooling not given"),
    ],
)
def test_a_pooling_that_no_product_computes_is_refused_in_one_line(directory, content, said):
    write(directory / "1_Pooling" / "config.json", content)
    with pytest.raises(ModelError, match=said) as caught:
        StaticEmbeddingPipeline(directory, "CPU", **F32)
    assert one_line(caught)


def test_files_without_a_mode_mean_the_mean_as_in_sentence_transformers(directory, states_of):
    write(directory / "1_Pooling" / "config.json", {"pooling_mode_cls_token": False})
    with StaticEmbeddingPipeline(directory, "CPU", normalize=False, **F32) as pipe:
        np.testing.assert_allclose(pipe.encode(["a fox"])[0], states_of("a fox").mean(axis=0), atol=5e-6)


@pytest.fixture
def pooled_directory(tmp_path):
    """A model whose graph takes the first token, without a file that says so."""
    folder = encoder_directory(tmp_path)
    model = get_core().read_model(folder / "openvino_model.xml")
    (result,) = model.get_results()
    first = ops.gather(result.input_value(0), ops.constant(np.int64(0)), ops.constant(np.int64(1)))
    found = ops.result(first)
    found.output(0).set_names({"sentence_embedding"})
    model.remove_result(result)
    model.add_results([found])
    ov.save_model(model, folder / "new.xml", compress_to_fp16=False)
    del model
    for suffix in ("xml", "bin"):
        (folder / f"new.{suffix}").replace(folder / f"openvino_model.{suffix}")
    return folder


def test_another_pooling_than_that_of_the_graph_is_refused(pooled_directory, states_of):
    kinds = StaticEmbeddingPipeline.PoolingType
    with pytest.raises(ModelError, match=r"files name the pooling 'mean', and its graph pools by 'first'") as caught:
        StaticEmbeddingPipeline(pooled_directory, "CPU", **F32)
    assert one_line(caught)
    with StaticEmbeddingPipeline(pooled_directory, "CPU", pooling_type=kinds.CLS, normalize=False, **F32) as pipe:
        np.testing.assert_allclose(pipe.encode(["a fox"])[0], states_of("a fox")[0], atol=5e-6)
    (pooled_directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    with pytest.raises(ConfigError, match=r"pooling_type 'mean': the graph .* pools by itself, by 'first'") as caught:
        StaticEmbeddingPipeline(pooled_directory, "CPU", pooling_type=kinds.MEAN, **F32)
    assert one_line(caught)
