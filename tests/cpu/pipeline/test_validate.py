"""Compares the simulator with the engine: the same requests, with costs measured from the engine's records."""

import pytest

from staticllm.core import FinishReason, Variant
from staticllm.model_dir import demo_model_path
from staticllm.pipelines.profiling.records import RequestRecord, StepRecord
from staticllm.pipelines.simulator import validate as validation
from staticllm.pipelines.simulator.workload import Lengths, burst, poisson

pytestmark = pytest.mark.usefixtures("shared_programs")

ONE, TWO = Variant(1, 64), Variant(2, 64, 2)


def trace(host, calls):
    """Return a trace of one request with these calls, ``host`` seconds apart."""
    records, now = [], 1.0
    for variant, seconds in calls:
        records.append(StepRecord(now, seconds, variant, tuple(range(variant.sequences)), (), 1))
        now += seconds + host(variant)
    return [*records, RequestRecord(0, 0.5, 1.0, (1.1, now), 1, 0, FinishReason.LENGTH)]


def test_costs_are_means_without_the_first_call():
    other = Variant(16, 64)
    calls = [(ONE, 7.0), (TWO, 0.5), (ONE, 0.1), (ONE, 0.3)]
    table = validation.measured_costs(trace(lambda v: 0, calls), {ONE: 9.0, other: 2.0})
    assert (table(ONE), table(TWO), table(other)) == pytest.approx((0.2, 0.5, 2.0))


def test_host_time_is_fitted_per_call_row_and_sequence():
    calls = [(ONE, 0.1), (TWO, 0.2), (ONE, 0.1), (TWO, 0.2), (TWO, 0.2), (ONE, 0.1)]
    host = validation.measured_host(trace(lambda v: 0.01 + 0.002 * v.sequences, calls))
    assert (host(1, 1), host(2, 2)) == pytest.approx((0.012, 0.014))


def test_idle_time_does_not_count_as_host_time():
    first = trace(lambda v: 0.01, [(ONE, 0.1)] * 3)
    late = StepRecord(99.0, 0.1, ONE, (1,), (), 1)
    records = [*first, late, RequestRecord(1, 98.9, 99.0, (99.2,), 1, 0, FinishReason.LENGTH)]
    assert validation.measured_host(records)(1, 1) == pytest.approx(0.01)


def test_output_delay_and_wake_up_time_are_measured():
    steps = [StepRecord(start, 0.1, ONE, (1,), (), 1) for start in (1.0, 1.2, 9.0)]
    requests = [
        RequestRecord(1, 0.8, 1.0, (1.11, 1.33), 1, 0, FinishReason.LENGTH),  # 10 and 30 ms after the ends of its calls
        RequestRecord(2, 1.25, 1.2, (1.32,), 1, 0, FinishReason.LENGTH),  # the device was not idle
        RequestRecord(3, 8.7, 9.0, (9.14,), 1, 0, FinishReason.LENGTH),
    ]
    host = validation.measured_host([*steps, *requests])
    assert (host.answer, host.wake) == pytest.approx((0.025, 0.25))


@pytest.mark.slow
def test_simulator_and_engine_serve_the_same_requests(monkeypatch):
    monkeypatch.setattr(validation, "WORKLOADS", ((12, 6), (20, 10)))
    monkeypatch.setattr(validation, "CALIBRATION_REQUESTS", 3)
    checks = [check for check, _ in validation.validate(demo_model_path(), "CPU", ["fcfs"], 5, None, 0)]
    assert [(check.prompt, check.output) for check in checks] == [(12, 6), (20, 10)]
    for check in checks:
        sides = (check.predicted, check.measured, check.replayed)
        assert [side.num_tokens for side in sides] == [5 * check.output] * 3
        assert all(side.tpot_ms > 0 and side.ttft_ms > 0 for side in sides)
        assert set(check.deviations) == {"tokens_per_second", "ttft_ms", "tpot_ms"}


def test_a_calibrated_device_has_the_costs_of_the_engine():
    with validation._load(demo_model_path(), "CPU", "dynamic") as pipe:
        validation.serve(pipe, poisson(50, 3, Lengths.fixed(12, 4)), 0)
        model = validation.calibrate(pipe, burst(3, Lengths.fixed(12, 4)))
        assert model.known == pipe.engine.runner.costs.measured
        assert model.kv_slots == pipe.engine.runner.cache.slots.num_slots
