"""The checked arguments of one call, and a request with what its reader needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from staticllm.errors import GenerationConfigError

from ..engine.client import UserProcessors
from ..engine.overflow import OverflowRule
from ..engine.request import EngineRequest
from ..generation.options.resolve import GenerationOptions
from .conversations import AnswerParser
from .detokenizer import IncrementalDetokenizer
from .inputs import Form


@dataclass(frozen=True)
class GenerateCall:
    """The checked arguments of one call."""

    form: Form
    options: GenerationOptions
    overflow: OverflowRule
    priority: int
    deadline: float | None
    started: float
    """A ``time.perf_counter`` moment, as ``deadline`` is."""
    is_chat: bool = False

    def check_single(self, receiver: str) -> None:
        """Check that one answer per prompt is requested, whose tokens are known one by one.

        Raises:
            GenerationConfigError: there are several, and ``receiver`` could not tell them apart; or beams.
        """
        count = self.options.num_sequences
        beams = self.options.beams
        if beams is not None:
            raise GenerationConfigError(
                f"a {receiver} for num_beams={beams.num_beams}: the tokens are known at the end; leave one of them out"
            )
        if count > 1:
            raise GenerationConfigError(
                f"a {receiver} for {count} answers: it could not tell the answers apart; leave one of them out"
            )


def no_text(tokens: list[int]) -> str:
    """Return "": the text of tokens where nothing can decode them."""
    return ""


@dataclass(frozen=True)
class PreparedRequest:
    """A checked request together with the details of the call that its reader needs."""

    request: EngineRequest
    call: GenerateCall
    encoded: float
    """A ``time.perf_counter`` moment."""
    template_seconds: float | None = None
    """The time that the chat template took, None without a template."""
    processors: UserProcessors = ()
    """The logits processors that the user made, per answer."""
    decode: Callable[[list[int]], str] = no_text
    """Makes text of tokens."""
    new_parser: Callable[[], AnswerParser] | None = None
    """Makes the parser of an answer; it is None if answers are not parsed."""
    num_dropped: int = 0
    """The tokens of the prompt that its overflow rule left out."""

    @property
    def options(self) -> GenerationOptions:
        """The checked options."""
        return self.call.options

    def detokenizer(self, decode: Callable[[list[int]], str] | None = None) -> IncrementalDetokenizer:
        """Return what decodes an answer and finds its stop strings, with ``decode`` in the place of the request's own.

        Where a grammar writes the content, stop strings do not count in the reasoning and the layout before it.
        """
        options = self.options
        grammar = self.request.grammar
        lead = () if grammar is None else filter(None, (grammar.opening, grammar.reasoning_end))
        decode = decode or self.decode
        include_stop = options.include_stop_str_in_output
        return IncrementalDetokenizer(decode, options.stop_strings, include_stop, tuple(lead))
