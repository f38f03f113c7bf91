"""Requests that see windows through cross-attention: no request ever hears another one's window (openvino #37937)."""

from __future__ import annotations

import sys
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from staticllm.config import StaticLLMConfig
from staticllm.core import CrossWindows
from staticllm.errors import ClosedError, NumericalError, PromptError
from staticllm.pipelines.engine.request import EngineRequest, Finished
from staticllm.pipelines.engine.window_jobs import WindowJobs
from staticllm.pipelines.launch.arguments import Candidate
from staticllm.pipelines.launch.engine import launch
from staticllm.pipelines.loading.kind import LoadJob
from staticllm.pipelines.loading.load import load_job
from staticllm.pipelines.loading.window_kind import WindowKind
from staticllm.pipelines.scheduling.planner import make_policy

sys.path.append(str(Path(__file__).resolve().parents[2] / "support" / "models"))
from speech_model import DECODER, ENCODER, FRAMES, OriginalSpeech, features, write_speech_model

PROMPT = tuple(range(1, 13))
COUNT = 12
NUM_WINDOWS = 3


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = write_speech_model(tmp_path_factory.mktemp("speech"))
    return folder, OriginalSpeech(folder)


def config(name, **more):
    spec = CrossWindows(f"{name}.xml", FRAMES, NUM_WINDOWS)
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    return StaticLLMConfig(cross_windows=spec, device_properties=exact, max_prompt_len=32, min_response_len=32, **more)


@pytest.fixture(params=["phases", "separate", "blocks", "shared"])
def serving(original, request):
    """An engine of the decoder, and the jobs of its windows."""
    folder, _ = original
    job = LoadJob(WindowKind(f"{DECODER}.xml"), folder, "CPU", config(ENCODER), lambda event: None)
    encoder = load_job(job)
    candidate = Candidate("CPU", config(DECODER, programs=request.param), frozenset())
    launched = launch(folder, [candidate], make_policy("dynamic"), lambda event: None)
    jobs = WindowJobs(encoder.runner, launched.engine)
    launched.engine.add_jobs(jobs)
    yield launched.engine, jobs
    launched.close()


def answer(engine, jobs, seed, prompt=PROMPT):
    """Return what is said of a window."""
    number = jobs.encode(features(seed)).result(timeout=60)
    queue = engine.submit(EngineRequest(prompt, cross_window=number, max_new_tokens=COUNT))
    tokens = []
    while not isinstance(output := queue.get(timeout=60), Finished):
        tokens.append(output.id)
    jobs.remove(number)
    assert output.error is None, output.error
    return tokens


def test_the_second_call_never_hears_the_first(original, serving):
    """The prompts are equal, so keys and values of an earlier one would be found by the prefix cache."""
    _, reference = original
    expected = [reference.answer(features(seed), PROMPT, COUNT) for seed in range(4)]
    assert len({tuple(each) for each in expected}) == 4, "the windows must differ"
    for seed in (0, 1, 2, 3, 0, 1):
        assert answer(*serving, seed) == expected[seed]


def test_more_clients_than_places_see_their_own_windows(original, serving):
    _, reference = original
    expected = [reference.answer(features(seed), PROMPT, COUNT) for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda seed: answer(*serving, seed), range(8))) == expected
    serving[0].run_between_steps(lambda: None)
    assert serving[0].runner.cache.cross.num_free == NUM_WINDOWS


def test_a_window_that_fails_or_is_given_up_leaves_the_others(original, serving):
    engine, jobs = serving
    held = [jobs.encode(features(seed)).result(timeout=60) for seed in range(NUM_WINDOWS)]
    given_up = jobs.encode(features(5))
    bad = jobs.encode(np.full_like(features(0), np.inf))
    assert given_up.cancel()
    for number in held:
        jobs.remove(number)
    with pytest.raises(NumericalError, match="check the sound"):
        bad.result(timeout=60)
    with pytest.raises(CancelledError):
        given_up.result()
    assert answer(engine, jobs, 2) == original[1].answer(features(2), PROMPT, COUNT)


def test_a_request_about_a_window_that_is_gone_ends_with_an_error(original, serving):
    engine, jobs = serving
    number = jobs.encode(features(0)).result(timeout=60)
    jobs.remove(number)
    engine.run_between_steps(lambda: None)
    queue = engine.submit(EngineRequest(PROMPT, cross_window=number, max_new_tokens=4))
    end = queue.get(timeout=60)
    assert isinstance(end, Finished) and isinstance(end.error, PromptError), end
    queue = engine.submit(EngineRequest(PROMPT, max_new_tokens=4))
    end = queue.get(timeout=60)
    assert isinstance(end, Finished) and isinstance(end.error, PromptError), end
    assert answer(engine, jobs, 1) == original[1].answer(features(1), PROMPT, COUNT)


def test_closing_ends_what_waits(serving):
    engine, jobs = serving
    held = [jobs.encode(features(seed)).result(timeout=60) for seed in range(NUM_WINDOWS)]
    waiting = jobs.encode(features(9))
    engine.remove_jobs(jobs)
    with pytest.raises(ClosedError):
        waiting.result(timeout=60)
    with pytest.raises(ClosedError):
        jobs.encode(features(0))
    assert held


def test_a_window_stays_in_its_process():
    request = replace(EngineRequest((1,)), cross_window=7)
    assert "cross_window" not in request.to_dict()
    assert EngineRequest.from_dict({**request.to_dict(), "cross_window": 7}).cross_window == 0
