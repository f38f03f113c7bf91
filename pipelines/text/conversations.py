"""What a request for text needs of the model's chat template, and of the format of answers that the template shows.

``pipelines/conversation`` implements it. Without it, prompts are plain texts or tokens, and no answer is parsed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from staticllm.events import Event

from ..generation.grammar import Grammar
from ..generation.options.resolve import GenerationOptions


class AnswerFormat(Protocol):
    """How the model writes one answer: its reasoning, its calls, and the text for the user."""

    @property
    def markers(self) -> tuple[str, ...]:
        """The texts that separate the parts; they may be special tokens, which are decoded for the parser."""
        ...


class AnswerParser(Protocol):
    """Parses one answer while it is written."""

    has_called: bool
    """Whether its only call has ended it."""

    def push(self, text: str) -> list[Event]:
        """Add a piece of the answer, and return the events that are certain now."""
        ...

    def finish(self) -> list[Event]:
        """End the answer, and return its last events; to be called once."""
        ...

    def cut(self) -> list[Event]:
        """End an answer whose required call was cut off, in place of ``finish``: the call stays one."""
        ...


class Conversations(Protocol):
    """Renders conversations, and reads the answers to them."""

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        tokens: Mapping[str, str],
        tools: Sequence[Mapping[str, Any]],
        extra_context: Mapping[str, Any],
    ) -> str:
        """Return the prompt of a conversation, up to the header of the assistant's answer.

        Raises:
            PromptError: the template has an error, refuses the conversation, or exceeds a bound.
        """
        ...

    def always_thinks(self, template: str, prompt: str) -> bool:
        """Return whether an answer to ``prompt``, which the template made, begins with reasoning that nobody asked for.

        Raises:
            PromptError: the template has an error.
        """
        ...

    def format_of(self, template: str, shows_tools: bool, ending: str) -> AnswerFormat:
        """Return the format of the answer to a prompt that ends with ``ending``.

        Raises:
            PromptError: the template has an error.
        """
        ...

    def grammar_of(self, format: AnswerFormat | None, options: GenerationOptions) -> Grammar | None:
        """Return the grammar that the answer follows by ``tool_choice`` and the options; None if it is free.

        Raises:
            GenerationConfigError: a call is required, and the format has none, or another option contradicts it.
        """
        ...

    def parser_of(
        self, format: AnswerFormat, tools: Iterable[Mapping[str, Any]], options: GenerationOptions
    ) -> AnswerParser:
        """Return the parser of one answer in this format, with the functions that its prompt shows."""
        ...
