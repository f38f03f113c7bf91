"""Gives each property and argument of a constructor: it changes what is loaded or how it answers, is refused, or is documented.

The names come from the tables of properties and the signatures, so that a new one without a case here fails.
"""

from __future__ import annotations

import ast
from dataclasses import fields
from functools import partial
from inspect import signature
from pathlib import Path

import numpy as np
import pytest
from support.encoders.encoder_directories import a_scorer
from support.encoders.encoder_models import encoder_directory, unpack

from staticllm import (
    BusyError,
    ConfigError,
    StaticEmbeddingPipeline,
    StaticLLMConfig,
    StaticLLMError,
    StaticLLMPipeline,
    StaticRerankPipeline,
    demo_model_path,
    draft_model,
)
from staticllm.pipelines.embedding.embedding_config import WITHOUT_EFFECT
from staticllm.pipelines.embedding.encoder_job import OF_DECODERS, OPTIONS, encoder_config
from staticllm.pipelines.embedding.pool.pool_plan import POOL_PROPERTIES, take_options
from staticllm.pipelines.launch.arguments import resolve_candidates
from staticllm.pipelines.launch.draft_origin import DraftOrigin, take_draft_origin
from staticllm.properties import DECODER_OPTIONS
from tests.support.inside import driver_of

pytestmark = pytest.mark.usefixtures("shared_programs", "shared_lowering")

F32 = {"INFERENCE_PRECISION_HINT": "f32"}
LONG = "Tell me a story about a fox. " * 80
VALUES = {
    "MAX_PROMPT_LEN": 64, "MIN_RESPONSE_LEN": 64, "PROGRAMS": "separate", "PREFILL_ROWS": [16], "PREFILL_KV_LENS": [0, 64],
    "GENERATE_KV_LENS": [64], "KV_CACHE_PRECISION": "f32", "PREFIX_CACHING": False, "MEASURE_COSTS": False, "MAX_NUM_SEQS": 2,
    "KV_SLOTS": 5000, "KV_CACHE_GB": 1.5, "HOST_KV_SLOTS": 0, "PROMPT_LOOKUP": True, "prompt_lookup": True,
    "MEMORY_LIMIT_MB": 900, "MAX_WAITING": 3, "SCHEDULER": "fcfs", "TTFT_MS": 5, "TPOT_MS": 5, "GAP_MS": 5, "CACHE_DIR": "cache",
    "CACHE_MODE": "OPTIMIZE_SPEED", "CACHE_LIMIT_GB": 1.0, "CACHE_ENCRYPTION_CALLBACKS": (bytes, bytes),
    "WEIGHTS_DECRYPTION_CALLBACK": bytes, "BLOB_PATH": "blob", "EXPORT_BLOB": True, "INTEGRITY_KEY": b"0123456789abcdef",
    "WEIGHTS_PATH": "weights.bin", "BACKGROUND_COMPILE": False, "SERVE_FROM_CPU": True, "PREFILL_CONFIG": F32,
    "GENERATE_CONFIG": F32, "PREFILL_HINT": "STATIC", "GENERATE_HINT": "FAST_COMPILE", "DEVICE_PROPERTIES": {"CPU": F32},
    "HETEROGENEOUS": True, "LATENCY_MS": 5, "QUEUE_POLICY": "plain", "QUEUE_DEPTHS": "depths.json", "SEPARATE_PROCESS": True,
}  # fmt: skip
"""A value of each property that is not its default."""
ROOT = Path(__file__).resolve().parents[3]


def attributes_read():
    """Return the attributes and texts that any code reads, except the code of the config itself."""
    found = set()
    for folder in ("staticllm", "pipelines", "kvcache", "compiler_passes"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name not in ("config.py", "properties.py"):
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                        found.add(node.attr)
    own = (ROOT / "staticllm" / "config.py").read_text(encoding="utf-8")
    return found | {node.attr for node in ast.walk(ast.parse(own)) if isinstance(node, ast.Attribute)}


def test_each_field_of_the_config_is_read_by_some_code():
    assert {item.name for item in fields(StaticLLMConfig)} <= attributes_read()


@pytest.mark.parametrize("name", DECODER_OPTIONS)
def test_a_property_of_a_language_model_changes_its_config_or_is_refused(name, request):
    plain = resolve_candidates("CPU", None, {})
    if name == "ADAPTERS":
        with pytest.raises(ConfigError, match=r"^adapters is a "):
            resolve_candidates("CPU", None, {name: "lora"})
    elif name == "adapters":
        from staticllm import AdapterConfig

        given = AdapterConfig(request.getfixturevalue("handles")[0])
        assert resolve_candidates("CPU", None, {name: given})[0].config.adapters is not None
    elif name == "draft_model":
        from staticllm.pipelines.launch.arguments import positional

        given = positional((), None, None, None)
        assert isinstance(take_draft_origin(given, {name: draft_model(demo_model_path())})[1], DraftOrigin)
    else:
        found = resolve_candidates("CPU", None, {name: VALUES[name]})
        assert [each.config for each in found] != [each.config for each in plain]


def test_a_property_of_an_encoder_changes_its_config_or_is_refused():
    plain = encoder_config("CPU", {})
    names = {name.upper() for name in OPTIONS} - {"DEVICE_PROPERTIES"}
    for name in names:
        assert encoder_config("CPU", {name: VALUES[name]}) != plain, name
    assert encoder_config("CPU", F32) != plain
    for name in OF_DECODERS:
        with pytest.raises(ConfigError, match=f"{name} is an option of decoders"):
            encoder_config("CPU", {name: VALUES.get(name, 5)})


def test_a_property_of_a_pool_changes_its_options():
    for name in POOL_PROPERTIES:
        more = {"LATENCY_MS": 9} if name.startswith("QUEUE_") else {}
        more |= {"QUEUE_POLICY": "windve"} if name == "QUEUE_DEPTHS" else {}
        assert take_options({name: VALUES[name], **more}) != take_options(dict(more)), name


def parameters(function):
    return [name for name in signature(function).parameters if name not in ("self", "properties")]


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """The folders of an encoder, of a cross-encoder, and of a causal language model that scores."""
    folders = {name: tmp_path_factory.mktemp(name) for name in ("encoder", "reranker", "causal")}
    encoder_directory(folders["encoder"])
    a_scorer(folders["reranker"])
    unpack("qwen3_scores", folders["causal"])
    return folders


@pytest.fixture(scope="module")
def embedder(places):
    with StaticEmbeddingPipeline(places["encoder"], "CPU", **F32) as pipe:
        yield pipe


@pytest.fixture(scope="module")
def reranker(places):
    with StaticRerankPipeline(places["reranker"], "CPU", **F32) as pipe:
        yield pipe


def seen(pipe):
    """Return what a pipeline answers."""
    if isinstance(pipe, StaticEmbeddingPipeline):
        return [pipe.embed_query("a fox"), *pipe.embed_documents(["a fox", LONG])]
    return pipe.rerank("a fox", ["yes", "no", LONG, "what?", "the sun"])


def are_alike(found, expected):
    """Compare answers but for rounding: which texts share a call depends on measured times."""
    return len(found) == len(expected) and all(
        np.shape(one) == np.shape(other) and np.allclose(one, other, rtol=0, atol=1e-4)
        for one, other in zip(found, expected, strict=True)
    )


def is_changed(plain, kind, place, **options):
    """Return whether options change the answer, or what becomes of too much or too many."""
    with kind(place, "CPU", **F32, **options) as pipe:
        try:
            return not are_alike(seen(pipe), seen(plain))
        except StaticLLMError:
            return True


CHANGING = {
    "max_length": 8, "normalize": False, "pooling_type": StaticEmbeddingPipeline.PoolingType.CLS, "query_instruction": "find: ",
    "embed_instruction": "this: ", "overflow": "refuse", "max_waiting": 1, "top_n": 1, "activation": "identity",
    "config": {StaticEmbeddingPipeline: StaticEmbeddingPipeline.Config(normalize=False),
               StaticRerankPipeline: StaticRerankPipeline.Config(top_n=2)},
    "device": "CPU,CPU#0", "models_path": None, "engine": None, "on_progress": None, "score_words": None,
}  # fmt: skip
"""A value of each argument that changes the answer; None where another test is needed."""
PLAIN_VALUES = {"pad_to_max_length": True, "padding_side": "left", "batch_size": 4}


@pytest.mark.parametrize("kind", [StaticEmbeddingPipeline, StaticRerankPipeline])
def test_an_argument_of_an_encoder_changes_the_answer_or_is_documented(kind, places, embedder, reranker):
    is_embedder = kind is StaticEmbeddingPipeline
    plain, place = (embedder, places["encoder"]) if is_embedder else (reranker, places["reranker"])
    pages = (ROOT / "docs" / "reference" / "options.md").read_text(encoding="utf-8")
    for name in dict.fromkeys([*parameters(kind.__init__), *vars(kind.Config())]):
        if name in WITHOUT_EFFECT:
            assert f"| `{name}` |" in pages
            assert not is_changed(plain, kind, place, **{name: PLAIN_VALUES[name]}), name
        elif name == "config":
            assert is_changed(plain, kind, place, config=CHANGING[name][kind])
        elif name == "device":
            with kind(place, device="CPU", SEPARATE_PROCESS=False, **F32) as pipe:
                assert [device.name for device in pipe.devices()] == ["CPU"]
        elif CHANGING[name] is not None:
            given = {name: CHANGING[name]}
            assert is_changed(plain, kind, place, **given) or (name == "max_waiting" and is_busy(kind, place)), name
    assert told(kind, place)


def told(kind, place):
    """Return what the function ``on_progress`` was called with."""
    calls = []
    with kind(place, "CPU", on_progress=calls.append, **F32):
        return calls


def is_busy(kind, place):
    """Return whether one text may wait and many may not."""
    with kind(place, "CPU", max_waiting=1, **F32) as pipe:
        give = pipe.submit_texts if kind is StaticEmbeddingPipeline else lambda texts: pipe.submit("a", texts)
        try:
            handles = [give([f"{LONG} {count} {text}" for text in range(50)]) for count in range(50)]
        except BusyError:
            return True
        return not handles


def test_an_engine_runs_the_encoders_that_are_given_it(places):
    with StaticLLMPipeline(demo_model_path(), "CPU", MAX_PROMPT_LEN=64, **F32) as llm:
        for kind, place in ((StaticEmbeddingPipeline, "encoder"), (StaticRerankPipeline, "reranker")):
            with kind(places[place], "CPU", engine=llm.engine, **F32) as pipe:
                assert pipe.engine is llm.engine


def test_score_words_are_those_of_a_causal_model_and_refused_by_others(places):
    with pytest.raises(ConfigError, match=r"^score_words=\('no', 'yes'\): the words are for causal language models"):
        StaticRerankPipeline(places["reranker"], "CPU", score_words=("no", "yes"), **F32)


def test_queue_depths_are_refused_by_policies_that_have_none():
    for given in ({}, {"QUEUE_POLICY": "plain"}, {"QUEUE_POLICY": "predicted", "LATENCY_MS": 9}):
        with pytest.raises(ConfigError, match=r"^QUEUE_DEPTHS='depths.json' with QUEUE_POLICY="):
            take_options({"QUEUE_DEPTHS": "depths.json", **given})


@pytest.mark.filterwarnings("ignore:the ranges of int8")
def test_an_argument_of_a_call_of_an_encoder_changes_something(embedder, reranker):
    texts = ["a fox", "the sun", LONG]
    plain = embedder.encode(texts)
    values = {
        "prompt": "find: ", "prompt_name": "query", "dimensions": 8, "output_type": "int8", "deadline_ms": 1e-6,
        "calibration": plain[:2], "priority": 3, "on_progress": None,
    }  # fmt: skip
    for name in parameters(embedder.encode):
        if name in ("texts", "on_progress", "priority"):
            continue
        more = {"output_type": "int8"} if name == "calibration" else {}
        try:
            found = embedder.encode(texts, **more, **{name: values[name]})
        except StaticLLMError:
            assert name == "deadline_ms"
        else:
            compared = embedder.encode(texts, **more)
            assert (
                found.shape != compared.shape or found.dtype != compared.dtype or not np.array_equal(found, compared)
            ), name
    with pytest.raises(StaticLLMError, match="deadline"):
        reranker.scores("a fox", texts, deadline_ms=1e-6)


@pytest.mark.parametrize("kind", ["embedder", "reranker"])
def test_a_call_tells_its_priority_and_its_progress(kind, request, monkeypatch):
    pipe = request.getfixturevalue(kind)
    taken, heard = [], []
    submit = driver_of(pipe).submit
    monkeypatch.setattr(driver_of(pipe), "submit", lambda given: (taken.append(given.priority), submit(given)))
    call = partial(pipe.encode, ["a"]) if kind == "embedder" else partial(pipe.scores, "a", ["b"])
    call(priority=7, on_progress=lambda *count: heard.append(count))
    assert taken == [7]
    assert heard
