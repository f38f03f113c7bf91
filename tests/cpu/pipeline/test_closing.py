"""A pipeline that is closed gives everything back at once: its programs, memory, threads and files, without the collector."""

import sys
import threading
import time
import warnings
import zipfile
from functools import partial

import numpy as np
import pytest
from support.encoders.encoder_directories import TEXTS, a_directory, scores_directory
from support.encoders.encoder_models import ARCHIVES
from support.helpers import PROMPT, SHORT, one_line, tokens_of
from support.models.adapter_models import Models
from support.server.held import check_gives_back, no_collector, num_files, num_threads, programs

from staticllm import (
    Adapter,
    AdapterConfig,
    ClosedError,
    StaticEmbeddingPipeline,
    StaticLLMPipeline,
    StaticRerankPipeline,
    demo_model_path,
    draft_model,
)
from staticllm.system.long_calls import wait_for_left
from tests.support.inside import launched_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="counts threads and files in /proc")


def a_pipeline(**properties):
    return StaticLLMPipeline(demo_model_path(), "CPU", **{**SHORT, "BACKGROUND_COMPILE": False, **properties})


def ask(pipe):
    tokens_of(pipe, count=3)


def generate_text(pipe):
    pipe.generate("Tell me a story.", max_new_tokens=5, stop_strings={"zzz"})


def chat(pipe):
    pipe.start_chat("Be brief.")
    for text in ("Hello.", "And then?"):
        pipe.generate(text, max_new_tokens=3)


def search(pipe):
    pipe.generate("Tell me a story.", max_new_tokens=4, num_beams=3, num_return_sequences=3)


def fail_in_a_streamer(pipe):
    def streamer(text):
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        pipe.generate("Tell me a story.", streamer=streamer, max_new_tokens=5)


def call_back(pipe):
    pipe.submit("Tell me a story.", max_new_tokens=3, callback=lambda text: None).result()


def refuse(pipe):
    with pytest.raises(ValueError, match="no_such"):
        pipe.generate("Hello", no_such=1)


USES = (ask, generate_text, chat, search, fail_in_a_streamer, call_back, refuse)


def test_a_closed_pipeline_holds_nothing():
    def open_and_close(use):
        with a_pipeline() as pipe:
            use(pipe)

    def open_and_close_all():
        for use in USES:  # texts and templates start threads of OpenVINO as well
            open_and_close(use)

    check_gives_back(open_and_close_all, *(partial(open_and_close, use) for use in USES))


def test_a_deleted_pipeline_holds_nothing():
    def open_and_delete(use):
        use(a_pipeline())

    check_gives_back(*(partial(open_and_delete, use) for use in (ask, *USES)))


@pytest.mark.parametrize(
    "properties",
    [
        {"PROGRAMS": "separate", "MAX_PROMPT_LEN": 32, "MIN_RESPONSE_LEN": 16},
        {"PROGRAMS": "blocks", "MAX_PROMPT_LEN": 32, "MIN_RESPONSE_LEN": 16},
        {"BACKGROUND_COMPILE": True, "PROGRAMS": "separate", "MAX_PROMPT_LEN": 32, "MIN_RESPONSE_LEN": 16},
        {"prompt_lookup": True},
    ],
    ids=str,
)
def test_pipelines_with_other_programs_hold_nothing(properties):
    def open_and_close():
        with a_pipeline(**properties) as pipe:
            ask(pipe)
            pipe.wait_until_complete()

    check_gives_back(open_and_close, open_and_close)


def test_pipelines_that_are_closed_while_they_compile_hold_nothing():
    """The compiler cannot be interrupted: it runs to its end alone, and its program is dropped."""

    def open_and_close():
        with a_pipeline(BACKGROUND_COMPILE=None) as pipe:
            ask(pipe)

    with no_collector():
        known = {id(held) for held in programs()}  # those that tests share
        for _ in range(3):
            open_and_close()
            wait_for_left()
            assert not [held for held in programs() if id(held) not in known]
        threads = num_threads()
        for _ in range(4):
            open_and_close()
            wait_for_left()
        most = threads + 3  # the compiler itself starts one or two more when it is busy; a leak would be one each time
        end = time.monotonic() + 5
        while num_threads() > most and time.monotonic() < end:  # one that has ended is counted a moment longer
            time.sleep(0.02)
        assert num_threads() <= most


def test_pipelines_with_cached_or_exported_programs_hold_nothing(tmp_path):
    def cached():
        with a_pipeline(CACHE_DIR=tmp_path / "cache", PROGRAMS="shared") as pipe:
            ask(pipe)

    def imported():
        with a_pipeline(BLOB_PATH=tmp_path / "set") as pipe:
            ask(pipe)

    check_gives_back(cached, cached)
    with a_pipeline(BLOB_PATH=tmp_path / "set", EXPORT_BLOB=True):
        pass
    check_gives_back(imported, imported)


def test_pipelines_with_a_draft_model_or_adapters_hold_nothing(tmp_path):
    loras = [Adapter(file) for file in Models(demo_model_path(), ("q_proj", "v_proj"), tmp_path).files()]

    def drafting():
        with a_pipeline(draft_model=draft_model(demo_model_path(), "CPU")) as pipe:
            tokens_of(pipe, count=6, num_assistant_tokens=3)

    def adapting():
        with a_pipeline(adapters=AdapterConfig([(lora, 1.0) for lora in loras])) as pipe:
            ask(pipe)

    check_gives_back(drafting, drafting)
    check_gives_back(adapting, adapting)


@pytest.mark.parametrize("stage", ["passes", "compile", "warm-up", "ready"])
def test_a_pipeline_that_failed_while_it_was_loaded_holds_nothing(stage):
    def fail(event):
        if event.stage == stage and event.is_done:
            raise ValueError(f"at {stage}")

    def open_in_vain():
        with pytest.raises(ValueError, match=f"at {stage}"):
            a_pipeline(on_progress=fail)

    check_gives_back(open_in_vain, open_in_vain)


@pytest.mark.parametrize("waits", [False, True])
def test_a_pipeline_whose_background_work_failed_holds_nothing(waits):
    """Its error is kept, which leads to the frames that it came from, and to those that it was raised in."""

    def fail(event):
        if event.stage == "compile" and event.is_done and threading.current_thread().name == "staticllm-background":
            raise ValueError("in the background")

    def open_and_close():
        with a_pipeline(BACKGROUND_COMPILE=None, PROGRAMS="phases", on_progress=fail) as pipe:
            while not launched_of(pipe).background.is_done:
                time.sleep(0.02)
            if waits:
                with pytest.raises(ValueError, match="in the background"):
                    pipe.wait_until_complete()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        check_gives_back(open_and_close, open_and_close, open_and_close)


def test_a_pipeline_whose_draft_model_failed_holds_nothing(tmp_path):
    def open_in_vain():
        with pytest.raises(ValueError, match="NO_SUCH"):
            a_pipeline(draft_model=draft_model(tmp_path, NO_SUCH=1))

    check_gives_back(open_in_vain, open_in_vain)


def test_encoders_hold_nothing(tmp_path):
    embedder, reranker = tmp_path / "embedder", scores_directory(tmp_path / "reranker")
    with zipfile.ZipFile(ARCHIVES / "bert_tokenizer.zip") as archive:
        archive.extractall(reranker)
    embedder.mkdir()
    a_directory(embedder)

    def embed():
        with StaticEmbeddingPipeline(embedder, "CPU") as pipe:
            pipe.embed_documents(TEXTS)

    def embed_and_delete():
        pipe = StaticEmbeddingPipeline(embedder, "CPU", CACHE_DIR=tmp_path / "cache")
        pipe.start_embed_documents_async(TEXTS)
        pipe.wait_embed_documents()

    def rerank():
        with StaticRerankPipeline(reranker, "CPU") as pipe:
            pipe.rerank("a", TEXTS[:2])

    def pool():
        with StaticEmbeddingPipeline(embedder, "CPU", LATENCY_MS=1000) as pipe:
            pipe.embed_documents(TEXTS)

    check_gives_back(embed, embed, embed_and_delete, embed_and_delete, pool)
    check_gives_back(rerank, rerank)


def test_encoders_on_the_engine_of_another_pipeline_hold_nothing(tmp_path):
    a_directory(tmp_path)

    def both():
        with a_pipeline() as llm, StaticEmbeddingPipeline(tmp_path, "CPU", engine=llm.engine) as embedder:
            embedder.embed_documents(TEXTS)
            ask(llm)

    def one(llm):
        with StaticEmbeddingPipeline(tmp_path, "CPU", engine=llm.engine) as embedder:
            embedder.embed_documents(TEXTS)

    check_gives_back(both, both)
    with a_pipeline() as llm:
        check_gives_back(partial(one, llm), partial(one, llm))


def test_what_a_closed_pipeline_gives_back_does_not_wait_for_its_deletion():
    with no_collector():
        ask(first := a_pipeline())
        first.close()
        before = num_threads(), num_files(), len(programs())
        kept = []
        for _ in range(3):
            pipe = a_pipeline()
            handle = pipe.submit("Tell me a story.", max_new_tokens=60, ignore_eos=True)
            next(iter(handle))
            pipe.close()
            kept.append((pipe, handle.result()))
            assert str(kept[-1][1])
            del handle
        assert (num_threads(), num_files(), len(programs())) == before


@pytest.mark.parametrize(
    "call",
    [
        lambda pipe: pipe.generate("Hello"),
        lambda pipe: pipe.generate(np.array(PROMPT)),
        lambda pipe: pipe.submit("Hello"),
        lambda pipe: pipe.submit("Hello", structured_output_config={"regex": "a"}),
        lambda pipe: pipe.get_tokenizer(),
        lambda pipe: pipe.save_snapshot("none", "Hello"),
    ],
)
def test_calls_of_a_closed_pipeline_raise_one_line(call):
    pipe = a_pipeline()
    pipe.start_chat()
    pipe.generate("Hello", max_new_tokens=2)
    pipe.close()
    pipe.close()
    with pytest.raises(ClosedError) as error:
        call(pipe)
    assert "load the model again" in one_line(error)
    assert pipe.config.max_prompt_len == 64
    assert pipe.get_generation_config().max_new_tokens
    assert pipe.stats().num_requests == 1
