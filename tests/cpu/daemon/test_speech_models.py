"""Tests speech through the daemon: the same text, segments and words, programs that share a model, and what ends with them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from support.helpers import one_line
from support.models.whisper_directory import sound, write_whisper

from staticllm import StaticLLMPipeline, StaticWhisperPipeline, demo_model_path
from staticllm.daemon.clients.session import Session
from staticllm.daemon.process import lifetime
from staticllm.errors import ClosedError, ConfigError, ProcessLostError, StaticLLMError
from staticllm.pipelines.daemon_client.engine_connection import EngineConnection
from tests.support.attach.daemons import daemon_process, daemon_thread, wait_for
from tests.support.inside import speech_of

F32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "word_timestamps": True}
SECONDS = 120
RECORDINGS = [sound(seconds, number) for number, seconds in enumerate((0.8, 3.5, 2.5, 1.7))]
PLAIN = {"word_timestamps": False}
KINDS = {
    "text": PLAIN,
    "segments": {**PLAIN, "return_timestamps": True},
    "words": {},
    "a language": {**PLAIN, "language": "<|de|>", "task": "translate"},
    "beams": {"num_beams": 3},
    "sampled": {**PLAIN, "do_sample": True, "top_k": 5, "rng_seed": 3},
    "fall-back": {**PLAIN, "temperatures": (0.0, 0.4, 0.8), "logprob_threshold": -0.5, "rng_seed": 3},
    "silence": {**PLAIN, "no_speech_threshold": 0.0005},
    "context": {**PLAIN, "initial_prompt": "Once upon a time", "hotwords": "fox"},
    "other suppressed tokens": {**PLAIN, "suppress_tokens": [0, 5], "max_initial_timestamp_index": 2},
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_whisper(tmp_path_factory.mktemp("whisper"), num_layers=3)


@pytest.fixture(scope="module")
def here(directory):
    with StaticWhisperPipeline(directory, **F32) as pipe:
        yield pipe


@pytest.fixture(scope="module")
def daemon(tmp_path_factory):
    with (
        pytest.MonkeyPatch.context() as patch,
        daemon_thread(patch, tmp_path_factory.mktemp("run") / "run") as daemon,
    ):
        yield daemon


def load(directory, **more):
    return StaticWhisperPipeline(directory, daemon=True, **{**F32, **more})


def parts_of(found):
    """Return all that a transcription tells."""
    chunks = [(each.start_ts, each.end_ts, each.text) for each in found.chunks or ()]
    words = [(each.word, each.start_ts, each.end_ts, each.token_ids) for each in found.words or ()]
    return str(found), found.language, chunks, words


def model_of(daemon):
    """Return the daemon's model of ``directory``, which is the first one."""
    return daemon.models.served()[0][1]


def bank_of(daemon):
    """Return the bank of the windows of that model."""
    return model_of(daemon).engine.runner.cache.cross


def test_the_daemon_writes_what_a_pipeline_here_writes(daemon, directory, here):
    with load(directory) as there:
        for name, options in KINDS.items():
            for samples in RECORDINGS[:2]:
                found = parts_of(there.generate(samples, **options))
                assert found == parts_of(here.generate(samples, **options)), name
                assert found[0] or name == "silence"
        assert there.num_windows == here.num_windows == 4
        assert there.stats().num_requests > len(KINDS)
        bank = bank_of(daemon)
        wait_for(lambda: bank.num_free == bank.num_cross_windows)


def test_text_is_streamed(daemon, directory, here):
    pieces = []
    with load(directory) as there:
        found = there.generate(RECORDINGS[0], streamer=pieces.append, **PLAIN)
    assert "".join(pieces) == str(found) == str(here.generate(RECORDINGS[0], **PLAIN))
    assert len(pieces) > 3


def test_programs_share_a_model_and_its_calls_and_nobody_hears_another_one(daemon, directory, here):
    expected = [str(here.generate(samples, **PLAIN)) for samples in RECORDINGS]
    assert len(set(expected)) == len(RECORDINGS)
    with load(directory) as first, load(directory) as second:
        (slot,) = [slot for slot, model in daemon.models.served() if model is model_of(daemon)]
        assert slot.num_users == 2
        with model_of(daemon).engine.record() as trace, ThreadPoolExecutor(8) as pool:
            found = [
                pool.submit(lambda pipe, samples: str(pipe.generate(samples, **PLAIN)), pipe, samples)
                for pipe in (first, second)
                for samples in RECORDINGS
            ]
            assert [each.result(SECONDS) for each in found] == expected * 2
        assert max(len(step.decode) + len(step.prefill) for step in trace.steps) > 2, "windows share calls"
        for samples, text in zip(reversed(RECORDINGS), reversed(expected), strict=True):
            assert str(first.generate(samples, **PLAIN)) == text
        bank = bank_of(daemon)
        wait_for(lambda: bank.num_free == bank.num_cross_windows)


def test_a_chat_and_speech_share_a_device(daemon, directory, here):
    llm = {"INFERENCE_PRECISION_HINT": "f32", "MAX_PROMPT_LEN": 64, "PROGRAMS": "shared"}
    with StaticLLMPipeline(demo_model_path(), "CPU", **llm) as alone:
        answer = str(alone.generate("The sun", max_new_tokens=40))
    with load(directory) as there, StaticLLMPipeline(demo_model_path(), "CPU", daemon=True, **llm) as chat:
        handle = chat.submit("The sun", max_new_tokens=40)
        assert str(there.generate(RECORDINGS[1], **PLAIN)) == str(here.generate(RECORDINGS[1], **PLAIN))
        assert str(handle.result(SECONDS)) == answer
        hearing = [each["by_phase"].get("call", 0.0) for each in daemon.stats()["clients"]]
        assert min(hearing) == 0.0, "the chat pays for no window"
        assert max(hearing) > 0.0, "speech pays for its windows"


def test_one_program_leaves_a_place_for_others(daemon, directory, here, monkeypatch):
    """Six recordings of one program at once: three windows of four are its own at most."""
    with load(directory) as greedy, load(directory) as other:
        counts, count = [], Session.count_window

        def noted(session, model, *rest):
            count(session, model, *rest)
            counts.append(session._num_cross_windows[model])

        monkeypatch.setattr(Session, "count_window", noted)
        handles = [greedy.submit(RECORDINGS[number % 4], **PLAIN) for number in range(6)]
        texts = [str(handle.result(SECONDS)) for handle in handles]
        assert texts == [str(here.generate(RECORDINGS[number % 4], **PLAIN)) for number in range(6)]
        assert max(counts) == 3
        held = [speech_of(greedy).windows.encode(np.zeros((4, 20), np.float32)).result(SECONDS) for _ in range(3)]
        waiting = speech_of(greedy).windows.encode(np.zeros((4, 20), np.float32))
        assert str(other.generate(RECORDINGS[2], **PLAIN)) == str(here.generate(RECORDINGS[2], **PLAIN))
        assert not waiting.done()
        speech_of(greedy).windows.remove(held[0])
        speech_of(greedy).windows.remove(waiting.result(SECONDS))


def test_a_window_that_is_given_up_gives_its_place_back(daemon, directory, here):
    """Once while it waits for a place in this program, and once while the daemon hears it."""
    with load(directory) as there:
        windows, features = speech_of(there).windows, np.zeros((4, 20), np.float32)
        held = [windows.encode(features).result(SECONDS) for _ in range(3)]
        given_up = windows.encode(features)
        late = there.submit(RECORDINGS[0], **PLAIN)
        wait_for(lambda: len(windows.waiting) == 2)
        assert given_up.cancel()
        late.cancel()
        for end in (late.result, given_up.result):
            with pytest.raises(CancelledError):
                end(SECONDS)
        wait_for(lambda: not windows.waiting)
        for number in held:
            windows.remove(number)
        runs, goes_on = threading.Event(), threading.Event()
        runner = model_of(daemon).windows.runner
        encode = runner.run_blocks
        runner.run_blocks = lambda *rest: (runs.set(), goes_on.wait(SECONDS), encode(*rest))[2]
        being_encoded, next_one = windows.encode(features), windows.encode(features)
        assert runs.wait(SECONDS)
        assert being_encoded.cancel()
        assert next_one.cancel()
        goes_on.set()
        bank = bank_of(daemon)
        wait_for(lambda: bank.num_free == bank.num_cross_windows and not windows.windows)
        runner.run_blocks = encode
        assert str(there.generate(RECORDINGS[0], **PLAIN)) == str(here.generate(RECORDINGS[0], **PLAIN))


PROGRAM = """
import sys, time
import numpy as np
from staticllm import StaticWhisperPipeline
f32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
pipe = StaticWhisperPipeline(sys.argv[1], daemon=True, word_timestamps=True, **f32)
held = [pipe._model.windows.encode(np.zeros((4, 20), np.float32)).result() for _ in range(2)]
def stop(text):
    print("in the middle", flush=True)
    time.sleep(1000)
pipe.generate(np.load(sys.argv[2]), streamer=stop, word_timestamps=False)
"""


def test_ctrl_c_while_a_window_begins_takes_no_place(daemon, directory, here, monkeypatch):
    """The interrupt comes when the window's thread runs, and its caller has not got the future."""
    with load(directory) as there:
        text = str(there.generate(RECORDINGS[0], **PLAIN))
        start = threading.Thread.start

        def interrupted(thread):
            start(thread)
            if thread.name == "staticllm-remote-window":
                raise KeyboardInterrupt

        monkeypatch.setattr(threading.Thread, "start", interrupted)
        for _ in range(6):
            with pytest.raises(KeyboardInterrupt):
                there.generate(RECORDINGS[0], **PLAIN)
        monkeypatch.undo()
        assert str(there.submit(RECORDINGS[0], **PLAIN).result(SECONDS)) == text
        bank = bank_of(daemon)
        wait_for(lambda: bank.num_free == bank.num_cross_windows)


def test_a_program_that_is_killed_within_a_window_leaves_nothing(daemon, directory, here, tmp_path):
    np.save(tmp_path / "sound.npy", RECORDINGS[0])
    with load(directory) as other:
        command = [sys.executable, "-c", PROGRAM, str(directory), str(tmp_path / "sound.npy")]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as program:
            assert program.stdout.readline() == b"in the middle\n"
            bank = bank_of(daemon)
            assert bank.num_free == 1
            assert str(other.generate(RECORDINGS[1], **PLAIN)) == str(here.generate(RECORDINGS[1], **PLAIN))
            program.send_signal(signal.SIGTERM if os.name == "nt" else signal.SIGKILL)
        wait_for(lambda: bank.num_free == bank.num_cross_windows and len(daemon.sessions) == 1)
        assert model_of(daemon).engine.steps.num_requests == 0
        assert parts_of(other.generate(RECORDINGS[3])) == parts_of(here.generate(RECORDINGS[3]))


def test_close_ends_a_transcription_with_one_line_and_gives_no_half_text(daemon, directory):
    there = load(directory)
    begun, goes_on = threading.Event(), threading.Event()

    def on_text(text):
        begun.set()
        goes_on.wait(SECONDS)

    handle = there.submit(RECORDINGS[0], on_text=on_text, **PLAIN)
    assert begun.wait(SECONDS)
    held = [speech_of(there).windows.encode(np.zeros((4, 20), np.float32)).result(SECONDS) for _ in range(2)]
    waiting = speech_of(there).windows.encode(np.zeros((4, 20), np.float32))
    closing = threading.Thread(target=there.close)
    closing.start()
    wait_for(lambda: speech_of(there).windows.is_closed)  # or the text, of several windows, may end before
    goes_on.set()
    for end in (handle.result, waiting.result):
        with pytest.raises(ClosedError) as caught:
            end(SECONDS)
        one_line(caught)
    closing.join(SECONDS)
    assert held
    with pytest.raises(ClosedError):
        there.generate(RECORDINGS[0])
    wait_for(lambda: not daemon.sessions)


def test_what_a_speech_model_of_the_daemon_does_not_have(daemon, directory, here):
    with load(directory, word_timestamps=False) as there:
        assert not there.has_words
        with pytest.raises(ConfigError, match="the engine is in the daemon"):
            _ = there.engine
        assert there.shared_engine is None
    with pytest.raises(ConfigError, match="leave one out"):
        load(directory, engine=here.engine)
    with pytest.raises(ConfigError, match="the daemon takes a name"):
        load(directory, scheduler=object())
    with pytest.raises(ConfigError, match="PROMPT_LOOKUP has no meaning for speech"):
        load(directory, PROMPT_LOOKUP=True)
    with pytest.raises(ConfigError, match="must be True, False or a DaemonHome"):
        StaticWhisperPipeline(directory, daemon="yes")


@pytest.fixture
def killable(monkeypatch, tmp_path):
    """The runtime folder of a daemon with a process of its own."""
    folder = tmp_path / "run"
    with daemon_process(monkeypatch, folder):
        yield folder
        lifetime.stop(folder)


def kill(folder):
    process = psutil.Process(lifetime.status(folder)["pid"])
    process.kill()
    return process.pid


def test_a_killed_daemon_does_not_change_a_transcription(killable, directory, here):
    """The next one hears the window again, while tokens of it were delivered, and the windows after it."""
    with load(directory) as there:
        pieces, pids = [], []

        def stream(text):
            pieces.append(text)
            if len(pieces) == 3:
                pids.append(kill(killable))

        found = there.generate(RECORDINGS[0], streamer=stream, **PLAIN)
        assert str(found) == "".join(pieces) == str(here.generate(RECORDINGS[0], **PLAIN))
        assert lifetime.status(killable)["pid"] not in pids


def test_a_daemon_that_is_killed_between_the_windows_or_before_the_words(killable, directory, here, monkeypatch):
    align = EngineConnection.align
    with load(directory) as there:
        expected = parts_of(here.generate(RECORDINGS[1], return_timestamps=True))
        kills = []

        def kill_first(connection, *rest):
            if not kills:
                kills.append(kill(killable))
            return align(connection, *rest)

        monkeypatch.setattr(EngineConnection, "align", kill_first)
        assert parts_of(there.generate(RECORDINGS[1], return_timestamps=True)) == expected
        windows = []

        def on_window(window):
            windows.append(window)
            if len(windows) == 2:
                kills.append(kill(killable))

        handle = there.submit(RECORDINGS[1], on_window=on_window, return_timestamps=True)
        assert parts_of(handle.result(SECONDS)) == expected
        assert len(windows) > 2
        assert len(set(kills)) == 2


def test_several_recordings_go_on_in_the_next_daemon(killable, directory, here):
    """More windows than it takes at a time: those with a place are encoded again, the others wait."""
    options = {**PLAIN, "return_timestamps": True, "num_beams": 2}
    expected = [str(here.generate(RECORDINGS[number % 4], **options)) for number in range(8)]
    with load(directory) as there:
        killed = threading.Event()

        def on_window(window):
            if not killed.is_set():
                killed.set()
                kill(killable)

        handles = [there.submit(RECORDINGS[number % 4], on_window=on_window, **options) for number in range(8)]
        assert [str(handle.result(SECONDS)) for handle in handles] == expected
        assert killed.is_set()
        assert not speech_of(there).engine.live
        assert not speech_of(there).windows.windows


def test_a_window_that_is_lost_twice_ends_with_one_line(killable, directory, here, monkeypatch):
    encode = EngineConnection.encode
    with load(directory) as there:

        def encode_and_kill(connection, *rest):
            kill(killable)
            return encode(connection, *rest)

        with monkeypatch.context() as change:
            change.setattr(EngineConnection, "encode", encode_and_kill)
            with pytest.raises(ProcessLostError) as caught:
                there.generate(RECORDINGS[0])
        one_line(caught)
        assert parts_of(there.generate(RECORDINGS[0])) == parts_of(here.generate(RECORDINGS[0]))


def test_a_stopped_daemon_ends_a_transcription_and_the_next_one_starts_another(killable, directory, here):
    with load(directory) as there:
        stopped = []

        def stream(text):
            if not stopped:
                stopped.append(lifetime.stop(killable))

        with pytest.raises(StaticLLMError) as caught:
            there.generate(sound(0.9, 9), streamer=stream, **PLAIN)
        one_line(caught)
        assert str(there.generate(RECORDINGS[0], **PLAIN)) == str(here.generate(RECORDINGS[0], **PLAIN))


def test_a_model_that_changed_on_disk_is_another_model(daemon, directory, tmp_path):
    own = write_whisper(tmp_path / "own", num_layers=3)
    with load(own):
        config = json.loads((own / "config.json").read_text())
        (own / "config.json").write_text(json.dumps({**config, "some": 1}))
        with load(own):
            assert len([slot for slot, _ in daemon.models.served() if slot.origin.directory == own]) == 2
