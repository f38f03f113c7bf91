"""``staticllm plan --measured``: where the private memory of a pipeline goes."""

from __future__ import annotations

import json
import sys

import pytest
from support import command_line

from staticllm import demo_model_path
from staticllm.pipelines.diagnostics.measured_memory import BUFFERS, KV_SLOTS, PROGRAM, UNKNOWN, WEIGHTS_FILE

LENGTHS = ("--max-prompt-len", 128, "--min-response-len", 64)


@pytest.fixture(scope="module")
def measured():
    printed = command_line.in_here(
        "plan", demo_model_path(), "--measured", "--json", "--programs", "phases", *LENGTHS
    ).stdout
    return json.loads(printed)


def test_the_parts_add_up_to_the_private_memory(measured):
    assert list(measured) == ["model", "device", "stages", "bytes", "private", "unknown"]
    assert sum(measured["bytes"].values()) == measured["private"] == measured["stages"][-1]["private"]
    assert measured["private"] > 50 << 20


def test_stages_are_those_of_a_life(measured):
    names = [stage["name"] for stage in measured["stages"]]
    order = ["start", "tokenizer", "read", "passes", "ready", "prompt of 128 tokens", "decode steps"]
    assert [name for name in names if name in order] == order
    for kind in ("before compile", "compile", "warm-up"):
        assert any(name.startswith(kind) for name in names)


def test_programs_are_told_apart(measured):
    parts = {name: count for name, count in measured["bytes"].items() if name.endswith(PROGRAM)}
    assert set(parts) == {f"generate {PROGRAM}", f"prefill {PROGRAM}"}
    weights = (demo_model_path() / "openvino_model.bin").stat().st_size
    assert sum(parts.values()) > weights


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_slots_and_buffers_are_counted(measured):
    assert measured["unknown"] == ""
    assert 0 < measured["bytes"][KV_SLOTS] < 64 << 20
    assert 0 < measured["bytes"][BUFFERS] < 64 << 20
    assert measured["bytes"][WEIGHTS_FILE] <= (demo_model_path() / "openvino_model.bin").stat().st_size + 4096


def test_the_table_names_what_the_system_does_not_tell():
    printed = command_line.in_here("plan", demo_model_path(), "--measured", "--programs", "shared", *LENGTHS).stdout
    lines = printed.splitlines()
    assert lines[0] == "private memory after each stage on CPU"
    assert "where it goes at the end" in lines
    assert (lines[-1] == UNKNOWN) == (sys.platform != "linux")
    assert sum(PROGRAM in line for line in lines) == 1


def test_an_error_of_the_process_is_one_line(tmp_path):
    failed = command_line.in_here("plan", tmp_path, "--measured", *LENGTHS)
    assert failed.returncode == 1
    assert "openvino_model.xml is missing" in failed.stderr
    assert len(failed.stderr.splitlines()) == 1
    failed = command_line.in_here("plan", demo_model_path(), "--measured", "-p", "MEMORY_LIMIT_MB=100", *LENGTHS)
    assert failed.returncode == 1
    assert failed.stderr.startswith("Error: MEMORY_LIMIT_MB=100: this model needs about")
    assert len(failed.stderr.splitlines()) == 1
