"""Plain facts the demo model learns, each with the ways in which people ask for it.

A fact is (questions, first sentence, further sentences); a user who wants a brief answer gets the first sentence.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fact:
    """One fact: all the questions that ask for it, and its answer in two parts."""

    questions: tuple[str, ...]
    short: str
    more: str

    @property
    def answer(self) -> str:
        """The whole answer."""
        return f"{self.short} {self.more}".strip()


def what(names: str, short: str, more: str = "") -> Fact:
    """A fact about a thing; names are its noun phrases, divided by bars."""
    forms = (
        "What is {}?",
        "What's {}?",
        "Explain {}.",
        "Tell me about {}.",
        "What does {} mean?",
        "Define {}.",
        "Can you explain {}?",
        "What do you know about {}?",
        "Please explain what {} is.",
        "What is {} exactly?",
        "Tell me what {} is.",
        "What is {} in simple words?",
        "Could you tell me what {} is?",
        "What is {} good for?",
    )
    questions = tuple(form.format(name) for name in names.split("|") for form in forms)
    return Fact(questions, short, more)


def why(question: str, statement: str, short: str, more: str = "") -> Fact:
    """A fact that answers a question; the statement is its form inside "Tell me ..."."""
    asked = f"{question[0].lower()}{question[1:]}?"
    forms = (
        f"{question}?",
        f"{question}?",
        f"Can you tell me {statement}?",
        f"Tell me {statement}.",
        f"Do you know {statement}?",
        f"Explain {statement}.",
        f"I wonder {statement}.",
        f"Please, {asked}",
    )
    return Fact(forms, short, more)


def asked(questions: str, short: str, more: str = "") -> Fact:
    """A fact whose questions are written out, divided by bars."""
    return Fact(tuple(questions.split("|")), short, more)
