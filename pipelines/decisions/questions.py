"""The questions of a decision: whether a statement holds, which of several options, how much of something."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from staticllm.errors import PromptError, shown

MAX_QUESTIONS = 400
MAX_OPTIONS = 255
MAX_LEVELS = 10
MAX_ALL_OPTIONS = 10_000
"""Options of all questions together: each is tokenized before anything runs."""
Reading = Literal["list", "branches"]
"""How the options of a question are shown: all in a list, or each in a branch of its own, which shows no other option."""
Value: TypeAlias = str | bool
"""What names an option. ``True`` and ``"true"`` are two."""


class QuestionError(PromptError):
    """A question or a state that cannot be asked about."""

    path: str
    """Where the fault is: ``questions.1.choices.0.value``."""

    def __init__(self, message: str, path: Sequence[str | int] = ()) -> None:
        super().__init__(message)
        self.path = ".".join(map(str, path))

    def __reduce__(self) -> tuple[type[QuestionError], tuple[str, list[str]]]:
        return type(self), (str(self), self.path.split("."))


@dataclass(frozen=True)
class Option:
    """One option of a choice."""

    value: Value
    """Names it: text, or a boolean."""
    description: str | None = None
    """Says what it stands for; the model reads both."""


@dataclass(frozen=True)
class Level:
    """One level of a score."""

    label: str
    """Names it."""
    description: str | None = None
    """Says what it stands for; the model reads both."""


@dataclass(frozen=True)
class Predicate:
    """Whether a statement holds."""

    instructions: str
    """The statement, or a question that is answered with yes or no."""
    name: str | None = None
    """Names the answer; the model does not read it."""
    if_true: str | None = None
    """What yes stands for."""
    if_false: str | None = None
    """What no stands for."""


@dataclass(frozen=True)
class Choice:
    """Which of several options."""

    instructions: str
    """The question."""
    options: Sequence[Option | Value]
    """2 to 255 different ones; a text or a boolean is an option without a description."""
    name: str | None = None
    """Names the answer; the model does not read it."""

    @property
    def values(self) -> tuple[Value, ...]:
        """The values of the options."""
        return tuple(option.value if isinstance(option, Option) else option for option in self.options)


@dataclass(frozen=True)
class Score:
    """How much of something."""

    instructions: str
    """The question."""
    levels: Sequence[Level | str]
    """2 to 10 different ones, the lowest first; a text is a level without a description."""
    name: str | None = None
    """Names the answer; the model does not read it."""

    @property
    def labels(self) -> tuple[str, ...]:
        """The labels of the levels."""
        return tuple(level.label if isinstance(level, Level) else level for level in self.levels)


Question: TypeAlias = Predicate | Choice | Score


def checked(questions: Question | Sequence[Question]) -> tuple[Question, ...]:
    """Return the questions with ``Option`` and ``Level`` values in place of bare ones.

    Raises:
        QuestionError: there are none, or more than ``MAX_QUESTIONS``, or one cannot be asked.
    """
    if isinstance(questions, Predicate | Choice | Score):
        questions = (questions,)
    if not isinstance(questions, Sequence) or isinstance(questions, str | bytes):
        raise QuestionError(
            f"questions={shown(questions)}: must be a list of Predicate, Choice and Score", ("questions",)
        )
    if not 1 <= len(questions) <= MAX_QUESTIONS:
        raise QuestionError(
            f"{len(questions)} questions: there must be 1 to {MAX_QUESTIONS}; ask in several calls, the state stays cached",
            ("questions",),
        )
    found = tuple(_checked(question, ("questions", place)) for place, question in enumerate(questions))
    total = sum(len(question.options) for question in found if isinstance(question, Choice))
    if total > MAX_ALL_OPTIONS:
        raise QuestionError(
            f"{total} options in all questions together: at most {MAX_ALL_OPTIONS}; ask in several calls, the state stays cached",
            ("questions",),
        )
    return found


def _checked(question: object, path: tuple[str | int, ...]) -> Question:
    if not isinstance(question, Predicate | Choice | Score):
        raise QuestionError(f"{_at(path)} is {shown(question)}: must be a Predicate, a Choice or a Score", path)
    _check_text(question.instructions, (*path, "instructions"))
    if question.name is not None and not isinstance(question.name, str):
        raise QuestionError(f"{_at(path)} has the name {shown(question.name)}: must be a string", (*path, "name"))
    if isinstance(question, Predicate):
        for key in ("if_true", "if_false"):
            if getattr(question, key) is not None:
                _check_text(getattr(question, key), (*path, key))
        return question
    if isinstance(question, Choice):
        options = _items(question.options, (*path, "choices"), "options", MAX_OPTIONS)
        return Choice(question.instructions, _options(options, (*path, "choices")), question.name)
    levels = _items(question.levels, (*path, "levels"), "levels", MAX_LEVELS)
    return Score(question.instructions, _levels(levels, (*path, "levels")), question.name)


def _items(items: object, path: tuple[str | int, ...], what: str, most: int) -> Sequence[object]:
    if not isinstance(items, Sequence) or isinstance(items, str | bytes | Mapping):
        raise QuestionError(f"{_at(path)} is {shown(items)}: must be a list of {what}", path)
    if not 2 <= len(items) <= most:
        raise QuestionError(f"{_at(path)} has {len(items)} {what}: there must be 2 to {most}", path)
    return items


def _options(items: Sequence[object], path: tuple[str | int, ...]) -> tuple[Option, ...]:
    found: dict[tuple[type, Value], Option] = {}
    for place, item in enumerate(items):
        here = (*path, place)
        option = item if isinstance(item, Option) else Option(item)  # type: ignore[arg-type]
        if not isinstance(option.value, str | bool):
            raise QuestionError(
                f"{_at(here)} is {shown(option.value)}: must be a string or a boolean", (*here, "value")
            )
        if isinstance(option.value, str):
            _check_text(option.value, (*here, "value"))
        _check_description(option.description, here)
        key = (type(option.value), option.value)  # True == 1 == "true" nowhere
        if key in found:
            raise QuestionError(f"{_at(here)} is {shown(option.value)} again: options must differ", (*here, "value"))
        found[key] = option
    return tuple(found.values())


def _levels(items: Sequence[object], path: tuple[str | int, ...]) -> tuple[Level, ...]:
    found: dict[str, Level] = {}
    for place, item in enumerate(items):
        here = (*path, place)
        level = item if isinstance(item, Level) else Level(item)  # type: ignore[arg-type]
        _check_text(level.label, (*here, "label"))
        _check_description(level.description, here)
        if level.label in found:
            raise QuestionError(f"{_at(here)} is {shown(level.label)} again: levels must differ", (*here, "label"))
        found[level.label] = level
    return tuple(found.values())


def _check_description(description: object, path: tuple[str | int, ...]) -> None:
    if description is not None and not isinstance(description, str):
        where = (*path, "description")
        raise QuestionError(f"{_at(where)} is {shown(description)}: must be a string", where)


def _check_text(text: object, path: tuple[str | int, ...]) -> None:
    if not isinstance(text, str) or not text.strip():
        raise QuestionError(f"{_at(path)} is {shown(text)}: must be a text that is not empty", path)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise QuestionError(
            f"{_at(path)} has half a character (a lone surrogate) at index {error.start}: remove it", path
        ) from error


def _at(path: Sequence[str | int]) -> str:
    """Return where something is, as a program would write it: ``questions[1].choices[0]``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")
