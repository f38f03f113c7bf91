"""Kills the daemon while requests run: they go on in another one with the same tokens, or end with one line, never mixed."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
from openvino_genai import StructuredOutputConfig

import staticllm
from staticllm import StaticLLMPipeline
from staticllm.cli.attach import attached_environment
from staticllm.daemon.process import lifetime
from staticllm.errors import ProcessLostError, SnapshotError
from staticllm.pipelines.daemon_client.engine_connection import EngineConnection
from tests.support.attach.daemons import daemon_process, wait_for
from tests.support.helpers import EXACT, one_line
from tests.support.inside import engine_of, reader_of

PROMPT = "What is an NPU?"
SECONDS = 120
"""The deadline of waits for what takes as long as starting a daemon and loading a model."""
OPTIONS = {**EXACT, "MAX_PROMPT_LEN": 256, "MIN_RESPONSE_LEN": 1000, "PROGRAMS": "shared"}
LONG = {"max_new_tokens": 300, "ignore_eos": True}
GRAMMAR = StructuredOutputConfig(regex="([a-z]{3,9} ){60}")
SAMPLED = {**LONG, "do_sample": True, "top_k": 20}  # without the tail, where a rounding error chooses
KINDS = {
    "greedy": LONG,
    "sampled": {**SAMPLED, "rng_seed": 7},
    "without a seed": SAMPLED,
    "several answers": {**SAMPLED, "rng_seed": 5, "num_return_sequences": 2},
    "beams": {"num_beams": 2, "max_new_tokens": 60, "ignore_eos": True},
    "grammar": {"max_new_tokens": 300, "structured_output_config": GRAMMAR},
    "drafts": {**LONG, "num_assistant_tokens": 3, "max_ngram_size": 3},
    "stop string": {**SAMPLED, "rng_seed": 7, "stop_strings": {"neural"}},
}


def load(**more):
    return StaticLLMPipeline(staticllm.demo_model_path(), "CPU", **{**OPTIONS, **more})


@pytest.fixture(scope="module")
def here():
    with load() as pipe:
        yield pipe


@contextlib.contextmanager
def daemons(monkeypatch, tmp_path):
    """Serve a folder with a process, and stop in the end whatever daemon serves it then; return the folder."""
    folder = tmp_path / "run"
    with daemon_process(monkeypatch, folder):
        try:
            yield folder
        finally:
            lifetime.stop(folder)


def kill(folder):
    """Kill the daemon of a folder, and return its process id."""
    process = psutil.Process(lifetime.status(folder)["pid"])
    process.kill()
    return process.pid


def begin(pipe, **options):
    """Submit a request, and wait until some of it was delivered, or for beams until it runs; return its handle."""
    handle = pipe.submit(PROMPT, **options)
    live = engine_of(pipe).live[handle.request_id]
    if "num_beams" not in options:
        wait_for(lambda: live.is_over or min(map(len, live.delivered)) >= 5, SECONDS)
    return handle


def tokens_of(outputs):
    return [output.tokens for output in outputs]


def expected_of(here, handle, options):
    """Return the answers of the pipeline in this process, with the seed that the request of a handle had."""
    options = {**options, "rng_seed": handle._prepared.request.seed} if "do_sample" in options else options
    return tokens_of(here.submit(PROMPT, **options).outputs(SECONDS))


def test_a_killed_daemon_does_not_change_an_answer(monkeypatch, tmp_path, here):
    options = {**LONG, "logprobs": 1}
    with daemons(monkeypatch, tmp_path) as folder, load(daemon=True) as pipe:
        handle = begin(pipe, **options)
        killed = kill(folder)
        found, expected = handle.output(SECONDS), here.submit(PROMPT, **options).output(SECONDS)
        assert found.tokens == expected.tokens
        assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
        assert any(found.logprobs)
        assert lifetime.status(folder)["pid"] != killed
        assert not engine_of(pipe).live


def test_requests_of_all_kinds_and_a_streamer_survive_together(monkeypatch, tmp_path, here):
    with daemons(monkeypatch, tmp_path) as folder, load(daemon=True) as pipe:
        handles = {kind: begin(pipe, **options) for kind, options in KINDS.items()}
        parts, texts = [], []
        is_streaming = threading.Event()

        def stream(part):
            parts.append(part)
            is_streaming.set()

        thread = threading.Thread(target=lambda: texts.append(str(pipe.generate(PROMPT, **LONG, streamer=stream))))
        thread.start()
        assert is_streaming.wait(SECONDS)
        kill(folder)
        for kind, handle in handles.items():
            assert tokens_of(handle.outputs(SECONDS)) == expected_of(here, handle, KINDS[kind]), kind
        thread.join(SECONDS)
        assert texts == [str(here.generate(PROMPT, **LONG))] == ["".join(parts)]
        assert pipe.stats().num_requests <= len(KINDS) + 2  # answers in the new daemon: each once


def test_a_request_that_is_lost_twice_ends_with_one_line(monkeypatch, tmp_path, here):
    """As with a request that crashes whatever process runs it: two daemons are lost, the third runs the next request."""
    submit, pids = EngineConnection.submit, []
    with daemons(monkeypatch, tmp_path) as folder, load(daemon=True) as pipe:

        def submit_and_kill(connection, request, queue):
            times = submit(connection, request, queue)
            pids.append(kill(folder))
            return times

        with monkeypatch.context() as change:
            change.setattr(EngineConnection, "submit", submit_and_kill)
            handle = pipe.submit(PROMPT, **LONG)
            with pytest.raises(ProcessLostError, match="send it again") as caught:
                handle.result(SECONDS)
        one_line(caught)
        assert len(set(pids)) == 2
        assert pipe.generate(PROMPT, **LONG) == here.generate(PROMPT, **LONG)
        assert not engine_of(pipe).live


@contextlib.contextmanager
def slow_start(monkeypatch, tmp_path):
    """Let the start of a daemon take until the block ends."""
    script = (
        "import pathlib, sys, time\nfolder = pathlib.Path(sys.argv[1])\n(folder / 'begun').touch()\n"
        "while not (folder / 'go on').exists(): time.sleep(0.05)\nsys.exit('no room')"
    )
    with monkeypatch.context() as change:
        command = [sys.executable, "-c", script, str(tmp_path)]
        change.setenv("STATICLLM_DAEMON_COMMAND", json.dumps(command))
        try:
            yield
        finally:
            (tmp_path / "go on").touch()


def wait_for_start(tmp_path):
    """Wait until a daemon is being started."""
    wait_for((tmp_path / "begun").exists, SECONDS)


def threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("staticllm-remote-")]


def test_cancel_and_deadline_end_a_request_while_a_daemon_starts(monkeypatch, tmp_path):
    with daemons(monkeypatch, tmp_path) as folder, load(daemon=True) as pipe, slow_start(monkeypatch, tmp_path):
        first, second = (begin(pipe, **KINDS[kind]) for kind in ("greedy", "several answers"))
        late = pipe.submit(PROMPT, **LONG, deadline_ms=4000)
        kill(folder)
        wait_for_start(tmp_path)
        first.cancel()
        assert first.output(10).finish_reason == "cancelled"
        assert len(first.output().tokens) >= 5  # what was delivered stays
        assert late.output(15).finish_reason == "deadline"
        engine_of(pipe).cancel(second.request_id, 1)
        wait_for(
            lambda: reader_of(second).queue.get(0) is not None and not engine_of(pipe).live[second.request_id].is_over,
            10,
        )
        second.cancel()
        wait_for(lambda: not engine_of(pipe).live, 10)


def test_a_deleted_handle_and_a_close_end_requests_while_a_daemon_starts(monkeypatch, tmp_path):
    with daemons(monkeypatch, tmp_path) as folder, slow_start(monkeypatch, tmp_path):
        pipe = load(daemon=True)
        handles = [begin(pipe, **LONG) for _ in range(3)]
        kill(folder)
        wait_for_start(tmp_path)
        number = handles.pop().request_id  # deleted
        wait_for(lambda: number not in engine_of(pipe).live, 10)
        start = time.monotonic()
        pipe.close()
        assert time.monotonic() - start < 15, "it waited for the start of the daemon"
        assert [handle.output(10).finish_reason for handle in handles] == ["cancelled"] * 2
    wait_for(lambda: not threads(), SECONDS)


def test_a_daemon_that_does_not_come_is_one_line_and_the_next_request_starts_one(monkeypatch, tmp_path, here):
    with daemons(monkeypatch, tmp_path) as folder, load(daemon=True) as pipe:
        with slow_start(monkeypatch, tmp_path):
            handle = begin(pipe, **LONG)
            kill(folder)
            wait_for_start(tmp_path)
            (tmp_path / "go on").touch()  # now the start fails, and the second one as well
            with pytest.raises(ProcessLostError, match="send it again") as caught:
                handle.result(SECONDS)
        one_line(caught)
        assert "no room" in str(caught.value.__cause__)
        assert pipe.generate(PROMPT, **LONG) == here.generate(PROMPT, **LONG)


def test_a_stopped_daemon_is_not_started_again_for_running_requests(monkeypatch, tmp_path):
    with daemons(monkeypatch, tmp_path) as folder, load(daemon=True) as pipe:
        handle = begin(pipe, **LONG)
        lifetime.stop(folder)
        with pytest.raises(ProcessLostError, match="send it again"):
            handle.result(SECONDS)
        assert lifetime.status(folder) is None


def test_a_chat_and_snapshots_go_on_without_what_the_daemon_had_cached(monkeypatch, tmp_path, here):
    def chat(pipe, between):
        pipe.start_chat()
        answers = [str(pipe.generate("Hello!", max_new_tokens=40))]
        between()
        answers.append(str(pipe.generate("Who are you?", max_new_tokens=40)))
        pipe.finish_chat()
        return answers

    with daemons(monkeypatch, tmp_path) as folder, load(daemon=True) as pipe:
        assert chat(pipe, lambda: kill(folder)) == chat(here, lambda: None)
        kill(folder)
        with pytest.raises(SnapshotError, match="no known sequence"):  # in a daemon that has just started
            pipe.save_snapshot(tmp_path / "snapshot", PROMPT * 8)


def test_waiting_requests_go_on_as_well_and_a_draining_close_waits_for_them(monkeypatch, tmp_path, here):
    with daemons(monkeypatch, tmp_path) as folder, load(daemon=True, MAX_NUM_SEQS=1) as pipe:
        handles = [begin(pipe, **LONG)] + [pipe.submit(PROMPT, max_new_tokens=20, ignore_eos=True) for _ in range(3)]
        kill(folder)
        pipe.close(drain=True)
        whole = expected_of(here, handles[0], LONG)[0]
        found = [handle.output(SECONDS).tokens for handle in handles]
        assert found == [whole] + [whole[:20]] * 3


PROGRAM = """
import sys, staticllm
pipe = staticllm.StaticLLMPipeline(staticllm.demo_model_path(), "CPU", daemon=True, PROGRAMS="shared", MIN_RESPONSE_LEN=1000)
def show(text):
    print("running", flush=True)
    sys.stdin.readline()
pipe.generate("What is an NPU?", max_new_tokens=300, ignore_eos=True, streamer=show)
"""


@pytest.mark.skipif(os.name == "nt", reason="Ctrl-C there goes to every process of the console")
def test_ctrl_c_ends_a_program_whose_daemon_starts(monkeypatch, tmp_path):
    with daemons(monkeypatch, tmp_path) as folder, slow_start(monkeypatch, tmp_path):
        program = subprocess.Popen(
            [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        try:
            assert program.stdout.readline() == b"running\n"
            kill(folder)
            wait_for_start(tmp_path)
            program.stdin.write(b"\n" * 1000)
            program.stdin.flush()
            time.sleep(0.5)  # most likely it waits for tokens now
            program.send_signal(signal.SIGINT)
            _, errors = program.communicate(timeout=15)
        finally:
            program.kill()
            program.communicate()
        assert program.returncode and errors.rstrip().endswith(b"KeyboardInterrupt"), errors


GENAI = """
import json, os, psutil, sys
import openvino_genai
exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
pipe = openvino_genai.LLMPipeline(sys.argv[1], "CPU", **exact)
pieces = []
def show(text):
    pieces.append(text)
    if len(pieces) == 4 and len(sys.argv) > 2:
        psutil.Process(int(sys.argv[2])).kill()
pipe.generate("What is an NPU?", max_new_tokens=200, ignore_eos=True, streamer=show)
print(json.dumps([type(pipe).__name__, "".join(pieces)]))
"""


def test_a_genai_program_does_not_notice_that_the_daemon_was_killed(monkeypatch, tmp_path):
    def run(*arguments, mode):
        environment = {**attached_environment(dict(os.environ)), "STATICLLM_ATTACH": mode}
        command = [sys.executable, "-c", GENAI, str(staticllm.demo_model_path()), *arguments]
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=2 * SECONDS, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    with daemons(monkeypatch, tmp_path) as folder:
        before = lifetime.status(folder)["pid"]
        attached, native = run(str(before), mode="require"), run(mode="off")
        assert lifetime.status(folder)["pid"] != before
    assert [attached[0], native[0]] == ["StaticLLMPipeline", "LLMPipeline"]
    assert attached[1] == native[1]
