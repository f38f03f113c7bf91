"""Tests that each request counts as one user of its model while it runs, and as none afterwards."""

from __future__ import annotations

import threading

import httpx
import pytest

from staticllm.pipelines.scheduling.planner import make_policy
from staticllm.testing import fake_pipeline
from tests.support.attach.daemons import wait_for
from tests.support.server.served import SECONDS, serving

MESSAGES = [{"role": "user", "content": "Is it sunny?"}]
REQUESTS = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES}),
    "two answers": ("/v1/chat/completions", {"messages": MESSAGES, "n": 2, "temperature": 1.0}),
    "completion": ("/v1/completions", {"prompt": "Is it sunny?"}),
    "response": ("/v1/responses", {"input": "Is it sunny?"}),
    "Ollama chat": ("/api/chat", {"messages": MESSAGES}),
    "Ollama generate": ("/api/generate", {"prompt": "Is it sunny?"}),
}
WRONG = {
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, "temperature": 1.0, "top_p": 0.5, "n": 129}),
    "long": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "sunny " * 2000}]}),
    "Ollama": ("/api/chat", {"messages": MESSAGES, "think": True}),
    "Ollama, schema": ("/api/chat", {"messages": MESSAGES, "format": {"type": "nonsense"}}),
}


class HeldPolicy:
    """``fcfs`` that waits before each step until it may go on."""

    def __init__(self):
        self._policy, self.may_go_on = make_policy("fcfs"), threading.Event()

    def plan(self, view):
        self.may_go_on.wait(1)
        return self._policy.plan(view)


@pytest.fixture(scope="module")
def policy():
    return HeldPolicy()


@pytest.fixture(scope="module")
def served(policy):
    def load(*_):
        return fake_pipeline("sunny", scheduler=policy)

    with serving(pipelines={"demo": load}) as served:
        yield served


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_is_one_user_of_its_model(served, policy, name, is_stream):
    path, body = REQUESTS[name]
    model, answers = served.state.hub.models["demo"], []

    def ask():
        answers.append(httpx.post(served.url + path, json={"model": "demo", "stream": is_stream, **body}, timeout=60))

    policy.may_go_on.clear()
    thread = threading.Thread(target=ask)
    thread.start()
    try:
        wait_for(lambda: model.admission.num_running, SECONDS)
        assert model.num_users == 1
    finally:
        policy.may_go_on.set()
        thread.join(SECONDS)
    assert answers[0].status_code == 200, answers[0].text
    wait_for(lambda: model.num_users == 0, SECONDS)


@pytest.mark.parametrize("name", WRONG)
def test_a_refused_request_leaves_no_user(served, policy, name):
    policy.may_go_on.set()
    path, body = WRONG[name]
    assert httpx.post(served.url + path, json={"model": "demo", **body}, timeout=60).status_code == 400
    wait_for(lambda: served.state.hub.models["demo"].num_users == 0, SECONDS)
