"""Says what a GGUF file holds, and whether it can be converted, before that is tried."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path

from staticllm.errors import ModelError, shown
from staticllm.sources.gguf_architectures import check_architecture, context_length
from staticllm.sources.gguf_header import GGUFHeader, read_gguf_header

from ...compiler_passes.conversion.gguf_tokenizer import KIND, PRE, TOKENS, check_vocabulary
from .reports import Finding


def check_gguf(path: Path) -> Finding:
    """Return what a file is, and if it cannot be converted, why and what helps."""
    try:
        header = read_gguf_header(path)
    except ModelError as error:
        return _failed(error, "")
    try:
        check_architecture(header)
        check_vocabulary(header)
    except ModelError as error:
        return _failed(error, f"{describe(header)}; ")
    return Finding("ok", "GGUF", f"{describe(header)}; it can be converted")


def _failed(error: ModelError, what: str) -> Finding:
    problem, _, remedy = str(error).rpartition(": ")
    return Finding("fail", "GGUF", what + problem, remedy)


def describe(header: GGUFHeader) -> str:
    """Return architecture, numbers, types of weights, context and vocabulary of a file in one line."""
    numbers = Counter[str]()
    for tensor in header.tensors:
        numbers[tensor.kind] += math.prod(tensor.shape)
    kinds = ", ".join(kind for kind, _ in numbers.most_common())
    tokens = header.metadata.get(TOKENS)
    size = f"{len(tokens)} tokens" if isinstance(tokens, list) else "none"
    how = ", ".join(shown(header.text(key)) for key in (KIND, PRE) if header.text(key))
    parts = [
        f"architecture {shown(header.architecture)}",
        f"{sum(numbers.values()) / 1e6:.0f} million numbers ({kinds or 'no weights'})",
        f"{header.num_bytes / 1e9:.2f} GB",
        f"context of {context_length(header) or 'unknown'} tokens",
        f"vocabulary: {size}" + (f" ({how})" if how else ""),
    ]
    return "; ".join(parts)
