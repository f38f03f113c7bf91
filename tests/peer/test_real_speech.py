"""Tests Whisper tiny.en as `scripts/real_whisper.py` makes it of CTranslate2's file: it hears recorded speech, has the logits of
CTranslate2 in f32, and optimum's exports of it have those of transformers.

They are not among the tests that `scripts/test_real.py` runs, because making the model and the tests take more than two minutes
beside other work. The speech is that of the distribution's package `pocketsphinx-testdata`.

    python scripts/real_whisper.py && pip install ".[speech-test]" && pytest --all tests/peer/test_real_speech.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import openvino as ov
import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))
from real_models import MODELS, folder
from real_whisper import is_whole, place

PYTHON = os.environ.get("STATICLLM_EXPORT_PYTHON")
REFERENCE = Path(__file__).resolve().parents[1] / "support" / "export" / "whisper_reference.py"
RECORDINGS = Path("/usr/share/pocketsphinx/test/data/librivox")
RATE = 16000
F32 = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
SPELLED = {"mr": "mister"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        PYTHON is None, reason="STATICLLM_EXPORT_PYTHON names no environment: `staticllm export --setup` makes one"
    ),
    pytest.mark.skipif(
        not RECORDINGS.is_dir(), reason=f"no {RECORDINGS}: the distribution's package pocketsphinx-testdata has it"
    ),
]


@pytest.fixture(scope="module")
def whisper():
    if not is_whole():
        pytest.skip(f"no {place()}: python scripts/real_whisper.py")
    return place()


@pytest.fixture(scope="module")
def spoken():
    """The words of each recording by its name."""
    lines = (RECORDINGS / "transcription").read_text("utf-8").splitlines()
    return {found[2]: found[1].split() for line in lines if (found := re.match(r"<s> (.*) </s> \((.*)\)", line))}


@pytest.fixture(scope="module")
def reference(whisper, spoken, tmp_path_factory):
    """What transformers computes for each recording: a dictionary of `whisper_reference.py`'s fields by name."""
    scratch = tmp_path_factory.mktemp("speech")
    np.savez(scratch / "clips.npz", **{name: samples_of(RECORDINGS / f"{name}.wav") for name in spoken})
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    subprocess.run(
        [PYTHON, str(REFERENCE), str(whisper / "original"), str(scratch / "clips.npz"), str(scratch / "heard.npz")],
        check=True, timeout=600, env={**environment, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    with np.load(scratch / "heard.npz") as found:
        return {
            name: {key.removeprefix(f"{name}."): found[key] for key in found if key.startswith(name)} for name in spoken
        }


def samples_of(path):
    with wave.open(str(path)) as file:
        assert (file.getnchannels(), file.getsampwidth(), file.getframerate()) == (1, 2, RATE)
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768


def words_of(text):
    return [SPELLED.get(word, word) for word in re.findall(r"[a-z']+", text.lower())]


def num_edits(first, second):
    """Return the number of words that must be changed, added or removed."""
    row = list(range(len(second) + 1))
    for count, word in enumerate(first, 1):
        before = row
        row = [count]
        for index, other in enumerate(second, 1):
            row.append(min(before[index] + 1, row[-1] + 1, before[index - 1] + (word != other)))
    return row[-1]


def assert_close(found, expected):
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < 1e-3  # logits range over 50, the encoder's values over 20


def compiled(path):
    return ov.Core().compile_model(path, "CPU", F32)


def test_transformers_hears_what_was_said(reference, spoken):
    edits = sum(num_edits(words, words_of(str(reference[name]["text"]))) for name, words in spoken.items())
    num_words = sum(map(len, spoken.values()))
    assert edits < 0.08 * num_words, {name: str(heard["text"]) for name, heard in reference.items()}


def test_logits_are_those_of_ctranslate2(whisper, reference):
    """Of the file that was converted, fed with the same features and tokens: nothing is lost or at a wrong place."""
    ctranslate2 = pytest.importorskip("ctranslate2")
    model = ctranslate2.models.Whisper(str(folder() / MODELS["whisper"].file), device="cpu", compute_type="float32")
    for heard in reference.values():
        features = ctranslate2.StorageView.from_array(np.ascontiguousarray(heard["features"]))
        given = heard["tokens"][: int(heard["prompt"])].tolist()
        (result,) = model.generate(
            features, [given], beam_size=1, return_logits_vocab=True, suppress_tokens=[], suppress_blank=False
        )
        logits = np.stack([np.array(row) for row in result.logits[0]])
        assert result.sequences_ids[0] == heard["tokens"][len(given) : -1].tolist()
        assert_close(logits, heard["logits"][len(given) - 1 : -1])


def test_exported_encoder_is_that_of_transformers(whisper, reference):
    encoder = compiled(whisper / "stateful" / "openvino_encoder_model.xml")
    for heard in reference.values():
        assert_close(encoder(heard["features"])[0], heard["encoded"])


def test_exported_stateful_decoder_is_that_of_transformers(whisper, reference):
    """The prompt in one call, then a token per call, each recording after a reset."""
    request = compiled(whisper / "stateful" / "openvino_decoder_model.xml").create_infer_request()
    for heard in reference.values():
        request.reset_state()
        logits = []
        for ids in pieces_of(heard):
            inputs = {"input_ids": ids, "encoder_hidden_states": heard["encoded"], "beam_idx": np.zeros(1, np.int32)}
            logits.append(np.array(request.infer(inputs)["logits"])[0])
        assert_close(np.concatenate(logits), heard["logits"])


def test_exported_decoders_with_and_without_past_are_that_of_transformers(whisper, reference):
    """The first returns the keys and values that the second takes; those of the recording are computed once."""
    first, later = (
        compiled(whisper / "three_files" / f"openvino_{name}_model.xml") for name in ("decoder", "decoder_with_past")
    )
    for heard in reference.values():
        past = {}
        logits = []
        for ids in pieces_of(heard):
            program = later if past else first
            inputs = {"input_ids": ids, "encoder_hidden_states": heard["encoded"], **past}
            found = program(
                {name: inputs[name] for port in program.inputs for name in port.get_names() & inputs.keys()}
            )
            outputs = {name: np.array(value) for port, value in found.items() for name in port.get_names()}
            logits.append(outputs["logits"][0])
            past |= {
                name.replace("present", "past_key_values"): value
                for name, value in outputs.items()
                if name.startswith("present")
            }
        assert_close(np.concatenate(logits), heard["logits"])


def pieces_of(heard):
    """Return the token ids of each call, ``[1, tokens]``: the prompt, then one each."""
    tokens = heard["tokens"][None]
    length = int(heard["prompt"])
    return [tokens[:, :length], *(tokens[:, place : place + 1] for place in range(length, tokens.shape[1]))]
