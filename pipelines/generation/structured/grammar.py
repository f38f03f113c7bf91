"""Holds the grammar of a request as a plain value that can be sent to another process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from staticllm.errors import GenerationConfigError

Kind = Literal["json_schema", "regex", "choice", "ebnf", "lark", "structural_tag"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MAX_TEXT = 1 << 20
"""The most bytes of a grammar's text in UTF-8."""


@dataclass(frozen=True)
class Grammar:
    """What an answer must look like from its first to its last character.

    ``text`` is, by ``kind``: the JSON schema as JSON; the regular expression, which matches the whole answer; a JSON list of
    strings; the grammar in EBNF (of xgrammar, and GBNF) or in Lark (of llguidance); a structural tag as JSON.
    """

    kind: Kind
    text: str

    def check(self) -> None:
        """Check the types and the length, for a grammar from another process.

        Raises:
            GenerationConfigError: one is wrong.
        """
        if self.kind not in KINDS:
            raise GenerationConfigError(f"a grammar of the kind {self.kind!r}: must be one of {', '.join(KINDS)}")
        if not isinstance(self.text, str) or not self.text:
            raise GenerationConfigError(f"a grammar ({self.kind}) without text: give a str that is not empty")
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
