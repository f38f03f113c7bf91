"""Tests scripts/genai_suite.py on a small checkout: counts, crashes, the swapped class, and local models."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.models.whisper_directory import sound, wav, write_whisper

TESTS = """
import os
import openvino_genai as genai
import pytest
from optimum.intel.utils.import_utils import is_transformers_version
from utils.hugging_face import download_and_convert_model, run_hugging_face

SCHEMA = download_and_convert_model("some/model")
PROPERTIES = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f16"}

def test_same_text():
    assert is_transformers_version(">=", "5.0")
    config = genai.GenerationConfig(max_new_tokens=5)
    pipe = genai.LLMPipeline(SCHEMA.models_path, "NPU", PROPERTIES, MAX_PROMPT_LEN=64, MIN_RESPONSE_LEN=64)
    assert type(pipe).__mro__[1].__name__ == "StaticLLMPipeline"
    (expected,) = run_hugging_face(SCHEMA.opt_model, SCHEMA.hf_tokenizer, ["Hello!"], config)
    assert pipe.generate(["Hello!"], config).texts == expected.m_generation_ids

def test_fails():
    assert 1 == 2

def test_dies():
    os._exit(7)

def test_skips():
    pytest.skip("why not")

@pytest.mark.xfail
def test_is_known():
    raise ValueError
"""


@pytest.mark.slow
def test_the_table_counts_what_happened(root, tmp_path):
    folder = tmp_path / "tests" / "python_tests"
    (folder / "utils").mkdir(parents=True)
    (folder / "utils" / "__init__.py").touch()
    (folder / "test_some.py").write_text(TESTS, encoding="utf-8")
    command = [sys.executable, root / "scripts" / "genai_suite.py", tmp_path, "test_some.py", "--only", "ours"]
    ended = subprocess.run([*map(str, command)], capture_output=True, text=True, encoding="utf-8", check=False)
    lines = ended.stdout.splitlines()
    assert "| test_some.py | 2 | 2 | 1 |" in lines, ended.stdout + ended.stderr
    assert "test_some.py: 1 x test_fails: assert 1 == 2" in lines
    assert "test_some.py: 1 x test_dies: died" in lines


SPEECH_TESTS = """
import types
import datasets
import openvino_genai as genai
import pytest
from transformers import AutoProcessor

def read_asr_model(params, **rest):
    raise ValueError("this would download a model")

load_and_save_whisper_model = read_asr_model

def get_audio_dataset(is_long):
    raise ValueError("this would download recordings")

@pytest.fixture
def sample():
    return get_audio_dataset(False)[0]

def test_text(sample):
    name, path, reference, pipe = read_asr_model(("some/whisper", "path"), word_timestamps=True)
    assert (name, path.name, type(pipe).__name__) == ("some/whisper", "stateful", "StaticWhisperPipeline")
    found = pipe.generate(sample, word_timestamps=True)
    assert found.texts[0] and found.words

def test_forms(sample):
    assert load_and_save_whisper_model(("some/whisper", "path"))[1].name == "three_files"

def test_another_class(sample):
    read_asr_model(("some/whisper", "path"), pipeline_type=types.SimpleNamespace(name="ASR"))

def test_language_mode(sample):
    read_asr_model(("some/whisper", "path"))
"""


@pytest.mark.slow
def test_tests_of_speech_get_local_models_and_recordings(root, tmp_path):
    pytest.importorskip("soundfile")
    folder = tmp_path / "tests" / "python_tests"
    folder.mkdir(parents=True)
    (folder / "test_whisper_pipeline.py").write_text(SPEECH_TESTS, encoding="utf-8")
    write_whisper(tmp_path / "model" / "stateful")
    (tmp_path / "recordings").mkdir()
    for number in range(2):
        (tmp_path / "recordings" / f"{number}.wav").write_bytes(wav(sound(0.8, number)))
    command = [
        sys.executable, root / "scripts" / "genai_suite.py", tmp_path, "test_whisper_pipeline.py", "--only", "ours",
        "--speech", tmp_path / "model", "--recordings", tmp_path / "recordings",
    ]  # fmt: skip
    ended = subprocess.run([*map(str, command)], capture_output=True, text=True, encoding="utf-8", check=False)
    assert "| test_whisper_pipeline.py | 2 | 0 | 2 |" in ended.stdout.splitlines(), ended.stdout + ended.stderr


def test_a_missing_checkout_is_a_one_line_error(root, tmp_path):
    command = [sys.executable, str(root / "scripts" / "genai_suite.py"), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1
    assert "tests/python_tests" in ended.stderr
