"""Questions are checked before anything runs, and answers follow from probabilities by the published formulas."""

import math
import pickle

import pytest

from staticllm.pipelines.decisions.answers import (
    PredicateAnswer,
    Refusal,
    answer_of,
    choice_confidence,
    score_confidence,
    softmax,
)
from staticllm.pipelines.decisions.questions import (
    MAX_LEVELS,
    MAX_OPTIONS,
    MAX_QUESTIONS,
    Choice,
    Level,
    Option,
    Predicate,
    QuestionError,
    Score,
    checked,
)

GOOD = Predicate("It rains.")


def test_bare_values_become_options_and_levels():
    choice, score = checked(
        [Choice("Which?", ["a", True, Option("b", "more")]), Score("How much?", ["low", Level("high")])]
    )
    assert choice.options == (Option("a"), Option(True), Option("b", "more"))
    assert score.levels == (Level("low"), Level("high"))
    assert checked(GOOD) == (GOOD,), "one question alone"


@pytest.mark.parametrize(
    ("questions", "path"),
    [
        ([], ("questions",)),
        ([GOOD] * (MAX_QUESTIONS + 1), ("questions",)),
        ("text", ("questions",)),
        ([GOOD, 7], ("questions", 1)),
        ([Predicate(" ")], ("questions", 0, "instructions")),
        ([Predicate("half \ud83d")], ("questions", 0, "instructions")),
        ([Predicate("a", name=3)], ("questions", 0, "name")),
        ([Predicate("a", if_true="")], ("questions", 0, "if_true")),
        ([Choice("a", ["one"])], ("questions", 0, "choices")),
        ([Choice("a", "one")], ("questions", 0, "choices")),
        ([Choice("a", [str(number) for number in range(MAX_OPTIONS + 1)])], ("questions", 0, "choices")),
        ([Choice("a", ["one", 3])], ("questions", 0, "choices", 1, "value")),
        ([Choice("a", ["one", None])], ("questions", 0, "choices", 1, "value")),
        ([Choice("a", ["one", ""])], ("questions", 0, "choices", 1, "value")),
        ([Choice("a", ["one", "two", "one"])], ("questions", 0, "choices", 2, "value")),
        ([Choice("a", ["one", Option("two", 5)])], ("questions", 0, "choices", 1, "description")),
        ([Score("a", ["low"])], ("questions", 0, "levels")),
        ([Score("a", [str(number) for number in range(MAX_LEVELS + 1)])], ("questions", 0, "levels")),
        ([Score("a", ["low", "low"])], ("questions", 0, "levels", 1, "label")),
    ],
)
def test_a_question_that_cannot_be_asked_is_refused_with_its_place(questions, path):
    with pytest.raises(QuestionError) as caught:
        checked(questions)
    assert caught.value.path == ".".join(map(str, path))
    assert "\n" not in str(caught.value)
    assert pickle.loads(pickle.dumps(caught.value)).path == caught.value.path


def test_true_and_its_name_are_two_options():
    (choice,) = checked([Choice("a", [True, "true", "1"])])
    assert [type(option.value) for option in choice.options] == [bool, str, str]


@pytest.mark.parametrize(
    ("confidence", "probabilities", "expected"),
    [
        (choice_confidence, [0.8, 0.1, 0.1], 0.7),
        (choice_confidence, [1 / 3] * 3, 0),
        (choice_confidence, [1.0], 1),
        (score_confidence, [0.1, 0.1, 0.8], 0.55),
        (score_confidence, [0.4, 0.2, 0.4], 0),
        (score_confidence, [0, 1, 0], 1),
        (score_confidence, [1.0], 1),
    ],
)
def test_confidences_are_those_of_the_published_formulas(confidence, probabilities, expected):
    assert confidence(probabilities) == pytest.approx(expected, abs=1e-12)


def test_answers_name_the_first_of_the_most_probable_options():
    question = Choice("a", (Option(False), Option("b"), Option("c")), "desk")
    answer = answer_of(question, [0.2, 0.4, 0.4])
    assert (answer.name, answer.choice) == ("desk", "b")
    assert [(each.value, each.probability) for each in answer.probabilities] == [(False, 0.2), ("b", 0.4), ("c", 0.4)]
    score = answer_of(Score("a", (Level("low"), Level("mid"), Level("high"))), [0.25, 0.25, 0.5])
    assert score.score == 1.25
    assert [(each.label, each.value) for each in score.probabilities] == [("low", 0), ("mid", 1), ("high", 2)]
    assert answer_of(GOOD, [0.75, 0.25]) == PredicateAnswer(None, 0.75)
    assert isinstance(answer_of(question, [math.nan] * 3), Refusal)


def test_a_softmax_of_log_probabilities_adds_up_to_one_and_a_temperature_flattens_it():
    assert softmax([2.0, 1.0, 0.0], 2.0) == pytest.approx([0.5065, 0.3072, 0.1863], abs=5e-5)
    assert softmax([-900.0, -1000.0]).sum() == 1
