"""Tests how ``scripts/npu_check.py`` compares predictions, and when it is skipped. Its lane of CI runs the compiler itself."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from staticllm.compiler_passes.compiling.npu_platform import PLATFORMS
from staticllm.errors import ConfigError, DeviceError

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture
def worker(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import npu_check_worker

    yield npu_check_worker
    for name in ("npu_check_worker", "npu_programs"):
        sys.modules.pop(name, None)


def test_predictions_may_differ_by_5_percent(worker):
    recorded = {"block": {"3720": [100.0, 100.0], "4000": [200.0, 80.0]}}
    assert not worker.compare({"block": {"3720": [104.9, 95.1], "4000": [200.0, 80.0]}}, recorded)
    assert worker.compare({"block": {"3720": [105.1, 94.9], "4000": [200.0, 80.0]}}, recorded) == [
        "block for 3720: 105.1 us, on record 100.0 us",
        "block for 3720: 94.9 us repriced, on record 100.0 us",
    ]
    assert worker.compare({"block": {"3720": [100.0, 100.0]}, "new": {"5010": [1.0, 1.0]}}, recorded) == [
        "block for 4000: on record, but not compiled",
        "new for 5010: not on record",
    ]


def test_the_programs_are_those_on_record(worker, zoo):
    recorded = json.loads(worker.RECORD.read_text())["us"]
    programs = dict(worker.programs_to_check(zoo))
    assert set(programs) == set(recorded)
    assert all(set(each) == set(PLATFORMS) for each in recorded.values())
    for model in programs.values():
        assert not any(port.get_partial_shape().is_dynamic for port in (*model.inputs, *model.outputs))


@pytest.mark.parametrize(
    ("step", "is_skipped"), [("", True), ("checking", True), ("downloading", True), ("building", False)]
)
def test_only_what_the_machine_lacks_is_skipped(worker, monkeypatch, capsys, step, is_skipped):
    def find(kind="auto"):
        raise DeviceError("there is none")

    def set_up(on_step, **more):
        if step:
            on_step(f"{step} it", 1, 6)
        raise (DeviceError if step else ConfigError)("it failed")

    monkeypatch.setattr(worker, "find_compiler", find)
    monkeypatch.setattr(worker, "set_up", set_up)
    with pytest.raises(SystemExit if is_skipped else DeviceError) as caught:
        worker.compiler_or_skip()
    if is_skipped:
        assert caught.value.code == 0
        assert "skipped: there is none; it failed" in capsys.readouterr().out
