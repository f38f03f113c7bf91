"""Tests the histograms of latencies against what the pipeline itself says of its tokens."""

from __future__ import annotations

import re
import time

import httpx
import pytest

from staticllm.pipelines.scheduling.planner import make_policy
from staticllm.testing import fake_pipeline
from tests.support.server.served import serving

STEP_SECONDS = 0.002
NUM_TOKENS = 60


class SlowPolicy:
    """``fcfs`` with some time before each step, so that about 400 tokens per second are chosen, two or more per message."""

    def __init__(self):
        self._policy = make_policy("fcfs")

    def plan(self, view):
        time.sleep(STEP_SECONDS)
        return self._policy.plan(view)


@pytest.fixture(scope="module")
def served():
    def load(*_):
        return fake_pipeline("sunny " * 200, scheduler=SlowPolicy(), MIN_RESPONSE_LEN=256)

    with serving(pipelines={"demo": load}) as served:
        yield served


def gaps(served):
    """Return how many gaps were observed, and how many of them took at most 1 ms."""
    text = httpx.get(served.url + "/metrics", timeout=60).text
    name = 'staticllm_inter_token_seconds_{}{{{}model="demo"}} (\\S+)'
    found = [re.search(name.format(*each), text) for each in (("count", ""), ("bucket", 'le="0.001",'))]
    return [0.0 if match is None else float(match[1]) for match in found]


@pytest.mark.parametrize("fields", [{"stream": True}, {"stream": False}, {"stream": True, "n": 2, "temperature": 1.0}])
def test_tokens_that_are_sent_together_are_no_gaps_of_nothing(served, fields):
    before = gaps(served)
    body = {"model": "demo", "messages": [{"role": "user", "content": "?"}], "max_tokens": NUM_TOKENS, **fields}
    answer = httpx.post(served.url + "/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    num_answers = fields.get("n", 1)
    count, num_short = (after - earlier for after, earlier in zip(gaps(served), before, strict=True))
    assert count == num_answers * (NUM_TOKENS - 1)
    assert num_short == 0
