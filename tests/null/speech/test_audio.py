"""Tests the checks of samples, and the reading of files if ``soundfile``, ``soxr`` and ``av`` are installed."""

from __future__ import annotations

import builtins
import io
import wave

import numpy as np
import pytest

from staticllm.errors import ConfigError, PromptError
from staticllm.pipelines.speech.audio import RATE, check_samples, read_audio

SECONDS = 3


def tone(rate, amplitudes=(0.5, 0.25)):
    """Return a tone of 440 Hz ``[n, channels]``."""
    time = np.arange(rate * SECONDS) / rate
    return np.stack([amplitude * np.sin(2 * np.pi * 440 * time) for amplitude in amplitudes], axis=1)


def encoded(form, rate=44100, samples=None):
    soundfile = pytest.importorskip("soundfile")
    content = io.BytesIO()
    soundfile.write(content, tone(rate) if samples is None else samples, rate, format=form)
    return content.getvalue()


def in_mp4(rate=44100):
    av = pytest.importorskip("av")
    content = io.BytesIO()
    with av.open(content, "w", format="mp4") as file:
        stream = file.add_stream("aac", rate=rate)
        frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(tone(rate).T, "f4"), format="fltp", layout="stereo")
        frame.sample_rate = rate
        file.mux([*stream.encode(frame), *stream.encode(None)])
    return content.getvalue()


def assert_is_tone(samples, amplitude=0.375):
    """Assert that the middle of a recording is the tone of 440 Hz at 16 kHz, the mean of two channels."""
    assert samples.dtype == np.float32
    middle = samples[RATE // 2 : RATE // 2 + RATE]
    spectrum = np.abs(np.fft.rfft(middle * np.hanning(len(middle))))
    assert spectrum.argmax() == 440
    assert np.abs(middle).max() == pytest.approx(amplitude, rel=0.15)


def refused(function, *arguments, **keywords):
    with pytest.raises(PromptError) as error:
        function(*arguments, **keywords)
    assert "\n" not in str(error.value)
    assert "object at 0x" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("given", [[0.5] * 300, np.full(300, 0.5), np.full(300, 0.5, np.float16), (0.5,) * 300])
def test_samples_become_an_array(given):
    samples = check_samples(given)
    assert samples.dtype == np.float32
    assert samples.tolist() == [0.5] * 300


def test_an_array_of_float32_is_not_copied():
    given = np.zeros(500, np.float32)
    assert check_samples(given) is given


def test_whole_numbers_of_silence_are_fine():
    assert not check_samples([0] * 500).any()


IMPOSSIBLE = [
    ([], "has the length 0"),
    ([0.1], "has the length 1"),
    ([0.1] * 200, "has the length 200"),
    ([0.0] * 300 + [float("nan")], "raw_speech[300] is nan"),
    ([float("-inf")] * 300, "raw_speech[0] is -inf"),
    (np.zeros((400, 2)), "has the shape [400, 2]"),
    (np.float32(1), "has the shape []"),
    (np.ma.masked_greater(np.linspace(0, 1, 400), 0.5), "masked elements"),
    (np.full(400, 9000, np.int16), "whole numbers (int16): divide them"),
    (np.full(400, 9000.0), "no numbers near [-1, 1]: divide them"),
    ("speech.wav", "read the file with read_audio"),
    (b"RIFF", "read the file with read_audio"),
    ([[1.0], [2.0, 3.0]], "no list of numbers"),
    ([None] * 300, "elements of type object"),
    (["a"] * 300, "elements of type <U1"),
    (np.broadcast_to(np.float32(0), 10 * 3600 * RATE), "lasts 10 hours, at most 8 hours"),
]


@pytest.mark.parametrize(("given", "message"), IMPOSSIBLE)
def test_impossible_samples_get_one_line(given, message):
    assert message in refused(check_samples, given)


def test_another_rate_is_refused():
    assert "sampling_rate=8000" in refused(check_samples, [0.0] * 300, sampling_rate=8000)


@pytest.mark.parametrize("form", ["WAV", "FLAC", "OGG", "MP3"])
@pytest.mark.parametrize("rate", [8000, 16000, 44100])
def test_soundfile_reads_and_resamples(form, rate):
    pytest.importorskip("soxr")
    samples = read_audio(encoded(form, rate))
    assert len(samples) == pytest.approx(SECONDS * RATE, abs=1)
    assert_is_tone(samples)


def test_av_reads_what_soundfile_does_not_know():
    samples = read_audio(in_mp4())
    assert len(samples) == pytest.approx(SECONDS * RATE, abs=2048)
    assert_is_tone(samples)


def test_blocks_are_joined_without_a_gap(monkeypatch):
    monkeypatch.setattr("staticllm.pipelines.speech.audio.BLOCK", 3000)
    in_blocks = read_audio(encoded("WAV"))
    monkeypatch.undo()
    np.testing.assert_allclose(in_blocks, read_audio(encoded("WAV")), atol=1e-6)


def test_a_file_is_read_by_its_path(tmp_path):
    path = tmp_path / "tone.wav"
    path.write_bytes(encoded("WAV", RATE))
    np.testing.assert_allclose(read_audio(path), tone(RATE).mean(axis=1), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("text.txt", b"This is a text, and no sound at all.\n" * 50),
        ("empty.wav", b""),
        ("header.wav", b"RIFF" + bytes(40)),
        ("list.m3u8", b"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:9,\nother.wav\n#EXT-X-ENDLIST\n"),
        ("list.ffconcat", b"ffconcat version 1.0\nfile 'other.wav'\n"),
        ("page.html", b"<html><audio src='http://localhost/a.wav'></audio></html>"),
    ],
)
def test_what_is_no_audio_gets_one_line(tmp_path, name, content):
    pytest.importorskip("soundfile")
    with wave.open(str(tmp_path / "other.wav"), "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(bytes(2 * RATE))
    path = tmp_path / name
    path.write_bytes(content)
    message = refused(read_audio, path)
    assert name in message
    assert "cannot be read as audio" in message


def test_a_damaged_file_gets_one_line():
    content = encoded("FLAC")
    assert "cannot be read as audio" in refused(read_audio, content[: len(content) // 2])
    content = in_mp4()
    assert "cannot be read as audio" in refused(read_audio, content[:3000])


def test_garbage_in_a_file_never_gets_more_than_one_line():
    content = encoded("WAV")
    random = np.random.default_rng(0)
    for _ in range(50):
        damaged = bytearray(content[: 4000 + int(random.integers(4000))])
        for place in random.integers(0, 120, 8):
            damaged[place] = random.integers(256)
        try:
            samples = read_audio(bytes(damaged))
        except PromptError as error:
            assert "\n" not in str(error)
        else:
            assert np.isfinite(samples).all()


def test_a_file_that_is_not_there():
    assert "cannot be opened" in refused(read_audio, "/no/such/file.wav")
    assert "is no file" in refused(read_audio, "/")


def test_too_long_and_too_short_files():
    assert "lasts 3 s, at most 2 s" in refused(read_audio, encoded("WAV", RATE), max_seconds=2)
    assert "at most 2 s" in refused(read_audio, in_mp4(), max_seconds=2)
    assert "a length of 5" in refused(read_audio, encoded("WAV", RATE, np.zeros(5)))


def test_a_file_with_few_samples_per_second_is_not_made_a_long_one():
    content = io.BytesIO()
    with wave.open(content, "wb") as file:
        file.setparams((1, 2, 1, 0, "NONE", ""))
        file.writeframes(bytes(1 << 20))
    pytest.importorskip("soundfile")
    assert "it has 1 samples per second" in refused(read_audio, content.getvalue())


def test_numbers_in_a_file_that_are_not_finite():
    soundfile = pytest.importorskip("soundfile")
    content = io.BytesIO()
    soundfile.write(content, np.full(RATE, np.nan), RATE, format="WAV", subtype="FLOAT")
    assert "not finite" in refused(read_audio, content.getvalue())


def test_missing_packages_are_named(monkeypatch, tmp_path):
    known = builtins.__import__

    def imported(name, *rest):
        if name in ("soundfile", "av"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return known(name, *rest)

    monkeypatch.setattr(builtins, "__import__", imported)
    path = tmp_path / "a.wav"
    path.write_bytes(b"RIFF")
    with pytest.raises(ConfigError, match=r"pip install \"staticllm\[speech\]\""):
        read_audio(path)


@pytest.mark.parametrize("place", [(20, b"\x99\x99"), (34, b"\0\0"), (20, b"\xfe\xff")])
def test_a_codec_that_nothing_knows_is_named_without_objects_of_the_library(place):
    pytest.importorskip("av")
    pytest.importorskip("soundfile")
    content = bytearray(encoded("WAV"))
    start, value = place
    content[start : start + 2] = value
    message = refused(read_audio, bytes(content))
    assert "codec is not known" in message
    assert "attribute" not in message
