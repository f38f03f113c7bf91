"""Holds the grammar of a request as a plain value that can be sent to another process."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from staticllm.errors import GenerationConfigError

Kind = Literal["json_schema", "regex", "choice", "ebnf", "lark", "structural_tag"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAX_TEXT = 1 << 20
"""The most bytes of a grammar's text in UTF-8."""
MAX_LEAD = 256
"""The most characters of ``opening`` and of ``reasoning_end``."""


@dataclass(frozen=True)
class Grammar:
    """What an answer must look like from its first to its last character.

    ``text`` is, by ``kind``: the JSON schema as JSON; the regular expression, which matches the whole answer; a JSON list of
    strings; the grammar in EBNF (of xgrammar, and GBNF) or in Lark (of llguidance); a structural tag as JSON.

    Where the model's format has something before the answer proper, the grammar describes what follows it: first the text
    ``opening``, then free text, which is reasoning, up to and including ``reasoning_end``. Either is "" where there is none.
    """

    kind: Kind
    text: str
    opening: str = ""
    reasoning_end: str = ""

    @property
    def has_lead(self) -> bool:
        """Whether anything comes before the answer proper."""
        return bool(self.opening or self.reasoning_end)

    @property
    def proper(self) -> Grammar:
        """The grammar of the answer proper alone."""
        return replace(self, opening="", reasoning_end="")

    def check(self) -> None:
        """Check the types and the length, for a grammar from another process.

        Raises:
            GenerationConfigError: one is wrong.
        """
        if self.kind not in KINDS:
            raise GenerationConfigError(f"a grammar of the kind {self.kind!r}: must be one of {', '.join(KINDS)}")
        if not isinstance(self.text, str) or not self.text:
            raise GenerationConfigError(f"a grammar ({self.kind}) without text: give a str that is not empty")
        for lead in (self.opening, self.reasoning_end):
            if not isinstance(lead, str) or len(lead) > MAX_LEAD:
                raise GenerationConfigError(
                    f"a lead of a grammar ({self.kind}): must be a str of at most {MAX_LEAD} characters"
                )
        try:
            num_bytes = len(self.text.encode())
        except UnicodeEncodeError as error:
            half = self.text[error.start]
            raise GenerationConfigError(
                f"a grammar ({self.kind}) has half of a surrogate pair, {half!r}, at character {error.start}: leave it out"
            ) from None
        if num_bytes > MAX_TEXT:
            raise GenerationConfigError(
                f"a grammar ({self.kind}) of {num_bytes} bytes, the most are {MAX_TEXT}: shorten it, or split the task"
            )
