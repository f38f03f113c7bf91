"""Tests how crashes of processes are told from other ends, and counted for a blob set."""

from __future__ import annotations

import os
import signal
import sys

import pytest

pytest.importorskip("openvino")

from staticllm.compiler_passes.artifacts import crashes


@pytest.mark.skipif(os.name == "nt", reason="exit codes of signals are POSIX")
def test_signals_of_the_device_layer_are_crashes_and_those_of_others_are_not():
    assert crashes.crash_name(-signal.SIGSEGV) == "SIGSEGV"
    assert crashes.crash_name(-signal.SIGABRT) == "SIGABRT"
    for code in (0, 1, 139, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGINT, -signal.SIGHUP):
        assert crashes.crash_name(code) is None


def test_exceptions_of_windows_are_crashes(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    assert crashes.crash_name(0xC0000005) == "exception 0xc0000005"
    assert crashes.crash_name(0xC0000005 - (1 << 32)) == "exception 0xc0000005"  # as a signed number
    assert [crashes.crash_name(code) for code in (0, 1, 15)] == [None] * 3


def test_crashes_are_counted_until_the_set_is_in_quarantine(tmp_path):
    assert crashes.num_crashes(tmp_path) == 0
    assert crashes.quarantine_text(tmp_path) is None
    assert crashes.count_crash(tmp_path, "SIGSEGV") == 1
    assert crashes.quarantine_text(tmp_path) is None
    assert crashes.count_crash(tmp_path, "SIGSEGV") == 2
    assert str(tmp_path) in crashes.quarantine_text(tmp_path)
    assert crashes.count_crash(tmp_path / "missing", "SIGSEGV") == 0


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"crashes": "2"}', '{"crashes": true}', '{"crashes": -5}', "x" * 10000]
)
def test_a_damaged_note_counts_as_none(tmp_path, text):
    (tmp_path / "crashes.json").write_text(text)
    assert crashes.num_crashes(tmp_path) == 0
    assert crashes.count_crash(tmp_path, "SIGABRT") == 1
