"""Tests ``staticllm decide`` and ``staticllm calibrate``: questions, states, forms of output, and mistakes."""

from __future__ import annotations

import json

import pytest
from support import command_line

from staticllm import Calibration, demo_model_path
from staticllm.pipelines.decisions.calibration import FILE_NAME

F32 = ("--precision", "f32")
STATE = "Parcel 88 arrived broken."
CHOICE = ("--choice", "Which desk?", "money=refunds, parcels, praise")


@pytest.fixture
def model():
    return demo_model_path()


def answers(done):
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["answers"]


@command_line.IN_BOTH
def test_questions_of_all_types_have_bars_and_json(staticllm, model):
    asked = ("--predicate", "It is broken.", *CHOICE, "--score", "How urgent?", "low, high")
    done = staticllm("decide", model, STATE, *asked, *F32)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if not line.startswith(" ")][:3] == [
        "It is broken.",
        "Which desk?",
        "How urgent?",
    ]
    assert done.stdout.count("%") == 2 + 3 + 2
    found = answers(staticllm("decide", model, STATE, *asked, *F32, "--json"))
    assert [answer["type"] for answer in found] == ["predicate", "choice", "score"]
    assert [each["value"] for each in found[1]["probabilities"]] == ["money", "parcels", "praise"]


def test_the_state_comes_from_an_argument_a_file_or_stdin(staticllm, model, tmp_path):
    (tmp_path / "state.txt").write_text(STATE, encoding="utf-8")
    given = answers(staticllm("decide", model, STATE, *CHOICE, *F32, "--json"))
    assert answers(staticllm("decide", model, "-f", tmp_path / "state.txt", *CHOICE, *F32, "--json")) == given
    assert answers(staticllm("decide", "-m", model, *CHOICE, *F32, "--json", stdin=STATE)) == given


def test_questions_come_from_a_file(staticllm, model, tmp_path):
    questions = [{"type": "predicate", "name": "broken", "instructions": "It is broken."}]
    (tmp_path / "questions.json").write_text(json.dumps(questions), encoding="utf-8")
    (found,) = answers(staticllm("decide", model, STATE, "--questions", tmp_path / "questions.json", *F32, "--json"))
    assert found["name"] == "broken"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((), "no question"),
        (("--choice", "Which?", "one"), "has 1 options"),
        (("--choice", "Which?", "one,one"), "again"),
        (("--questions", "nowhere.json"), "cannot be read"),
        (("--predicate", "a", "--calibration", "nowhere"), "staticllm calibrate"),
        (("--predicate", "a", "-f", "nowhere.txt"), "leave one out"),
        (("--predicate", "a", "--orders", "9"), "1<=x<=4"),
    ],
)
def test_mistakes_are_told_in_one_line(staticllm, model, arguments, text):
    done = staticllm("decide", model, STATE, *arguments, *F32)
    assert done.returncode in (1, 2) and text in done.stderr
    assert "Traceback" not in done.stderr


def test_a_calibration_is_fitted_told_and_used(staticllm, model, tmp_path):
    examples = [
        {
            "state": f"Parcel {number} arrived {'broken' if number % 3 else 'whole'}.",
            "question": {"type": "predicate", "instructions": "It is broken."},
            "answer": bool(number % 3),
        }
        for number in range(40)
    ]
    file = tmp_path / "examples.jsonl"
    file.write_text("".join(json.dumps(each) + "\n" for each in examples), encoding="utf-8")
    done = staticllm("calibrate", "-m", model, file, "-o", tmp_path / FILE_NAME, *F32)
    assert done.returncode == 0, done.stderr
    assert [line.split("|")[2].strip() for line in done.stdout.splitlines() if line.startswith("| predicate")] == [
        "before",
        "after",
    ]
    heat = Calibration.read(tmp_path).temperatures["predicate"]
    asked = ("decide", model, STATE, "--predicate", "It is broken.", *F32, "--json")
    plain, hot = answers(staticllm(*asked)), answers(staticllm(*asked, "--calibration", tmp_path))
    assert (plain != hot) == (heat != 1)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{", "line 1"),
        ('{"state": "a"}', "line 1"),
        (
            '{"state": "a", "question": {"type": "predicate", "instructions": "b"}, "answer": "yes"}',
            "none of True, False",
        ),
        ('{"state": "a", "question": {"type": "predicate", "instructions": "b"}, "answer": true}', "too few examples"),
    ],
)
def test_examples_that_are_none_are_refused_with_their_line(staticllm, model, tmp_path, line, text):
    file = tmp_path / "examples.jsonl"
    file.write_text(line + "\n", encoding="utf-8")
    done = staticllm("calibrate", "-m", model, file, "-o", tmp_path / FILE_NAME, *F32)
    assert done.returncode == 1 and text in done.stderr
    assert not (tmp_path / FILE_NAME).exists()
