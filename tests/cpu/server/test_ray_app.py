"""Tests the server on a cluster of several nodes: lost machines, replacement, autoscaling, several models, encoders."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from functools import partial

import httpx
import numpy as np
import pytest

pytest.importorskip("ray")

from support.attach.daemons import wait_for
from support.command_line import in_child, in_here
from support.encoders.encoder_directories import a_directory
from support.server.ray_cluster import EXACT, RayCluster, text_of

from staticllm import StaticEmbeddingPipeline, StaticLLMPipeline, demo_model_path

pytestmark = pytest.mark.slow
QUESTIONS = [
    f"Tell me a story about {name}." for name in ("a fox", "the sea", "a king", "my friend", "two birds", "rain")
]


@pytest.fixture(scope="module")
def cluster():
    found = RayCluster(num_nodes=3, port=18765)
    yield found
    found.close()


@pytest.fixture(scope="module")
def answers():
    """The greedy answers of a pipeline in this process."""
    with StaticLLMPipeline(demo_model_path(), **EXACT) as pipeline:
        return [pipeline.generate(text, max_new_tokens=100) for text in QUESTIONS]


def together(function, items):
    """Return the results of a function on a thread per item."""
    results = [None] * len(items)

    def run(index, item):
        try:
            results[index] = function(item)
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(items)]
    for thread in threads:
        thread.start()
    return threads, results


def finished(threads, results):
    for thread in threads:
        thread.join(180)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return results


def test_every_answer_is_right_when_a_machine_is_lost(cluster, answers):
    cluster.run(min_replicas=3, max_replicas=3, imbalance=0)
    cluster.wait_for(3)
    begun = threading.Barrier(2 * len(QUESTIONS) + 1)

    def ask(index):
        is_waiting = True

        def wait_once():
            nonlocal is_waiting
            if is_waiting:
                is_waiting = False
                begun.wait(60)

        return text_of(cluster.stream(QUESTIONS[index % len(QUESTIONS)], 100, wait_once, temperature=0))

    running = together(ask, range(2 * len(QUESTIONS)))
    begun.wait(60)  # every stream has begun
    whole = together(lambda index: cluster.chat(QUESTIONS[index], 100)["choices"][0]["message"]["content"], range(6))
    cluster.kill(cluster.nodes.pop(0))
    assert finished(*running) == [*answers, *answers]
    assert finished(*whole) == answers
    cluster.nodes.append(cluster.add_node())
    cluster.wait_for(3)


def test_a_sampled_stream_is_continued_by_its_seed(cluster):
    cluster.run(min_replicas=3, max_replicas=3)
    cluster.wait_for(3)
    alone = [text_of(cluster.stream(text, 60, temperature=1, seed=number)) for number, text in enumerate(QUESTIONS)]
    running = together(
        lambda n: text_of(cluster.stream(QUESTIONS[n], 60, temperature=1, seed=n)), range(len(QUESTIONS))
    )
    time.sleep(0.4)
    cluster.kill(cluster.nodes.pop(0))
    assert finished(*running) == alone
    cluster.nodes.append(cluster.add_node())
    cluster.wait_for(3)


def test_nothing_is_refused_while_replicas_are_replaced(cluster, answers):
    cluster.run(min_replicas=2, max_replicas=2)
    cluster.wait_for(2)
    is_over, found = threading.Event(), []

    def ask(index):
        while not is_over.is_set():
            found.append(cluster.chat(QUESTIONS[index], 100)["choices"][0]["message"]["content"] == answers[index])

    running = together(ask, range(3))
    time.sleep(1)
    cluster.run(
        min_replicas=2, max_replicas=2, target_requests=7.0, max_body=1 << 20
    )  # other settings: all are replaced
    cluster.wait_for(2)
    num_before = len(found)
    time.sleep(2)
    is_over.set()
    finished(*running)
    assert all(found)
    assert len(found) > num_before > 0


def test_replicas_are_added_under_load(cluster, monkeypatch):
    from ray.serve.config import AutoscalingConfig

    from staticllm.server.ray_app import application

    # by default, Ray measures for 30 s, and wants more replicas for 30 s before it adds them, and fewer for 600 s: there may
    # have been two before this test
    delays = {"upscale_delay_s": 2, "downscale_delay_s": 2}
    soon = partial(AutoscalingConfig, metrics_interval_s=1, look_back_period_s=4, **delays)
    monkeypatch.setattr(application, "AutoscalingConfig", soon)
    cluster.run(min_replicas=1, max_replicas=3, target_requests=1.0)
    cluster.wait_for(1)
    is_over = threading.Event()

    def ask(index):
        while not is_over.is_set():
            cluster.chat(QUESTIONS[index], 100)

    running = together(ask, range(6))
    try:
        cluster.wait_for(3, seconds=180)
    finally:
        is_over.set()
        finished(*running)


def test_a_replica_keeps_as_many_models_as_it_may(cluster):
    models = [f"{name}={demo_model_path()}" for name in ("one", "two", "three")]
    cluster.run(models=models, models_per_replica=2)
    cluster.wait_for(1)
    listed = httpx.get(cluster.url + "/v1/models", timeout=60).json()["data"]
    assert [each["id"] for each in listed] == ["one", "two", "three"]
    found = [cluster.chat("What is an NPU?", model=name) for name in ("one", "two", "three", "one")]
    texts = [each["choices"][0]["message"]["content"] for each in found]
    assert len(set(texts)) == 1

    def num_loaded():
        models = httpx.get(cluster.url + "/v1/models", timeout=60).json()["data"]
        return sum(each["status"] == "loaded" for each in models)

    wait_for(lambda: num_loaded() == 2, 30)


def test_bad_requests_get_the_answers_of_the_server(cluster):
    cluster.run(api_keys=("secret",), max_body=2000)
    cluster.wait_for(1)
    url, headers = cluster.url + "/v1/chat/completions", {"Authorization": "Bearer secret"}
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    assert httpx.post(url, json=body, timeout=60).status_code == 401
    assert httpx.post(url, json=body, headers=headers, timeout=60).status_code == 200
    assert (
        httpx.post(url, json={**body, "model": "no"}, headers=headers, timeout=60).json()["error"]["code"]
        == "model_not_found"
    )
    assert httpx.post(url, content=b"[" * 1000, headers=headers, timeout=60).json()["error"]["code"] == "invalid_json"
    assert httpx.post(url, json={**body, "stop": "x" * 3000}, headers=headers, timeout=60).status_code == 413
    assert httpx.get(cluster.url + "/no/such/path", headers=headers, timeout=60).status_code == 404


def test_only_requests_with_the_key_and_for_an_answer_load_a_model(cluster):
    models = [f"{name}={demo_model_path()}" for name in ("one", "two")]
    cluster.run(models=models, api_keys=("secret",), models_per_replica=1)
    cluster.wait_for(1)
    url, headers = cluster.url + "/v1/chat/completions", {"Authorization": "Bearer secret"}
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}

    def loaded():
        listed = httpx.get(cluster.url + "/v1/models", headers=headers, timeout=60).json()["data"]
        return [each["id"] for each in listed if each["status"] == "loaded"]

    assert httpx.post(url, json={**body, "model": "two"}, headers=headers, timeout=60).status_code == 200
    assert "two" in loaded()
    assert httpx.post(url, json={**body, "model": "one"}, timeout=60).status_code == 401
    assert httpx.get(cluster.url + "/health", timeout=60).status_code == 200
    assert "two" in loaded()


def test_a_closed_connection_frees_the_replica(cluster):
    cluster.run(min_replicas=2, max_replicas=2)
    cluster.wait_for(2)
    body = {
        "messages": [{"role": "user", "content": QUESTIONS[0]}],
        "stream": True,
        "max_tokens": 500,
        "min_tokens": 500,
    }
    with httpx.stream("POST", cluster.url + "/v1/chat/completions", json=body, timeout=60) as answer:
        assert answer.status_code == 200
        next(answer.iter_lines())
    until = time.monotonic() + 20
    while True:
        page = httpx.get(cluster.url + "/metrics", timeout=60).text
        running = [line for line in page.splitlines() if line.startswith("staticllm_running_requests{")]
        cancelled = [line for line in page.splitlines() if line.startswith("staticllm_cancelled_requests_total{")]
        if sum(float(line.split()[-1]) for line in cancelled) == 1:
            break
        assert time.monotonic() < until, cancelled
        time.sleep(0.2)
    assert len(cancelled) == 2 and 'replica="' in cancelled[0]  # both replicas are on the page
    assert running
    assert not sum(float(line.split()[-1]) for line in running)


def test_vectors_of_replicas_are_those_of_a_pipeline(cluster, tmp_path):
    directory = a_directory(tmp_path)
    with StaticEmbeddingPipeline(directory, **EXACT) as pipeline:
        expected = pipeline.embed_documents(QUESTIONS)
    cluster.run(models=[f"chat={demo_model_path()}", f"vectors={directory}"], max_replicas_per_node=2, num_cpus=0.5)
    body = {"input": QUESTIONS}
    for url in ("/v1/embeddings", "/embeddings/"):
        found = httpx.post(cluster.url + url, json=body, timeout=60).json()["data"]
        np.testing.assert_allclose([each["embedding"] for each in found], expected, atol=1e-6)
    assert cluster.num_replicas("encoder") == 1
    named = httpx.post(cluster.url + "/v1/embeddings", json={**body, "model": "chat"}, timeout=60)
    assert named.json()["error"]["code"] == "wrong_model_kind"


def test_the_command_serves_on_this_machine_alone(tmp_path):
    command = [sys.executable, "-m", "staticllm", "serve", "--ray", "--port", "0", "--api-key", "secret"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            url, names = process.stdout.readline().split()
            assert names == "demo"
            assert httpx.get(url + "/models", timeout=60).status_code == 401
            headers = {"Authorization": "Bearer secret"}
            body = {"messages": [{"role": "user", "content": QUESTIONS[0]}], "max_tokens": 3}
            assert httpx.post(url + "/chat/completions", json=body, headers=headers, timeout=60).status_code == 200
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
            with pytest.raises(httpx.ConnectError):
                httpx.get(url + "/models", timeout=60)
        finally:
            process.kill()


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--replicas", "2"], "give --ray too"),
        (["--ray", "--replicas", "3:2"], "max_replicas 2 is less than min_replicas 3"),
        (["--ray", "--replicas", "0"], "min_replicas"),
        (["--ray", "--idle-unload", "3"], "leave it out with --ray"),
        (["--ray", "--host", "0.0.0.0"], "there is no API key"),
        (["--ray", "no-such-folder"], "no model directory"),
        (["--ray", "--ray-address", "127.0.0.1:1"], "no Ray cluster at"),
    ],
)
def test_mistakes_get_one_line(arguments, words):
    run = in_child if "--ray-address" in arguments else in_here  # here is a cluster
    done = run("serve", "--port", "0", *arguments)
    assert done.returncode in (1, 2)
    assert not done.stdout
    assert words in done.stderr.splitlines()[-1], done.stderr
