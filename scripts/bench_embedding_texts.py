"""The texts of ``bench_embedding.py``: words of this repository's pages, cut to committed lengths.

The lengths, in words, are those of the paragraphs of the pages when the benchmark was written, in a random order. So
it keeps them when pages change. To write them again: python scripts/bench_embedding_texts.py
"""

from __future__ import annotations

import json
import random
import re
from itertools import cycle, islice
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = Path(__file__).resolve().parent / "bench_embedding_lengths.json"
MIN_WORDS = 5


def paragraphs(page: str) -> list[str]:
    """Return the paragraphs of prose in a page of Markdown, each as one line."""
    without_code = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    found = (" ".join(part.split()) for part in without_code.split("\n\n"))
    return [text for text in found if len(text.split()) >= MIN_WORDS and text[0] not in "#|<-!"]


def all_paragraphs() -> list[str]:
    pages = sorted((ROOT / "docs").glob("*.md"))
    return [text for page in pages for text in paragraphs(page.read_text(encoding="utf-8"))]


def texts(count: int, seed: int = 0) -> list[str]:
    """Return ``count`` texts of the committed lengths. Another seed begins at another place of pages and lengths."""
    lengths: list[int] = json.loads(LENGTHS.read_text(encoding="utf-8"))
    words = [word for text in all_paragraphs() for word in text.split()]
    first = 997 * seed
    source = islice(cycle(words), 31 * first % len(words), None)
    return [" ".join(islice(source, lengths[(first + n) % len(lengths)])) for n in range(count)]


if __name__ == "__main__":
    found = [len(text.split()) for text in all_paragraphs()]
    random.Random(0).shuffle(found)  # the pages that come first have short paragraphs
    LENGTHS.write_text(json.dumps(found) + "\n", encoding="utf-8")
