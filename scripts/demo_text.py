"""The sentences and words of the demo model's training text, read from ``demo_text/*.txt``.

A file has sections under a heading in brackets, and a section has blocks of lines with empty lines between them. ``|`` divides
alternatives, or the columns of a table; ``#`` begins a comment.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).with_name("demo_text")
Plot = tuple[tuple[str, ...], ...]
"""A list of steps; a step is a list of alternatives with slots: {A} the hero's name or "the fox", {theA} always "the fox", {a_A}
how the hero is introduced; {he}, {him}, {his}, {himself} the hero's pronouns; {B} the partner (with {bhe} and so on); {F} and {G}
two friends. A small "c" after a slot's name means that it starts a sentence."""


@dataclass(frozen=True)
class Fact:
    """One fact: all the questions that ask for it, and its answer in two parts. Who wants a brief answer gets the first."""

    questions: tuple[str, ...]
    short: str
    more: str

    @property
    def answer(self) -> str:
        """The whole answer."""
        return f"{self.short} {self.more}".strip()


@dataclass(frozen=True)
class Habitat:
    """What fits together in one kind of place, so that no whale climbs a tree."""

    places: list[str]
    spots: list[str]
    goals: list[str]
    friends: list[str]
    foods: list[str]
    habits: list[str]


class TextFile:
    """The sections of a file, by their headings, and each as a list of blocks of lines."""

    def __init__(self, name: str) -> None:
        self._sections: dict[str, list[list[str]]] = {}
        for line in (FOLDER / name).read_text(encoding="utf-8").splitlines():
            if line.startswith("["):
                blocks = self._sections[line.strip("[]")] = [[]]
            elif not line:
                blocks.append([])
            elif not line.startswith("#"):
                blocks[-1].append(line)

    def blocks(self, heading: str) -> list[list[str]]:
        """Return the blocks of a section."""
        return [block for block in self._sections[heading] if block]

    def lines(self, heading: str) -> list[str]:
        """Return the lines of a section."""
        return [line for block in self.blocks(heading) for line in block]

    def rows(self, heading: str) -> list[tuple[str, ...]]:
        """Return the lines of a section, each divided at its bars."""
        return [tuple(line.split("|")) for line in self.lines(heading)]

    def pairs(self, heading: str) -> list[tuple[str, str]]:
        """Return the lines of a section, each of which has two parts."""
        return [(first, second) for first, second in self.rows(heading)]

    def words(self, heading: str) -> list[str]:
        """Return the words of a section's only line."""
        (line,) = self.lines(heading)
        return line.split("|")

    def under(self, heading: str) -> dict[str, str]:
        """Return the headings that begin with this one, by what follows it."""
        return {each[len(heading) :].strip(): each for each in self._sections if each.split(" ")[0] == heading}


PROMPTS, WORDS, TABLES, PLOTS, _FACTS = (
    TextFile(f"{name}.txt") for name in ("prompts", "words", "tables", "plots", "facts")
)


def plots(heading: str) -> list[Plot]:
    """Return the plots of a section."""
    return [tuple(tuple(step.split("|")) for step in block) for block in PLOTS.blocks(heading)]


def words_under(heading: str) -> dict[str, list[str]]:
    """Return groups of words by what follows a common heading."""
    return {kind: WORDS.words(each) for kind, each in WORDS.under(heading).items()}


def facts(heading: str) -> list[Fact]:
    """Return the facts of a section."""
    return [_fact(*block) for block in _FACTS.blocks(heading)]


def _fact(head: str, short: str, more: str = "") -> Fact:
    """``what: NAMES`` is a thing; ``why: QUESTION|STATEMENT`` has its form inside "Tell me …"; ``asked: QUESTIONS``."""
    kind, _, said = head.partition(": ")
    names = said.split("|")
    if kind == "asked":
        return Fact(tuple(names), short, more)
    forms = PROMPTS.lines(kind)
    if kind == "what":
        return Fact(tuple(form.format(name) for name in names for form in forms), short, more)
    question, statement = names
    asked = f"{question[0].lower()}{question[1:]}"
    return Fact(tuple(form.format(question=question, statement=statement, asked=asked) for form in forms), short, more)


HABITATS = {kind: Habitat(*map(list, WORDS.rows(each))) for kind, each in WORDS.under("habitat").items()}
SELF, COMPUTING, NATURE = map(facts, ("self", "computing", "nature"))
