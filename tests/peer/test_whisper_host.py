"""Tests the host side of Whisper against GenAI and transformers on the real tiny.en: features, rules, segments and words.

    python scripts/real_whisper.py && pytest --all tests/peer/test_whisper_host.py

What needs transformers is skipped unless STATICLLM_EXPORT_PYTHON names an environment that has it. The speech is that of the
distribution's package `pocketsphinx-testdata`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import openvino as ov
import openvino_genai as genai
import pytest

from staticllm.pipelines.generation.speech_rules import TimestampRules
from staticllm.pipelines.speech.log_mel import MelConfig, log_mel, read_mel_config, window_of
from staticllm.pipelines.speech.results import chunks_of
from staticllm.pipelines.speech.segments import WindowTimes, segments_of
from staticllm.pipelines.speech.whisper_config import WhisperGenerationConfig, whisper_options
from staticllm.pipelines.speech.whisper_prompt import NO_LANGUAGE, context_tokens, window_prompt
from staticllm.pipelines.speech.whisper_rules import whisper_rules
from staticllm.pipelines.speech.words import (
    alignment_tokens,
    cheapest_starts,
    median_filtered,
    text_tokens_of,
    token_starts,
    words_of,
)

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from real_whisper import is_whole, place

PYTHON = os.environ.get("STATICLLM_EXPORT_PYTHON")
REFERENCE = Path(__file__).resolve().parents[1] / "support" / "export" / "whisper_host.py"
RECORDINGS = Path("/usr/share/pocketsphinx/test/data/librivox")
RATE = 16000
F32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
NUM_ROWS = 24

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not RECORDINGS.is_dir(), reason=f"no {RECORDINGS}: the distribution's package pocketsphinx-testdata has it"
    ),
]


@pytest.fixture(scope="module")
def model():
    if not is_whole():
        pytest.skip(f"no {place()}: python scripts/real_whisper.py")
    return place() / "stateful"


@pytest.fixture(scope="module")
def recordings():
    """The recordings by name, and one of 95 s made of them."""
    found = {}
    for path in sorted(RECORDINGS.glob("*.wav")):
        with wave.open(str(path)) as file:
            found[path.stem] = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768
    found["long"] = np.concatenate([*found.values()] * 4)[: 95 * RATE + 3]
    return found


@pytest.fixture(scope="module")
def peer(model):
    return genai.WhisperPipeline(model, "CPU", word_timestamps=True, **F32)


@pytest.fixture(scope="module")
def heard(peer, recordings):
    """What GenAI hears in each recording, with chunks and words."""
    return {name: peer.generate(samples.tolist(), return_timestamps=True) for name, samples in recordings.items()}


@pytest.fixture(scope="module")
def options(model):
    return whisper_options(WhisperGenerationConfig(model / "generation_config.json"), {})


@pytest.fixture(scope="module")
def given(recordings, heard, options):
    """The arrays of which transformers makes the reference."""
    random = np.random.default_rng(0)
    clips = [*recordings.values()]
    clips += [clips[0][:1], clips[0][:201], recordings["long"][: 30 * RATE - 10], recordings["long"][: 30 * RATE + 1]]
    found = {f"clip.{number}": clip for number, clip in enumerate(clips)}
    found["logits"] = random.normal(0, 4, (NUM_ROWS, 51864)).astype(np.float32)
    begin = options.tokens.timestamp_begin
    for row in range(NUM_ROWS):
        tokens = [begin + row, *random.integers(0, 50000, row % 3), begin + 40, begin + 40][: random.integers(0, 5)]
        found[f"generated.{row}"] = np.array(tokens, np.int64)
    for number, name in enumerate(name for name in recordings if name != "long"):
        text = [token for word in heard[name].words for token in word.token_ids]
        found[f"tokens.{number}"] = np.array(alignment_tokens([options.tokens.decoder_start], text, options.tokens))
        found[f"features.{number}"] = window_of(log_mel(recordings[name], MelConfig()), 0, 3000)[None]
        found[f"frames.{number}"] = np.array(len(recordings[name]) // 160)
    return found


@pytest.fixture(scope="module")
def reference(model, given, tmp_path_factory):
    if PYTHON is None:
        pytest.skip("STATICLLM_EXPORT_PYTHON names no environment: `staticllm export --setup` makes one")
    scratch = tmp_path_factory.mktemp("host")
    np.savez(scratch / "given.npz", **given)
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run(
        [PYTHON, str(REFERENCE), str(model.parent / "original"), str(scratch / "given.npz"), str(scratch / "found.npz")],
        check=True, timeout=600, env={**environment, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    with np.load(scratch / "found.npz") as found:
        return {name: found[name] for name in found.files}


def decoder_of(peer):
    tokenizer = peer.get_tokenizer()
    return lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=False)) if tokens else ""


@pytest.mark.parametrize("num_mels", [80, 128])
def test_features_are_those_of_transformers(given, reference, num_mels):
    clips = {name: clip for name, clip in given.items() if name.startswith("clip.")}
    assert len(clips) >= 6
    for name, clip in clips.items():
        expected = reference[f"features.{num_mels}.{name.removeprefix('clip.')}"]
        np.testing.assert_allclose(log_mel(clip, MelConfig(feature_size=num_mels)), expected, atol=5e-5)


def test_timestamp_rules_are_those_of_transformers(given, reference, options):
    for row in range(NUM_ROWS):
        logits = given["logits"][row].copy()
        rules = TimestampRules(whisper_rules(options, has_timestamps=True).timestamps)
        for token in given[f"generated.{row}"].tolist():
            rules.accept(token)
        rules.process(logits)
        np.testing.assert_array_equal(logits, reference["processed"][row])


def test_words_are_those_of_genai(given, reference, recordings, heard, options, peer):
    """By transformers' attention weights, for the tokens that GenAI chose."""
    decode = decoder_of(peer)
    for number, name in enumerate(name for name in recordings if name != "long"):
        text = text_tokens_of(given[f"tokens.{number}"].tolist(), options.tokens)
        starts = token_starts(reference[f"weights.{number}"], 1, int(given[f"frames.{number}"]) // 2)
        ours, theirs = words_of(text, starts, decode, "en"), heard[name].words
        assert [word.word for word in ours] == [word.word for word in theirs]
        assert [word.token_ids for word in ours] == [word.token_ids for word in theirs]
        for attribute in ("start_ts", "end_ts"):
            found, expected = ([getattr(word, attribute) for word in words] for words in (ours, theirs))
            np.testing.assert_allclose(found, expected, atol=0.021)


def test_filter_and_path_are_those_of_transformers(given, reference):
    """Of real weights. At the two ends transformers reflects the weights, and GenAI, as here, takes fewer of them."""
    for number in range(sum(name.startswith("tokens.") for name in given)):
        weights = reference[f"weights.{number}"]
        standardised = (weights - weights.mean(axis=1, keepdims=True)) / weights.std(axis=1, keepdims=True)
        filtered = np.stack([median_filtered(head) for head in standardised])
        np.testing.assert_allclose(filtered[..., 3:-3], reference[f"filtered.{number}"][..., 3:-3], atol=1e-3)
        np.testing.assert_array_equal(cheapest_starts(reference[f"cost.{number}"]), reference[f"starts.{number}"])


class PlainDecoder:
    """The exported models, without any pipeline: greedy decoding of windows with our host side."""

    def __init__(self, model):
        core = ov.Core()
        self.encoder = core.compile_model(model / "openvino_encoder_model.xml", "CPU", F32)
        decoder = core.compile_model(model / "openvino_decoder_model.xml", "CPU", F32)
        self.request = decoder.create_infer_request()

    def decode(self, features, prompt, processors, eos):
        encoded = self.encoder(features[None])[0]
        self.request.reset_state()
        given, tokens = list(prompt), []
        while len(tokens) < 200:
            inputs = {
                "input_ids": np.array([given]),
                "encoder_hidden_states": encoded,
                "beam_idx": np.zeros(1, np.int32),
            }
            logits = np.array(self.request.infer(inputs)["logits"])[0, -1]
            for each in processors:
                if each.is_active:
                    each.process(logits)
            token = int(logits.argmax())
            for each in processors:
                each.accept(token)
            tokens.append(token)
            given = [token]
            if token == eos:
                break
        return tokens


def transcribed(plain, model, samples, peer, **values):
    """Return text and chunks of a recording, window by window as GenAI."""
    options = whisper_options(WhisperGenerationConfig(model / "generation_config.json"), values)
    mel = read_mel_config(model)
    features = log_mel(samples, mel)
    times = WindowTimes.of(options.tokens, mel)
    has_timestamps = options.return_timestamps or features.shape[1] > mel.window_frames
    tokenizer = peer.get_tokenizer()
    context = context_tokens(
        options, lambda text: tokenizer.encode(text, add_special_tokens=False).input_ids.data[0].tolist()
    )
    place, text, segments = 0, [], []
    while place < features.shape[1]:
        prompt = window_prompt(context, options, NO_LANGUAGE, place == 0, has_timestamps).tokens
        processors = whisper_rules(options, has_timestamps).processors(51864)
        window = window_of(features, place, mel.window_frames)
        tokens = plain.decode(window, prompt, processors, options.tokens.eos)
        if not has_timestamps:
            text += text_tokens_of(tokens, options.tokens)
            break
        found = segments_of(tokens, times, place / mel.frames_per_second)
        segments += found.segments
        text += found.text
        place += found.advance
    return tokenizer.decode(text), chunks_of(segments, lambda tokens: str(tokenizer.decode(tokens)))


@pytest.fixture(scope="module")
def plain(model):
    return PlainDecoder(model)


def test_chunks_are_those_of_genai(plain, model, recordings, heard, peer):
    for name, samples in recordings.items():
        text, chunks = transcribed(plain, model, samples, peer, return_timestamps=True)
        assert text == heard[name].texts[0]
        assert [chunk.text for chunk in chunks] == [chunk.text for chunk in heard[name].chunks]
        for attribute in ("start_ts", "end_ts"):
            found, expected = ([getattr(chunk, attribute) for chunk in each] for each in (chunks, heard[name].chunks))
            np.testing.assert_allclose(found, expected, atol=1e-3)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"initial_prompt": "Mister Jon Dashwud"},
        {"hotwords": "Dashwud, Polychrome"},
        {"initial_prompt": "Jon Dashwud.", "hotwords": "leasure"},
        {"suppress_tokens": [], "begin_suppress_tokens": []},
    ],
)
def test_text_is_that_of_genai_with_texts_before_it(plain, model, recordings, peer, values):
    for name in [*recordings][:2]:
        expected = peer.generate(recordings[name].tolist(), **values).texts[0]
        assert transcribed(plain, model, recordings[name], peer, **values)[0] == expected


def test_the_text_before_later_windows_is_that_of_genai(plain, model, recordings, peer):
    samples = recordings["long"][: 45 * RATE]
    values = {"initial_prompt": "Mister Jon Dashwud", "hotwords": "leasure"}
    expected = peer.generate(samples.tolist(), return_timestamps=True, **values)
    text, chunks = transcribed(plain, model, samples, peer, return_timestamps=True, **values)
    assert text == expected.texts[0]
    assert len(chunks) == len(expected.chunks)
