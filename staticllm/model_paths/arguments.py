"""Decides whether an argument of the command line is the path of a model, or text for one."""

from __future__ import annotations

import os
import re
from itertools import islice
from pathlib import Path

MOST_CHARS = 4096
SUFFIXES = (".gguf", ".xml", ".blob", ".safetensors", ".onnx", ".zip")
"""Endings of a single word that is a file of a model."""
_MOST_BLANKS = 16
"""The blanks at which a path may end that begins a text."""
_HERE = re.compile(r"(\.{1,2}|~\w*)[/\\]|[A-Za-z]:[/\\]")
"""The beginning of a path that no text has: ``./``, ``../``, ``~/``, ``C:\\``."""
_NO_PATH = re.compile(r"[?!]$|://|[\d/.,:]+$")
"""A word that is a question, an address of the web, or a number such as 24/7."""

_SIZE = r"(?:\d+x)?\d+(?:\.\d+)?[bm]"
_NAME = re.compile(
    rf"""[a-z][\w.-]*:[a-z0-9][\w.-]*          # family1.2:3b
    |[a-z]{{2,}}[-_]?\d+\.\d+[\w.-]*            # family2.5, family-3.2-instruct
    |[a-z]{{3,}}\d{{1,2}}(?:[-_][\w.-]+)?        # family3, family3-coder
    |[a-z][\w.]*[-_][a-z]\d{{1,2}}(?:[-_.][\w.-]+)?    # deepseek-r1
    |[a-z][\w.]*(?:[-_][\w.]+)*?[-_.:]{_SIZE}(?:[-_.][\w.-]+)?    # family-7b-instruct
    |[\w.-]+[-._](?:i?q\d_[a-z0-9_]+|mxfp4|bf16|f16|gguf)    # with a quantization
    """,
    re.IGNORECASE | re.VERBOSE | re.ASCII,
)
"""One word that has a version, a size, a tag or a quantization, as names of models have."""


def is_model_name(text: str) -> bool:
    """Return whether one word looks like the name of a model: it has a version, a size, a tag or a quantization."""
    return len(text) <= 96 and _NAME.fullmatch(text) is not None


def is_path(text: str) -> bool:
    """Return whether an argument is a path: it exists, or looks like one that may have been mistyped.

    | argument | is |
    |---|---|
    | the name of something that exists | a path |
    | begins with ``./``, ``../``, ``~/`` or a drive, as ``C:\\`` | a path |
    | begins with ``/``, and the folder of it exists | a path |
    | one word with a separator (``models/chat``), or with an ending of ``SUFFIXES`` | a path |
    | words with blanks, a question, a web address, ``24/7`` | text |
    | words that begin with the path of something that exists (``/etc/hosts what is this``) | text |
    """
    if not text or len(text) > MOST_CHARS or "\n" in text or "\0" in text:
        return False
    if _exists(expanded(text)):
        return True
    if _HERE.match(text):
        return not _begins_with_path(text)
    if re.search(r"\s", text):
        separator = os.sep if os.sep in text else "/"
        parent = text.rpartition(separator)[0]
        return text.startswith(separator) and bool(parent) and _exists(parent) and not _begins_with_path(text)
    if _NO_PATH.search(text):
        return False
    separators = {os.sep, os.altsep or os.sep}
    return any(mark in text for mark in separators) or text.lower().endswith(SUFFIXES)


def _begins_with_path(text: str) -> bool:
    """Return whether words follow a path that exists."""
    blanks = islice(re.finditer(r"\s+", text), _MOST_BLANKS)
    return any(_exists(expanded(text[: blank.start()])) for blank in blanks)


def expanded(text: str) -> str:
    """Return a path with the home directory in place of ``~``."""
    try:
        return str(Path(text).expanduser()) if text.startswith("~") else text
    except RuntimeError:  # there is no such user
        return text


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):
        return False
