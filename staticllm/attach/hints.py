"""Knows when a caller reads only the logits after the last token, although the model returns those of all tokens.

``transformers`` reads ``outputs.logits[:, -1, :]`` while it samples or searches with beams. Then the daemon computes only these,
and may reuse keys and values of an earlier prompt that begins alike. Without the hint answers are the same, and prompts slower.
Calls that a program makes meanwhile, such as those of a logits processor that asks a model, return all logits.
It is on for ``TESTED`` versions of transformers; ``STATICLLM_HINTS=0`` turns it off, and another value on for all versions.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
from typing import Any

TESTED = ((5, 5), (5, 6))
"""The versions of transformers that it was tested with: the first, and the first that was not."""
METHODS = ("_sample", "_beam_search")
"""The methods of ``GenerationMixin`` that read only the last row."""
LOOP = "transformers.generation.utils"
"""The module of these methods."""
CALLERS = frozenset((*METHODS, "_prefill"))
"""The functions of ``LOOP`` that call the model."""
BETWEEN = ("optimum.", "openvino.", "torch.", __name__.partition(".")[0] + ".")
"""Packages whose functions lie between these methods and a call of an infer request."""

_thread = threading.local()


def wants_last() -> bool:
    """Return whether the caller's call is one of a method that reads only the logits after the last token."""
    if not getattr(_thread, "depth", 0):
        return False
    frame: Any = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).startswith(BETWEEN):
        frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == LOOP and frame.f_code.co_name in CALLERS


def attach(module: Any) -> None:
    """Wrap the methods of ``transformers``, which has been imported. A second call does nothing."""
    if not _is_on():
        return
    for name in METHODS:
        method = getattr(module.GenerationMixin, name, None)
        if method is not None and not hasattr(method, "__wrapped__"):
            setattr(module.GenerationMixin, name, _counted(method))


def _is_on() -> bool:
    wanted = os.environ.get("STATICLLM_HINTS")
    if wanted:
        return wanted != "0"
    version = str(getattr(sys.modules.get("transformers"), "__version__", ""))
    numbers = re.match(r"(\d+)\.(\d+)", version)  # those of 5.5rc1 are 5 and 5
    return numbers is not None and TESTED[0] <= (int(numbers[1]), int(numbers[2])) < TESTED[1]


def _counted(method: Any) -> Any:
    @functools.wraps(method)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _thread.depth = getattr(_thread, "depth", 0) + 1
        try:
            return method(*args, **kwargs)
        finally:
            _thread.depth -= 1

    return wrapper
