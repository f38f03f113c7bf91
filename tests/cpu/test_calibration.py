"""What the CPU is told to do faster: only where it was measured to be, and never over the user's head."""

from __future__ import annotations

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from staticllm.devices import get_core
from staticllm.pipelines import calibration
from staticllm.pipelines.calibration import GROUP_SIZE, LARGE_GROUP, calibrated

PHASES = {"prefill": {"PERFORMANCE_HINT": "LATENCY"}, "generate": {"PERFORMANCE_HINT": "LATENCY"}}


def stack(size=1024, count=2, head=64, compressed=True):
    """``count`` square matrices in 8 bits and one more, the head."""
    value = ops.parameter([1, -1, size], np.float32)
    result = value
    for rows in (*[size] * count, head):
        weights = np.ones((rows, size), np.uint8 if compressed else np.float32)
        constant = ops.constant(weights)
        if compressed:
            constant = ops.multiply(ops.convert(constant, np.float32), np.full((rows, 1), 0.01, np.float32))
        result = ops.matmul(result, constant, False, True)
    return ov.Model([ops.result(result)], [value])


@pytest.fixture
def seconds(monkeypatch):
    """What the two candidates take; the probes that were timed."""
    probes, answer = [], [2.0, 1.0]

    def measured(core, device, probe, candidates):
        probes.append(probe)
        assert [properties.get(GROUP_SIZE) for properties in candidates] == [None, LARGE_GROUP]
        return answer

    monkeypatch.setattr(calibration, "_seconds", measured)
    return answer, probes


def test_the_faster_group_is_taken_for_both_phases_which_still_share_a_program(seconds):
    found = calibrated(get_core(), "CPU", stack(), PHASES)
    assert found["prefill"] == found["generate"] == {"PERFORMANCE_HINT": "LATENCY", GROUP_SIZE: LARGE_GROUP}
    (probe,) = seconds[1]
    assert [tuple(port.shape) for port in probe.inputs] == [(1, calibration.PROBE_ROWS, 1024)], "one of each, no head"
    assert GROUP_SIZE not in PHASES["prefill"]


def test_a_small_gain_changes_nothing(seconds):
    seconds[0][:] = [1.05, 1.0]
    assert calibrated(get_core(), "CPU", stack(), PHASES) == PHASES


@pytest.mark.parametrize(
    ("device", "model", "user"),
    [
        ("NPU", stack(), {}),
        ("CPU", stack(), {GROUP_SIZE: 0}),  # the user's, or what asking for f32 brings
        ("CPU", stack(size=256), {}),  # too small to tell
        ("CPU", stack(size=1000), {}),  # does not divide
        ("CPU", stack(compressed=False), {}),
    ],
)  # fmt: skip
def test_where_there_is_nothing_to_try_nothing_is_timed(device, model, user, seconds):
    phases = {**PHASES, "generate": {**PHASES["generate"], **user}}
    assert calibrated(get_core(), device, model, phases) == phases
    assert not seconds[1]


def test_both_candidates_are_run_and_the_model_stays_as_it_was():
    model = stack()
    before = len(model.get_ordered_ops())
    probe = calibration._probe(model)
    times = calibration._seconds(get_core(), "CPU", probe, [{}, {GROUP_SIZE: LARGE_GROUP}])
    assert len(times) == 2 and all(0 < time < 10 for time in times)
    assert len(model.get_ordered_ops()) == before
