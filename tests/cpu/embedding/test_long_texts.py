"""Tests pipelines with long texts of a decoder that was exported with past, against the stateful original in f32."""

import shutil

import numpy as np
import openvino_genai as genai
import pytest
from support.encoders.encoder_directories import a_directory, no_compilation
from support.encoders.encoder_models import unit
from support.encoders.long_texts import Original, demo_embedder, hidden_states, words

from staticllm.errors import BlobError
from staticllm.pipelines.diagnostics.kinds import diagnosis_of
from staticllm.pipelines.embedding.encoder_job import encoder_job
from staticllm.pipelines.embedding.encoder_kind import EncoderChoices, continuing_for
from staticllm.pipelines.embedding.packing.chunks import chunk_variant
from staticllm.pipelines.embedding.packing.tokenized_text import TokenizedText
from staticllm.pipelines.loading.export import export_set
from staticllm.pipelines.text_embedding_pipeline import StaticEmbeddingPipeline
from tests.support.inside import driver_of

pytestmark = pytest.mark.usefixtures("shared_lowering")

F32 = {"INFERENCE_PRECISION_HINT": "f32"}


def report_of(directory, choices):
    return diagnosis_of("encoder").report(encoder_job(directory, "CPU", choices))


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    return demo_embedder(tmp_path_factory.mktemp("demo") / "model")


@pytest.fixture(scope="module")
def demo_alone(demo):
    original, tokenizer = Original(demo / "openvino_model.xml"), genai.Tokenizer(demo)
    return lambda text: original(tokenizer.encode(text).input_ids.data[0][:2000])


TEXTS = [words(count, count) for count in (3, 700, 40, 1500, 5000, 20)]


@pytest.fixture(scope="module", params=["shared", "separate"])
def first_start(demo, request, tmp_path_factory):
    """The options of a start with a cache, and the vectors of ``TEXTS`` from the first one."""
    options = {"PROGRAMS": request.param, "CACHE_DIR": str(tmp_path_factory.mktemp("cache")), **F32}
    with StaticEmbeddingPipeline(demo, "CPU", **options) as pipe:
        assert pipe.max_length == 2000
        return options, pipe.embed_documents(TEXTS, as_array=True)


@pytest.fixture(scope="module")
def pipe(demo):
    with StaticEmbeddingPipeline(demo, "CPU", **F32) as found:
        yield found


def test_the_pipeline_embeds_long_and_short_texts(first_start, demo_alone):
    for text, vector in zip(TEXTS, first_start[1], strict=True):
        assert np.abs(vector - demo_alone(text)).max() <= 1e-6


def test_a_blob_set_holds_the_programs_of_chunks(first_start, demo, demo_alone, monkeypatch):
    options, first = first_start
    no_compilation(monkeypatch)
    with StaticEmbeddingPipeline(demo, "CPU", **options) as pipe:
        again = pipe.embed_documents(TEXTS[:4], as_array=True)
    assert np.abs(first[:4] - again).max() <= 1e-6
    assert np.abs(again[3] - demo_alone(TEXTS[3])).max() <= 1e-6


def test_a_mean_needs_the_whole_text_in_one_call(demo):
    """Its parts would have to be added up before Dense modules and normalisation, which are in the program."""
    kind = StaticEmbeddingPipeline.PoolingType.MEAN
    report = report_of(demo, EncoderChoices(pooling="mean"))
    assert max(variant.rows for variant in report.variants) == 2000
    assert not any(variant.past for variant in report.variants)
    with StaticEmbeddingPipeline(demo, "CPU", pooling_type=kind, **F32) as pipe:
        states = hidden_states(demo, pipe.max_length, TEXTS[1])
        assert np.abs(np.array(pipe.embed_query(TEXTS[1])) - unit(states.mean(axis=0))).max() <= 1e-6


def test_long_texts_run_in_a_worker_process(demo, demo_alone):
    with StaticEmbeddingPipeline(demo, "CPU", SEPARATE_PROCESS=True, **F32) as pipe:
        found = pipe.embed_documents(TEXTS[:2], as_array=True)
    for text, vector in zip(TEXTS, found, strict=False):
        assert np.abs(vector - demo_alone(text)).max() <= 1e-6


@pytest.mark.parametrize("longest", [5, 9, 20, 40, 96, 100, 127, 128, 129, 300, 511, 512, 513, 600, 1024, 1025, 8192])
def test_a_text_can_go_on_after_any_of_its_tokens(longest):
    variants = continuing_for(longest, is_shared=True)
    for done in (*range(8, min(longest, 700)), *range(700, longest, 97), longest - 1):
        if variants and done < longest:
            assert chunk_variant(variants, done, longest - done).past >= done
    static, done = continuing_for(longest, is_shared=False), 0
    assert len(static) == (longest > 512)
    while static and done < longest:
        assert chunk_variant(static, done, longest - done).past >= done
        done += 512


def after_some_queries(pipe):
    """Let a beginning be kept that is not a whole number of chunks long."""
    for number in range(3):
        pipe.embed_query(words(30) + words(3, number))


@pytest.mark.parametrize("count", [600, 1100, 5000])
def test_a_long_text_may_begin_with_what_is_kept(pipe, demo_alone, count):
    after_some_queries(pipe)
    text = words(30) + words(count, 5)
    assert np.abs(np.array(pipe.embed_documents([text])[0]) - demo_alone(text)).max() <= 1e-6
    assert np.abs(np.array(pipe.embed_query(TEXTS[0])) - demo_alone(TEXTS[0])).max() <= 1e-6


def test_short_chunks_never_end_where_no_program_goes_on(pipe, demo, demo_alone):
    """A limit of time, as beside a chat, makes chunks of any size, after a beginning of any size."""
    after_some_queries(pipe)
    runner, tokenizer, rng = driver_of(pipe).runner, genai.Tokenizer(demo), np.random.default_rng(0)
    for count in (40, 200, 600, 1900, 5000):
        text = words(30) + words(count, 9)
        chunk = runner.continued(TokenizedText(tokenizer.encode(text).input_ids.data[0][:2000]))
        vector = None
        while vector is None:
            vector = runner.run_chunk(chunk, runner.next_chunk(chunk, rng.choice([0.0, 1e-3, 3e-3, 10.0])))
        assert np.abs(vector - demo_alone(text)).max() <= 1e-6


LATENCY = {"LATENCY_MS": 5000}


@pytest.mark.parametrize(("longest", "latency"), [(14, {}), (14, LATENCY), (30, {}), (60, LATENCY), (100, {})])
def test_short_limits_load_with_predictions(demo, latency, longest):
    with StaticEmbeddingPipeline(demo, "CPU", max_length=longest, SEPARATE_PROCESS=True, **latency, **F32) as pipe:
        assert len(pipe.embed_query(TEXTS[2])) == 256


def test_a_set_of_a_model_without_states_serves_any_pooling(tmp_path):
    (tmp_path / "model").mkdir()
    folder = a_directory(tmp_path / "model")
    shutil.rmtree(folder / "1_Pooling")
    export_set(encoder_job(folder, "CPU", EncoderChoices()), tmp_path / "set")
    kind = StaticEmbeddingPipeline.PoolingType.MEAN
    with StaticEmbeddingPipeline(folder, "CPU", pooling_type=kind, BLOB_PATH=str(tmp_path / "set")) as pipe:
        assert pipe.embed_query("a")


def test_a_set_with_chunks_is_not_that_of_another_pooling(demo, tmp_path):
    export_set(encoder_job(demo, "CPU", EncoderChoices()), tmp_path / "set")
    kind = StaticEmbeddingPipeline.PoolingType.MEAN
    with pytest.raises(BlobError, match="sizes"):
        StaticEmbeddingPipeline(demo, "CPU", pooling_type=kind, BLOB_PATH=str(tmp_path / "set"))


def test_inspect_names_the_chunks(demo):
    report = report_of(demo, EncoderChoices())
    sizes = {(variant.rows, variant.past) for variant in report.variants if variant.past}
    assert {(rows, past) for rows in (64, 256, 512) for past in (512, 1024, 2000)} <= sizes
    assert {past for _, past in sizes} == {32, 64, 128, 512, 1024, 2000}
    report = report_of(demo, EncoderChoices(properties={"PROGRAMS": "separate"}))
    assert [(variant.rows, variant.past) for variant in report.variants if variant.past] == [(512, 1536)]
