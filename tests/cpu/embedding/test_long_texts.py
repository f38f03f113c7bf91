"""Tests texts that run in chunks, and beginnings that are kept, against the stateful original in f32, at every level."""

import json
import shutil
import time

import numpy as np
import openvino_genai as genai
import pytest
from encoder_directories import add_tokenizer, no_compilation
from encoder_models import unit, unpack

from staticllm import demo_model_path
from staticllm.compiler_passes.graph.step_graph import named_result
from staticllm.compiler_passes.lower_encoder import lower_encoder
from staticllm.compiler_passes.pass_pipeline import EncoderOptions
from staticllm.compiler_passes.shapes.select_logits import find_head
from staticllm.core import EncoderVariant
from staticllm.devices import get_core
from staticllm.errors import ClosedError, StaticLLMError
from staticllm.pipelines.diagnostics.encoder_reports import inspect_encoder
from staticllm.pipelines.diagnostics.reference import EXACT
from staticllm.pipelines.embedding.embedding_queue import EmbeddingQueue
from staticllm.pipelines.embedding.embedding_request import EmbeddingRequest
from staticllm.pipelines.embedding.encoder_job import EncoderChoices
from staticllm.pipelines.embedding.encoder_runner import EncoderRunner
from staticllm.pipelines.embedding.packing.tokenized_text import TokenizedText
from staticllm.pipelines.embedding.pool.instances import embed_texts
from staticllm.pipelines.text_embedding_pipeline import StaticEmbeddingPipeline

F32 = {"INFERENCE_PRECISION_HINT": "f32"}
VOCABULARY = 99


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A decoder that was exported with past, and says nothing of the length of texts."""
    found = tmp_path_factory.mktemp("embedder")
    unpack("qwen3_with_past", found)
    add_tokenizer(found)
    (found / "1_Pooling").mkdir()
    (found / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    return found


class Original:
    """The stateful original, whose hidden states are an output."""

    def __init__(self, path):
        model = get_core().read_model(path)
        (result,) = model.get_results()
        model.add_results([named_result("states", find_head(result).input_value(0))])
        self.program = get_core().compile_model(model, "CPU", EXACT)

    def __call__(self, ids):
        request, count = self.program.create_infer_request(), len(ids)
        feeds = {
            "input_ids": np.asarray(ids)[None],
            "attention_mask": np.ones((1, count), np.int64),
            "position_ids": np.arange(count)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        request.infer({name: feeds[name] for port in self.program.inputs for name in port.get_names()})
        return unit(np.array(request.get_tensor("states").data[0, -1]))


@pytest.fixture(scope="module")
def original(folder):
    return Original(folder / "openvino_model.xml")


def tokens(count, seed=0):
    return np.random.default_rng(seed).integers(5, VOCABULARY, count)


def runner_of(path, variants, is_shared, max_rows=64):
    lowered = lower_encoder(get_core().read_model(path), EncoderOptions(max_rows))
    assert lowered.shape.past, [report.notes for report in lowered.reports]
    compile_model = get_core().compile_model
    if is_shared:
        program = compile_model(lowered.share(variants), "CPU", EXACT)
        compiled = dict.fromkeys(variants, program)
    else:
        compiled = {variant: compile_model(lowered.specialise(variant), "CPU", EXACT) for variant in variants}
    return EncoderRunner(lowered.shape, compiled, "last")


SMALL = EncoderVariant(1, 8, 2), EncoderVariant(2, 16, 4)
CHUNKS = tuple(EncoderVariant(1, rows, 1, past) for rows in (4, 16) for past in (16, 32, 48))


@pytest.mark.parametrize("is_shared", [False, True])
def test_chunks_give_the_vector_of_the_original(folder, original, is_shared):
    chunks = CHUNKS if is_shared else (EncoderVariant(1, 16, 1, 48),)
    runner = runner_of(folder / "openvino_model.xml", (*SMALL, *chunks), is_shared)
    runner.warm_up(1)
    lengths = (17, 5, 64, 33, 16, 50)
    texts = [TokenizedText(tokens(length, length)) for length in lengths]
    for _ in range(2):  # the second time in memory that was used before
        found = embed_texts(runner, texts)
        for text, vector in zip(texts, found, strict=True):
            assert np.abs(vector - original(text.ids)).max() <= 1e-6


def test_whatever_comes_between_two_chunks_changes_nothing(folder, original):
    runner = runner_of(folder / "openvino_model.xml", (*SMALL, *CHUNKS), True)
    one, other = (runner.continued(TokenizedText(tokens(length, length))) for length in (40, 61))
    short = TokenizedText(tokens(7))
    found = {}
    while len(found) < 2:
        for text in (one, other):
            if text in found:
                continue
            vector = runner.run_chunk(text, runner.next_chunk(text))
            if vector is not None:
                found[text] = vector
            assert np.abs(runner.run(SMALL[0], [[short]])[0] - original(short.ids)).max() <= 1e-6
    for text, vector in found.items():
        assert np.abs(vector - original(text.text.ids)).max() <= 1e-6


STEM = tokens(12, 77)
WHOLE = EncoderVariant(1, 32, 2)
RESTS = tuple(EncoderVariant(1, rows, 1, 16) for rows in (4, 8, 24))


def begun(count, seed, stem=STEM):
    return TokenizedText(np.concatenate((stem, tokens(count, seed))))


def calls_of(runner):
    """Return the list of the variants that the runner runs from now on."""
    found, old = [], runner._measure
    runner._measure = lambda variant, seconds: (found.append(variant), old(variant, seconds))
    return found


def test_the_beginning_of_queries_runs_once(folder, original):
    runner = runner_of(folder / "openvino_model.xml", (*SMALL, *RESTS, WHOLE), True)
    runner._seconds = {variant: 1e-3 * variant.rows for variant in (*runner.variants, *runner.continuing)}
    calls = calls_of(runner)
    for number, count in enumerate((6, 9, 3, 8, 4)):
        text = begun(count, number)
        assert np.abs(embed_texts(runner, [text])[0] - original(text.ids)).max() <= 1e-6
    assert calls == [WHOLE, RESTS[2], RESTS[0], RESTS[1], RESTS[0]]
    other = TokenizedText(tokens(10, 5))  # begins otherwise, and does not push out what is kept
    assert np.abs(embed_texts(runner, [other])[0] - original(other.ids)).max() <= 1e-6
    text = begun(2, 40)
    assert np.abs(embed_texts(runner, [text])[0] - original(text.ids)).max() <= 1e-6
    assert calls[-1] == RESTS[0]
    short = TokenizedText(STEM[:9])  # a part of what is kept, of which the last token runs
    assert np.abs(embed_texts(runner, [short])[0] - original(short.ids)).max() <= 1e-6
    assert calls[-1] == RESTS[0]


def test_few_beginnings_are_kept_and_each_is_right(folder, original):
    runner = runner_of(folder / "openvino_model.xml", (*SMALL, *RESTS, WHOLE), True)
    runner._seconds = {variant: 1e-3 * variant.rows for variant in (*runner.variants, *runner.continuing)}
    rng = np.random.default_rng(2)
    stems = [tokens(10, 100 + number) for number in range(6)]
    for number in range(40):
        text = begun(int(rng.integers(1, 9)), number, stems[number // 2 % 6 if number < 24 else int(rng.integers(6))])
        assert np.abs(embed_texts(runner, [text])[0] - original(text.ids)).max() <= 1e-6
    assert len(runner._beginnings._kept) <= 4


def test_vectors_that_are_not_finite_keep_nothing(folder):
    runner = runner_of(folder / "openvino_model.xml", (*SMALL, *RESTS, WHOLE), True)
    runner._seconds = {variant: 1e-3 * variant.rows for variant in (*runner.variants, *runner.continuing)}
    embed_texts(runner, [begun(3, 1)])
    chunk = runner.resumed(begun(3, 2))
    program = runner._continued_program(runner.next_chunk(chunk), chunk.past)
    old = program.run
    program.run = lambda meanwhile=None: (old(meanwhile), program.buffers.output.fill(np.nan))[0]
    assert not np.isfinite(runner.run_chunk(chunk, runner.next_chunk(chunk))).all()
    assert not runner._beginnings._kept


def test_a_limit_of_time_makes_chunks_shorter(folder):
    runner = runner_of(folder / "openvino_model.xml", (*SMALL, *CHUNKS), True)
    costs = {**dict.fromkeys(SMALL, 0.1), **{chunk: 0.01 * chunk.rows for chunk in CHUNKS}}
    runner.cost = costs.__getitem__
    text = runner.continued(TokenizedText(tokens(40)))
    assert runner.next_chunk(text) == EncoderVariant(1, 16, 1, 16)
    assert runner.next_chunk(text, 0.05) == EncoderVariant(1, 4, 1, 16)
    assert runner.next_chunk(text, 0.001) == EncoderVariant(1, 4, 1, 16)


def queue_of(folder):
    return EmbeddingQueue(runner_of(folder / "openvino_model.xml", (*SMALL, *CHUNKS), True), 100)


def a_request(*lengths, **options):
    return EmbeddingRequest([TokenizedText(tokens(length, length)) for length in lengths], 64, **options)


def test_a_query_runs_between_the_chunks_of_a_long_text(folder, original):
    queue = queue_of(folder)
    width = queue.runner.shape.width
    long = EmbeddingRequest([TokenizedText(tokens(60, 60))], width)
    queue.submit(long)
    assert queue.run_next()
    assert not long.future.done()
    query = EmbeddingRequest([TokenizedText(tokens(6, 6))], width, priority=1)
    queue.submit(query)
    assert queue.run_next()
    assert query.future.done()
    assert not long.future.done()
    while queue.run_next():
        pass
    assert queue.num_waiting == 0
    assert np.abs(long.future.result()[0] - original(tokens(60, 60))).max() <= 1e-6


@pytest.mark.parametrize("end", ["cancel", "deadline", "close"])
def test_a_long_text_ends_between_its_chunks(folder, end):
    queue = queue_of(folder)
    deadline = time.perf_counter() + 0.3 if end == "deadline" else None
    long = EmbeddingRequest([TokenizedText(tokens(60))], queue.runner.shape.width, deadline=deadline)
    queue.submit(long)
    assert queue.run_next()
    assert queue.num_waiting == 1
    if end == "cancel":
        assert long.future.cancel()
    elif end == "close":
        queue.close()
    else:
        time.sleep(0.35)
    calls = []
    queue.runner.run_chunk = lambda *arguments: calls.append(1)
    assert not queue.run_next()
    assert (queue.num_waiting, calls, queue.next_job()) == (0, [], None)
    if end != "cancel":
        error = ClosedError if end == "close" else StaticLLMError
        with pytest.raises(error):
            long.future.result(0)


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The embedded language model as an embedder, for texts of up to 2000 tokens."""
    found = tmp_path_factory.mktemp("demo") / "model"
    shutil.copytree(demo_model_path(), found)
    (found / "1_Pooling").mkdir()
    (found / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_lasttoken": True}))
    (found / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 2000}))
    return found


def words(count, seed=1):
    rng = np.random.default_rng(seed)
    return " ".join(rng.choice(["the", "fox", "asks", "a", "device", "why", "it", "runs", "graphs"], count))


@pytest.fixture(scope="module")
def demo_alone(demo):
    original, tokenizer = Original(demo / "openvino_model.xml"), genai.Tokenizer(demo)
    return lambda text: original(tokenizer.encode(text).input_ids.data[0][:2000])


TEXTS = [words(count, count) for count in (3, 700, 40, 1500, 5000, 20)]


@pytest.mark.parametrize("mode", ["shared", "separate"])
def test_the_pipeline_embeds_long_and_short_texts(demo, demo_alone, mode):
    with StaticEmbeddingPipeline(demo, "CPU", PROGRAMS=mode, **F32) as pipe:
        assert pipe.max_length == 2000
        found = pipe.embed_documents(TEXTS, as_array=True)
        for text, vector in zip(TEXTS, found, strict=True):
            assert np.abs(vector - demo_alone(text)).max() <= 1e-6


def test_a_mean_needs_the_whole_text_in_one_call(demo):
    """Its parts would have to be added up before Dense modules and normalisation, which are in the program."""
    kind = StaticEmbeddingPipeline.PoolingType.MEAN
    report = inspect_encoder(demo, "CPU", EncoderChoices(pooling="mean"))
    assert max(variant.rows for variant in report.variants) == 2000
    assert not any(variant.past for variant in report.variants)
    with StaticEmbeddingPipeline(demo, "CPU", pooling_type=kind, **F32) as pipe:
        states = hidden_states(demo, pipe.max_length, TEXTS[1])
        assert np.abs(np.array(pipe.embed_query(TEXTS[1])) - unit(states.mean(axis=0))).max() <= 1e-6


def hidden_states(folder, most, text):
    model = get_core().read_model(folder / "openvino_model.xml")
    (result,) = model.get_results()
    model.add_results([named_result("states", find_head(result).input_value(0))])
    request = get_core().compile_model(model, "CPU", EXACT).create_infer_request()
    ids = genai.Tokenizer(folder).encode(text).input_ids.data[:, :most]
    feeds = {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "position_ids": np.arange(ids.shape[1])[None],
        "beam_idx": np.zeros(1, np.int32),
    }
    request.infer(feeds)
    return np.array(request.get_tensor("states").data[0])


@pytest.mark.parametrize("mode", ["shared", "separate"])
def test_a_blob_set_holds_the_programs_of_chunks(demo, demo_alone, mode, tmp_path, monkeypatch):
    options = {"PROGRAMS": mode, "CACHE_DIR": str(tmp_path), **F32}
    with StaticEmbeddingPipeline(demo, "CPU", **options) as pipe:
        first = pipe.embed_documents(TEXTS[:4], as_array=True)
    no_compilation(monkeypatch)
    with StaticEmbeddingPipeline(demo, "CPU", **options) as pipe:
        again = pipe.embed_documents(TEXTS[:4], as_array=True)
    assert np.abs(first - again).max() <= 1e-6
    assert np.abs(again[3] - demo_alone(TEXTS[3])).max() <= 1e-6


def test_long_texts_run_in_a_worker_process(demo, demo_alone):
    with StaticEmbeddingPipeline(demo, "CPU", SEPARATE_PROCESS=True, **F32) as pipe:
        found = pipe.embed_documents(TEXTS[:2], as_array=True)
    for text, vector in zip(TEXTS, found, strict=False):
        assert np.abs(vector - demo_alone(text)).max() <= 1e-6


def test_inspect_names_the_chunks(demo):
    report = inspect_encoder(demo, "CPU", EncoderChoices())
    assert {(variant.rows, variant.past) for variant in report.variants if variant.past >= 512} == {
        (rows, past) for rows in (64, 256, 512) for past in (512, 1024, 1536)
    }
    assert {variant.past for variant in report.variants if 0 < variant.past < 512} == {32, 64, 128}
    report = inspect_encoder(demo, "CPU", EncoderChoices(properties={"PROGRAMS": "separate"}))
    assert [(variant.rows, variant.past) for variant in report.variants if variant.past] == [(512, 1536)]
