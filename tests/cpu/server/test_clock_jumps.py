"""A clock that is set by a day, forwards or back, changes no deadline, no store and no time after which models are unloaded."""

import time

import httpx
import pytest
from support.attach.daemons import wait_for
from support.server.served import serving

from staticllm.testing import fake_pipeline

DAY = 86_400


@pytest.fixture(params=[DAY, -DAY], ids=["forwards", "back"])
def jump(request, monkeypatch):
    """A function that sets the clock by a day."""
    real = time.time
    return lambda: monkeypatch.setattr(time, "time", lambda: real() + request.param)


@pytest.fixture
def served():
    with serving(idle_unload=600, pipelines={"demo": lambda *_: fake_pipeline("sunny")}) as served:
        yield served


def ask(served, path, **body):
    return httpx.post(served.url + path, json={"model": "demo", **body}, timeout=60)


def test_a_deadline_goes_by_what_has_passed(jump):
    with fake_pipeline("sunny " * 40, MAX_PROMPT_LEN=64, MIN_RESPONSE_LEN=512) as pipe:
        handle = pipe.submit("Hello", deadline_ms=60_000)
        jump()
        assert "sunny" in str(handle.result())
        assert pipe.stats().num_requests == 1


def test_models_stay_loaded_and_answers_stored(served, jump):
    first = ask(served, "/v1/responses", input="Hello")
    assert first.status_code == 200, first.text
    assert ask(served, "/api/generate", prompt="a", stream=False, keep_alive="5m").status_code == 200
    jump()
    time.sleep(1.5)
    assert served.state.hub.loaded
    id = first.json()["id"]
    assert httpx.get(f"{served.url}/v1/responses/{id}", timeout=60).status_code == 200
    again = ask(served, "/v1/responses", input="And then?", previous_response_id=id)
    assert again.status_code == 200, again.text
    (running,) = httpx.get(served.url + "/api/ps", timeout=60).json()["models"]
    assert running["expires_at"]
    assert httpx.get(served.url + "/health", timeout=60).status_code == 200
    for path in ("/v1/models", "/api/tags", "/metrics"):
        assert httpx.get(served.url + path, timeout=60).status_code == 200


def test_a_model_is_unloaded_after_the_seconds_that_have_passed(served, jump):
    jump()
    assert ask(served, "/api/generate", prompt="a", stream=False, keep_alive=1).status_code == 200
    wait_for(lambda: not served.state.hub.loaded, 30)
