"""Tests ``staticllm trace`` as a user runs it: record a trace, and read the file."""

from __future__ import annotations

import json
from functools import partial
from itertools import pairwise

import pytest
from support.command_line import IN_BOTH

from staticllm import StaticLLMPipeline
from staticllm.pipelines.profiling.trace import Trace

pytestmark = pytest.mark.usefixtures("shared_programs")


@pytest.fixture(scope="module")
def trace(staticllm):
    return partial(staticllm, "trace")


@pytest.fixture(scope="module")
def recorded(zoo, tmp_path_factory, trace):
    path = tmp_path_factory.mktemp("trace") / "trace.json"
    load = ("--requests", 6, "--prompt-len", 40, "--new-tokens", 8, "--scheduler", "prefill_first")
    done = trace("record", "-o", path, "-m", zoo / "llama", *load, "--max-prompt-len", 64, "-p", "MAX_NUM_SEQS=2")
    assert done.returncode == 0, done.stderr
    for word in ("6, 48 tokens", "TTFT", "TPOT", "device calls, 6 requests in"):
        assert word in done.stdout
    return path


@IN_BOTH
def test_record_writes_every_request(recorded):
    events = json.loads(recorded.read_text())["traceEvents"]
    assert {"X", "M", "C", "i"} == {event["ph"] for event in events}
    ended = Trace.load(recorded).requests
    assert [len(request.token_times) for request in ended] == [8] * 6
    assert {r.num_prompt for r in ended} == {40}
    assert any(event["name"] == "swapped" and event["ph"] == "X" for event in events), "six requests, MAX_NUM_SEQS is 2"


def test_slices_of_one_track_do_not_overlap(recorded):
    """The times come from the engine's clock; viewers drop a slice that ends after the next one begins."""
    steps = Trace.load(recorded).steps
    assert all(before.end <= after.start for before, after in pairwise(steps))
    assert all(request.ended >= request.token_times[-1] for request in Trace.load(recorded).requests)


def test_the_rate_spreads_arrivals(zoo, tmp_path, trace):
    load = ("--requests", 4, "--prompt-len", 8, "--new-tokens", 2, "--rate", 20, "--json")
    done = trace("record", "-o", tmp_path / "trace.json", "-m", zoo / "llama", "--max-prompt-len", 16, *load)
    arrivals = sorted(request.arrival for request in Trace.load(tmp_path / "trace.json").requests)
    report = json.loads(done.stdout)
    assert report["requests_ended"] == report["num_requests"] == 4
    assert report["ttft_ms"] > 0
    assert done.returncode == 0
    assert arrivals[-1] - arrivals[0] > 0.02


def test_a_pipeline_records_its_requests(zoo, tmp_path):
    with StaticLLMPipeline(zoo / "llama", MAX_PROMPT_LEN=32) as pipe:
        with pipe.record() as seen:
            pipe.generate("hello", max_new_tokens=5, ignore_eos=True)
        pipe.generate("hello", max_new_tokens=5, ignore_eos=True)
    assert len(seen.requests) == 1
    assert sum(len(step.decode) for step in seen.steps) == 4
    seen.save(tmp_path / "trace.json")
    assert len(Trace.load(tmp_path / "trace.json").steps) == len(seen.steps)


@pytest.mark.parametrize(
    ("arguments", "code", "word"),
    [
        (["record", "-o", "no/such/trace.json"], 1, "make it first"),
        (["record", "-o", "."], 1, "is a folder"),
        (["record", "-o", "x.json", "--scheduler", "lottery"], 2, "is not one of"),
        (["record", "-o", "x.json", "-m", "no_such_model"], 1, "no model directory"),
        (["record", "-o", "x.json", "--rate", "0"], 2, "'--rate': 0"),
        (["record", "-o", "x.json", "--requests", "0"], 2, "x>=1"),
        (["record", "-o", "x.json", "--prompt-len", "9", "--max-prompt-len", "8"], 2, "--max-prompt-len is 8"),
        (["record"], 2, "--output"),
        (["play"], 2, "No such command"),
    ],
)
def test_mistakes_are_one_line_errors_with_an_exit_code(arguments, code, word, tmp_path, monkeypatch, trace):
    monkeypatch.chdir(tmp_path)
    done = trace(*arguments)
    assert done.returncode == code, done.stderr
    assert word in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert code == 2 or len(done.stderr.strip().splitlines()) == 1
    assert not list(tmp_path.iterdir()), "nothing is written by a mistake"
