"""Compares two tokenizers of a model by some hundred texts. It runs in the environment for exports too, so it imports nothing of
ours: ``tool.py`` loads it from its file.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any

NUM_RANDOM = 300
_LINES = (
    "Hello, world!", "The quick brown fox jumps over the lazy dog.", "version 3.14", "in 2024", "1234567890", "10,000.50 €",
    "def f(self, x):\n    return self.append(x)\n", "\tif (a != b) { return a->c[0]; }", "don't, I'll, they've, WE'RE", " a",
    "a ", "  two  spaces  ", "a\n\nb\r\nc", "\n", "   \n\n  x", "https://example.com/a?b=c&d=%20e", "x@y.org", "...!?", "a--b__c",
    "Größe, naïve, señor, œuvre", "Привет, мир", "你好，世界", "こんにちは世界", "안녕하세요", "مرحبا بالعالم", "नमस्ते दुनिया",
    "שלום",
    "🎉 👍🏽 👨‍👩‍👧", "e\u0301 and \u00e9", "\u00a0x\u2003y", "{\"a\": [1, 2.5, null]}", "# Title\n\n- one\n- two\n",
    "CamelCaseAndsnake_case",
    "ALL CAPS", "x" * 60, "    " * 6 + "x", "½ ² Ⅷ ①", "<b>bold</b>", "$\\alpha^2$", "a'b\"c`d",
)  # fmt: skip
_PARTS = (
    *"aeiostnrAEIOSTN", "the", "ing", " and", " of", "tion", " ", " ", "  ", "\n", "\t", *"0123456789",
    *".,;:!?'\"()-_/\\<>=+*#@&%", "é", "ß", "日", "本", "д", "🎉",
)  # fmt: skip
_MOST_IDS, _MOST_CHARS = 16, 80
_MOST_ADDED = 50
_AROUND = ("a {0} b", "x{0}{0}\n\n", "{0}\nHi {0}")
"""Texts with markers, as chat templates write them: spaces beside some are no text."""


def sample_texts(added: Sequence[str] = ()) -> list[str]:
    """Return the texts: always the same.

    Args:
        added: Tokens that are found before a text is split, of which some are used.
    """
    chance = random.Random(20)
    found = ("".join(chance.choice(_PARTS) for _ in range(chance.randint(1, 30))) for _ in range(NUM_RANDOM))
    marked = [each.format(token) for token in added[:_MOST_ADDED] for each in _AROUND]
    return [*_LINES, *found, *marked]


def added_tokens(original: Any) -> list[str]:
    """Return the texts of the added tokens of a tokenizer of the library ``tokenizers``, the first ids first."""
    return [token.content for _, token in sorted(original.get_added_tokens_decoder().items())]


def first_difference(
    here: Callable[[str], Sequence[int]], there: Callable[[str], Iterable[Sequence[int]]], texts: Iterable[str]
) -> str | None:
    """Return in a line which text has other ids here than all that it may have there; None if there is none."""
    for text in texts:
        wanted = [list(ids) for ids in there(text)]
        try:
            found = list(here(text))
        except RuntimeError as error:
            said = " ".join(str(error).split())
            return f"{_shown(text)} cannot be encoded ({said[-120:]}), {_ids(wanted[0])} in tokenizer.json: {_REMEDY}"
        if found not in wanted:
            return f"{_shown(text)} is {_ids(found)}, {_ids(wanted[0])} in tokenizer.json: {_REMEDY}"
    return None


_REMEDY = (
    "the converted tokenizer reads texts in another way than the model has learnt; use the model's GGUF file, or export it "
    "with another version of openvino-tokenizers"
)


def _shown(text: str) -> str:
    return repr(text) if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]!r}…"


def _ids(ids: Sequence[int]) -> str:
    return str(list(ids)) if len(ids) <= _MOST_IDS else f"{str(list(ids[:_MOST_IDS]))[:-1]}, …]"
