"""Tests what makes two models of clients the same: their files as they are, whatever their times say."""

from __future__ import annotations

import os
import shutil
import time

import pytest

from staticllm.config import StaticLLMConfig
from staticllm.daemon.models.client_models import LanguageOrigin, ModelOrigin, SpeechOrigin
from staticllm.pipelines.launch.arguments import Candidate
from staticllm.pipelines.launch.draft_origin import DraftOrigin

CANDIDATE = Candidate("CPU", StaticLLMConfig(), frozenset())
STEP = 0.02
"""Longer than the steps of the clock that file systems take times from, in seconds."""


@pytest.fixture
def folder(tmp_path):
    """Model directories by their names, with files that are models by name only."""
    for name in ("model", "draft"):
        (tmp_path / name).mkdir()
        for each in ("openvino_model", "openvino_encoder_model", "openvino_decoder_model"):
            for end in (".xml", ".bin"):
                (tmp_path / name / f"{each}{end}").write_bytes(b"12345")
        (tmp_path / name / "config.json").write_text("{}")
    return tmp_path


def attached(folder):
    model = folder / "model"
    return ModelOrigin(model / "openvino_model.xml", model / "openvino_model.bin", "CPU", (), "auto", False)


def drafted(folder):
    return LanguageOrigin(folder / "model", (CANDIDATE,), "", draft=DraftOrigin(folder / "draft", "CPU", {}))


def heard(folder):
    return SpeechOrigin(folder / "model", (CANDIDATE,), "", 1, ())


FILES = {
    attached: ("model/openvino_model.xml", "model/openvino_model.bin"),
    drafted: tuple(f"{name}/openvino_model{end}" for name in ("model", "draft") for end in (".xml", ".bin")),
    heard: tuple(f"model/openvino_{name}_model{end}" for name in ("encoder", "decoder") for end in (".xml", ".bin")),
}


@pytest.mark.parametrize("make", FILES)
def test_another_content_with_the_same_size_and_time_is_another_model(make, folder):
    origin = make(folder)
    for name in FILES[make]:
        path = folder / name
        before = origin.identity()
        assert origin.identity() == before
        stat = path.stat()
        time.sleep(STEP)
        path.write_bytes(b"54321")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        written = origin.identity()
        assert written != before
        time.sleep(STEP)
        other = folder / "other"
        other.write_bytes(b"67890")
        os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        shutil.copy2(other, path)
        assert origin.identity() not in (before, written)
