"""Tests that one slow copy between arena and host pool does not end the time slices."""

from staticllm.pipelines.scheduling.planner import make_policy
from staticllm.testing.engine import fake_engine, fake_request, run_to_end


def test_a_slow_copy_is_corrected_by_the_next_one(monkeypatch):
    engine = fake_engine(make_policy("dynamic"), 2, gap_ms=500.0, starts_thread=False, host_kv_slots=4096)
    manager = engine.core.device.kv_manager
    count_swap, num_copies = manager.count_swap, 0

    def slow_at_first(num_slots, seconds):
        nonlocal num_copies
        num_copies += 1
        count_swap(num_slots, 0.05 if num_copies == 1 else 1e-5)

    monkeypatch.setattr(manager, "count_swap", slow_at_first)
    run_to_end(engine, [fake_request([*range(5, 25), 30 + index], 30) for index in range(40)])
    assert num_copies > 1, "places change hands again"
    assert manager.swap_seconds < 0.05 / 50, "0.05 s for at most 50 slots"
