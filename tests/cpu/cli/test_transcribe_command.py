"""Tests ``staticllm transcribe`` against the pipeline itself: forms of output, several files, mistakes, Ctrl-C."""

from __future__ import annotations

import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from support import command_line
from support.models.whisper_directory import AS_GENAI, RATE, sound, wav, write_whisper

from staticllm import StaticWhisperPipeline
from staticllm.pipelines import whisper_pipeline
from staticllm.pipelines.speech.voice import FRAME

soundfile = pytest.importorskip("soundfile")
soxr = pytest.importorskip("soxr")
F32 = ("-p", "INFERENCE_PRECISION_HINT=f32", *(part for pair in AS_GENAI.items() for part in ("-p", "=".join(pair))))
CUE = re.compile(r"(\d\d):(\d\d):(\d\d)[,.](\d{3}) --> (\d\d):(\d\d):(\d\d)[,.](\d{3})")


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_whisper(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def pipe(directory):
    with StaticWhisperPipeline(directory, INFERENCE_PRECISION_HINT="f32") as found:
        yield found


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Paths of recordings by the seconds that they last."""
    folder = tmp_path_factory.mktemp("recordings")
    found = {seconds: folder / f"{seconds}.wav" for seconds in (0.8, 2.5, 3.0)}
    for seconds, path in found.items():
        path.write_bytes(wav(sound(seconds, int(seconds * 10)), subtype="FLOAT"))
    return found


def samples_of(seconds):
    return sound(seconds, int(seconds * 10))


def moments(text):
    """Return begin and end of each cue, in seconds."""
    found = []
    for match in CUE.finditer(text):
        numbers = list(map(int, match.groups()))
        found += [
            tuple(h * 3600 + m * 60 + s + ms / 1000 for h, m, s, ms in (numbers[:4], numbers[4:])),
        ]
    return found


def expected_segments(results, seconds):
    """Return begin, end and text of the chunks that have any. One without an end lasts to the next one, or to the end."""
    starts = [chunk.start_ts for chunk in results.chunks[1:]] + [seconds]
    return [
        (chunk.start_ts, following if chunk.end_ts < 0 else chunk.end_ts, " ".join(chunk.text.split()))
        for chunk, following in zip(results.chunks, starts, strict=True)
        if chunk.text.split()
    ]


@command_line.IN_BOTH
def test_text(staticllm, directory, pipe, files):
    done = staticllm("transcribe", files[0.8], "-m", directory, *F32)
    assert (done.returncode, done.stderr) == (0, "")
    expected = str(pipe.generate(samples_of(0.8))).strip()
    assert done.stdout.split() == "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in expected).split()
    assert expected


def always_speech(samples):
    """Takes the place of a package that finds speech, which may not be installed."""
    return np.random.default_rng(5).uniform(0.6, 1, -(-len(samples) // FRAME)).astype(np.float32)


def test_windows_at_silences(directory, pipe, files, monkeypatch):
    monkeypatch.setattr(whisper_pipeline, "voice_detector", lambda: always_speech)
    done = command_line.in_here("transcribe", files[3.0], "-m", directory, "--parallel-windows", 3, "--json", *F32)
    assert (done.returncode, done.stderr) == (0, "")
    expected = pipe.generate(samples_of(3.0), parallel_windows=1, return_timestamps=True)
    assert json.loads(done.stdout)["text"].split() == str(expected).split()
    assert str(expected) != str(pipe.generate(samples_of(3.0), return_timestamps=True)), "other windows"
    refused = command_line.in_here("transcribe", files[3.0], "-m", directory, "--parallel-windows", 0)
    assert refused.returncode == 2 and "--parallel-windows" in refused.stderr


def test_json_has_the_times_of_segments(staticllm, directory, pipe, files):
    done = staticllm("transcribe", files[2.5], "-m", directory, *F32, "--json", "--language", "de", "--translate")
    assert (done.returncode, done.stderr) == (0, "")
    results = pipe.generate(samples_of(2.5), return_timestamps=True, language="de", task="translate")
    found = json.loads(done.stdout)
    assert found["text"] == str(results).strip()
    assert (found["language"], found["duration"]) == ("de", 2.5)
    segments = [(each["start"], each["end"], each["text"]) for each in found["segments"]]
    expected = [(round(start, 3), round(end, 3), text) for start, end, text in expected_segments(results, 2.5)]
    assert segments == expected
    assert len(segments) > 1


def test_json_has_words_if_the_model_is_loaded_with_them(staticllm, directory, files):
    done = staticllm("transcribe", files[0.8], "-m", directory, *F32, "--json", "-p", "WORD_TIMESTAMPS=YES")
    assert (done.returncode, done.stderr) == (0, "")
    with StaticWhisperPipeline(directory, config={"WORD_TIMESTAMPS": "YES"}, INFERENCE_PRECISION_HINT="f32") as pipe:
        expected = pipe.generate(samples_of(0.8), return_timestamps=True, word_timestamps=True).words
    found = [(each["word"], each["start"], each["end"]) for each in json.loads(done.stdout)["words"]]
    assert found == [(word.word.strip(), round(word.start_ts, 3), round(word.end_ts, 3)) for word in expected]
    assert found


@pytest.mark.parametrize(
    ("arguments", "num_windows"),
    [((), 1), (("-p", "MAX_WINDOWS=3"), 3), (("-p", "max_windows=2"), 2), (("--parallel-windows", "2"), 4)],
)
def test_one_file_alone_is_loaded_for_one_window(directory, files, monkeypatch, arguments, num_windows):
    found = []
    load = whisper_pipeline.load_speech
    monkeypatch.setattr(whisper_pipeline, "voice_detector", lambda: always_speech)
    monkeypatch.setattr(whisper_pipeline, "load_speech", lambda *args: found.append(args[2]) or load(*args))
    done = command_line.in_here("transcribe", files[0.8], "-m", directory, *F32, *arguments)
    assert (done.returncode, found) == (0, [num_windows])


@pytest.mark.parametrize("form", ["srt", "vtt", "timestamps"])
def test_subtitles_have_the_times_of_segments(staticllm, directory, pipe, files, form):
    done = staticllm("transcribe", files[2.5], "-m", directory, *F32, f"--{form}")
    assert (done.returncode, done.stderr) == (0, "")
    expected = expected_segments(pipe.generate(samples_of(2.5), return_timestamps=True), 2.5)
    assert moments(done.stdout) == [pytest.approx((start, end), abs=1e-3) for start, end, _ in expected]
    assert done.stdout.startswith({"srt": "1\n", "vtt": "WEBVTT\n\n", "timestamps": "[00:"}[form])


def test_several_files_each_have_a_file_of_their_own(staticllm, directory, pipe, files, tmp_path):
    done = staticllm("transcribe", *files.values(), "-m", directory, *F32, "-o", tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    for seconds in files:
        assert (tmp_path / f"{seconds}.txt").read_text().strip() == str(pipe.generate(samples_of(seconds))).strip()
    assert len(list(tmp_path.iterdir())) == len(files)


@pytest.mark.skipif(os.name == "nt", reason="names of files are characters there")
def test_a_name_in_no_encoding(staticllm, directory, pipe, files, tmp_path):
    recording = tmp_path / os.fsdecode(b"\xff.wav")
    shutil.copyfile(files[0.8], recording)
    staticllm("transcribe", recording, "-m", directory, *F32, "--json", "-o", tmp_path)
    content = json.loads(recording.with_suffix(".json").read_text())
    assert content["file"].endswith("?.wav")
    assert content["text"] == str(pipe.generate(samples_of(0.8), return_timestamps=True)).strip()


@command_line.IN_BOTH
def test_several_files_are_written_in_their_order(staticllm, directory, files):
    order = [files[3.0], files[0.8], files[2.5]]
    done = staticllm("transcribe", *order, "-m", directory, *F32, "--json")
    assert [json.loads(line)["file"] for line in done.stdout.splitlines()] == [str(path) for path in order]


def test_other_rates_and_channels_are_converted(staticllm, directory, pipe, tmp_path):
    left, right = sound(1.0, 1, 8000), sound(1.0, 2, 8000)
    path = tmp_path / "stereo.wav"
    path.write_bytes(wav(np.stack([left, right], 1), 8000, subtype="FLOAT"))
    done = staticllm("transcribe", path, "-m", directory, *F32, "--json")
    samples = soxr.resample((left + right) / 2, 8000, RATE)
    assert json.loads(done.stdout)["text"] == str(pipe.generate(samples, return_timestamps=True)).strip()


MISTAKES = {
    "text": (b"This is a text, and no recording at all.", "cannot be read as audio"),
    "empty": (b"", "cannot be read as audio"),
    "one sample": (lambda: wav(np.zeros(1, np.float32)), "1 "),
    "NaN": (lambda: wav(np.full(RATE, np.nan, np.float32), subtype="FLOAT"), "not finite"),
    "no samples": (lambda: wav(np.zeros(0, np.float32)), "0 "),
    "truncated": (lambda: wav(sound(1.0))[:30], "cannot be read as audio"),
    "ten hours": (lambda: wav(np.zeros(10 * 3600 * 1000, np.int16), 1000, "FLAC"), "hours"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_bad_recording_gets_one_line(directory, tmp_path, name):
    content, part = MISTAKES[name]
    path = tmp_path / "recording.wav"
    path.write_bytes(content if isinstance(content, bytes) else content())
    done = command_line.in_here("transcribe", path, "-m", directory)
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"Error: [^\n]*recording\.wav'[^\n]*\n", done.stderr), done.stderr
    assert part in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (("missing.wav",), 1, "cannot be opened"),
        (("{file}", "--language", "fr"), 1, "language='fr'"),
        (("{file}", "{file}", "--srt"), 2, "--output DIR"),
        (("{file}", "--srt", "--timestamps"), 2, "--timestamps"),
        (("{file}", "-o", "missing"), 1, "make it first"),
        (("{file}", "-p", "MAX_WINDOWS=0"), 1, "MAX_WINDOWS=0"),
        (("{file}", "-p", "MAX_WINDOWZ=2"), 1, "MAX_WINDOWZ"),
        ((), 2, "FILE"),
    ],
)
def test_a_mistake_gets_one_line(directory, files, arguments, code, part):
    given = [each.replace("{file}", str(files[0.8])) for each in arguments]
    done = command_line.in_here("transcribe", *given, "-m", directory)
    assert (done.returncode, done.stdout) == (code, "")
    assert part in done.stderr.splitlines()[-1]


def test_two_recordings_do_not_become_one_file(directory, files, tmp_path):
    twin = tmp_path / "other" / files[0.8].name
    twin.parent.mkdir()
    twin.write_bytes(files[0.8].read_bytes())
    done = command_line.in_here("transcribe", files[0.8], twin, "-m", directory, "-o", tmp_path)
    assert done.returncode == 1
    assert "would both become" in done.stderr


def test_a_chat_model_is_no_speech_model(files):
    from staticllm import demo_model_path

    done = command_line.in_here("transcribe", files[0.8], "-m", demo_model_path())
    assert done.returncode == 1
    assert "is no speech model" in done.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="no pseudo-terminals")
def test_a_bar_shows_the_sound_and_ctrl_c_ends_it_at_once(directory, tmp_path):
    import fcntl
    import pty
    import struct
    import termios

    path = tmp_path / "long.wav"
    path.write_bytes(wav(np.tile(sound(60.0), 40)))  # 40 minutes, half a minute of work
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
    command = [*command_line.STATICLLM, "transcribe", str(path), "-m", str(directory), *F32]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal, env=command_line.ENVIRONMENT) as process:
        os.close(terminal)
        shown = b""
        until = time.monotonic() + 60
        while not re.search(rb"transcribing, s of sound: [1-9]\d*/2400", shown):
            assert time.monotonic() < until, shown
            if select.select([screen], [], [], 1.0)[0]:
                shown += os.read(screen, 1 << 16)
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
        assert time.monotonic() - begin < 10
        assert process.stdout.read() == b""
    rest = b""
    try:
        while more := os.read(screen, 1 << 16):
            rest += more
    except OSError:  # the end of a pseudo-terminal
        pass
    os.close(screen)
    assert b"Traceback" not in rest
    assert b"Error" not in rest
