"""Tests what ``staticllm doctor`` says of a GGUF file before it is converted."""

from __future__ import annotations

import pytest
from support.models.gguf_random import write_random

from staticllm.pipelines.diagnostics.doctor import check_gguf, examine


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_file_is_described(tmp_path):
    finding = check_gguf(write_random(tmp_path / "model.gguf", "llama", quantised="Q8_0"))
    assert finding.level == "ok"
    for part in (
        "architecture 'llama'",
        "1 million numbers (Q8_0, F32)",
        "context of 512 tokens",
        "vocabulary: 600 tokens ('gpt2', 'smollm')",
        "it can be converted",
    ):
        assert part in finding.value


def test_a_file_that_cannot_run_says_why_and_what_helps_and_is_not_converted(tmp_path):
    path = write_random(tmp_path / "model.gguf", "exaone4")
    findings = [finding for finding in examine((), None, str(path)) if finding.level == "fail"]
    assert [finding.name for finding in findings] == ["GGUF"]
    assert "architecture 'exaone4'; 1 million numbers (F32)" in findings[0].value
    assert findings[0].remedy == "export the original model with `staticllm export`"
    assert not (tmp_path / "cache").exists()


def test_a_damaged_file_says_what_is_wrong(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF\3\0\0\0")
    finding = check_gguf(path)
    assert (finding.level, "the file ends" in finding.value) == ("fail", True)
