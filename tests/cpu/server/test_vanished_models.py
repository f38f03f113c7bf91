"""A model whose files are gone is listed without facts, and breaks nothing of the other models."""

import shutil
import threading

import httpx
import pytest
from support.encoders.encoder_directories import a_directory
from support.server.served import serving

from staticllm import demo_model_path
from staticllm.server.models.served import demo_spec, model_spec

LISTS = ("/v1/models", "/api/tags", "/api/ps", "/api/v0/models", "/props")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def served(folder):
    for name in ("loaded", "unloaded"):
        shutil.copytree(demo_model_path(), folder / name)
    (folder / "embedder").mkdir()
    a_directory(folder / "embedder")
    specs = [demo_spec(), *(model_spec(str(folder / name)) for name in ("loaded", "unloaded", "embedder"))]
    with serving(specs) as served:
        assert ask(served, "loaded").status_code == 200
        for name in ("loaded", "unloaded", "embedder"):
            (folder / name).rename(folder / f"{name}.away")
        yield served


def ask(served, model):
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3}
    return httpx.post(served.url + "/v1/chat/completions", json=body, timeout=60)


@pytest.mark.parametrize("path", LISTS)
def test_lists_have_all_models(served, path):
    found = httpx.get(served.url + path, timeout=60)
    assert found.status_code == 200, found.text
    if path not in ("/api/ps", "/props"):
        assert "unloaded" in found.text
        assert "demo" in found.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/api/chat", {"messages": [{"role": "user", "content": "a"}]}),
        ("/api/show", {}),
    ],
)
def test_a_request_for_a_vanished_model_gets_503_and_one_line(served, folder, path, body):
    found = httpx.post(served.url + path, json={"model": "unloaded", **body}, timeout=60)
    assert found.status_code == 503, found.text
    assert "not there any more" in found.text
    assert str(folder) not in found.text, "clients learn no paths"


def test_an_encoder_that_vanished_gets_503(served):
    found = httpx.post(served.url + "/v1/embeddings", json={"model": "embedder", "input": "a"}, timeout=60)
    assert (found.status_code, found.json()["error"]["code"]) == (503, "model_missing")


def test_loaded_models_answer_and_show_their_template(served):
    assert ask(served, "loaded").status_code == 200
    assert ask(served, "demo").status_code == 200
    shown = httpx.post(served.url + "/api/show", json={"model": "loaded"}, timeout=60)
    assert shown.status_code == 200
    assert shown.json()["template"]
    turn = {"model": "loaded", "messages": [{"role": "user", "content": "a"}], "stream": False}
    found = httpx.post(served.url + "/api/chat", json={**turn, "options": {"num_predict": 2}}, timeout=60)
    assert found.status_code == 200, found.text
    assert httpx.get(served.url + "/props", params={"model": "loaded"}, timeout=60).status_code == 200


def test_a_model_that_came_back_works_again(served, folder):
    (folder / "unloaded.away").rename(folder / "unloaded")
    try:
        assert ask(served, "unloaded").status_code == 200
        assert httpx.post(served.url + "/api/show", json={"model": "unloaded"}, timeout=60).status_code == 200
    finally:
        (folder / "unloaded").rename(folder / "unloaded.away")


def test_lists_do_not_break_while_a_model_is_unloaded(served):
    """Facts of a loaded model come from its pipeline, which may be closed at the same moment."""
    is_over, failed = threading.Event(), []

    def read():
        while not is_over.is_set():
            for path in LISTS:
                found = httpx.get(served.url + path, timeout=60)
                if found.status_code != 200:
                    failed.append(found.text)

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(3):
        ask(served, "demo")
        httpx.post(served.url + "/api/generate", json={"model": "demo", "keep_alive": 0}, timeout=60)
    is_over.set()
    thread.join()
    assert not failed
