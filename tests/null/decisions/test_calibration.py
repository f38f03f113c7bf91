"""A temperature is fitted to examples with known answers, and changes nothing where it would not help."""

from pathlib import Path

import numpy as np
import pytest

from staticllm.errors import ConfigError
from staticllm.pipelines.decisions.calibration import (
    FILE_NAME,
    LEAST,
    MOST,
    Calibration,
    Example,
    fitted,
    quality_of,
)
from staticllm.pipelines.decisions.questions import Choice, Predicate, Score


def examples(heat, count=4000, seed=0):
    """Return examples whose answers have the probabilities of their scores at ``heat``."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        scores = rng.normal(0, 3, 4)
        weights = np.exp(scores / heat)
        found.append(Example("choice", tuple(scores), int(rng.choice(4, p=weights / weights.sum()))))
    return found


@pytest.mark.parametrize("heat", [0.5, 1.7, 4.0])
def test_the_temperature_of_the_examples_is_found(heat):
    found = fitted(examples(heat))
    assert found == pytest.approx(heat, rel=0.1)
    held_out = examples(heat, seed=1)
    before, after = quality_of(held_out), quality_of(held_out, found)
    assert after.log_loss < before.log_loss and after.calibration_error < before.calibration_error
    assert after.accuracy == before.accuracy, "an order of options stays"


def test_a_temperature_that_does_not_help_is_one_and_bounds_hold():
    assert fitted([Example("choice", (0.0, 0.0), 0)] * 20) == 1.0
    sure = [Example("choice", (1.0, 0.0), 0)] * 20
    assert fitted(sure) == pytest.approx(LEAST)
    wrong = [Example("choice", (1.0, 0.0), each % 2) for each in range(20)]
    assert fitted(wrong) == pytest.approx(MOST)


def test_quality_counts_what_its_names_say():
    found = quality_of(
        [Example("choice", tuple(np.log([0.8, 0.2])), 0), Example("choice", tuple(np.log([0.6, 0.4])), 1)]
    )
    assert (found.num, found.accuracy) == (2, 0.5)
    assert found.brier == pytest.approx(((0.2**2 * 2) + (0.6**2 * 2)) / 2)
    assert found.log_loss == pytest.approx(-(np.log(0.8) + np.log(0.4)) / 2)
    assert found.calibration_error == pytest.approx(0.5 * 0.2 + 0.5 * 0.6)


def test_a_calibration_is_written_and_read(tmp_path):
    made = Calibration({"choice": 1.5, "predicate": 0.7})
    made.write(tmp_path / FILE_NAME)
    found = Calibration.read(tmp_path)
    assert found == made
    assert found.temperature_of(Choice("a", ["b", "c"])) == 1.5
    assert found.temperature_of(Predicate("a")) == 0.7
    assert found.temperature_of(Score("a", ["b", "c"])) == 1


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"temperatures": 3}', '{"temperatures": {"choice": "1"}}', '{"temperatures": {"choice": 0}}',
             '{"temperatures": {"mood": 1}}', '{"temperatures": {"choice": true}}']
)  # fmt: skip
def test_a_file_that_is_none_is_refused(text, tmp_path):
    (tmp_path / "file.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError):
        Calibration.read(tmp_path / "file.json")


def test_a_missing_file_names_the_command():
    with pytest.raises(ConfigError, match="staticllm calibrate"):
        Calibration.read(Path("nowhere.json"))
