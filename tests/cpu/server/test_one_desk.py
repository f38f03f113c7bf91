"""Tests a desk: chat, embeddings and rerank in one server share the engine of a device, and overflow to another device."""

from __future__ import annotations

import json
import os
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise

import httpx
import numpy as np
import pytest
from click.testing import CliRunner
from support.encoders.encoder_directories import a_directory, scores_directory
from support.encoders.encoder_models import ARCHIVES
from support.engine.held_engine import hold
from support.models.whisper_directory import AS_GENAI, sound, wav, write_whisper
from support.server.served import serving

from staticllm import StaticEmbeddingPipeline, StaticRerankPipeline, StaticWhisperPipeline
from staticllm.cli.servers import top
from staticllm.pipelines.embedding.windve.affinity import unsupported
from staticllm.server.models.served import demo_spec, model_spec
from staticllm.server.settings import ApiClient
from tests.support.inside import driver_of

openai = pytest.importorskip("openai")

pytestmark = pytest.mark.usefixtures("shared_programs")
F32 = {"INFERENCE_PRECISION_HINT": "f32"}
TEXTS = [f"Paragraph {number} of a document. " * (1 + number % 3) for number in range(120)]
CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Tell me a story"}], "max_tokens": 40}
SECONDS = 60
apart = pytest.mark.skipif(
    bool(unsupported()) or len(os.sched_getaffinity(0)) < 2, reason="needs two cores that threads can be bound to"
)


def groups():
    """Two groups of cores: the first stands for an NPU, the second for the CPU beside it."""
    first, *_, last = sorted(os.sched_getaffinity(0))
    return f"CPU#{last},CPU#{first}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    (folder / "tiny").mkdir()
    a_directory(folder / "tiny")
    scores_directory(folder / "scorer")
    with zipfile.ZipFile(ARCHIVES / "bert_tokenizer.zip") as archive:
        archive.extractall(folder / "scorer")
    return folder


@pytest.fixture(scope="module")
def expected(folder):
    with StaticEmbeddingPipeline(folder / "tiny", "CPU", **F32) as alone:
        return alone.encode(TEXTS)


def specs_of(folder, device=None, **properties):
    tiny = replace(model_spec(str(folder / "tiny")), device=device, properties=properties)
    return [demo_spec(), tiny]


def client_of(served):
    return openai.OpenAI(base_url=served.url + "/v1", api_key="any", max_retries=0, timeout=SECONDS)


def vectors_of(client, texts):
    return np.array([each.embedding for each in client.embeddings.create(model="tiny", input=texts).data], np.float32)


def metric(served, name, **labels):
    """Return the value of a metric; None if it is not told."""
    wanted = name + "{" + ",".join(f'{key}="{value}"' for key, value in sorted(labels.items())) + "}"
    lines = httpx.get(served.url + "/metrics", timeout=SECONDS).text.splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(wanted)), None)


def encoders(served, key="any"):
    headers = {"Authorization": f"Bearer {key}"}
    found = httpx.get(served.url + "/api/scheduler", headers=headers, timeout=SECONDS).json()
    return {each["model"]: each for each in found["encoders"]}


def test_chat_embeddings_and_rerank_share_one_engine(folder, expected):
    specs = [*specs_of(folder), model_spec(str(folder / "scorer"))]
    documents = TEXTS[:10]
    with StaticRerankPipeline(folder / "scorer", "CPU", **F32) as alone:
        scores = alone.scores("a document", documents)
    with serving(specs) as served, client_of(served) as client, ThreadPoolExecutor(2) as pool:
        answer = client.chat.completions.create(**CHAT).choices[0].message.content
        with served.pipeline().record() as trace:
            chat = pool.submit(client.chat.completions.create, **CHAT)
            np.testing.assert_allclose(vectors_of(client, TEXTS), expected, atol=1e-6)
            body = {"model": "scorer", "query": "a document", "documents": documents}
            found = httpx.post(served.url + "/v1/rerank", json=body, timeout=SECONDS).json()["results"]
            assert chat.result(SECONDS).choices[0].message.content == answer
        calls = sorted([*trace.steps, *trace.jobs], key=lambda call: call.start)
        assert all(before.end <= after.start for before, after in pairwise(calls)), "two at once"
        assert len({job.source for job in trace.jobs}) == 2, "embeddings and rerank are jobs of the chat's engine"
        assert sum(job.num_parts for job in trace.jobs) == len(TEXTS) + len(documents)
        assert {each["index"]: each["relevance_score"] for each in found} == pytest.approx(
            dict(enumerate(scores.tolist())), abs=1e-6
        )
        assert [each["engine"] for each in encoders(served).values()] == ["demo", "demo"]
        assert metric(served, "staticllm_shared_engine", model="tiny", engine="demo") == 1
        assert metric(served, "staticllm_device_jobs_total", model="demo") >= len(trace.jobs)


def test_the_engine_of_a_device_outlives_its_chat_models(folder, expected):
    with serving(specs_of(folder), is_lazy=True) as served, client_of(served) as client:
        unload = lambda name: httpx.post(  # noqa: E731
            served.url + "/api/generate", json={"model": name, "keep_alive": 0}, timeout=SECONDS
        ).raise_for_status()
        np.testing.assert_allclose(vectors_of(client, TEXTS), expected, atol=1e-6)
        assert encoders(served)["tiny"]["engine"] is None
        for _ in range(2):  # the chat comes and goes while texts wait
            with ThreadPoolExecutor(1) as pool:
                texts = pool.submit(vectors_of, client, TEXTS * 5)
                client.chat.completions.create(**CHAT)
                assert encoders(served)["tiny"]["engine"] == "demo"
                unload("demo")
                np.testing.assert_allclose(texts.result(SECONDS), np.concatenate([expected] * 5), atol=1e-6)
            for _ in range(SECONDS * 50):
                if served.state.hub.models["demo"].loaded is None:
                    break
                threading.Event().wait(0.02)
            assert encoders(served)["tiny"]["engine"] is None
            np.testing.assert_allclose(vectors_of(client, TEXTS), expected, atol=1e-6)


@pytest.mark.parametrize(
    "overflow", [{}, pytest.param({"HETEROGENEOUS": True, "LATENCY_MS": 1e6}, marks=apart)], ids=["one", "two"]
)
def test_clients_pay_for_the_device_time_of_their_texts_and_not_for_waiting(folder, overflow):
    device = groups() if overflow else None
    settings = {"clients": (ApiClient("editor", "editor-key"), ApiClient("index", "index-key")), "device": "CPU"}
    with serving(specs_of(folder, device, **overflow), **settings) as served, ThreadPoolExecutor(1) as pool:
        client = openai.OpenAI(base_url=served.url + "/v1", api_key="index-key", max_retries=0, timeout=SECONDS)
        with client:
            client.embeddings.create(model="tiny", input=TEXTS[:2])
            paid = served.state.hub.tenants.seconds["client index"]
            pipeline = served.pipeline()
            for _ in range(SECONDS * 50):  # the texts move to its engine, on a busy machine later
                if encoders(served, "index-key")["tiny"]["engine"] == "demo":
                    break
                threading.Event().wait(0.02)
            is_free, thread = hold(pipeline)
            answer = pool.submit(client.embeddings.create, model="tiny", input=TEXTS[:4])
            threading.Event().wait(0.8)
            assert overflow or not answer.done()  # the other device may have measured faster, and has them then
            is_free.set()
            thread.join()
            answer.result(SECONDS)
        assert 0 < served.state.hub.tenants.seconds["client index"] - paid < 0.4


@apart
def test_texts_overflow_to_the_other_device_while_the_chat_has_the_first(folder, expected):
    with serving(specs_of(folder, groups())) as served, client_of(served) as client, ThreadPoolExecutor(2) as pool:
        vectors_of(client, ["load it"])
        npu, cpu = (device["name"] for device in encoders(served)["tiny"]["devices"])
        before = metric(served, "staticllm_embedded_texts_total", model="tiny", device=npu)
        is_free, thread = hold(served.pipeline())
        texts = pool.submit(vectors_of, client, TEXTS)
        for _ in range(SECONDS * 50):
            if (metric(served, "staticllm_embedded_texts_total", model="tiny", device=cpu) or 0) > 0:
                break
            threading.Event().wait(0.02)
        assert before is not None
        assert metric(served, "staticllm_embedded_texts_total", model="tiny", device=npu) == before
        assert metric(served, "staticllm_embedded_texts_total", model="tiny", device=cpu) > 0
        is_free.set()
        thread.join(SECONDS)
        np.testing.assert_allclose(texts.result(SECONDS), expected, atol=1e-6)
        body = {"model": "tiny", "input": TEXTS[:4]}
        found = httpx.post(served.url + "/api/embed", json=body, timeout=SECONDS).json()["embeddings"]
        np.testing.assert_allclose(np.array(found), expected[:4], atol=1e-6)


@apart
def test_full_queues_answer_429_and_recover(folder, expected):
    specs = specs_of(folder, groups(), LATENCY_MS=1000, QUEUE_POLICY="windve")
    with serving(specs) as served, client_of(served) as client, ThreadPoolExecutor(8) as pool:
        vectors_of(client, ["load it"])
        devices = driver_of(served.pipeline("tiny")).pool.devices
        for device in devices:  # depths that a test can fill
            device.recalibration = None
            device.queue.depth = 2
        is_open = threading.Event()
        devices[1].instance.embed = _gated(devices[1].instance.embed, is_open)
        is_free, thread = hold(served.pipeline())
        waiting = [pool.submit(vectors_of, client, [text]) for text in TEXTS[:4]]
        for _ in range(SECONDS * 50):
            told = encoders(served)["tiny"]["devices"]
            if [device["waiting"] + device["running"] for device in told] == [2, 2]:
                break
            threading.Event().wait(0.02)
        assert [device["depth"] for device in told] == [2, 2]
        with pytest.raises(openai.RateLimitError) as caught:
            vectors_of(client, [TEXTS[4]])
        assert int(caught.value.response.headers["Retry-After"]) >= 1
        body = {"model": "tiny", "input": TEXTS[4]}
        assert httpx.post(served.url + "/api/embed", json=body, timeout=SECONDS).status_code == 429
        is_open.set()
        is_free.set()
        thread.join(SECONDS)
        found = np.concatenate([each.result(SECONDS) for each in waiting])
        np.testing.assert_allclose(found, expected[:4], atol=1e-6)
        np.testing.assert_allclose(vectors_of(client, [TEXTS[4]]), expected[4:5], atol=1e-6)


def test_the_feed_of_a_server_without_chats_tells_of_its_encoders(folder, root):
    schema = json.loads((root / "docs" / "reference" / "scheduler_feed.schema.json").read_text(encoding="utf-8"))
    with serving(specs_of(folder)[1:]) as served, client_of(served) as client:
        vectors_of(client, TEXTS[:3])
        shown = httpx.get(served.url + "/api/scheduler", params={"after": 7}, timeout=SECONDS).json()
        assert (shown["model"], shown["totals"], shown["requests"]) == (None, None, [])
        assert [device["embedded"] for device in shown["encoders"][0]["devices"]] == [3]
        pytest.importorskip("jsonschema").validate(shown, schema)
        named = httpx.get(served.url + "/api/scheduler", params={"model": "tiny"}, timeout=SECONDS)
        assert named.status_code == 400
        done = CliRunner().invoke(top, ["--server", served.url, "--count", "1"])
        assert done.output.startswith("no chat model at http")


@apart
def test_a_query_that_no_idle_device_embeds_in_time_is_not_told_to_try_again(folder):
    scorer = replace(model_spec(str(folder / "scorer")), device=groups(), properties={"LATENCY_MS": 0.01})
    specs = [*specs_of(folder, groups(), LATENCY_MS=0.01), scorer]
    with serving(specs) as served, client_of(served) as client:
        with pytest.raises(openai.BadRequestError, match="takes longer than the limit") as caught:
            client.embeddings.create(model="tiny", input=["a"], extra_body={"input_type": "query"})
        assert "Retry-After" not in caught.value.response.headers
        body = {"model": "scorer", "query": "a", "documents": ["b"]}
        assert httpx.post(served.url + "/v1/rerank", json=body, timeout=SECONDS).status_code == 400


def _gated(function, gate):
    def run(*arguments):
        assert gate.wait(SECONDS)
        return function(*arguments)

    return run


@apart
def test_the_end_of_the_server_leaves_no_thread(folder):
    before = {thread.name for thread in threading.enumerate()}
    with serving(specs_of(folder, groups())) as served, client_of(served) as client, ThreadPoolExecutor(3) as pool:
        vectors_of(client, ["load it"])
        chat = pool.submit(client.chat.completions.create, **{**CHAT, "max_tokens": 100})
        texts = [pool.submit(vectors_of, client, TEXTS) for _ in range(2)]
        assert chat.result(SECONDS).choices
        served.stop()
        for each in texts:
            each.exception(SECONDS)  # a result, or the error of a server that stops
    for _ in range(SECONDS * 50):  # an idle thread of a pool ends a moment after the pool
        left = {thread.name for thread in threading.enumerate()} - before
        if not any(name.startswith("staticllm") for name in left):
            break
        threading.Event().wait(0.02)
    assert not [name for name in left if name.startswith("staticllm")], left


def test_a_recording_is_transcribed_in_the_engine_of_the_chat_which_comes_and_goes(tmp_path):
    for package in ("python_multipart", "soundfile", "soxr"):
        pytest.importorskip(package)
    whisper = write_whisper(tmp_path / "whisper")
    samples = sound(12.0)
    with StaticWhisperPipeline(whisper, **F32) as alone:
        text = str(alone.generate(samples, language="en"))
    content = wav(samples, subtype="FLOAT")

    def transcribe():
        answer = httpx.post(
            served.url + "/v1/audio/transcriptions",
            files={"file": ("a.wav", content)},
            data={"model": "whisper", "language": "en"},
            timeout=SECONDS,
        )
        return answer.json()["text"]

    specs = [demo_spec(), replace(model_spec(f"whisper={whisper}"), properties={**F32, **AS_GENAI})]
    with serving(specs, is_lazy=True) as served, client_of(served) as client, ThreadPoolExecutor(1) as pool:
        expected = transcribe()
        assert expected == text.strip()
        assert metric(served, "staticllm_shared_engine", model="whisper", engine="demo") is None
        for _ in range(2):
            heard = pool.submit(lambda: [transcribe() for _ in range(4)])
            answer = client.chat.completions.create(**CHAT).choices[0].message.content
            assert metric(served, "staticllm_shared_engine", model="whisper", engine="demo") == 1
            with served.pipeline().record() as trace:
                assert client.chat.completions.create(**CHAT).choices[0].message.content == answer
                assert transcribe() == expected
            calls = sorted([*trace.steps, *trace.jobs], key=lambda call: call.start)
            assert all(before.end <= after.start for before, after in pairwise(calls)), "two at once"
            assert len({job.source for job in trace.jobs}) == 2, "windows, and steps of the decoder"
            body = {"model": "demo", "keep_alive": 0}
            httpx.post(served.url + "/api/generate", json=body, timeout=SECONDS).raise_for_status()
            assert heard.result(SECONDS) == [expected] * 4
            assert transcribe() == expected
