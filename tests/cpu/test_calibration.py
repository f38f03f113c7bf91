"""What the CPU is told to do faster: only where it was measured to be, and never over the user's head."""

from __future__ import annotations

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from staticllm.devices import get_core
from staticllm.pipelines import calibration
from staticllm.pipelines.calibration import GROUP_SIZE, LARGE_GROUP, PRECISION, calibrated

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
def timed(monkeypatch):
    """How many times faster the second candidate is, with large groups and in f32; the probes that were timed."""
    faster, probes = {LARGE_GROUP: 2.0, "f32": 1.0}, []

    def measured(core, device, probe, candidates):
        probes.append(probe)
        own, other = candidates
        ((_, value),) = other.items() - own.items()
        return [faster[value], 1.0]

    monkeypatch.setattr(calibration, "_seconds", measured)
    return faster, probes


def calibrate(model, layout="shared", device="CPU", **generate):
    return calibrated(get_core(), device, model, {**PHASES, "generate": {**PHASES["generate"], **generate}}, layout)


def test_the_faster_group_is_taken_for_both_phases_which_still_share_a_program(timed):
    found = calibrate(stack())
    assert found["prefill"] == found["generate"] == {"PERFORMANCE_HINT": "LATENCY", GROUP_SIZE: LARGE_GROUP}
    (probe,) = timed[1]
    assert [tuple(port.shape) for port in probe.inputs] == [(1, calibration.PROBE_ROWS, 1024)], "one of each, no head"
    assert GROUP_SIZE not in PHASES["prefill"]


def test_a_small_gain_changes_nothing(timed):
    timed[0][LARGE_GROUP] = 1.05
    assert calibrate(stack()) == PHASES


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (stack(), {"device": "NPU"}),
        (stack(), {GROUP_SIZE: 0}),  # the user's, or what asking for f32 brings
        (stack(size=256), {}),  # too small to tell
        (stack(size=1000), {}),  # does not divide
        (stack(compressed=False), {}),
    ],
)  # fmt: skip
def test_where_there_is_nothing_to_try_nothing_is_timed(model, options, timed):
    expected = {**PHASES, "generate": {**PHASES["generate"], **{k: v for k, v in options.items() if k != "device"}}}
    assert calibrate(model, **options) == expected
    assert not timed[1]


@pytest.mark.parametrize("layout", ["single_row", "separate"])
def test_single_rows_are_not_quantized_and_in_f32_only_where_that_is_faster(layout, timed, monkeypatch):
    own = calibrate(stack(), layout)
    assert own["single_row"] == {"PERFORMANCE_HINT": "LATENCY", GROUP_SIZE: 0}
    assert own["generate"][GROUP_SIZE] == LARGE_GROUP, "steps of several rows still are"
    is_f32 = get_core().get_property("CPU", PRECISION).get_type_name() == "f32"
    assert [tuple(port.shape)[1] for probe in timed[1] for port in probe.inputs] == [128, *([] if is_f32 else [1])]
    if not is_f32:
        timed[0]["f32"] = 1.3
        assert calibrate(stack(), layout)["single_row"] == {**own["single_row"], PRECISION: "f32"}
        assert PRECISION not in calibrate(stack(), layout)["generate"]


def test_what_the_user_said_of_decoding_holds_for_single_rows(timed):
    timed[0]["f32"] = 1.3
    asked = {GROUP_SIZE: 64}
    assert calibrate(stack(), "single_row", **asked)["single_row"] == {**PHASES["generate"], **asked}
    asked = {PRECISION: "bf16"}
    assert calibrate(stack(), "single_row", **asked)["single_row"] == {**PHASES["generate"], **asked, GROUP_SIZE: 0}
    assert calibrate(stack(size=256), "single_row")["single_row"] == PHASES["generate"], "small: as the others"
    assert "single_row" not in calibrate(stack(), "shared")


def test_both_candidates_are_run_and_the_model_stays_as_it_was():
    model = stack()
    before = len(model.get_ordered_ops())
    probe = calibration._probe(calibration._matrices(model), calibration.PROBE_ROWS)
    times = calibration._seconds(get_core(), "CPU", probe, [{}, {GROUP_SIZE: LARGE_GROUP}])
    assert len(times) == 2 and all(0 < time < 10 for time in times)
    assert len(model.get_ordered_ops()) == before
