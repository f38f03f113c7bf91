"""Tests the live captions with a recording, and with sound that a stand-in for ``sounddevice`` gives, on a tiny model."""

from __future__ import annotations

import importlib.util
import sys
import threading
import types
from pathlib import Path

import numpy as np
import pytest
from support.models.whisper_directory import RATE, sound, wav, write_whisper

from staticllm import StaticWhisperPipeline

EXAMPLE = Path(__file__).parents[3] / "examples" / "live_captions.py"
FRAME = 512
pytest.importorskip("soundfile")
pytest.importorskip("soxr")


@pytest.fixture
def example(monkeypatch):
    """The example, in which whatever is louder than silence is speech."""
    spec = importlib.util.spec_from_file_location("live_captions", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "voice_detector", lambda: loud)
    return module


def loud(samples):
    frames = np.resize(samples, (-(-len(samples) // FRAME), FRAME))
    return (np.abs(frames).max(axis=1) > 0.01).astype(np.float32)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return write_whisper(tmp_path_factory.mktemp("whisper"), is_multilingual=False)


@pytest.fixture(scope="module")
def pipe(directory):
    with StaticWhisperPipeline(directory) as found:
        yield found


class Noted:
    """A screen that keeps what is shown: per sentence all pairs of settled words and others, then the whole of it."""

    def __init__(self):
        self.sentences, self.shown = [], []

    def show(self, settled, rest):
        self.shown.append((list(settled), list(rest)))

    def end(self, settled):
        self.sentences.append((self.shown, list(settled)))
        self.shown = []


def silence(seconds):
    return np.zeros(int(seconds * RATE), np.float32)


def heard(example, pipe, samples):
    screen = Noted()
    captions = example.Captions(pipe, loud, screen, max_new_tokens=12)
    for start in range(0, len(samples), example.STEP):
        captions.hear(samples[start : start + example.STEP])
    captions.finish()
    return screen.sentences


def test_sentences_end_at_pauses(example, pipe):
    samples = np.concatenate([silence(2), sound(2, 1), silence(1.5), sound(1, 2), silence(0.8), sound(1.2, 3)])
    sentences = heard(example, pipe, samples)
    assert len(sentences) == 3
    assert all(words for _, words in sentences)
    assert len({" ".join(words) for _, words in sentences}) == 3


def test_words_that_settled_stay_as_they_are(example, pipe):
    ((shown, words),) = heard(example, pipe, sound(8, 4))
    assert len(shown) > 8
    before = []
    for settled, _ in [*shown, (words, [])]:
        assert settled[: len(before)] == before
        before = settled
    assert any(rest for _, rest in shown)


class Said:
    """A pipeline that hears given texts, one after another."""

    def __init__(self, *texts):
        self.texts = list(texts)

    def submit(self, samples, on_text):
        text = self.texts.pop(0)
        on_text(text)
        return types.SimpleNamespace(result=lambda: text)


def test_a_word_settles_when_two_texts_agree(example):
    screen = Noted()
    captions = example.Captions(Said("one too", "one two three", "one two tree or", "won two tree four"), loud, screen)
    for _ in range(3):
        captions.guess_again(0, 1000)
    captions.settle(0, 1000)
    ((shown, words),) = screen.sentences
    assert [settled for settled, _ in shown[1::2]] == [[], ["one"], ["one", "two"]]
    assert words == ["one", "two", "tree", "four"]


def test_a_sentence_without_pauses_is_cut(example, pipe, monkeypatch):
    monkeypatch.setattr(example, "LONGEST", 2 * RATE)
    sentences = heard(example, pipe, sound(7, 5))
    assert len(sentences) >= 4


def run(example, monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["live_captions.py", *map(str, arguments)])
    code = None
    try:
        example.main()
    except SystemExit as end:
        code = end.code
    return code, capsys.readouterr().out


@pytest.fixture
def recording(tmp_path):
    samples = np.concatenate([sound(2, 1), silence(1.5), sound(1, 2)])
    (tmp_path / "a.wav").write_bytes(wav(samples, subtype="FLOAT"))
    return samples, tmp_path / "a.wav"


def test_a_file_takes_the_place_of_the_microphone(example, monkeypatch, capsys, directory, recording):
    code, printed = run(example, monkeypatch, capsys, directory, "--file", recording[1])
    assert code is None
    assert len(printed.splitlines()) == 2
    assert all(line.strip() for line in printed.splitlines())


def test_a_terminal_shows_words_that_may_change_in_grey(example, monkeypatch, capsys, directory, recording):
    _, plain = run(example, monkeypatch, capsys, directory, "--file", recording[1])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    _, printed = run(example, monkeypatch, capsys, directory, "--file", recording[1])
    assert "\x1b[90m" in printed
    ends = [line.rpartition("\x1b[K")[2] for line in printed.removesuffix("\n").split("\n")]
    assert [line.split() for line in ends] == [line.split() for line in plain.splitlines()]


def test_the_microphone_is_heard(example, monkeypatch, capsys, directory, recording):
    samples, path = recording
    _, expected = run(example, monkeypatch, capsys, directory, "--file", path)

    class InputStream:
        def __init__(self, rate, device, channels, dtype, callback):
            assert (rate, device, channels, dtype) == (RATE, "desk", 1, "float32")
            self.callback = callback

        def __enter__(self):
            parts = np.array_split(samples, 50)
            threading.Thread(
                target=lambda: [self.callback(each[:, None], len(each), None, None) for each in parts]
            ).start()

        def __exit__(self, *error):
            pass

    monkeypatch.setitem(sys.modules, "sounddevice", types.SimpleNamespace(InputStream=InputStream))
    monkeypatch.setattr(example, "SECONDS_TO_WAIT", 2)
    code, printed = run(example, monkeypatch, capsys, directory, "--microphone", "desk")
    assert "is it still there?" in code
    assert printed.splitlines()[0].split() == expected.splitlines()[0].split()


def test_a_mistake_gets_one_line(example, monkeypatch, capsys, directory, tmp_path):
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    for arguments, part in (
        ([tmp_path], "no speech model"),
        ([directory, "--file", tmp_path / "none.wav"], "cannot be opened"),
        ([directory], "sounddevice"),
    ):
        code, printed = run(example, monkeypatch, capsys, *arguments)
        assert part in code
        assert "\n" not in code
        assert printed == ""


def test_the_example_is_short():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) < 150
