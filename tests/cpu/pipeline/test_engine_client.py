"""A pipeline over another ``EngineClient`` than the engine of its process: one that sends everything as JSON text."""

from __future__ import annotations

import json
import threading
from dataclasses import replace

import numpy as np
import pytest

from staticllm import ClosedError, GenerationConfigError, StaticLLMPipeline, demo_model_path
from staticllm.core import FinishReason
from staticllm.pipelines.engine.client import EngineClient
from staticllm.pipelines.engine.request import EngineRequest, OutputQueue, output_from_dict, output_to_dict
from staticllm.pipelines.launch.engine import launch
from tests.support.inside import engine_of, launched_of


def _sent(target):
    return replace(target, adapters=tuple(json.loads(json.dumps(target.adapters))))


class JSONClient:
    """An engine behind a wire: requests and outputs cross it as JSON text, and requests have other ids on each side."""

    def __init__(self, engine):
        self._engine = engine
        self._ids = {}
        self.lock = threading.Lock()
        self.num_closed = 0

    def submit(self, request, queue=None, processors=()):
        queue = queue or OutputQueue()
        remote = EngineRequest.from_dict(json.loads(json.dumps(request.to_dict())))
        outputs = OutputQueue()
        outputs.add_listener(lambda output: queue.put(output_from_dict(json.loads(json.dumps(output_to_dict(output))))))
        with self.lock:
            self._ids[request.id] = remote.id
        self._engine.submit(remote, outputs, processors)
        return queue

    def cancel(self, request, index=None, reason=FinishReason.CANCELLED):
        with self.lock:
            remote = self._ids.get(request)
        if remote is not None:
            self._engine.cancel(remote, index, FinishReason(json.loads(json.dumps(reason))))

    def check_process(self):
        self._engine.check_process()

    def stats(self):
        return self._engine.stats()

    def record(self, max_records=1000):
        return self._engine.record(max_records)

    def save_snapshot(self, tokens, target):
        return self._engine.save_snapshot(tokens, _sent(target))

    def load_snapshot(self, target):
        return self._engine.load_snapshot(_sent(target))

    def close(self, drain=False):
        self.num_closed += 1
        self._engine.close(drain)


OPTIONS = {"MAX_PROMPT_LEN": 64, "MIN_RESPONSE_LEN": 64, "INFERENCE_PRECISION_HINT": "f32"}
"""Only f32 gives the same tokens whichever settings the probes of a load have chosen."""


@pytest.fixture
def pipe(monkeypatch):
    """The demo pipeline with a ``JSONClient`` between it and its engine."""

    def launched(*arguments):
        result = launch(*arguments)
        client: EngineClient = JSONClient(result.engine)
        return replace(result, engine=client)

    monkeypatch.setattr(StaticLLMPipeline, "_launch", staticmethod(launched))
    with StaticLLMPipeline(demo_model_path(), "CPU", **OPTIONS) as pipe:
        yield pipe


PROMPTS = [np.array([[i + 5, i + 6, i + 7]]) for i in range(4)]
# with seeds 3 and 4 a draw lies so near to the border of two tokens that a reused prefix, 1e-5 in the logits, changes the token
SAMPLED = {"do_sample": True, "rng_seed": 10, "num_return_sequences": 2}


def test_answers_are_those_of_the_engine_without_a_wire(pipe):
    with StaticLLMPipeline(demo_model_path(), "CPU", **OPTIONS) as plain:
        expected = [plain.generate(prompt, max_new_tokens=12).tokens for prompt in PROMPTS]
        several = plain.generate(PROMPTS[0], max_new_tokens=12, **SAMPLED).tokens
        stopped = str(plain.generate("Once upon a time", max_new_tokens=40, stop_strings={"."}))
    handles = [pipe.submit(prompt, max_new_tokens=12) for prompt in PROMPTS]
    assert [[list(handle.output().tokens)] for handle in handles] == expected
    assert pipe.generate(PROMPTS[0], max_new_tokens=12, **SAMPLED).tokens == several
    assert str(pipe.generate("Once upon a time", max_new_tokens=40, stop_strings={"."})) == stopped
    assert pipe.stats().num_requests >= len(PROMPTS) + 2, "the last one may still be ending"


def test_a_request_is_cancelled_by_its_own_id(pipe):
    with pipe.record() as trace:
        handle = pipe.submit(PROMPTS[0], max_new_tokens=60, ignore_eos=True)
        handle.cancel()
        assert str(handle.output().finish_reason) == "cancelled"
    assert [str(request.reason) for request in trace.requests] == ["cancelled"]


def test_an_error_of_sampling_keeps_its_class(pipe):
    everything = set(range(launched_of(pipe).vocab_size))
    with pytest.raises(GenerationConfigError, match="no token can be chosen"):
        pipe.generate(PROMPTS[0], max_new_tokens=4, min_new_tokens=4, stop_token_ids=everything)
    assert len(pipe.generate(PROMPTS[0], max_new_tokens=2, ignore_eos=True).tokens[0]) == 2


def test_a_snapshot_goes_through_the_client(pipe, tmp_path):
    prompt = np.array([list(range(5, 25))])
    pipe.generate(prompt, max_new_tokens=4, ignore_eos=True)
    saved = pipe.save_snapshot(tmp_path / "snapshot", prompt)
    assert saved == 20
    assert pipe.load_snapshot(tmp_path / "snapshot") == saved


def test_closing_the_pipeline_closes_the_client(pipe):
    pipe.close()
    assert engine_of(pipe).num_closed == 1
    with pytest.raises(ClosedError):
        pipe.generate(PROMPTS[0], max_new_tokens=2)
