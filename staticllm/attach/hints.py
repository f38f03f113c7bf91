"""Knows when a caller reads only the logits after the last token, although the model returns those of all tokens.

``transformers`` reads ``outputs.logits[:, -1, :]`` while it samples or searches with beams. Then the daemon computes only these,
and may reuse keys and values of an earlier prompt that begins alike. Without the hint answers are the same, and prompts slower.
``STATICLLM_HINTS=0`` turns it off.
"""

from __future__ import annotations

import functools
import os
import threading
from typing import Any

METHODS = ("_sample", "_beam_search")
"""The methods of ``GenerationMixin`` that read only the last row."""

_thread = threading.local()


def wants_last() -> bool:
    """Return whether this thread is inside a method that reads only the logits after the last token."""
    return bool(getattr(_thread, "depth", 0))


def attach(module: Any) -> None:
    """Wrap the methods of ``transformers``, which has been imported. A second call does nothing."""
    if os.environ.get("STATICLLM_HINTS", "1") == "0":
        return
    for name in METHODS:
        method = getattr(module.GenerationMixin, name, None)
        if method is not None and not hasattr(method, "__wrapped__"):
            setattr(module.GenerationMixin, name, _counted(method))


def _counted(method: Any) -> Any:
    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _thread.depth = getattr(_thread, "depth", 0) + 1
        try:
            return method(*args, **kwargs)
        finally:
            _thread.depth -= 1

    return wrapper
