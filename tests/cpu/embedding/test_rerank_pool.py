"""Tests rerankers on two groups of cores and with a latency limit: the scores of one device, kills, busy devices and depths."""

import os
import signal
import threading
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from support.encoders.encoder_models import ARCHIVES, unpack
from support.helpers import one_line

from staticllm import StaticRerankPipeline
from staticllm.errors import BusyError, ConfigError, ModelError, PromptError
from staticllm.pipelines.embedding.windve.affinity import unsupported
from tests.support.inside import driver_of

pytestmark = pytest.mark.usefixtures("shared_lowering")

apart = pytest.mark.skipif(
    bool(unsupported()) or len(os.sched_getaffinity(0)) < 2, reason="needs two cores that threads can be bound to"
)
F32 = {"INFERENCE_PRECISION_HINT": "f32"}
QUERY = "what is a fox?"
TEXTS = [f"{'a fox is an animal ' * (number % 5)}and {number}" for number in range(40)]
SECONDS = 60


def groups():
    first, *_, last = sorted(os.sched_getaffinity(0))
    return f"CPU#{last},CPU#{first}"


def directory_of(name, folder):
    unpack(name, folder)
    with zipfile.ZipFile(ARCHIVES / "bert_tokenizer.zip") as archive:
        archive.extractall(folder)
    return folder


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return directory_of("bert_scores", tmp_path_factory.mktemp("reranker"))


@apart
@pytest.mark.parametrize("name", ["bert_scores", "xlm_roberta_scores", "qwen3_with_past"])
def test_several_devices_score_as_one(name, tmp_path):
    folder = directory_of(name, tmp_path)
    with StaticRerankPipeline(folder, "CPU", max_length=96, top_n=5, **F32) as alone:
        expected, labels, ranking = (
            alone.scores(QUERY, TEXTS),
            alone.label_scores(QUERY, TEXTS),
            alone.rerank(QUERY, TEXTS),
        )
    with StaticRerankPipeline(folder, groups(), max_length=96, top_n=5, **F32) as pipe:
        np.testing.assert_allclose(pipe.scores(QUERY, TEXTS), expected, atol=1e-6)
        np.testing.assert_allclose(pipe.label_scores(QUERY, TEXTS), labels, atol=1e-6)
        found = pipe.rerank(QUERY, TEXTS)
        assert [score for _, score in found] == pytest.approx([score for _, score in ranking], abs=1e-6)
        for device in driver_of(pipe).pool.devices:  # each of them, not only the one that was free
            (text, *_) = pipe._pairs(QUERY, TEXTS[:1]).texts
            logits = device.instance.embed([text])
            np.testing.assert_allclose(pipe._scored(logits), expected[:1], atol=1e-6)
    assert len(set(np.round(expected, 5))) > 5


@apart
def test_token_types_reach_worker_processes(directory):
    with StaticRerankPipeline(directory, groups(), max_length=64, **F32) as pipe:
        (text,) = pipe._pairs(QUERY, ["a fox is an animal"]).texts
        assert text.types is not None and set(text.types.tolist()) == {0, 1}
        instance = driver_of(pipe).pool.devices[0].instance
        untyped = type(text)(text.ids)
        assert np.abs(instance.embed([text]) - instance.embed([untyped])).max() > 1e-3


@apart
def test_a_worker_that_is_killed_loses_no_pair(directory):
    with StaticRerankPipeline(directory, "CPU", max_length=96, **F32) as alone:
        expected = alone.scores(QUERY, TEXTS)
    with StaticRerankPipeline(directory, groups(), max_length=96, LATENCY_MS=60_000, **F32) as pipe:
        worker = driver_of(pipe).pool.devices[0].instance
        with ThreadPoolExecutor(20) as threads:
            futures = [threads.submit(pipe.scores, QUERY, TEXTS, priority=n % 2) for n in range(40)]
            os.kill(worker.pid, signal.SIGKILL)
            for future in futures:
                np.testing.assert_allclose(future.result(120), expected, atol=1e-6)


def test_a_latency_limit_answers_busy_with_the_time_to_try_again(directory, monkeypatch):
    limit_ms = 2000.0
    with StaticRerankPipeline(directory, "CPU", max_length=64, LATENCY_MS=limit_ms, **F32) as pipe:
        expected = pipe.scores(QUERY, TEXTS[:2])
        instance = driver_of(pipe).pool.devices[0].instance
        inner, began, go_on = instance.embed, threading.Event(), threading.Event()

        def held(*arguments):
            began.set()
            assert go_on.wait(SECONDS)
            return inner(*arguments)

        monkeypatch.setattr(instance, "embed", held)
        running = pipe.submit(QUERY, TEXTS[:2])
        assert began.wait(SECONDS)
        time.sleep(1.2 * limit_ms / 1e3)  # a batch that is late by so much is expected to take as much more
        with pytest.raises(BusyError) as caught:
            pipe.scores(QUERY, TEXTS[:2])
        assert 0 < caught.value.retry_after < SECONDS
        assert one_line(caught)
        bulk = pipe.submit(QUERY, TEXTS[:2], priority=0)  # without a limit
        go_on.set()
        np.testing.assert_allclose(running.scores(SECONDS), expected, atol=1e-6)
        np.testing.assert_allclose(bulk.scores(SECONDS), expected, atol=1e-6)


@pytest.mark.parametrize("max_length", [8, 32])
def test_programs_that_are_shorter_than_typical_texts(directory, max_length):
    with StaticRerankPipeline(directory, "CPU", max_length=max_length, **F32) as alone:
        expected = alone.scores("fox", TEXTS)
    with StaticRerankPipeline(directory, "CPU", max_length=max_length, LATENCY_MS=60_000, **F32) as pipe:
        np.testing.assert_allclose(pipe.scores("fox", TEXTS), expected, atol=1e-6)
        np.testing.assert_allclose(pipe.scores("fox", TEXTS, priority=0), expected, atol=1e-6)


def test_queue_depths_of_algorithm_1(directory, tmp_path):
    options = {"LATENCY_MS": 100.0, "QUEUE_POLICY": "windve", "QUEUE_DEPTHS": tmp_path / "depths.json"}
    with StaticRerankPipeline(directory, "CPU", max_length=64, **options, **F32) as pipe:
        (queue,) = [device.queue for device in driver_of(pipe).pool.devices]
        assert queue.depth > 0
        with pytest.raises(PromptError, match="idle, the devices take only the first"):
            pipe.scores(QUERY, ["fox"] * (queue.depth + 1))
        assert pipe.scores(QUERY, ["fox"]).shape == (1,)
        with pytest.raises(ConfigError, match="no engine to share"):
            pipe.engine  # noqa: B018


@apart
def test_what_no_worker_can_score_gets_one_line_and_ends_the_workers(tmp_path):
    folder = directory_of("bert", tmp_path)
    with pytest.raises(ModelError, match=r"hidden states and no scores") as caught:
        StaticRerankPipeline(folder, groups(), max_length=64, **F32)
    assert one_line(caught)
