"""Gives the arguments of all constructors and methods values of every kind: each is taken, or refused in one line of ours."""

from __future__ import annotations

import warnings
from inspect import signature

import pytest
from support.encoders.encoder_directories import a_scorer
from support.encoders.encoder_models import encoder_directory
from support.odd_values import VALUES, is_refused

from staticllm import (
    StaticEmbeddingPipeline,
    StaticLLMConfig,
    StaticLLMPipeline,
    StaticRerankPipeline,
    demo_model_path,
    draft_model,
)
from staticllm.pipelines.embedding.encoder_job import OF_DECODERS, OPTIONS
from staticllm.pipelines.encoder_pipeline import EncoderPipeline
from staticllm.properties import DECODER_OPTIONS

pytestmark = pytest.mark.usefixtures("shared_programs", "shared_lowering")

F32 = {"INFERENCE_PRECISION_HINT": "f32"}
NOWHERE = "/no/such/model"
OF_DEVICES = ("INFERENCE_PRECISION_HINT", "NUM_STREAMS", "NO_SUCH_PROPERTY")
ENCODERS = (StaticEmbeddingPipeline, StaticRerankPipeline)
LASTING = tuple(value for value in VALUES if not hasattr(type(value), "__next__"))
CALLBACKS = ("streamer", "callback", "on_progress")


def parameters(function):
    return [name for name in signature(function).parameters if name not in ("self", "args", "kwargs", "properties")]


def names_of(kind):
    if kind is StaticLLMPipeline:
        return [*parameters(kind.__init__), *DECODER_OPTIONS, *OF_DEVICES]
    properties = [*(name.upper() for name in OPTIONS), *OF_DECODERS, *EncoderPipeline._options, *vars(kind.Config())]
    return [*parameters(kind.__init__), *properties, *OF_DEVICES]


@pytest.mark.parametrize("kind", [StaticLLMPipeline, *ENCODERS])
def test_an_argument_of_a_constructor_is_taken_or_refused_in_one_line(kind):
    for name in dict.fromkeys(names_of(kind)):
        for value in VALUES:

            def call(value, name=name):
                kind(**{"models_path": NOWHERE, name: value})

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert is_refused(call, value), (name, value)  # at last because there is no model


def test_an_argument_by_position_is_taken_or_refused_in_one_line():
    for value in VALUES:
        assert is_refused(lambda value: StaticLLMPipeline(NOWHERE, value), value)
        assert is_refused(lambda value: StaticLLMPipeline(NOWHERE, "CPU", value), value)
        assert is_refused(lambda value: StaticLLMPipeline(NOWHERE, None, "CPU", value), value)


def test_other_constructors_take_or_refuse_a_value_in_one_line():
    for value in VALUES:
        is_refused(draft_model, value)
        for name in ("device_properties", "prefill_config", "generate_config"):
            is_refused(lambda value, name=name: StaticLLMConfig(**{name: value}), value)


def check_methods(calls):
    """Call each method with each odd value of each argument. ``calls``: the method, and the arguments that it needs."""
    for method, needed in calls:
        for name in parameters(method):
            for value in LASTING:
                if name in CALLBACKS and callable(value):  # its exception is that of the caller
                    continue

                def call(value, method=method, needed=needed, name=name):
                    found = method(**{**needed, name: value})
                    if callable(getattr(found, "result", None)):
                        found.result()

                is_refused(call, value)


def test_methods_of_a_language_model(tmp_path, monkeypatch):
    def record(max_records):
        with pipe.record(max_records):
            pass

    monkeypatch.chdir(tmp_path)  # some values are names of files
    with StaticLLMPipeline(demo_model_path(), "CPU", MAX_PROMPT_LEN=64, **F32) as pipe:
        few = {"inputs": "a", "max_new_tokens": 1}
        check_methods([(pipe.submit, few)])
        check_methods([(lambda inputs: pipe.generate(inputs, max_new_tokens=1), {})])
        check_methods([(lambda text: pipe.generate([text], max_new_tokens=1), {})])
        check_methods([(lambda role: pipe.generate([{"role": role, "content": "a"}], max_new_tokens=1), {})])
        check_methods([(lambda content: pipe.generate([{"role": "user", "content": content}], max_new_tokens=1), {})])
        check_methods([(pipe.set_generation_config, {}), (pipe.wait_until_complete, {}), (pipe.load_snapshot, {})])
        check_methods([(lambda inputs: pipe.save_snapshot(tmp_path / "a", inputs), {})])
        check_methods([(lambda path: pipe.save_snapshot(path, "a"), {})])
        check_methods([(record, {}), (pipe.start_chat, {})])
        pipe.finish_chat()
        assert pipe.generate("Hello", max_new_tokens=5)


def test_methods_of_an_embedder(tmp_path):
    with StaticEmbeddingPipeline(encoder_directory(tmp_path), "CPU", **F32) as pipe:
        check_methods(
            [(pipe.encode, {"texts": ["a"]}), (pipe.submit, {"text": "a"}), (pipe.submit_texts, {"texts": ["a"]})]
        )
        check_methods([(pipe.embed, {"texts": ["a"]}), (pipe.embed_query, {}), (pipe.count_tokens, {})])
        check_methods([(lambda text: pipe.encode([text]), {})])


def test_methods_of_a_reranker(tmp_path):
    with StaticRerankPipeline(a_scorer(tmp_path), "CPU", **F32) as pipe:
        given = {"query": "a", "texts": ["b"]}
        check_methods([(method, given) for method in (pipe.scores, pipe.submit, pipe.rerank, pipe.label_scores)])
