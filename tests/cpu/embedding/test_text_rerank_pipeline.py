"""Tests the rerank pipeline against the original models, one pair per call in f32, and against GenAI's class."""

from __future__ import annotations

import asyncio
import gc
import shutil
import threading
import zipfile

import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest
from openvino import opset13 as ops
from support.encoders.encoder_models import ARCHIVES, Alone, unpack, write
from support.helpers import one_line

from staticllm import StaticEmbeddingPipeline, StaticRerankPipeline
from staticllm.devices import get_core
from staticllm.errors import ClosedError, ConfigError, ModelError, PromptError, StaticLLMError
from staticllm.pipelines.diagnostics.doctor import check_model
from staticllm.pipelines.diagnostics.reference import EXACT
from staticllm.pipelines.embedding.score_activation import activated, chosen_activation
from staticllm.pipelines.text_rerank_pipeline import ranking

pytestmark = pytest.mark.usefixtures("shared_lowering")

F32 = {"INFERENCE_PRECISION_HINT": "f32"}
QUERY = "what is a fox?"
TEXTS = ["yes", "a fox is an animal, 12 of them.", "no", "", "the sun is hot; the moon is not." * 3, "what?", "fox fox"]


def directory_of(name, folder):
    unpack(name, folder)
    with zipfile.ZipFile(ARCHIVES / "bert_tokenizer.zip") as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return directory_of("bert_scores", tmp_path_factory.mktemp("reranker"))


@pytest.fixture(scope="module")
def pipe(directory):
    with StaticRerankPipeline(directory, "CPU", top_n=100, **F32) as found:
        yield found


def pair(tokenizer, query, text):
    """Return the ids and types of a pair as BERT has them: [CLS] query [SEP] text [SEP]."""
    first, second = (tokenizer.encode(each).input_ids.data[0] for each in (query, text))
    ids = np.concatenate([first, second[1:]])
    return ids, (np.arange(len(ids)) >= len(first)).astype(np.int64)


@pytest.fixture(scope="module")
def expected(directory):
    """The score of each text alone, from the original model."""
    original, tokenizer = Alone(get_core().read_model(directory / "openvino_model.xml")), genai.Tokenizer(directory)
    logits = []
    for text in TEXTS:
        ids, types = pair(tokenizer, QUERY, text)
        logits.append(float(original(ids, "first", types)[0]))
    return 1 / (1 + np.exp(-np.array(logits)))


def test_scores_are_those_of_the_original_alone(pipe, expected):
    assert np.abs(pipe.scores(QUERY, TEXTS) - expected).max() <= 1e-6
    assert len(set(np.round(expected, 4))) == len(TEXTS)
    found = pipe.rerank(QUERY, TEXTS)
    assert [index for index, _ in found] == list(np.argsort(-expected))
    assert [score for _, score in found] == pytest.approx(sorted(expected, reverse=True), abs=1e-6)


def test_options_may_be_numbers_of_numpy(directory, tmp_path):
    config = StaticRerankPipeline.Config(top_n=np.int64(2))
    options = {"max_length": np.int64(32), "CACHE_DIR": str(tmp_path)}  # they are written into the cache
    with StaticRerankPipeline(directory, "CPU", config, **options) as pipe:
        assert pipe.max_length == 32
        assert len(pipe.rerank("what?", ["yes", "no", "a fox"])) == 2


def test_genai_gives_the_same(directory, pipe):
    peer = genai.TextRerankPipeline(directory, "CPU", top_n=4, **F32)
    texts = [text for text in TEXTS if text]
    theirs = peer.rerank(QUERY, texts)
    with StaticRerankPipeline(directory, "CPU", genai.TextRerankPipeline.Config(top_n=4), **F32) as ours:
        found = ours.rerank(QUERY, texts)
        assert [index for index, _ in found] == [index for index, _ in theirs]
        assert [score for _, score in found] == pytest.approx([score for _, score in theirs], abs=1e-6)
        ours.start_rerank_async(QUERY, texts)
        assert np.array(ours.wait_rerank()) == pytest.approx(np.array(found), abs=1e-6)
        with pytest.raises(ConfigError, match="start_rerank_async first"):
            ours.wait_rerank()
    with StaticRerankPipeline(directory, "CPU", **F32) as ours:
        assert len(ours.rerank(QUERY, texts)) == 3, "GenAI's default"


def test_a_causal_language_model_ranks_by_yes_and_no(tmp_path):
    folder = directory_of("qwen3_with_past", tmp_path)
    tokenizer = genai.Tokenizer(folder)
    words = [tokenizer.get_vocab()[word] for word in (b" no", b" yes")]
    original = get_core().compile_model(get_core().read_model(folder / "openvino_model.xml"), "CPU", EXACT)
    expected = []
    for text in TEXTS:
        ids = tokenizer.encode(QUERY + text).input_ids.data
        request = original.create_infer_request()
        count = ids.shape[1]
        feeds = {"input_ids": ids, "attention_mask": np.ones((1, count), np.int64)}
        feeds |= {"position_ids": np.arange(count)[None], "beam_idx": np.zeros(1, np.int32)}
        request.infer({name: feeds[name] for port in original.inputs for name in port.get_names()})
        no, yes = np.exp(request.get_tensor("logits").data[0, -1, words].astype(np.float64))
        expected.append(yes / (no + yes))
    with StaticRerankPipeline(folder, "CPU", top_n=100, **F32) as pipe:
        assert np.abs(pipe.scores(QUERY, TEXTS) - expected).max() <= 2e-6
    (folder / "1_LogitScore").mkdir()
    write(folder / "1_LogitScore" / "config.json", {"true_token_id": words[0], "false_token_id": words[1]})
    score = {"type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore", "path": "1_LogitScore"}
    write(folder / "modules.json", [{"type": "a.Transformer", "path": ""}, score])
    with StaticRerankPipeline(folder, "CPU", **F32) as pipe:
        assert np.abs(pipe.scores(QUERY, TEXTS) - (1 - np.array(expected))).max() <= 2e-6
    checked = check_model(str(folder), "CPU", None, lambda event: None)
    assert (checked.level, checked.remedy) == ("ok", "")
    assert checked.value.endswith("with a query and two texts"), "its files say that it is a reranker"
    with pytest.raises(ModelError, match=r"'bad' or 'good' is not a single token: .* by score_words="):
        StaticRerankPipeline(folder, "CPU", score_words=("bad", "good"), **F32)
    with pytest.raises(ModelError, match=r"is not an encoder but a causal language model.*PoolingType\.LAST_TOKEN"):
        StaticEmbeddingPipeline(folder, "CPU", **F32)
    last = StaticEmbeddingPipeline.PoolingType.LAST_TOKEN
    with StaticEmbeddingPipeline(folder, "CPU", pooling_type=last, **F32) as embedder:
        assert np.linalg.norm(embedder.embed_query("fox")) == pytest.approx(1, abs=1e-6)


def test_a_decoder_with_one_label_ranks_prompts_by_its_sigmoid(tmp_path):
    folder = directory_of("qwen3_scores", tmp_path)
    original, tokenizer = Alone(get_core().read_model(folder / "openvino_model.xml")), genai.Tokenizer(folder)
    prompts = [QUERY + " " + text for text in TEXTS]
    logits = np.array([float(original(tokenizer.encode(text).input_ids.data[0], "last")[0]) for text in prompts])
    with StaticRerankPipeline(folder, "CPU", top_n=100, **F32) as pipe:
        pipe._is_paired = False  # the tokenizer is BERT's; that of a decoder encodes no pairs
        found = pipe.scores(QUERY + " ", TEXTS)
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-logits)), atol=2e-6)
    assert len(set(np.round(found, 3))) > 3


def test_activations_are_those_of_torch():
    logits = np.array([[1.0, 3.0, 0.5], [800.0, 0.0, -800.0]], np.float32)
    weights = np.exp(logits[0].astype(np.float64))
    np.testing.assert_allclose(activated(logits, "softmax"), [weights / weights.sum(), [1, 0, 0]], atol=1e-7)
    np.testing.assert_allclose(activated(logits, "sigmoid")[0], 1 / (1 + np.exp(-logits[0])), atol=1e-7)
    np.testing.assert_array_equal(activated(logits, "sigmoid")[1], [1, 0.5, 0])
    np.testing.assert_array_equal(activated(logits, "identity"), logits)
    assert ranking(np.array([0.5, 0.7, 0.5, 0.9], np.float32), 3) == [
        (3, pytest.approx(0.9)),
        (1, pytest.approx(0.7)),
        (0, 0.5),
    ]


@pytest.mark.parametrize(
    ("config", "of_one", "of_three"),
    [
        ({}, "sigmoid", "softmax"),
        ({"sentence_transformers": {"version": "5"}}, "sigmoid", "softmax"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "identity", "softmax"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, "sigmoid", "sigmoid"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "identity", "softmax"),
        ({"sentence_transformers": {"activation_fn": "own.module.Scale"}}, "sigmoid", "softmax"),
    ],
)
def test_the_activation_is_that_of_the_models_files(tmp_path, config, of_one, of_three):
    write(tmp_path / "config.json", config)
    assert chosen_activation(None, tmp_path, 1) == of_one
    assert chosen_activation(None, tmp_path, 3) == of_three
    assert chosen_activation("sigmoid", tmp_path, 3) == "sigmoid"


def test_the_newer_file_has_the_activation(tmp_path):
    write(tmp_path / "config.json", {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}})
    own = tmp_path / "config_sentence_transformers.json"
    write(own, {"activation_fn": "torch.nn.modules.linear.Identity"})
    assert chosen_activation(None, tmp_path, 1) == "identity"
    write(own, {"prompts": {}})
    assert chosen_activation(None, tmp_path, 1) == "sigmoid"


def test_logits_are_scores_if_the_files_say_identity(directory, expected, tmp_path):
    copied = tmp_path / "model"
    shutil.copytree(directory, copied)
    write(copied / "config.json", {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}})
    logits = np.log(expected / (1 - expected))
    with StaticRerankPipeline(copied, "CPU", top_n=100, **F32) as pipe:
        np.testing.assert_allclose(pipe.scores(QUERY, TEXTS), logits, atol=1e-5)
        np.testing.assert_allclose(pipe.label_scores(QUERY, TEXTS)[:, 0], logits, atol=1e-5)
        assert [score for _, score in pipe.rerank(QUERY, TEXTS)] == pytest.approx(
            sorted(logits, reverse=True), abs=1e-5
        )
    with StaticRerankPipeline(copied, "CPU", activation="sigmoid", **F32) as pipe:
        assert np.abs(pipe.scores(QUERY, TEXTS) - expected).max() <= 1e-6
    write(copied / "config.json", {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.GELU"}})
    with pytest.raises(ModelError, match=r"activation 'torch\.nn.*GELU' is not supported: give activation=") as caught:
        StaticRerankPipeline(copied, "CPU", **F32)
    assert one_line(caught)


def test_of_several_labels_the_second_counts(tmp_path):
    folder = directory_of("xlm_roberta_scores", tmp_path)
    with StaticRerankPipeline(folder, "CPU", top_n=100, activation="identity", **F32) as pipe:
        logits = pipe.label_scores(QUERY, TEXTS)
        assert logits.shape == (len(TEXTS), 2)
        np.testing.assert_allclose(pipe.scores(QUERY, TEXTS), logits[:, 1], atol=1e-6)
    with StaticRerankPipeline(folder, "CPU", top_n=100, **F32) as pipe:
        found = pipe.label_scores(QUERY, TEXTS)
        weights = np.exp(logits.astype(np.float64))
        np.testing.assert_allclose(found, weights / weights.sum(axis=1, keepdims=True), atol=1e-6)
        np.testing.assert_allclose(pipe.scores(QUERY, TEXTS), found[:, 1], atol=1e-6)  # two calls may have two shapes


def test_many_threads_and_ways_to_wait(pipe, expected):
    order, wrong = list(np.argsort(-expected)), []

    def rank():
        for _ in range(5):
            if [index for index, _ in pipe.rerank(QUERY, TEXTS)] != order:
                wrong.append(1)

    threads = [threading.Thread(target=rank) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong

    async def awaited():
        return await asyncio.gather(*(pipe.submit(QUERY, TEXTS) for _ in range(3)))

    assert all([index for index, _ in found] == order for found in asyncio.run(awaited()))
    seen = []
    pipe.scores(QUERY, TEXTS, on_progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (len(TEXTS), len(TEXTS))


def test_an_engine_is_shared(directory, pipe, expected):
    with StaticRerankPipeline(directory, "CPU", engine=pipe.engine, top_n=2, **F32) as second:
        assert [index for index, _ in second.rerank(QUERY, TEXTS)] == list(np.argsort(-expected))[:2]
    assert np.abs(pipe.scores(QUERY, TEXTS) - expected).max() <= 1e-6


def test_nothing_to_rank_and_long_texts(directory, pipe):
    assert pipe.rerank(QUERY, []) == []
    assert pipe.submit(QUERY, []).result(0) == []
    long = "fox " * 5000
    cut, short = pipe.scores(QUERY, [long, "fox"])
    assert 0 <= cut <= 1
    assert short == pytest.approx(float(pipe.scores(QUERY, ["fox"])[0]), abs=1e-6)
    with (
        StaticRerankPipeline(directory, "CPU", overflow="refuse", **F32) as strict,
        pytest.raises(PromptError, match=r"text 1 has .* tokens, the limit is") as caught,
    ):
        strict.rerank(QUERY, ["fox", long])
    assert one_line(caught)


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda pipe: pipe.rerank(5, ["a"]), PromptError, "the query is a int"),
        (lambda pipe: pipe.rerank("q", "abc"), ConfigError, "texts is a str"),
        (lambda pipe: pipe.rerank("q", ["a", None]), PromptError, "text 1 is a NoneType"),
        (lambda pipe: pipe.rerank("\ud800", ["a"]), PromptError, "not valid text"),
        (lambda pipe: pipe.rerank("q", 5), ConfigError, "texts is a int: must be a list"),
        (lambda pipe: pipe.scores("q", ["a"] * 50, deadline_ms=-1), StaticLLMError, "deadline"),
        (lambda pipe: pipe.submit("q", ["a"], deadline_ms="soon"), ConfigError, "deadline_ms='soon': must be a number"),
        (lambda pipe: pipe.submit("q", ["a"], priority=0.5), ConfigError, "priority=0.5: must be a whole number"),
    ],
)
def test_bad_calls_get_one_line_and_the_pipeline_goes_on(pipe, call, kind, message):
    with pytest.raises(kind, match=message) as caught:
        call(pipe)
    assert one_line(caught)
    assert pipe.rerank(QUERY, ["fox"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_n": 0}, "top_n=0"),
        ({"max_length": True}, "max_length=True"),
        ({"max_length": 100_000}, "max_length=100000: must be at most 8192"),
        ({"overflow": "cut"}, "overflow='cut'"),
        ({"max_waiting": 0}, "max_waiting=0: must be a whole number from 1"),
        ({"on_progress": 5}, "on_progress=5: must be a function"),
        ({"activation": "relu"}, "activation='relu': must be one of None, 'sigmoid', 'identity', 'softmax'"),
        ({"score_words": "no"}, "score_words='no': must be two words"),
        ({"engine": 5}, "engine is a int"),
        ({"config": 5}, "config is a int"),
        ({"topn": 3}, "topn"),
        ({"device": "CPU,CPU"}, "CPU is used twice"),
        ({"LATENCY_MS": 0}, "LATENCY_MS=0: must be a number of ms above 0"),
        ({"QUEUE_POLICY": "windve"}, "QUEUE_POLICY='windve' needs a latency limit: give LATENCY_MS"),
        ({"MAX_NUM_SEQS": 3}, "MAX_NUM_SEQS is an option of decoders"),
    ],
)
def test_bad_options_get_one_line(directory, options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        StaticRerankPipeline(directory, **{"device": "CPU", **options})
    assert one_line(caught)


def test_a_model_without_scores_says_what_it_is_for(tmp_path):
    folder = directory_of("bert", tmp_path)
    with pytest.raises(ModelError, match=r"hidden states and no scores: .* StaticEmbeddingPipeline") as caught:
        StaticRerankPipeline(folder, "CPU", **F32)
    assert one_line(caught)


def test_weights_that_are_not_finite_fail_in_one_line(tmp_path):
    folder = directory_of("bert_scores", tmp_path)
    model = get_core().read_model(folder / "openvino_model.xml")
    (result,) = model.get_results()
    result.input(0).replace_source_output(ops.add(result.input_value(0), np.float32(np.nan)).output(0))
    ov.save_model(model, folder / "new.xml", compress_to_fp16=False)
    del model
    for suffix in ("xml", "bin"):
        (folder / f"new.{suffix}").replace(folder / f"openvino_model.{suffix}")
    with pytest.raises(StaticLLMError) as caught, StaticRerankPipeline(folder, "CPU", **F32) as pipe:
        pipe.rerank(QUERY, ["fox"])
    assert one_line(caught)


def test_loading_is_told_and_a_deleted_pipeline_ends_its_thread(directory):
    events = []
    pipe = StaticRerankPipeline(directory, "CPU", on_progress=events.append, **F32)
    assert {"read", "compile", "warm-up", "ready"} <= {event.stage for event in events}
    handle = pipe.submit(QUERY, TEXTS)
    thread = pipe.engine.thread
    del pipe
    gc.collect()
    assert len(handle.result(60)) == 3, "a handle keeps its pipeline"
    assert thread.is_alive()
    del handle
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()


def test_closing_ends_what_waits(directory):
    pipe = StaticRerankPipeline(directory, "CPU", **F32)
    pipe.close()
    pipe.close()
    with pytest.raises(ClosedError):
        pipe.rerank(QUERY, ["fox"])


@pytest.mark.parametrize(
    ("make", "given", "near"),
    [
        (StaticRerankPipeline, "max_lenght", "max_length"),
        (StaticRerankPipeline, "top_m", "top_n"),
        (StaticRerankPipeline, "score_word", "score_words"),
        (StaticEmbeddingPipeline, "poolng_type", "pooling_type"),
        (StaticEmbeddingPipeline, "LATENCY", "LATENCY_MS"),
        (StaticEmbeddingPipeline, "CACHEDIR", "CACHE_DIR"),
    ],
)
def test_a_misspelled_option_has_a_hint(make, given, near, directory):
    with pytest.raises(ConfigError) as error:
        make(directory, "CPU", **{given: 5})
    assert str(error.value) == f"unknown property {given!r}: did you mean {near!r}?"


def test_whole_floats_are_whole_numbers(directory):
    with StaticRerankPipeline(directory, "CPU", top_n=2.0, max_length=32.0, **F32) as pipe:
        assert pipe.max_length == 32
        assert len(pipe.rerank(QUERY, TEXTS)) == 2
    with pytest.raises(ConfigError, match=r"top_n=2\.5"):
        StaticRerankPipeline(directory, "CPU", top_n=2.5)
