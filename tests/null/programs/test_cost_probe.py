"""Costs that are measured while the engine has nothing to do."""

import os
import queue
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from staticllm.core import Variant
from staticllm.pipelines.costs import probe as cost_probe
from staticllm.pipelines.costs.model import STABLE_CALLS, CostModel
from staticllm.pipelines.costs.probe import FIRST_CALLS, MAX_SECONDS, NUM_CHECKED, CostProbe, worth_measuring
from staticllm.pipelines.scheduling.planner import make_policy
from staticllm.testing import fake_answer, fake_engine, fake_request

VARIANTS = [
    *(Variant(rows, kv_len) for rows in (1, 16, 32) for kv_len in (0, 64, 128, 256) if rows > 1 or kv_len),
    *(Variant(rows, kv_len, rows) for rows in (2, 4) for kv_len in (64, 128, 256)),
    *(Variant(32, kv_len, sequences) for sequences in (2, 8) for kv_len in (0, 64, 128, 256)),
]


class TimedProgram:
    """A program that takes as long as it is told, and counts its runs."""

    def __init__(self, seconds, error=None):
        self.seconds, self.error, self.num_runs = seconds, error, 0
        self.buffers = SimpleNamespace(logit_rows=np.full(4, 999), stand_in=lambda: self.buffers.logit_rows.fill(0))

    def run(self):
        assert not self.buffers.logit_rows.any(), "a row outside of the call"
        self.num_runs += 1
        if self.error:
            raise self.error
        return self.seconds


def true_cost(variant):
    return (
        0.02 + 4e-4 * variant.rows + 2e-7 * variant.rows * (variant.kv_len + variant.rows) + 1e-4 * variant.num_logits
    )


def test_every_cost_is_close_after_measuring_what_is_worth_it():
    programs, costs = {variant: TimedProgram(true_cost(variant)) for variant in VARIANTS}, CostModel()
    probe = CostProbe(programs, costs)
    probe.choose(programs)
    while not probe.is_done:
        probe.measure_next(lambda: False)
    assert set(costs.measured) == set(worth_measuring(VARIANTS))
    assert len(costs.measured) < len(VARIANTS)
    for variant in VARIANTS:
        assert costs(variant) == pytest.approx(true_cost(variant), rel=0.05), variant


def test_a_prompt_is_compared_with_a_call_after_another_size_and_a_step_with_one_after_a_step():
    """As they run in an engine: the program prepares its nodes again for another number of rows."""
    last, prepare = [None], 0.008

    class Preparing(TimedProgram):
        def __init__(self, variant):
            super().__init__(true_cost(variant))
            self.variant = variant

        def run(self):
            is_other, last[0] = last[0] != self.variant.rows, self.variant.rows
            return super().run() + is_other * prepare

    programs, costs = {variant: Preparing(variant) for variant in VARIANTS}, CostModel()
    probe = CostProbe(programs, costs)
    probe.choose(programs)
    for variant, more in ((Variant(32, 64), prepare), (Variant(1, 64), 0), (Variant(4, 64, 4), 0)):
        assert probe.seconds_of(variant) == pytest.approx(true_cost(variant) + more)
    assert not costs.measured


def measured_all(probe):
    while not probe.is_done:
        probe.measure_next(lambda: False)


def test_a_first_call_that_was_slow_does_not_keep_a_prompt_from_being_measured():
    """The first call at a size prepares the program. Nobody would ever choose it, so nothing else would correct its cost."""
    slow = Variant(32, 0)
    programs, costs = {variant: TimedProgram(true_cost(variant)) for variant in VARIANTS}, CostModel()
    costs.update(slow, 2 * MAX_SECONDS)
    probe = CostProbe(programs, costs)
    probe.choose(programs)
    measured_all(probe)
    assert costs(slow) == pytest.approx(true_cost(slow))


def test_all_costs_are_measured_again_when_calls_take_another_time_than_measured():
    used, unused = Variant(16, 0), Variant(32, 0)
    programs, costs = {variant: TimedProgram(2 * true_cost(variant)) for variant in VARIANTS}, CostModel()
    probe = CostProbe(programs, costs)
    probe.choose(programs)
    measured_all(probe)  # beside other work
    assert costs(unused) == pytest.approx(2 * true_cost(unused))
    for variant, program in programs.items():
        program.seconds = true_cost(variant)
    num_calls = 0
    while probe.is_done:
        num_calls += 1
        assert num_calls < 4 * FIRST_CALLS
        costs.update(used, true_cost(used))
        probe.note_call(used)
    measured_all(probe)
    for variant in (used, unused):
        assert costs(variant) == pytest.approx(true_cost(variant))
    for _ in range(10 * FIRST_CALLS):
        costs.update(used, true_cost(used))
        probe.note_call(used)
    assert probe.is_done, "calls that take what was measured change nothing"


class DisturbedAtFirst(TimedProgram):
    """A program beside other work, which ends after a few of its calls."""

    def __init__(self, seconds, num_slow):
        super().__init__(seconds)
        self.num_slow = num_slow

    def run(self):
        return super().run() * (3 if self.num_runs < self.num_slow else 1)


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_a_prompt_that_took_longer_than_a_larger_one_is_measured_again(factor):
    """A prompt of 16 tokens ran in two calls of 8 rows, because that of 16 had been measured while the machine was slow."""
    disturbed = Variant(16, 64)
    programs, costs = {variant: TimedProgram(factor * true_cost(variant)) for variant in VARIANTS}, CostModel()
    programs[disturbed] = DisturbedAtFirst(factor * true_cost(disturbed), 4)
    assert 3 * 3.0 * true_cost(disturbed) > MAX_SECONDS
    probe, told = CostProbe(programs, costs), []
    probe.when_done(lambda: told.append(costs.measured))
    probe.choose(programs)
    measured_all(probe)
    assert costs(disturbed) == pytest.approx(factor * true_cost(disturbed))
    assert told == [costs.measured], "when nothing is left"


def measured_times(probe, monkeypatch):
    """Return a list that gets each variant whose time is taken."""
    times, timed = [], probe.timed
    monkeypatch.setattr(probe, "timed", lambda variant, is_needed: times.append(variant) or timed(variant, is_needed))
    return times


def measured_until(probe, times, variant):
    while variant not in times:
        probe.measure_next(lambda: False)


def probe_of(seconds):
    """Return programs that take ``seconds``, their costs, and a probe that has chosen what to measure."""
    programs, costs = {variant: TimedProgram(each) for variant, each in seconds.items()}, CostModel()
    probe = CostProbe(programs, costs)
    probe.choose(programs)
    return programs, costs, probe


SMALL, LARGE = Variant(16, 0), Variant(32, 0)


@pytest.mark.parametrize(("seconds", "num_times"), [(0.0321, 1), (0.0339, 2)])
def test_a_call_that_is_dear_by_itself_is_measured_twice(seconds, num_times, monkeypatch):
    _, costs, probe = probe_of({SMALL: seconds, LARGE: 0.03})
    times = measured_times(probe, monkeypatch)
    measured_all(probe)
    assert times.count(SMALL) == num_times
    assert times.count(LARGE) == 1
    assert costs(SMALL) == seconds


def test_a_slower_second_time_is_not_believed(monkeypatch):
    programs, costs, probe = probe_of({SMALL: 0.05, LARGE: 0.03})
    times = measured_times(probe, monkeypatch)
    measured_until(probe, times, LARGE)
    assert times == [SMALL, LARGE]
    assert probe.num_left == 1, "the second time"
    programs[SMALL].seconds = 0.07
    measured_all(probe)
    assert times == [SMALL, LARGE, SMALL]
    assert costs(SMALL) == 0.05


def test_whoever_asks_sees_what_is_left_until_the_second_time_is_over(monkeypatch):
    _, _, probe = probe_of({SMALL: 0.05, LARGE: 0.03})
    compare, left = probe.slower_than_larger, []
    monkeypatch.setattr(probe, "slower_than_larger", lambda: left.append(probe.num_left) or compare())
    measured_all(probe)
    assert left == [1], "as another thread sees it meanwhile"


def test_what_is_chosen_before_the_second_time_is_measured_too(monkeypatch):
    added = Variant(64, 0)
    programs, costs, probe = probe_of({SMALL: 0.05, LARGE: 0.03})
    times = measured_times(probe, monkeypatch)
    measured_until(probe, times, LARGE)
    programs[added] = TimedProgram(0.04)
    programs[SMALL].seconds = 0.02
    probe.choose(programs)
    told = []
    probe.when_done(lambda: told.append(costs.measured))
    measured_all(probe)
    assert times[2:] in ([added, SMALL], [SMALL, added])
    assert told == [{SMALL: 0.02, LARGE: 0.03, added: 0.04}]


def test_a_choice_that_finds_nothing_new_does_not_end_the_second_time(monkeypatch):
    programs, costs, probe = probe_of({SMALL: 0.05, LARGE: 0.03})
    times, told = measured_times(probe, monkeypatch), []
    probe.when_done(lambda: told.append(costs.measured))
    measured_until(probe, times, LARGE)
    programs[SMALL].seconds = 0.02
    probe.choose(programs)
    measured_all(probe)
    assert told == [{SMALL: 0.02, LARGE: 0.03}]


def test_the_end_is_told_too_if_calls_of_requests_have_measured_what_was_left(monkeypatch):
    programs, costs, probe = probe_of({SMALL: 0.02, LARGE: 0.03})
    told = []
    probe.when_done(lambda: told.append(costs.measured))
    probe.measure_next(lambda: False)
    for _ in range(STABLE_CALLS):
        costs.update(LARGE, 0.03)
    probe.choose(programs)
    assert not probe.num_left
    measured_all(probe)
    assert told == [{SMALL: 0.02, LARGE: pytest.approx(0.03)}]


def test_calls_of_a_new_program_are_not_compared_with_the_one_that_it_replaced():
    programs, costs, probe = probe_of({SMALL: 0.01, LARGE: 0.03})
    measured_all(probe)
    costs.doubt(SMALL)
    probe.choose(programs)
    for _ in range(2 * FIRST_CALLS):
        costs.update(SMALL, 0.06)
        probe.note_call(SMALL)
    assert costs.is_stable(LARGE)


def test_the_lower_value_is_not_that_of_a_program_which_was_replaced(monkeypatch):
    programs, costs, probe = probe_of({SMALL: 0.01, LARGE: 0.03})
    measured_all(probe)
    programs[SMALL].seconds = 0.06
    costs.doubt(SMALL)
    probe.choose(programs)
    times = measured_times(probe, monkeypatch)
    measured_all(probe)
    assert times == [SMALL, SMALL]
    assert costs(SMALL) == 0.06


def test_a_chunk_is_not_compared_with_a_step_which_follows_its_like():
    chunk, step = Variant(8, 64, 4), Variant(8, 64, 8)
    programs, costs = {chunk: TimedProgram(0.015), step: TimedProgram(0.01)}, CostModel()
    probe = CostProbe(programs, costs)
    probe.choose(programs)
    measured_all(probe)
    assert programs[chunk].num_runs == 5, "it is measured once"


def test_what_the_warm_up_measured_is_measured_again():
    costs = CostModel({VARIANTS[1]: 0.05})  # of a blob set: what its warm-up measured
    costs.update(VARIANTS[0], 0.09)
    probe = CostProbe({VARIANTS[0]: TimedProgram(0.03), VARIANTS[1]: TimedProgram(0.01)}, costs)
    probe.choose(VARIANTS[:2])
    while not probe.is_done:
        probe.measure_next(lambda: False)
    assert costs.measured == {VARIANTS[0]: 0.03, VARIANTS[1]: 0.01}
    for _ in range(STABLE_CALLS):
        costs.update(VARIANTS[2], 0.02)
    probe.choose(VARIANTS[:3])
    assert probe.is_done
    costs.doubt(VARIANTS[0])
    probe.choose(VARIANTS[:3])
    assert probe.num_left == 1, "its program was replaced"
    probe.pause()
    assert probe.is_done


def adopting(factor):
    """Return programs, costs of an earlier process that were ``factor`` times as high, and a probe that has chosen."""
    programs, costs = {variant: TimedProgram(true_cost(variant)) for variant in VARIANTS}, CostModel()
    wanted = worth_measuring(VARIANTS)
    costs.adopt({variant: factor * true_cost(variant) for variant in wanted})
    probe = CostProbe(programs, costs)
    probe.choose(programs)
    return programs, costs, probe


@pytest.mark.parametrize("factor", [1.0, 1.2, 1 / 1.2])
def test_costs_of_an_earlier_process_are_kept_while_the_machine_is_the_same(factor):
    programs, costs, probe = adopting(factor)
    wanted = worth_measuring(VARIANTS)
    assert costs.adopted == set(wanted)
    assert probe.num_left == NUM_CHECKED
    while not probe.is_done:
        probe.measure_next(lambda: False)
    checked = wanted[:NUM_CHECKED]
    assert costs.adopted == set(wanted) - set(checked)
    for variant in wanted:
        expected = true_cost(variant) if variant in checked else factor * true_cost(variant)
        assert costs(variant) == pytest.approx(expected), variant
    assert set(costs.stable) == set(wanted)
    probe.choose(programs)
    assert probe.is_done, "they are checked once"


@pytest.mark.parametrize("factor", [1.5, 1 / 1.5])
def test_costs_of_an_earlier_process_are_measured_again_if_the_machine_has_changed(factor):
    _, costs, probe = adopting(factor)
    while not probe.is_done:
        probe.measure_next(lambda: False)
    assert not costs.adopted
    for variant in worth_measuring(VARIANTS):
        assert costs(variant) == true_cost(variant), variant


def test_one_call_that_was_disturbed_is_no_change_of_the_machine():
    programs, costs, probe = adopting(1.0)
    programs[worth_measuring(VARIANTS)[0]].seconds *= 3
    while not probe.is_done:
        probe.measure_next(lambda: False)
    assert len(costs.adopted) == len(worth_measuring(VARIANTS)) - NUM_CHECKED


def test_the_end_of_measuring_is_told_once():
    programs, costs = {variant: TimedProgram(true_cost(variant)) for variant in VARIANTS}, CostModel()
    probe, told = CostProbe(programs, costs), []
    probe.when_done(lambda: told.append(set(costs.stable)))
    probe.measure_next(lambda: False)
    assert not told
    probe.choose(programs)
    while not probe.is_done:
        assert not told
        probe.measure_next(lambda: False)
    assert told == [set(worth_measuring(VARIANTS))]
    probe.measure_next(lambda: False)
    assert len(told) == 1


def test_nothing_is_chosen_of_sizes_that_only_run_without_a_past():
    assert worth_measuring([Variant(16, 0, 4), Variant(1, 64)]) == [Variant(1, 64)]


def test_a_run_that_is_needed_elsewhere_is_repeated_later():
    programs, costs = {VARIANTS[0]: TimedProgram(0.5)}, CostModel()
    probe = CostProbe(programs, costs)
    probe.choose(programs)
    probe.measure_next(lambda: True)
    assert not probe.is_done
    assert not costs.measured
    probe.measure_next(lambda: False)
    assert costs.measured == {VARIANTS[0]: 0.5}
    assert programs[VARIANTS[0]].num_runs == 5, "three of the variant, each after another call"


def test_a_prompt_is_timed_after_a_call_of_another_size_and_a_decode_step_after_its_like():
    calls = []

    class Program:
        def __init__(self, variant):
            self.variant, self.buffers = variant, SimpleNamespace(stand_in=lambda: None)

        def run(self):
            calls.append(self.variant)
            return 0.01 if calls[-2:-1] == [self.variant] else 0.015

    decode, small, large = Variant(2, 64, 2), Variant(16, 0), Variant(32, 0)
    programs, costs = {variant: Program(variant) for variant in (decode, small, large)}, CostModel()
    probe = CostProbe(programs, costs)
    probe.choose(programs)
    while not probe.is_done:
        probe.measure_next(lambda: False)
    assert costs.measured == {small: 0.015, large: 0.015, decode: 0.01}


def test_a_variant_that_fails_is_left_out():
    programs, costs = {VARIANTS[0]: TimedProgram(0.5, RuntimeError("the device is gone"))}, CostModel()
    probe = CostProbe(programs, costs)
    probe.choose(programs)
    probe.measure_next(lambda: False)
    assert probe.is_done
    assert not costs.measured


def test_long_calls_are_not_measured_because_a_request_would_wait_for_them():
    quick, other, long = Variant(16, 0), Variant(32, 0), Variant(64, 0)
    costs = CostModel({quick: 0.05, other: 0.05, long: 0.5})
    programs = {quick: TimedProgram(0.02), other: TimedProgram(0.03), long: TimedProgram(0.5)}
    probe = CostProbe(programs, costs)
    probe.choose(programs)
    while not probe.is_done:
        probe.measure_next(lambda: False)
    assert costs.measured[quick] == 0.02
    assert costs.measured[long] == 0.5
    assert not programs[long].num_runs


def test_costs_that_cannot_be_kept_do_not_end_the_engines_thread():
    programs = {variant: TimedProgram(true_cost(variant)) for variant in VARIANTS}
    probe, told = CostProbe(programs, CostModel()), []

    def keep():
        told.append(1)
        raise OSError("no space left")

    probe.when_done(keep)
    probe.choose(programs)
    while not probe.is_done:
        probe.measure_next(lambda: False)
    assert told == [1]


def test_the_engine_measures_when_it_rests_and_stops_for_a_request(monkeypatch):
    monkeypatch.setattr(cost_probe, "IDLE_SECONDS", 0.01)
    engine = fake_engine(make_policy("fcfs"))
    core = engine.core
    core.serving.device = replace(core.device, options=replace(core.device.options, measure_costs=True))
    has_begun, may_go_on = threading.Event(), threading.Event()

    def measure_next(is_needed):
        has_begun.set()
        assert may_go_on.wait(20)
        assert is_needed(), "the request that was submitted meanwhile"

    monkeypatch.setattr(engine.core, "measure_next", measure_next)
    first, second = fake_request([1, 2, 3], 2), fake_request([4, 5, 6], 3)
    engine.submit_state(first)
    assert has_begun.wait(20), "the engine never rested"
    engine.submit_state(second)
    may_go_on.set()
    while second.queue.get(timeout=20) is not None and len(second.tokens) < 6:
        pass
    assert second.tokens == fake_answer([4, 5, 6], 3)
    engine.close()
    assert not engine.step_host.thread.is_alive()


@pytest.mark.parametrize(("others", "least"), [(1.0, 9.0), (0.0, 0.0)])
def test_beside_other_work_a_tenth_of_the_time_is_measured(monkeypatch, others, least):
    monkeypatch.setattr(cost_probe, "IDLE_SECONDS", 0.01)
    engine = fake_engine(make_policy("fcfs"))
    core = engine.core
    core.serving.device = replace(core.device, options=replace(core.device.options, measure_costs=True))
    monkeypatch.setattr(engine.step_host.rests.use, "share", lambda with_own: others)
    times, is_done = [], threading.Event()

    def measure_next(is_needed):
        times.append(time.perf_counter())
        time.sleep(0.02)
        times.append(time.perf_counter())
        if len(times) == 6:
            is_done.set()

    monkeypatch.setattr(core, "measure_next", measure_next)
    engine.submit_state(fake_request([1, 2, 3], 2))
    assert is_done.wait(20)
    engine.close()
    seconds = [begin - end for end, begin in zip(times[1:5:2], times[2:5:2], strict=True)]
    assert all(each >= least * 0.02 for each in seconds)
    assert least or all(each < 9 * 0.02 for each in seconds)


class ScriptedUse:
    """The use of the processors by other processes, and by this one while the engine rests."""

    def __init__(self, others, own):
        self.others, self.own, self.num_begun = others, own, 0

    def begin(self):
        self.num_begun += 1

    def share(self, with_own):
        return self.others + (self.own if with_own else 0.0)


class Moments:
    """Rests on a clock that only measurements move."""

    def __init__(self, others, own):
        self.now = 100.0
        self.rests = cost_probe.Rests(clock=lambda: self.now)
        self.rests.use = self.use = ScriptedUse(others, own)

    def begin(self, is_awaited=False):
        self.rests.begin()
        return self.rests.seconds(is_awaited)

    def measure(self, seconds):
        def run():
            self.now += seconds

        return self.rests.measure(run)


def test_what_runs_in_this_process_during_a_rest_counts_and_the_engines_own_measurements_do_not():
    moments = Moments(0.0, 1.0)
    assert moments.begin() == 0.5
    assert moments.measure(0.1), "another pipeline of this process is at work"
    assert moments.begin() == pytest.approx(0.9)
    assert moments.begin() == pytest.approx(0.9), "a request came, and ended, before it was over"
    assert moments.begin(is_awaited=True) == 0.5
    moments.now += 0.9
    moments.use.own = 0.0
    assert not moments.measure(0.1)
    moments.use.own = 1.0
    assert not moments.measure(0.1), "the measurement before it"
    assert moments.use.num_begun == 4, "each rest sees what runs in it alone"
    assert moments.begin() == 0.5


def test_a_rest_is_never_longer_than_its_limit():
    moments = Moments(1.0, 0.0)
    moments.begin()
    assert moments.measure(5.0)
    assert moments.begin() == pytest.approx(30.0)
    moments.now += 30.0
    assert moments.begin() == 0.5, "it is over"


def test_measurements_end_after_a_while_for_a_rest():
    """Only a rest shows that another pipeline of this process has begun to work."""
    moments = Moments(0.0, 0.0)
    moments.begin()
    assert not moments.measure(1.5)
    assert moments.measure(0.6)
    assert moments.begin() == 0.5
    assert not moments.measure(1.5)


def test_costs_that_somebody_waits_for_are_measured_without_a_rest(monkeypatch):
    monkeypatch.setattr(cost_probe, "IDLE_SECONDS", 0.01)
    monkeypatch.setattr(cost_probe, "SERIES_SECONDS", 0.02)
    engine = fake_engine(make_policy("fcfs"))
    core = engine.core
    core.serving.device = replace(core.device, options=replace(core.device.options, measure_costs=True))
    engine.step_host.rests.use = ScriptedUse(1.0, 0.0)
    is_done, begun = threading.Event(), []

    def measure_next(is_needed):
        begun.append(engine.step_host.rests.use.num_begun)
        time.sleep(0.02)
        if len(begun) == 6:
            is_done.set()

    monkeypatch.setattr(core, "measure_next", measure_next)
    with engine.step_host.costs_awaited():
        engine.submit_state(fake_request([1, 2, 3], 2))
        assert is_done.wait(20)
    engine.close()
    assert len(set(begun[:6])) == 1


def measuring_engine(monkeypatch, share, measure_next):
    """Return an engine that rests for 0.01 s between measurements, and longer beside other work."""
    monkeypatch.setattr(cost_probe, "IDLE_SECONDS", 0.01)
    engine = fake_engine(make_policy("fcfs"))
    core = engine.core
    core.serving.device = replace(core.device, options=replace(core.device.options, measure_costs=True))
    engine.step_host.rests.use = ScriptedUse(share, 0.0)
    monkeypatch.setattr(core, "measure_next", measure_next)
    engine.submit_state(fake_request([1, 2, 3], 2))
    return engine


def test_a_long_rest_ends_for_those_who_wait_for_the_costs_and_at_the_end(monkeypatch):
    monkeypatch.setattr(cost_probe, "SHARE_WHILE_BUSY", 1e-4)
    measured = queue.SimpleQueue()
    engine = measuring_engine(monkeypatch, 1.0, lambda is_needed: time.sleep(0.02) or measured.put(time.monotonic()))
    measured.get(timeout=20)
    with pytest.raises(queue.Empty):
        measured.get(timeout=0.3)
    assert engine.step_host.rests.seconds() == pytest.approx(30, abs=1)
    with engine.step_host.costs_awaited():
        for _ in range(3):
            measured.get(timeout=10)
    begin = time.monotonic()
    engine.close()
    assert time.monotonic() - begin < 10


def test_after_an_error_of_a_measurement_nothing_is_measured_and_nothing_is_lost(monkeypatch, caplog):
    """It ended the engine's thread: later requests waited forever."""
    failed = queue.SimpleQueue()

    def fail(is_needed):
        failed.put(None)
        raise RuntimeError("a fault of ours")

    engine = measuring_engine(monkeypatch, 0.0, fail)
    failed.get(timeout=20)
    with pytest.raises(queue.Empty):
        failed.get(timeout=0.3)
    assert "costs are no longer measured" in caplog.text
    request = fake_request([1, 2, 3, 6], 3)
    engine.submit_state(request)
    engine.close(drain=True)
    assert request.tokens == fake_answer([1, 2, 3, 6], 3)
    assert request.num_cached == 3, "the prefix cache is kept"


def test_two_engines_of_a_process_do_not_measure_at_once():
    first, second, awaited = Moments(0.0, 0.0), Moments(0.0, 0.0), []
    for each in (first, second):
        each.begin()

    def run():
        assert second.measure(0.1), "it rests again"
        assert second.now == 100.0
        awaited.append(second.rests.measure(lambda: awaited.append("run"), is_awaited=True))

    assert not first.rests.measure(run)
    assert awaited == ["run", False], "somebody waits for it"
    assert not second.measure(0.1)
    with pytest.raises(ZeroDivisionError):
        first.rests.measure(lambda: 1 / 0)
    assert not second.measure(0.1), "an error ends a measurement"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_child_that_was_forked_during_a_measurement_measures():
    def fork():
        child = os.fork()
        if not child:
            os._exit(0 if not Moments(0.0, 0.0).measure(0.1) else 1)
        codes.append(os.waitpid(child, 0)[1])

    moments, codes = Moments(0.0, 0.0), []
    moments.begin()
    moments.rests.measure(fork)
    assert codes == [0]
