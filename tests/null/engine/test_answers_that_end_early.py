"""Tests how several answers to one prompt end: all together, or one alone."""

import json
import subprocess
import sys

import pytest
from support.engine.output_queues import outputs_of

from staticllm.pipelines.engine.request import EngineRequest, Finished
from staticllm.pipelines.generation.sampler import SamplingParams
from staticllm.pipelines.scheduling.planner import make_policy
from staticllm.testing import fake_engine, fake_request, run_to_end

SAMPLING = SamplingParams(do_sample=True, temperature=0.4, rng_seed=1)


def ends_of(request):
    return {output.index: str(output.reason) for output in outputs_of(request) if isinstance(output, Finished)}


def test_an_exception_during_a_fork_ends_every_answer():
    engine, calls = fake_engine(make_policy("fcfs")), []
    request = fake_request(range(10), 5, sampling=SAMPLING, num_sequences=4)
    fork = engine.runner.cache.fork

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise MemoryError
        return fork(*arguments)

    engine.runner.cache.fork = failing
    engine.steps.add([request])
    for _ in range(10):
        engine.steps.step()
    assert ends_of(request) == dict.fromkeys(range(4), "error"), "a reader waits forever for an answer without an end"
    assert engine.is_idle


@pytest.mark.parametrize("index", [0, 2])
def test_one_answer_can_be_cancelled_before_the_prompt_has_run(index):
    engine = fake_engine(make_policy("fcfs"))
    request = fake_request(range(10), 5, sampling=SAMPLING, num_sequences=3)
    engine.steps.add([request])
    engine.cancel(request.id, index)
    run_to_end(engine, [])
    assert ends_of(request) == {i: "cancelled" if i == index else "length" for i in range(3)}


CHILD = """
import json, sys
from staticllm.pipelines.engine.request import Finished
from staticllm.pipelines.engine.request import EngineRequest
from staticllm.pipelines.engine.state import RequestState
from staticllm.pipelines.scheduling.planner import make_policy
from staticllm.testing import VOCAB_SIZE, fake_engine, run_to_end
states = [RequestState(EngineRequest.from_dict(values), VOCAB_SIZE) for values in json.loads(sys.stdin.read())]
run_to_end(fake_engine(make_policy("fcfs")), states)
for state in states:
    outputs = iter(lambda: state.queue.get(0), None)
    print(*sorted(output.index for output in outputs if isinstance(output, Finished)))
"""


def test_request_ids_of_another_process_do_not_clash_with_answer_ids():
    requests = [
        EngineRequest((1, 2, 3), SAMPLING, num_sequences=3, max_new_tokens=4, id=1),
        EngineRequest((4, 5, 6), SAMPLING, max_new_tokens=9, id=2),
    ]
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=json.dumps([request.to_dict() for request in requests]),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert child.stdout.splitlines() == ["0 1 2", "0"], child.stderr[-500:]


def test_a_shared_prompt_is_counted_once():
    engine = fake_engine(make_policy("fcfs"))
    run_to_end(engine, [fake_request(range(20), 5, sampling=SAMPLING, num_sequences=4)])
    assert engine.core.profiler.stats().prompt_tokens == 20
