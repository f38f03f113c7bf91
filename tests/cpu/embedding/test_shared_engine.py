"""Tests embeddings on the engine of a language model: both give what they give alone, and each may end before the other."""

import gc
import threading
import time
from itertools import pairwise

import numpy as np
import pytest
from support.encoders.encoder_models import encoder_directory
from support.helpers import one_line

from staticllm import StaticEmbeddingPipeline, StaticLLMPipeline, Trace, demo_model_path
from staticllm.errors import ClosedError, ConfigError, StaticLLMError
from staticllm.pipelines.embedding.queue.drivers import JobDriver

pytestmark = pytest.mark.usefixtures("shared_lowering")

F32 = {"INFERENCE_PRECISION_HINT": "f32"}
TEXTS = [f"This is paragraph {i} of a document " * (1 + i % 7) for i in range(300)]
PROMPTS = ["Tell me a story", "Once upon a time there was a fox", "The sun"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return encoder_directory(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def llm():
    with StaticLLMPipeline(demo_model_path(), "CPU", **F32) as found:
        yield found


@pytest.fixture(scope="module")
def embedder(directory, llm):
    with StaticEmbeddingPipeline(directory, "CPU", engine=llm.engine, **F32) as found:
        yield found


def test_chats_and_embeddings_give_what_they_give_alone(directory, llm, embedder, tmp_path):
    with StaticEmbeddingPipeline(directory, "CPU", **F32) as alone:
        vectors = alone.encode(TEXTS)
    answers = [str(llm.generate(prompt, max_new_tokens=40)) for prompt in PROMPTS]
    found = {}

    def chat(prompt):
        found[prompt] = str(llm.generate(prompt, max_new_tokens=40))

    threads = [threading.Thread(target=chat, args=(prompt,)) for prompt in PROMPTS]
    before = llm.stats().num_jobs
    with llm.record() as trace:
        for thread in threads:
            thread.start()
        shared = embedder.encode(TEXTS)
        for thread in threads:
            thread.join()
    assert np.abs(shared - vectors).max() < 1e-6
    assert [found[prompt] for prompt in PROMPTS] == answers
    calls = sorted([*trace.steps, *trace.jobs], key=lambda call: call.start)
    assert sum(job.num_parts for job in trace.jobs) == len(TEXTS)
    assert llm.stats().num_jobs - before == len(trace.jobs)
    trace.save(tmp_path / "trace.json")
    loaded = Trace.load(tmp_path / "trace.json").jobs
    assert [(job.source, job.num_parts) for job in loaded] == [(job.source, job.num_parts) for job in trace.jobs]
    assert [job.seconds for job in loaded] == pytest.approx([job.seconds for job in trace.jobs], abs=1e-8)
    assert all(first.end <= second.start for first, second in pairwise(calls)), "two calls at once"


def test_a_query_goes_before_waiting_documents(llm, embedder):
    order, all_wait = [], threading.Event()
    holding = threading.Thread(target=llm.engine.run_between_steps, args=(lambda: all_wait.wait(30),))
    holding.start()
    handles = [embedder.submit(text) for text in TEXTS] + [embedder.submit("a query", priority=1)]
    for number, handle in enumerate(handles):
        handle.future.add_done_callback(lambda _, number=number: order.append(number))
    all_wait.set()
    for handle in handles:
        handle.result(30)
    holding.join()
    assert order[0] == len(TEXTS)


def test_closing_the_embeddings_leaves_the_chat(directory, llm):
    embedder = StaticEmbeddingPipeline(directory, "CPU", engine=llm.engine, **F32)
    all_wait = threading.Event()
    holding = threading.Thread(target=llm.engine.run_between_steps, args=(lambda: all_wait.wait(30),))
    holding.start()
    waiting = [embedder.submit(text) for text in TEXTS]
    embedder.close()
    embedder.close()
    all_wait.set()
    holding.join()
    ends = [handle.future.exception(10) for handle in waiting]
    assert all(isinstance(end, ClosedError) for end in ends)
    with pytest.raises(ClosedError):
        embedder.embed_query("late")
    assert str(llm.generate(PROMPTS[0], max_new_tokens=5))


def test_closing_the_chat_ends_the_embeddings(directory):
    llm = StaticLLMPipeline(demo_model_path(), "CPU", **F32)
    embedder = StaticEmbeddingPipeline(directory, "CPU", engine=llm.engine, **F32)
    assert len(embedder.embed_query("first")) == embedder.width
    llm.close()
    with pytest.raises(ClosedError) as caught:
        embedder.embed_query("late")
    assert one_line(caught)
    embedder.close()
    with pytest.raises(ClosedError):
        StaticEmbeddingPipeline(directory, "CPU", engine=llm.engine, **F32)


def test_two_embedding_pipelines_share_a_device(directory):
    with (
        StaticEmbeddingPipeline(directory, "CPU", **F32) as first,
        StaticEmbeddingPipeline(directory, "CPU", engine=first.engine, **F32) as second,
    ):
        handles = [pipe.submit(text) for text in TEXTS[:50] for pipe in (first, second)]
        vectors = [handle.result(30) for handle in handles]
        assert np.abs(np.array(vectors[::2]) - np.array(vectors[1::2])).max() < 1e-6


@pytest.mark.parametrize("engine", ["llm", object()])
def test_what_is_no_engine_is_refused_in_one_line(directory, engine):
    with pytest.raises(ConfigError, match=r"engine=llm\.engine") as caught:
        StaticEmbeddingPipeline(directory, "CPU", engine=engine, **F32)
    assert one_line(caught)


BAD_OPTIONS = [
    {"priority": "high"},
    {"priority": None},
    {"priority": 0.5},
    {"deadline_ms": "soon"},
    {"deadline_ms": float("nan")},
    {"dimensions": 1.5},
    {"dimensions": "8"},
    {"dimensions": True},
]


@pytest.mark.parametrize("options", BAD_OPTIONS)
def test_an_impossible_option_is_refused_in_one_line_and_the_chat_goes_on(llm, embedder, options):
    (name,) = options
    with pytest.raises(ConfigError, match=name) as caught:
        embedder.encode(["a text"], **options)
    assert one_line(caught)
    assert len(embedder.embed_query("next")) == embedder.width
    assert str(llm.generate(PROMPTS[0], max_new_tokens=5))


@pytest.mark.parametrize("value", ["many", 0, -1, None, True])
def test_an_impossible_number_of_waiting_texts_is_refused(directory, value):
    with pytest.raises(ConfigError, match="max_waiting"):
        StaticEmbeddingPipeline(directory, "CPU", max_waiting=value, **F32)


@pytest.mark.parametrize("texts", [None, 5, "a text"])
def test_what_is_no_list_of_texts_is_refused(embedder, texts):
    with pytest.raises(ConfigError, match="list of str"):
        embedder.encode(texts)


def test_a_deleted_pipeline_ends_its_thread_and_leaves_a_shared_engine(directory, llm):
    threads = set(threading.enumerate())
    owned = StaticEmbeddingPipeline(directory, "CPU", **F32)
    handle = owned.submit("a text")
    (thread,) = [each for each in set(threading.enumerate()) - threads if each.name == "staticllm-jobs"]
    del owned
    assert handle.result(10).shape
    del handle
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    shared = StaticEmbeddingPipeline(directory, "CPU", engine=llm.engine, **F32)
    assert len(shared.embed_query("a text")) == shared.width
    queues = sum(type(each) is JobDriver for each in gc.get_objects())
    del shared
    gc.collect()
    assert sum(type(each) is JobDriver for each in gc.get_objects()) == queues - 1, "the engine keeps the model"


def test_the_last_call_of_on_progress_has_all_texts(embedder):
    told = []

    def slow(done, total):
        told.append((done, total))
        if len(told) == 1:
            time.sleep(1)  # the other texts end meanwhile

    embedder.encode(TEXTS, on_progress=slow)
    assert told[-1] == (len(TEXTS), len(TEXTS))


@pytest.mark.parametrize("options", [{"HETEROGENEOUS": True}, {"LATENCY_MS": 60_000}])
def test_the_properties_of_several_devices_go_with_a_shared_engine(directory, llm, options):
    with StaticEmbeddingPipeline(directory, "CPU", **F32) as alone:
        vectors = alone.encode(TEXTS[:40])
    before = llm.stats().num_jobs
    with StaticEmbeddingPipeline(directory, engine=llm.engine, **F32, **options) as embedder:
        assert np.abs(embedder.encode(TEXTS[:40]) - vectors).max() < 1e-6
        assert [device.num_embedded for device in embedder.devices()] == [40]
    assert llm.stats().num_jobs > before


def test_ctrl_c_in_a_large_list_leaves_the_engine_to_others(llm, embedder):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        embedder.encode(TEXTS * 20, on_progress=interrupt)
    assert len(embedder.embed_query("next")) == embedder.width
    assert str(llm.generate(PROMPTS[0], max_new_tokens=5))
    assert embedder.encode(TEXTS[:3]).shape == (3, embedder.width)


def test_a_done_callback_may_embed(embedder):
    found, ended = [], threading.Event()
    handle = embedder.submit("a text")
    handle.future.add_done_callback(lambda _: (found.append(embedder.embed_query("another")), ended.set()))
    assert ended.wait(30)
    assert len(found[0]) == embedder.width


@pytest.mark.parametrize("what", ["chat", "embeddings"])
def test_closing_in_a_streamer_ends_what_waits(directory, what):
    llm = StaticLLMPipeline(demo_model_path(), "CPU", **F32)
    embedder = StaticEmbeddingPipeline(directory, "CPU", engine=llm.engine, **F32)
    texts = []

    def close(text):
        if not texts:
            texts.extend(embedder.submit(each) for each in TEXTS)
            (llm if what == "chat" else embedder).close()
        return False

    answer = llm.generate(PROMPTS[0], streamer=close, max_new_tokens=20)
    ends = [handle.future.exception(10) for handle in texts]
    assert len(texts) == len(TEXTS) and all(end is None or isinstance(end, ClosedError) for end in ends)
    assert what == "chat" or str(answer)
    embedder.close()
    llm.close()


def test_waiting_for_texts_on_the_thread_of_the_engine_is_refused(llm, embedder):
    with pytest.raises(StaticLLMError, match="another thread") as caught:
        llm.engine.run_between_steps(lambda: embedder.embed_query("a text"))
    assert one_line(caught)
    assert len(embedder.embed_query("a text")) == embedder.width
