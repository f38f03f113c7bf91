"""Tests the queue depth estimator on devices that are lines: fits, depths, stress tests, fine-tuning, and the file."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from staticllm.errors import ConfigError
from staticllm.pipelines.embedding.queue.loads import Line
from staticllm.pipelines.embedding.windve.queue_depth import (
    MAX_DEPTH,
    Estimate,
    Recalibration,
    choose_levels,
    depth,
    estimate,
    fine_tune,
    fit,
    profile,
    read_estimates,
    stress_test,
    sustained_rate,
    write_estimates,
)

V100, XEON = Line(0.0179, 0.27), Line(0.082, 0.32)
positive = st.floats(1e-4, 1.0)


@given(alpha=positive, beta=st.floats(0, 1.0), limit_s=st.floats(0.1, 5.0))
def test_the_depth_is_the_largest_concurrency_within_the_limit(alpha, beta, limit_s):
    line = Line(alpha, beta)
    found = depth(line, limit_s)
    assert found == 0 or line.seconds(found) <= limit_s + 1e-6
    assert line.seconds(found + 1) > limit_s - 1e-6


@given(
    main=positive,
    slower=st.floats(1, 20),
    beta=st.floats(0, 0.5),
    more=st.floats(0, 0.5),
    limits=st.lists(st.floats(1, 9), min_size=2, max_size=2),
)
def test_the_ratio_of_depths_is_bounded_by_that_of_alphas_and_grows_with_the_limit(main, slower, beta, more, limits):
    """Equations 19 and 23, before rounding down."""
    first, second = Line(main, beta), Line(main * slower, beta + more)
    ratios = [(limit - second.beta) / second.alpha / ((limit - first.beta) / first.alpha) for limit in sorted(limits)]
    assert ratios[0] <= ratios[1] + 1e-9
    assert ratios[1] <= first.alpha / second.alpha + 1e-9
    low, high = (depth(second, limit) for limit in sorted(limits))
    assert low <= high


@given(main=st.floats(1e-3, 0.1), limit_s=st.floats(1, 4), count=st.integers(1, 3), late=st.floats(0, 1))
def test_at_the_sustained_rate_no_query_exceeds_the_limit(main, limit_s, count, late):
    line = Line(main, 0.1)
    rate = sustained_rate(line, limit_s)
    assert line.seconds(rate * limit_s / 2) * 2 <= limit_s + 1e-9
    assert rate * limit_s / 2 < depth(line, limit_s) + 1, "a burst may be larger"


def test_published_rates():
    assert sustained_rate(V100, 1.0) == pytest.approx(25.7, abs=0.05)
    assert depth(V100, 1.0) == 40
    assert sustained_rate(Line(0.01, 0.5), 1.0) == 0
    assert (depth(Line(0.0, 0.5), 1.0), depth(Line(0.1, 1.5), 1.0)) == (MAX_DEPTH, 0)


@given(alpha=positive, beta=st.floats(0, 1.0), limit_s=st.floats(0.1, 5.0), tuned=st.none() | st.integers(0, 500))
def test_evenly_arriving_queries_need_no_fewer_machines_than_those_in_lockstep(alpha, beta, limit_s, tuned):
    found = Estimate("NPU", Line(alpha, beta), 1.0, limit_s, tuned)
    assert 0 <= found.sustained_rate <= found.depth / limit_s


def test_the_sustained_rate_is_that_of_the_line_through_the_fine_tuned_depth():
    """80 queries took 1.8 s with all devices running, where the line says 0.9 s: each query takes twice as long."""
    line = Line(0.01, 0.1)
    tuned = Estimate("NPU", line, 1.0, 1.8, 80)
    assert tuned.sustained_rate == pytest.approx(sustained_rate(Line(0.02, 0.2), 1.8))
    assert tuned.sustained_rate < replace(tuned, tuned=None).sustained_rate / 2
    assert replace(tuned, tuned=depth(line, 1.8)).sustained_rate == replace(tuned, tuned=None).sustained_rate


@given(alpha=positive, beta=st.floats(0, 1.0), seed=st.integers(0, 99))
def test_a_fit_to_the_least_of_noisy_runs_finds_the_line(alpha, beta, seed):
    rng = np.random.default_rng(seed)
    exact = {level: [Line(alpha, beta).seconds(level)] for level in (1, 3, 9, 20)}
    noisy = {level: [*(seconds[0] * (1 + rng.exponential(0.5, 4))), *seconds] for level, seconds in exact.items()}
    line, r2 = fit(noisy)
    assert (line.alpha, line.beta) == (pytest.approx(alpha, abs=1e-6), pytest.approx(beta, abs=1e-6))
    assert r2 == pytest.approx(1.0, abs=1e-6)


@given(st.dictionaries(st.integers(1, 50), st.floats(1e-3, 10), min_size=2, max_size=6))
def test_no_part_of_a_fit_is_negative_and_none_fits_better(points):
    line, r2 = fit({level: [seconds] for level, seconds in points.items()})
    assert line.alpha >= 0
    assert line.beta >= 0
    assert r2 <= 1 + 1e-9

    def error(alpha, beta):
        return sum((alpha * level + beta - seconds) ** 2 for level, seconds in points.items())

    best = error(line.alpha, line.beta)
    for alpha, beta in ((1.05, 1.0), (0.95, 1.0), (1.0, 1.05), (1.0, 0.95)):
        assert best <= error(line.alpha * alpha, line.beta * beta) + 1e-9
    levels, seconds = np.array(list(points)), np.array(list(points.values()))
    assert best <= error(0.0, seconds.mean()) + 1e-9
    assert best <= error((levels * seconds).sum() / (levels**2).sum(), 0.0) + 1e-9


@pytest.mark.parametrize("points", [{1: [0.1]}, {1: [0.1], 2: []}, {1: [0.1], 2: [0.0]}, {1: [0.1], 2: [math.nan]}])
def test_a_profile_without_a_line_is_refused(points):
    with pytest.raises(ConfigError, match="a profile"):
        fit(points)


def test_a_device_is_profiled_up_to_its_limit_in_turns():
    calls = []

    def run(concurrency):
        calls.append(concurrency)
        return V100.seconds(concurrency)

    assert choose_levels(V100.seconds, 1.0) == [1, 17, 32, 48, 64]
    assert choose_levels(Line(2.0, 1.0).seconds, 1.0) == [1, 2]
    assert set(profile(run, [1, 4], 3)) == {1, 4}
    assert calls == [1, 4] * 3
    found = estimate("V100", V100.seconds, 1.0)
    assert (found.depth, found.r2) == (40, pytest.approx(1.0))
    with pytest.raises(ConfigError, match="a latency limit of 0 s"):
        estimate("V100", V100.seconds, 0.0)


def test_a_stress_test_misses_up_to_a_step():
    assert stress_test(V100.seconds, 2.0) == 96
    assert stress_test(XEON.seconds, 2.0) == 16
    assert stress_test(XEON.seconds, 2.0, step=1) == 20
    assert stress_test(XEON.seconds, 0.5) == 0
    assert stress_test(lambda concurrency: 0.1, 1.0, most=20) == 16


class Together:
    """Two devices that slow each other down: each takes ``shared`` times as long while the other runs."""

    def __init__(self, lines, shared):
        self.lines, self.shared, self.num_runs = lines, shared, 0

    def __call__(self, depths):
        self.num_runs += 1
        both = all(depths)
        return [
            line.seconds(n) * (self.shared if both else 1.0) if n else 0.0
            for line, n in zip(self.lines, depths, strict=True)
        ]


@given(
    lines=st.tuples(
        st.tuples(st.floats(0.002, 0.1), st.floats(0, 0.4)), st.tuples(st.floats(0.002, 0.1), st.floats(0, 0.4))
    ),
    shared=st.floats(1.0, 1.3),
    wrong=st.floats(0.7, 1.4),
)
def test_fine_tuning_finds_the_largest_depths_of_devices_that_run_together(lines, shared, wrong):
    devices = [Line(*line) for line in lines]
    together = Together(devices, shared)
    guesses = [Estimate(str(n), Line(d.alpha * wrong, d.beta), 1.0, 1.0) for n, d in enumerate(devices)]
    tuned = [found.depth for found in fine_tune(together, guesses)]
    assume(together.num_runs < 64)
    assert together.num_runs <= 66
    assert max(together(tuned)) <= 1.0
    for device in (0, 1):
        more = [n + (index == device) for index, n in enumerate(tuned)]
        assert not tuned[device] or max(together(more)) > 1.0 - 1e-9


def test_fine_tuning_raises_no_device_at_the_cost_of_another():
    def run(depths):
        return [0.01 * depths[0] + 0.02 * depths[1], 0.02 * depths[1]]

    guesses = [Estimate("a", Line(0.01, 0.0), 1.0, 1.0, tuned=80), Estimate("b", Line(0.02, 0.0), 1.0, 1.0, tuned=5)]
    assert [found.depth for found in fine_tune(run, guesses)] == [90, 5], "the first device is raised first"


def test_fine_tuning_gives_up_on_a_device_that_is_always_late():
    guesses = [Estimate("a", V100, 1.0, 1.0), Estimate("b", XEON, 1.0, 1.0)]
    tuned = fine_tune(lambda depths: [V100.seconds(depths[0]), 9.0], guesses)
    assert [found.depth for found in tuned] == [40, 0]


def test_a_recalibration_follows_a_device_that_slows_down():
    followed = Recalibration(Estimate("V100", V100, 1.0, 2.0, tuned=90))
    for _ in range(60):
        followed.update(20, 2 * V100.seconds(20))
    assert followed.estimate.line.alpha == pytest.approx(2 * V100.alpha, rel=0.01)
    assert followed.estimate.depth == 90 * depth(Line(2 * V100.alpha, 2 * V100.beta), 2.0) // depth(V100, 2.0)
    followed.update(20, -1.0)
    assert followed.estimate.line.alpha == pytest.approx(2 * V100.alpha, rel=0.01)
    one = Recalibration(Estimate("V100", V100, 1.0, 2.0))
    one.update(20, 100 * V100.seconds(20))
    assert one.estimate.line.alpha > V100.alpha


FOUND = (Estimate("NPU", V100, 0.999, 2.0, 96), Estimate("CPU", replace(XEON, exponent=1.15), 0.99, 2.0))


def test_estimates_survive_a_file(tmp_path):
    path = tmp_path / "depths.json"
    assert read_estimates(path) == ()
    write_estimates(path, "model a on machine b", FOUND)
    assert read_estimates(path, "model a on machine b") == FOUND
    assert read_estimates(path) == FOUND
    assert read_estimates(path, "model a on machine c") == ()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": 2}, "version is 2: must be one of 1"),
        ({"devices": 3}, "devices is 3: must be array"),
        ({"alpha": -1}, "devices[0].alpha is -1: must be float >= 0.0"),
        ({"alpha": 10**400}, "devices[0].alpha is a whole number of 1329 bits: must be a number of at most 64 bits"),
        ({"beta": float("nan")}, "devices[0].beta is NaN: must be float"),
        ({"beta": True}, "devices[0].beta is True: must be float"),
        ({"r2": "x"}, "devices[0].r2 is 'x': must be float"),
        ({"tuned": 1.5}, "devices[0].tuned is 1.5: must be int | null"),
        ({"tuned": -1}, "devices[0].tuned is -1: must be int >= 0"),
        ({"limit_s": 0}, "devices[0].limit_s is 0: must be float > 0.0"),
        ({"alpha": 0, "beta": 0}, "alpha or beta of 'NPU' must be more than 0"),
        ({"name": ""}, "devices[0].name is '': must be str of length >= 1"),
        ({"name": "CPU"}, "names a device twice"),
    ],
)
def test_a_damaged_file_is_refused_in_one_line(tmp_path, change, said):
    path = tmp_path / "depths.json"
    write_estimates(path, "", FOUND)
    found = json.loads(path.read_text())
    (found if set(change) & {"version", "devices"} else found["devices"][0]).update(change)
    path.write_text(json.dumps(found))
    with pytest.raises(ConfigError, match=r"depths\.json") as error:
        read_estimates(path)
    assert said in str(error.value)
    assert str(error.value).endswith("delete the file, and the queue depths are measured again")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["another", None, 5])
def test_a_file_with_another_key_is_as_none_whatever_its_devices_are(tmp_path, key):
    path = tmp_path / "depths.json"
    write_estimates(path, "mine", FOUND)
    found = json.loads(path.read_text())
    found["key"] = key
    found["devices"][0]["alpha"] = -1
    path.write_text(json.dumps(found))
    assert read_estimates(path, "mine") == ()


@pytest.mark.parametrize("data", [b"", b"[" * 100_000, b"\xff", b"7" * 5000, b"[]", b'{"version": 1, "devices": [3]}'])
def test_bytes_that_are_not_estimates_are_refused(tmp_path, data):
    path = tmp_path / "depths.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="delete the file"):
        read_estimates(path)


def test_a_folder_or_a_huge_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_estimates(tmp_path)
    (tmp_path / "big").write_bytes(b" " * (1 << 21))
    with pytest.raises(ConfigError, match="at most 1048576 are read"):
        read_estimates(tmp_path / "big")
