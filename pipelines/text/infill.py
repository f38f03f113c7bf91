"""Prompts for the text between two others, by the markers that a model's tokenizer has for it (fill in the middle)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import openvino_genai as genai

from staticllm.errors import PromptError, encoding

from .inputs import real_ids
from .tokenizer_tools import SpecialTokens

MARKERS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),
    ("<PRE>", "<SUF>", "<MID>"),
)
"""Markers before the text, between it and what follows, and after that, where the answer begins."""
_ENDS = (
    *("<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<|file_sep|>", "<|file_separator|>"),
    *("<|fim_pad|>", "<fim_pad>", "<|repo_name|>", "▁<EOT>", "<EOT>", "<EOD>"),
)
"""Tokens that end an answer, beside those of the model's own config, which may be those of a chat."""


@dataclass(frozen=True)
class InfillPrompt:
    """The tokens of a prompt, and those that end its answer."""

    ids: tuple[int, ...]
    stops: frozenset[int]


def infill_prompt(tokenizer: genai.Tokenizer, before: str, after: str) -> InfillPrompt:
    """Return the prompt for the text between two others.

    Raises:
        PromptError: the tokenizer has no markers for it, or a text is not valid.
    """
    vocabulary: Mapping[bytes | str, int] = tokenizer.get_vocab()

    def token(name: str | bytes) -> int | None:
        return vocabulary.get(name if isinstance(name, bytes) else name.encode(), vocabulary.get(name))

    for names in MARKERS:
        first, middle, last = map(token, names)
        if first is not None and middle is not None and last is not None:
            ids = (first, *_ids(tokenizer, before), middle, *_ids(tokenizer, after), last)
            ends = {found for name in _ENDS if (found := token(name)) is not None}
            return InfillPrompt(ids, frozenset({first, middle, last, *ends}))
    raise PromptError(
        "the model has no tokens for text between two others (fill in the middle): leave the suffix out, or use a code model"
    )


def _ids(tokenizer: genai.Tokenizer, text: str) -> list[int]:
    """Return the tokens of a text. What looks like a special token is text, so it is divided and tokenized in two parts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"the text has half a character at index {error.start}: remove it") from error
    special = SpecialTokens(tokenizer)
    found = _encoded(tokenizer, text)
    names = {
        str(tokenizer.decode([token], skip_special_tokens=False)) for token in set(found) if special.is_special(token)
    }
    names.discard("")
    if not names:
        return found
    ends = [place.start() + 1 for place in re.finditer("|".join(map(re.escape, sorted(names))), text)]
    parts = [text[start:end] for start, end in pairwise((0, *ends, len(text)))]
    return [token for part in parts for token in _encoded(tokenizer, part)]


def _encoded(tokenizer: genai.Tokenizer, text: str) -> list[int]:
    if not text:
        return []
    with encoding(f"{len(text)} characters"):
        return list(real_ids(tokenizer.encode(text, add_special_tokens=False))[0])
