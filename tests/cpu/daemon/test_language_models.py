"""Tests pipelines whose engine is in the daemon: the same tokens, shared weights, cancelled and lost requests."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading

import numpy as np
import openvino as ov
import openvino.opset13 as ops
import pytest

import staticllm
from staticllm import StaticLLMPipeline
from staticllm.daemon.process import lifetime
from staticllm.errors import (
    ClosedError,
    ConfigError,
    DeviceError,
    GenerationConfigError,
    ProcessLostError,
    PromptTooLongError,
    StaticLLMError,
    UnsupportedModelError,
)
from staticllm.pipelines.engine.request import EngineRequest
from staticllm.pipelines.scheduling.interface import TokenBound
from staticllm.wire.messages import Kind, Message
from tests.support.attach.daemons import daemon_process, daemon_thread, wait_for
from tests.support.helpers import EXACT
from tests.support.inside import engine_of

pytestmark = pytest.mark.usefixtures("shared_programs")

PROMPT = "What is an NPU?"
OPTIONS = {**EXACT, "MAX_PROMPT_LEN": 256, "PROGRAMS": "shared"}


def load(**more):
    return StaticLLMPipeline(staticllm.demo_model_path(), "CPU", **OPTIONS, **more)


@pytest.fixture(scope="module")
def expected():
    with load() as pipe:
        yield {
            "greedy": str(pipe.generate(PROMPT, max_new_tokens=24)),
            "sampled": str(pipe.generate(PROMPT, max_new_tokens=24, do_sample=True, rng_seed=7, temperature=1.5)),
            "stop": str(pipe.generate(PROMPT, max_new_tokens=24, stop_strings={"unit"})),
        }


@pytest.fixture
def daemon(monkeypatch, tmp_path):
    with daemon_thread(monkeypatch, tmp_path / "run") as daemon:
        yield daemon


def test_a_pipeline_in_the_daemon_says_the_same(daemon, expected):
    with load(daemon=True) as pipe:
        assert pipe.generate(PROMPT, max_new_tokens=24) == expected["greedy"]
        sampled = pipe.generate(PROMPT, max_new_tokens=24, do_sample=True, rng_seed=7, temperature=1.5)
        assert sampled == expected["sampled"]
        assert pipe.generate(PROMPT, max_new_tokens=24, stop_strings={"unit"}) == expected["stop"]
        parts = []
        assert pipe.generate(PROMPT, max_new_tokens=24, streamer=parts.append) == "".join(parts) == expected["greedy"]
        many = pipe.generate([PROMPT] * 3, max_new_tokens=24)
        assert many.texts == [expected["greedy"]] * 3
        assert pipe.stats().num_requests == 7


SAMPLERS = (
    {"dry_multiplier": 2.0, "no_repeat_ngram_size": 3},
    {"bad_words": ["unit"], "logit_bias": {40: 1.5, 41: False}},
    {"do_sample": True, "rng_seed": 7, "xtc_probability": 0.5, "typical_p": 0.8},
    {"do_sample": True, "rng_seed": 7, "mirostat": 2},
)


def test_samplers_go_to_the_daemon_and_processors_of_this_program_do_not(daemon):
    with load() as here, load(daemon=True) as there:
        for options in SAMPLERS:
            expected = here.generate(PROMPT, max_new_tokens=24, **options)
            assert there.generate(PROMPT, max_new_tokens=24, **options) == expected
        with pytest.raises(GenerationConfigError, match="a logits_processor cannot go to the daemon"):
            there.generate(PROMPT, logits_processor=lambda ids, scores: scores)
        model = daemon.models.served()[0][1]
        request = EngineRequest((5, 6)).to_dict()
        wrong = [
            ("bad_words", [[-1]]), ("bad_words", [[]]), ("bad_words", [5]), ("logit_bias", [[1, "a"]]), ("mirostat", "2"),
            ("logit_bias", [[1]]), ("dry_breakers", [["x"]]), ("bad_words", [[1] * (1 << 19)]),
        ]  # fmt: skip
        for name, value in wrong:
            with pytest.raises(ConfigError):
                model.request_of({**request, "sampling": {**request["sampling"], name: value}})


def test_two_programs_share_one_engine_and_its_calls(daemon, expected):
    with load(daemon=True) as first, load(daemon=True) as second:
        ((slot, model),) = daemon.models.served()
        assert slot.num_users == 2
        results = []
        barrier = threading.Barrier(4)

        def ask(pipe):
            barrier.wait()
            results.append(str(pipe.generate(PROMPT, max_new_tokens=24)))

        threads = [threading.Thread(target=ask, args=(pipe,)) for pipe in (first, second) * 2]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [expected["greedy"]] * 4
        stats = model.engine.stats()
        assert stats.num_tokens > 1.5 * stats.num_steps  # calls were shared
        used = [client["calls"] for client in daemon.stats()["clients"]]
        assert sum(used) == stats.num_tokens
        assert used[0] == used[1]


def test_other_properties_are_another_engine(daemon):
    with load(daemon=True), load(daemon=True, KV_SLOTS=2048):
        assert len(daemon.models.served()) == 2


def test_engines_of_the_daemon_have_the_bound_of_shared_models(daemon):
    with load(daemon=True):
        ((_, model),) = daemon.models.served()
        assert model.engine.core.device.options.limits.token_bound == TokenBound(2.5, 0.04)
    with load() as pipe:
        assert pipe.engine.core.device.options.limits.token_bound == TokenBound(4.0, 0.1)


def test_a_program_that_leaves_frees_its_requests_and_its_model(daemon):
    pipe = load(daemon=True)
    handle = pipe.submit(PROMPT, max_new_tokens=200, ignore_eos=True)
    next(iter(handle))
    ((slot, model),) = daemon.models.served()
    pipe.close()
    wait_for(lambda: slot.num_users == 0 and model.engine.is_idle)
    with pytest.raises(ClosedError, match="load the model again"):
        pipe.generate(PROMPT)
    assert daemon.stats()["clients"] == []


def test_a_streamer_that_raises_ends_the_request_in_the_daemon(daemon, expected):
    with load(daemon=True) as pipe:
        ((_, model),) = daemon.models.served()
        with pytest.raises(KeyError):
            pipe.generate(PROMPT, max_new_tokens=200, ignore_eos=True, streamer=lambda _: {}["no"])
        wait_for(lambda: model.engine.is_idle)
        assert pipe.generate(PROMPT, max_new_tokens=24) == expected["greedy"]


def test_errors_of_a_request_keep_their_class(daemon):
    with load(daemon=True) as pipe:
        with pytest.raises(PromptTooLongError, match="MAX_PROMPT_LEN is 256"):
            pipe.generate("word " * 300)
        with pytest.raises(StaticLLMError, match="records its calls"), pipe.record():
            pass
        with pytest.raises(ConfigError, match="in the daemon"):
            _ = pipe.engine


def test_a_model_that_a_pass_refuses_keeps_pass_and_reason(daemon, tmp_path):
    paths = staticllm.demo_model_path()
    for path in paths.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    model = ov.Core().read_model(paths / "openvino_model.xml")
    (sink, *_) = model.get_sinks()
    sink.input(0).replace_source_output(ops.multiply(sink.input_value(0), np.float32(2)).output(0))
    ov.save_model(model, tmp_path / "openvino_model.xml")
    seen = []
    for where in (False, True):
        with pytest.raises(UnsupportedModelError) as raised:
            StaticLLMPipeline(tmp_path, "CPU", **OPTIONS, daemon=where)
        seen.append((str(raised.value), raised.value.stage, raised.value.reason))
    assert seen[0] == seen[1]
    assert seen[0][0] == f"{seen[0][1]}: {seen[0][2]}"


def test_as_many_answers_are_allowed_in_the_daemon_as_in_a_program(daemon):
    texts, refusals = [], []
    for where in (False, True):
        with load(daemon=where) as pipe:
            options = {"do_sample": True, "rng_seed": 5, "max_new_tokens": 2, "ignore_eos": True}
            texts.append(str(pipe.generate(PROMPT, best_of=100, **options)))
            for name in ("best_of", "num_return_sequences"):
                with pytest.raises(GenerationConfigError, match=f"{name}=129: must be a whole number from") as raised:
                    pipe.generate(PROMPT, **{name: 129}, **options)
                refusals.append(str(raised.value))
    assert texts[0] == texts[1]
    assert refusals[:2] == refusals[2:]


def test_secrets_and_policy_objects_do_not_leave_the_program(daemon):
    with pytest.raises(ConfigError, match="INTEGRITY_KEY cannot be sent"):
        load(daemon=True, INTEGRITY_KEY=b"0123456789abcdef0123456789abcdef")
    with pytest.raises(ConfigError, match="the daemon takes a name"):
        load(daemon=True, scheduler=type("Mine", (), {"plan": lambda self, view: None})())


def test_a_daemon_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="daemon='yes': must be True, False or a DaemonHome"):
        load(daemon="yes")


def test_a_trace_for_a_folder_that_is_missing_is_refused_before_it_is_recorded(daemon, tmp_path):
    arguments = ["daemon", "trace", "--seconds", "600", "-o", str(tmp_path / "none" / "trace.json")]
    done = subprocess.run(
        [sys.executable, "-m", "staticllm", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "there is no folder" in done.stderr


def test_a_snapshot_is_written_and_read_by_the_daemon(daemon, tmp_path):
    with load(daemon=True) as pipe:
        pipe.generate(PROMPT * 8, max_new_tokens=8)
        count = pipe.save_snapshot(tmp_path / "snapshot", PROMPT * 8)
        assert count > 16
    daemon.models.drop_idle(0.0)
    with load(daemon=True) as pipe:
        assert pipe.load_snapshot(tmp_path / "snapshot") == count


@pytest.mark.parametrize(
    "leave", [StaticLLMPipeline.close, lambda pipe: engine_of(pipe).connection.ask(Message(Kind.RELEASE))]
)
def test_a_kept_conversation_is_claimed_in_the_daemon_by_session_and_program(daemon, leave):
    with load(daemon=True) as first, load(daemon=True) as second:
        (served,) = (model for _, model in daemon.models.served())
        claims = served.engine.core.device.kv_manager.host_pool._claims
        for pipe, session in ((first, "talk"), (first, "talk"), (first, "other"), (second, "talk")):
            handle = pipe.submit(PROMPT, max_new_tokens=4)
            handle.result()
            handle.keep(session)
        wait_for(lambda: len(claims) == 3)
        leave(first)
        wait_for(lambda: len(claims) == 1)
        assert [session for _, session in claims] == [hashlib.sha256(b"talk").hexdigest()]
    wait_for(lambda: not claims)
    with pytest.raises(ClosedError):
        handle.keep("talk")


@pytest.mark.parametrize(
    "body",
    [
        {"session": "x", "tokens": [-1], "adapters": []},
        {"session": "x", "tokens": [1 << 70], "adapters": []},
        {"session": "x", "tokens": ["1"], "adapters": []},
        {"session": "x", "tokens": 5, "adapters": []},
        {"session": "x", "tokens": [1], "adapters": [0.5]},
        {"session": "x" * 65, "tokens": [1], "adapters": []},
        {},
    ],
)
def test_a_wrong_claim_is_refused_and_harms_no_engine(daemon, expected, body):
    with load(daemon=True) as pipe, load(daemon=True) as rude:
        with pytest.raises(StaticLLMError):
            engine_of(rude).connection.ask(Message(Kind.CLAIM, body=body))
        assert pipe.generate(PROMPT, max_new_tokens=24) == expected["greedy"]


def test_the_next_requests_after_a_kill_start_one_daemon(monkeypatch, tmp_path, expected):
    with daemon_process(monkeypatch, tmp_path / "run") as process:
        pipe = load(daemon=True)
        process.kill()
        process.wait()
        wait_for(lambda: not engine_of(pipe).is_connected)
    with pytest.raises(ProcessLostError, match="has ended"):
        pipe.stats()
    try:
        results = []
        threads = [
            threading.Thread(target=lambda: results.append(str(pipe.generate(PROMPT, max_new_tokens=24))))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [expected["greedy"]] * 4
        assert pipe.stats().num_requests == 4  # one connection, one engine
    finally:
        pipe.close()
        lifetime.stop(tmp_path / "run")
    with pytest.raises(ClosedError, match="is closed"):
        pipe.generate(PROMPT)


def test_a_daemon_that_cannot_be_started_again_is_said_and_tried_again(monkeypatch, tmp_path, expected):
    with daemon_process(monkeypatch, tmp_path / "run") as process:
        pipe = load(daemon=True)
        process.kill()
        process.wait()
        monkeypatch.setenv(
            "STATICLLM_DAEMON_COMMAND", json.dumps([sys.executable, "-c", "raise SystemExit('no room')"])
        )
        with pytest.raises(DeviceError, match="no room"):
            pipe.generate(PROMPT, max_new_tokens=24)
        monkeypatch.delenv("STATICLLM_DAEMON_COMMAND")
        with daemon_process(monkeypatch, tmp_path / "run"), pipe:
            assert pipe.generate(PROMPT, max_new_tokens=24) == expected["greedy"]


def test_a_trace_has_a_track_for_each_program_and_engine(daemon, tmp_path):
    with load(daemon=True) as pipe:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "staticllm",
                "daemon",
                "trace",
                "--seconds",
                "4",
                "-o",
                str(tmp_path / "trace.json"),
            ],
            stdout=subprocess.PIPE,
            env=dict(os.environ),
        )
        wait_for(lambda: daemon.timeline.is_recording, 20)
        pipe.generate(PROMPT, max_new_tokens=24)
        out, _ = process.communicate()
        assert process.returncode == 0
        assert b"uses of devices in" in out
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        names = {event["args"]["name"] for event in events if event["ph"] == "M"}
        assert len(names) == 2
        assert any(name.startswith("engine of model") for name in names)
        calls = [event for event in events if event["name"].startswith(("prefill of model", "decode of model"))]
        assert {event["name"].split()[0] for event in calls} == {"prefill", "decode"}
        assert sum(event["args"]["rows"] for event in calls if event["name"].startswith("decode")) >= 23
        assert all(event["dur"] > 0 and event["args"]["read_MB"] > 0 for event in calls)
        assert not daemon.timeline.is_recording  # nothing is kept while nobody records


def test_a_program_of_higher_priority_goes_first(daemon, monkeypatch):
    with load(daemon=True, MAX_NUM_SEQS=1) as low:
        monkeypatch.setenv("STATICLLM_ATTACH_PRIORITY", "7")
        with load(daemon=True, MAX_NUM_SEQS=1) as high:
            assert [client["priority"] for client in daemon.stats()["clients"]] == [0, 7]
            running = low.submit(PROMPT, max_new_tokens=60, ignore_eos=True)
            next(iter(running))
            order = []
            handles = [
                pipe.submit(PROMPT + " " * number, max_new_tokens=4, ignore_eos=True, callback=None)
                for number, pipe in enumerate((low, low, high))
            ]
            threads = [
                threading.Thread(target=lambda name, handle: (handle.result(), order.append(name)), args=each)
                for each in zip(("low", "low", "high"), handles, strict=True)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert order[0] == "high"
            running.cancel()


def test_a_priority_that_changes_while_a_request_is_submitted_counts_for_it(daemon, monkeypatch):
    with load(daemon=True) as pipe:
        ((_, model),) = daemon.models.served()
        (session,) = daemon.sessions.values()
        submit = model.engine.submit

        def submit_slowly(*given):
            daemon.set_priority(session, 7)
            return submit(*given)

        monkeypatch.setattr(model.engine, "submit", submit_slowly)
        handle = pipe.submit(PROMPT, max_new_tokens=60, ignore_eos=True, priority=2)
        next(iter(handle))
        wait_for(lambda: [each.priority for each in model.engine.progress().requests] == [7 + 2])
        handle.cancel()
