"""Tests scripts/genai_suite.py on a small checkout: counts, crashes, the swapped class, and local models."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


def test_a_missing_checkout_is_a_one_line_error(root, tmp_path):
    command = [sys.executable, str(root / "scripts" / "genai_suite.py"), str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1
    assert "tests/python_tests" in ended.stderr
