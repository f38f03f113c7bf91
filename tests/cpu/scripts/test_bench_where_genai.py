"""Tests that the calls that stand for GenAI's compute what GenAI's pipeline computes."""

from __future__ import annotations

import numpy as np
import pytest
from bench_where_genai import GenaiCalls

from staticllm.core import Variant
from staticllm.pipelines.diagnostics.reference import EXACT, StatefulReference
from staticllm.ports import LOGITS


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_calls_alone_and_counted_ones_are_those_of_the_request(name, model_path):
    calls = GenaiCalls(model_path(name), dict(EXACT))
    run = calls.run(np.arange(8, 20), 4, 0)
    assert [len(each) for each in (run.wall, run.own, run.calls, run.programs)] == [4] * 4
    assert all(0 < call < own for call, own in zip(run.calls, run.own, strict=True))
    assert 0.03 < sum(run.own) / sum(run.wall) < 30, "both are seconds"
    assert len(calls.repeat(run)) == 4
    reference = StatefulReference(model_path(name))
    reference.logits(list(range(8, 20)))
    expected = [reference.logits([token])[-1] for token in (20, 21, 22)][-1]
    alone = calls.request.get_tensor(LOGITS).data
    assert alone[0, -1] == pytest.approx(expected, abs=1e-3)
    for _ in range(2):
        calls.count(run)
        counted = calls.counted_runs["decode"].request.get_tensor(LOGITS).data
        assert counted[0, -1] == pytest.approx(expected, abs=1e-3), "decode steps begin with the prompt's state"
    assert calls.counted_runs["prefill"].request.get_tensor(LOGITS).shape[1] == 1, (
        "GenAI's head takes the last token only"
    )
    for phase in ("prefill", "decode"):
        found = calls.counted(run, phase)
        assert 0 < sum(each.ms for each in found.nodes) < found.mean_ms
        assert found.num_nodes > sum(each.count for each in found.nodes)


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_a_turn_follows_the_tokens_before_it_and_their_answer(name, model_path):
    calls = GenaiCalls(model_path(name), dict(EXACT))
    run = calls.run(np.arange(8, 20), 1, 7)
    assert run.programs == [(Variant(6, 7),)], "5 tokens, and the answer that GenAI has not run yet"
    assert len(run.wall) == len(run.own) == len(calls.repeat(run)) == 1
    reference = StatefulReference(model_path(name))
    reference.logits([8 + past % 100 for past in range(7)])
    expected = reference.logits([8 + past % 100 for past in range(7, 13)])[-1]
    assert calls.request.get_tensor(LOGITS).data[0, -1] == pytest.approx(expected, abs=1e-3)
    for _ in range(2):
        assert len(calls.count(run)) == 1
        counted = calls.counted_runs["turn"].request.get_tensor(LOGITS).data
        assert counted[0, -1] == pytest.approx(expected, abs=1e-3)
    assert calls.counted(run, "turn").mean_ms > 0
    assert calls.run(np.arange(8, 12), 1, 0).programs == [(Variant(4, 0),)], "the conversation has ended"
