"""Tests which costs an encoder's runner learns from its calls, and which of them later processes get."""

import pytest

from staticllm.core import EncoderShape, EncoderVariant
from staticllm.pipelines.costs.model import NEW_SHARE, STABLE_CALLS
from staticllm.pipelines.embedding.encoder_runner import EncoderRunner

SMALL, LARGE = EncoderVariant(1, 16, 2), EncoderVariant(2, 64, 16)


class Program:
    """Stands for a program, whose calls take the given seconds."""

    def __init__(self, *seconds):
        self._seconds = list(seconds)

    def run(self):
        return self._seconds.pop(0)


@pytest.fixture
def runner():
    return EncoderRunner(EncoderShape("embeddings", 2, (), 64), dict.fromkeys((SMALL, LARGE)), "mean")


def test_the_least_of_several_runs_at_warm_up_is_kept_for_later_processes(runner, monkeypatch):
    programs = {SMALL: Program(0.01, 0.004, 0.002, 0.003), LARGE: Program(0.5)}
    monkeypatch.setattr(runner, "program_of", programs.__getitem__)
    runner.warm_up()
    assert runner.costs.stable == {SMALL: 0.002, LARGE: 0.5}


def test_a_variant_that_one_text_has_measured_is_kept_for_later_processes(runner):
    runner.costs.set(SMALL, 0.002)
    runner.measure(LARGE, 0.001)
    assert runner.costs.stable == {SMALL: 0.002, LARGE: 0.001}


def test_a_first_run_that_prepares_does_not_make_a_variant_dear(runner):
    runner.costs.set(SMALL, 0.002)
    estimate = runner.cost(LARGE)
    runner.measure(LARGE, 1000.0)
    assert runner.cost(LARGE) == estimate


def test_the_next_faster_runs_replace_the_first_one_and_later_ones_are_mixed(runner):
    runner.measure(LARGE, runner.cost(LARGE))
    seconds = runner.cost(LARGE)
    for _ in range(STABLE_CALLS - 1):
        seconds /= 2
        runner.measure(LARGE, seconds)
        assert runner.costs.stable == {LARGE: seconds}
    runner.measure(LARGE, seconds / 2)
    assert runner.cost(LARGE) == pytest.approx(seconds * (1 - NEW_SHARE / 2))
    runner.costs.set(SMALL, 1.0)  # measured at leisure
    runner.measure(SMALL, 0.5)
    assert runner.cost(SMALL) == pytest.approx(1 - NEW_SHARE / 2)
