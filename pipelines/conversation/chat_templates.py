"""What a pipeline asks of chat templates, as one object: prompts, formats of answers, their grammars and their parsers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..generation.grammar import Grammar
from ..generation.options.resolve import GenerationOptions
from ..text.conversations import AnswerFormat
from .chat_template import render
from .formats import MessageFormat, format_beside
from .message_parser import MessageParser
from .parser_output import ExpectedCalls
from .required_calls import answer_grammar, is_content


class ChatTemplates:
    """Implements ``Conversations``. It holds nothing: what is known of a template is kept by the text of the template."""

    def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        tokens: Mapping[str, str],
        tools: Sequence[Mapping[str, Any]],
        extra_context: Mapping[str, Any],
    ) -> str:
        """Return the prompt of a conversation, as ``render`` of ``chat_template``."""
        return render(template, messages, tokens, tools, extra_context)

    def always_thinks(self, template: str, prompt: str) -> bool:
        """Return whether the prompt opens reasoning, or the answer has a part for it that comes first."""
        format = format_beside(template, False).after(prompt)
        return format.is_reasoning_open or bool(format.syntax == "harmony")

    def format_of(self, template: str, shows_tools: bool, ending: str) -> MessageFormat:
        """Return the format of the answer to a prompt that ends with ``ending``, as ``format_beside``."""
        return format_beside(template, shows_tools).after(ending)

    def grammar_of(self, format: AnswerFormat | None, options: GenerationOptions) -> Grammar | None:
        """Return the grammar that the answer follows, as ``answer_grammar``."""
        return answer_grammar(_own(format), options)

    def parser_of(
        self, format: AnswerFormat, tools: Iterable[Mapping[str, Any]], options: GenerationOptions
    ) -> MessageParser:
        own = _own(format)
        assert own is not None
        asked = options.extra.tool_options
        calls: ExpectedCalls = "required" if asked.is_call_required else "none" if asked.choice == "none" else "auto"
        return MessageParser(
            own, tools, calls=calls, is_content=is_content(options), has_one_call=not asked.is_parallel
        )


CHAT_TEMPLATES = ChatTemplates()


def _own(format: AnswerFormat | None) -> MessageFormat | None:
    assert format is None or isinstance(format, MessageFormat), "formats come from ``format_of``"
    return format
