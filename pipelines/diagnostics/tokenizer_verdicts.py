"""Compares the tokenizer of a model directory with the original in ``tokenizer.json``, if the library of that is installed."""

# pyright: reportMissingImports=false
# The library is optional.

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from staticllm.errors import last_line
from staticllm.export.tokenizer_texts import added_tokens, first_difference, sample_texts
from staticllm.model_paths.path_kind import TOKENIZER_XML

from ..launch.arguments import read_tokenizer
from .reports import Verdict

ORIGINAL = "tokenizer.json"


def tokenizer_verdicts(directory: Path) -> Iterator[Verdict]:
    """Yield the verdict on some hundred texts; none without an original, or what reads it.

    Raises:
        ModelError: the tokenizer cannot be read.
    """
    files = (directory / name for name in (ORIGINAL, *TOKENIZER_XML))
    if not all(path.is_file() for path in files):
        return
    try:
        from tokenizers import Tokenizer
    except ImportError:
        return
    try:
        original: Any = Tokenizer.from_file(str(directory / ORIGINAL))
        original.no_padding()
        original.no_truncation()
    except Exception as error:  # the library raises nothing narrower
        yield Verdict("tokenizer", False, 0.0, f"{ORIGINAL} cannot be read ({last_line(error)}): download it again")
        return
    own = read_tokenizer(directory)

    def here(text: str) -> list[int]:
        ids: list[int] = own.encode(text, add_special_tokens=False).input_ids.data.reshape(-1).tolist()
        return ids

    texts = sample_texts(added_tokens(original))
    found = first_difference(here, lambda text: [original.encode(text, add_special_tokens=False).ids], texts)
    said = "texts have the ids of the original" if found is None else "a text has other ids than in the original"
    figure = f"{len(texts)} {said}" if found is None else said
    yield Verdict("tokenizer", found is None, float(found is None), found or "", figure)
