"""Makes token ids of a state and of questions about it, so that all questions of one state begin with the same tokens.

The prompt is one message of the user: what to do, the state, and the question. What is the same for all questions comes before
the state, so that it runs once. State and question are tokenized on their own: the tokens of a state depend on nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from staticllm.errors import PromptError, encoding, shown

from ..text.inputs import real_ids
from ..text.tokenizer_tools import TokenizerTools
from .questions import Choice, Predicate, Question, QuestionError, Reading

MAX_ORDERS = 4
MAX_LABEL_TOKENS = 128
"""The most tokens of an answer: each of them has logits."""
MAX_KEPT_COUNTS = 8
MAX_KEPT_LABELS = 10_000
"""Labels whose tokens are kept: questions are asked again about other states."""
_PLACE = "\ue000"
"""Stands for the message when a template is rendered once for all; a character that no text uses."""
_TASK = "Read the text and choose the option that is right. Answer with that option only.\n\nText: "
_GAP = "\n\n"
"""``scripts/bench_decisions.py`` has chosen the words: shorter ones lose answers, longer ones gain none."""
YES, NO = "yes", "no"


@dataclass(frozen=True)
class Shown:
    """A question as the model reads it once.

    Attributes:
        tokens: Those behind the state, up to where the answer begins.
        labels: The tokens of each possible answer, with the token that ends the turn.
        places: The option that each label answers with.
    """

    tokens: tuple[int, ...]
    labels: tuple[tuple[int, ...], ...]
    places: tuple[int, ...]


@dataclass(frozen=True)
class _Frame:
    """What a chat template puts before a message and after it, and the token that ends an answer."""

    before: str
    after: str
    end: int
    header: tuple[int, ...]
    """The tokens of ``after``."""


class DecisionPrompts:
    """Tokenizes states and questions for one model. Any thread may call the methods."""

    def __init__(self, tools: TokenizerTools) -> None:
        self._tools = tools
        self._frames: dict[str, _Frame] = {}
        self._labels: dict[tuple[str, str], tuple[int, ...]] = {}
        self._counts: dict[str, int] = {}

    def state(self, text: str) -> list[int]:
        """Return the tokens of a state, with what the template writes before it."""
        return self._between(self._frame().before + _TASK, text, _GAP)

    def texts(self, question: Question, reading: Reading, orders: int, path: Sequence[str | int]) -> list[Shown]:
        """Return how a question is shown: once per order of its options, or once per option.

        Raises:
            QuestionError: two options have the same tokens.
        """
        if isinstance(question, Predicate):
            return [self._asked(_statement(question), (YES, NO), range(2), path)]
        texts = _labels_of(question)
        if reading == "branches":
            self._check_different([self._label(text) for text in texts], texts, path)
            lines = _lines_of(question, texts)
            return [
                self._asked(_proposal(question, line), (YES, NO), (place, place), path)
                for place, line in enumerate(lines)
            ]
        is_choice = isinstance(question, Choice)
        found = orders_of(len(texts), orders) if is_choice else [list(range(len(texts)))]
        lines = _lines_of(question, texts)
        return [
            self._asked(
                _listing(question, [lines[place] for place in order]), [texts[place] for place in order], order, path
            )
            for order in found
        ]

    def _asked(self, text: str, labels: Sequence[str], places: Sequence[int], path: Sequence[str | int]) -> Shown:
        frame = self._frame()
        tokens = self._between("", text, frame.after)
        found = [self._label(label) for label in labels]
        self._check_different(found, labels, path)
        return Shown(tuple(tokens), tuple(found), tuple(places))

    def _label(self, text: str) -> tuple[int, ...]:
        """Return the tokens of an answer behind the header of the assistant, and the token that ends it."""
        frame = self._frame()
        key = frame.after, text
        if key not in self._labels:
            joined = tuple(self._ids(frame.after + text))
            own = joined[len(frame.header) :] if joined[: len(frame.header)] == frame.header else tuple(self._ids(text))
            if any(map(self._tools.special_tokens.is_special, own)):
                own = tuple(self._ids(self._neutral(text)))
            if len(self._labels) >= MAX_KEPT_LABELS:
                self._labels = {}
            self._labels[key] = own
        return (*self._labels[key], frame.end)

    def _check_different(
        self, labels: Sequence[tuple[int, ...]], texts: Sequence[str], path: Sequence[str | int]
    ) -> None:
        known: dict[tuple[int, ...], str] = {}
        for label, text in zip(labels, texts, strict=True):
            if not 2 <= len(label) <= MAX_LABEL_TOKENS:
                name = shown(text)
                given = f"the option {name} has {len(label) - 1} tokens: it must have 1 to {MAX_LABEL_TOKENS - 1}"
                raise QuestionError(f"{given}; give it a shorter name, and describe it in its description", path)
            if label in known:
                raise QuestionError(
                    f"the options {shown(known[label])} and {shown(text)} are the same tokens: name one of them otherwise",
                    path,
                )
            known[label] = text

    def _ids(self, text: str) -> list[int]:
        with encoding(f"{len(text)} characters"):
            return list(real_ids(self._tools.tokenizer.encode(text, add_special_tokens=False))[0]) if text else []

    def _between(self, before: str, text: str, after: str) -> list[int]:
        """Return the tokens of a text and of what the template has around it; none of the text's is special."""
        found = self._ids(before + text + after)
        if self._num_special(found) == self._num_special_in(before) + self._num_special_in(after):
            return found
        return self._ids(before + self._neutral(text) + after)

    def _num_special(self, tokens: Sequence[int]) -> int:
        return sum(map(self._tools.special_tokens.is_special, tokens))

    def _num_special_in(self, text: str) -> int:
        """Return how many special tokens a part of the template has; they are counted once."""
        if text not in self._counts:
            self._counts = {
                **dict(list(self._counts.items())[-MAX_KEPT_COUNTS:]),
                text: self._num_special(self._ids(text)),
            }
        return self._counts[text]

    def _neutral(self, text: str) -> str:
        """Return a text in which no part is a special token: a blank divides each, so that nothing forges a turn."""
        special = self._tools.special_tokens
        found = {token for token in self._ids(text) if special.is_special(token)}
        for name in sorted(str(self._tools.tokenizer.decode([token], skip_special_tokens=False)) for token in found):
            text = text.replace(name, f"{name[:1]} {name[1:]}")
        return text

    def _frame(self) -> _Frame:
        template = str(self._tools.tokenizer.chat_template)
        if template not in self._frames:
            self._frames = {template: self._found(template)}
        return self._frames[template]

    def _found(self, template: str) -> _Frame:
        if not template:
            raise PromptError("the model has no chat template, which questions need: set one on the tokenizer")
        asked = self._rendered(template, [_user(_PLACE)])
        before, found, after = asked.partition(_PLACE)
        conversations = self._tools.conversations
        if not found:
            raise PromptError("the chat template does not show the user's message: set another on the tokenizer")
        if conversations.always_thinks(template, asked):
            raise PromptError(
                "the model thinks before every answer, and its template has no way to turn that off: ask another model"
            )
        talked = self._rendered(template, [_user("a"), {"role": "assistant", "content": _PLACE}, _user("b")])
        rest = self._ids(talked.partition(_PLACE)[2])
        is_end = bool(rest) and self._tools.special_tokens.is_special(rest[0])
        end = rest[0] if is_end else int(self._tools.tokenizer.get_eos_token_id())
        return _Frame(before, after, end, tuple(self._ids(after)))

    def _rendered(self, template: str, messages: Sequence[Mapping[str, Any]]) -> str:
        tokenizer = self._tools.tokenizer
        tokens = {
            "bos_token": tokenizer.get_bos_token(),
            "eos_token": tokenizer.get_eos_token(),
            "pad_token": tokenizer.get_pad_token(),
        }
        return self._tools.conversations.render(template, messages, tokens, [], NO_THINKING)


NO_THINKING: Mapping[str, Any] = {"enable_thinking": False, "thinking": False}
"""What templates of models that may think take for an answer without thinking."""


def state_text(state: object) -> str:
    """Return the text of a state: a text as it is, objects and lists as JSON.

    Raises:
        QuestionError: it is neither, or has half a character.
    """
    if isinstance(state, str):
        text = state
    elif isinstance(state, Mapping | list | tuple):
        try:
            text = json.dumps(state, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise QuestionError(f"the state is no JSON: {error}", ("input",)) from error
    else:
        raise QuestionError(f"the state is a {type(state).__name__}: must be a text, an object or a list", ("input",))
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise QuestionError(f"the state has half a character at index {error.start}: remove it", ("input",)) from error
    return text


def orders_of(count: int, orders: int) -> list[list[int]]:
    """Return ``orders`` orders of ``count`` options: as given, reversed, and both begun in the middle; no order twice."""
    given = list(range(count))
    middle = count // 2
    turned = given[middle:] + given[:middle]
    found = [given, given[::-1], turned, turned[::-1]][:orders]
    return [order for place, order in enumerate(found) if order not in found[:place]]


def _user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


def _labels_of(question: Question) -> list[str]:
    """Return the answers that stand for the options: their names, in JSON if one of them is a boolean."""
    if isinstance(question, Predicate):
        return [YES, NO]
    if isinstance(question, Choice):
        if any(isinstance(value, bool) for value in question.values):
            return [json.dumps(value, ensure_ascii=False) for value in question.values]
        return [str(value) for value in question.values]
    return list(question.labels)


def _lines_of(question: Question, texts: Sequence[str]) -> list[str]:
    items = question.options if isinstance(question, Choice) else getattr(question, "levels", ())
    described = [getattr(item, "description", None) for item in items]
    return [f"{text}: {more}" if more else text for text, more in zip(texts, described, strict=True)]


def _statement(question: Predicate) -> str:
    meant = ((YES, question.if_true), (NO, question.if_false))
    items = [f"{label}: {text}" if text else label for label, text in meant]
    return f"Statement: {question.instructions}\nIs the statement true?\n{_items(items)}"


def _listing(question: Question, lines: Sequence[str]) -> str:
    return f"Question: {question.instructions}\n{_items(lines)}"


def _proposal(question: Question, line: str) -> str:
    return f"Question: {question.instructions}\nProposed answer: {line}\nIs the answer right?\n{_items((YES, NO))}"


def _items(lines: Sequence[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)
