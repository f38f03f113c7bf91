"""Tests an encoder whose first device belongs to the engine of a chat, and whose second one takes what is too much for it."""

from __future__ import annotations

import os
import threading
from itertools import pairwise

import numpy as np
import pytest
from support.encoders.encoder_models import encoder_directory
from support.engine.held_engine import hold
from support.helpers import one_line

from staticllm import StaticEmbeddingPipeline, StaticLLMPipeline, demo_model_path
from staticllm.errors import BusyError, ConfigError
from staticllm.pipelines.embedding.windve.affinity import unsupported
from tests.support.inside import driver_of

pytestmark = [
    pytest.mark.usefixtures("shared_lowering"),
    pytest.mark.skipif(
        bool(unsupported()) or len(os.sched_getaffinity(0)) < 2, reason="needs two cores that threads can be bound to"
    ),
]
F32 = {"INFERENCE_PRECISION_HINT": "f32"}
TEXTS = [f"This is paragraph {i} of a document " * (1 + i % 7) for i in range(300)]
SECONDS = 60


def groups():
    """Two groups of cores: the first stands for an NPU, the second for the CPU beside it."""
    first, *_, last = sorted(os.sched_getaffinity(0))
    return f"CPU#{last},CPU#{first}"


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return encoder_directory(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="module")
def expected(directory):
    with StaticEmbeddingPipeline(directory, "CPU", **F32) as alone:
        return alone.encode(TEXTS)


@pytest.fixture(scope="module")
def llm():
    with StaticLLMPipeline(demo_model_path(), "CPU", **F32) as found:
        yield found


def embedded(pipe):
    return [device.num_embedded for device in pipe.devices()]


def test_texts_run_beside_a_chat_and_on_the_other_device(directory, llm, expected):
    answer = str(llm.generate("Tell me a story", max_new_tokens=60))
    with StaticEmbeddingPipeline(directory, groups(), engine=llm.engine, **F32) as pipe:
        assert pipe.engine is llm.engine
        handle = llm.submit("Tell me a story", max_new_tokens=60)
        with llm.record() as trace:
            found = pipe.encode(TEXTS)
            assert str(handle.result(SECONDS)) == answer
        np.testing.assert_allclose(found, expected, atol=1e-6)
        first, second = embedded(pipe)
        assert first + second == len(TEXTS)
        assert min(first, second) > 0
        assert sum(job.num_parts for job in trace.jobs) == first
        calls = sorted([*trace.steps, *trace.jobs], key=lambda call: call.start)
        assert all(before.end <= after.start for before, after in pairwise(calls)), "two at once"


def test_the_other_device_takes_all_while_the_engine_is_held(directory, llm, expected):
    with StaticEmbeddingPipeline(directory, groups(), engine=llm.engine, **F32) as pipe:
        is_free, thread = hold(llm)
        handle = pipe.submit_texts(TEXTS)
        until = threading.Event()
        for _ in range(SECONDS * 50):
            if embedded(pipe)[1] > 0:
                break
            until.wait(0.02)
        assert embedded(pipe)[0] == 0
        assert embedded(pipe)[1] > 0
        is_free.set()
        thread.join(SECONDS)
        np.testing.assert_allclose(handle.result(SECONDS), expected, atol=1e-6)


def test_full_queues_refuse_and_recover(directory, llm, expected):
    options = {"LATENCY_MS": 1000, "QUEUE_POLICY": "windve"}
    with StaticEmbeddingPipeline(directory, groups(), engine=llm.engine, **options, **F32) as pipe:
        for device in driver_of(pipe).pool.devices:  # depths that a test can fill
            device.recalibration = None
            device.queue.depth = 3
        is_free, thread = hold(llm)
        pool = driver_of(pipe).pool
        pool.devices[1].instance.embed, embed = _gate(pool.devices[1].instance.embed)
        handles = [pipe.submit(text) for text in TEXTS[:6]]
        assert [device.num_waiting + device.num_running for device in pipe.devices()] == [3, 3]
        with pytest.raises(BusyError) as caught:
            pipe.submit(TEXTS[6])
        assert one_line(caught)
        is_free.set()
        embed.set()
        thread.join(SECONDS)
        found = np.array([handle.result(SECONDS) for handle in handles])
        np.testing.assert_allclose(found, expected[:6], atol=1e-6)
        assert embedded(pipe) == [3, 3]
        np.testing.assert_allclose(pipe.submit(TEXTS[6]).result(SECONDS), expected[6], atol=1e-6)


def _gate(function):
    gate = threading.Event()

    def run(*arguments):
        assert gate.wait(SECONDS)
        return function(*arguments)

    return run, gate


def test_closing_the_chat_leaves_the_texts_to_the_other_device(directory, expected):
    llm = StaticLLMPipeline(demo_model_path(), "CPU", **F32)
    with StaticEmbeddingPipeline(directory, groups(), engine=llm.engine, **F32) as pipe:
        np.testing.assert_allclose(pipe.encode(TEXTS[:5]), expected[:5], atol=1e-6)
        llm.close()
        np.testing.assert_allclose(pipe.encode(TEXTS), expected, atol=1e-6)
        assert pipe.is_usable


def test_closing_the_encoder_leaves_the_chat_and_no_thread(directory, llm):
    before = {thread.name for thread in threading.enumerate()}
    pipe = StaticEmbeddingPipeline(directory, groups(), engine=llm.engine, **F32)
    pipe.encode(TEXTS[:20])
    pipe.close()
    pipe.close()
    assert str(llm.generate("Hi", max_new_tokens=4))
    assert {thread.name for thread in threading.enumerate()} - before <= {"staticllm-engine"}
    assert llm.engine.is_idle


def test_a_process_of_its_own_has_no_engine(directory, llm):
    with pytest.raises(ConfigError, match="SEPARATE_PROCESS with engine=") as caught:
        StaticEmbeddingPipeline(directory, "CPU", engine=llm.engine, SEPARATE_PROCESS=True)
    assert one_line(caught)
