"""Logits processors that a user made: objects like ours, or functions ``(input_ids, scores) -> scores`` on numpy arrays.

They run on the engine's thread. An exception in one, of whatever kind, ends only its own request; a slow one delays all requests.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from staticllm.errors import GenerationConfigError, last_line
from staticllm.pipelines.generation.filters import Logits
from staticllm.pipelines.generation.logits_processors import LogitsProcessor
from staticllm.pipelines.generation.repetition import TokenHistory

SLOW_MS = 20.0
"""A processor that takes longer for one token, ms, is reported once in the log ``staticllm``."""
log = logging.getLogger("staticllm")
_reported: set[str] = set()


def copies_for(given: Sequence[Any], prompt: Sequence[int], num_answers: int) -> list[list[LogitsProcessor]]:
    """Return the processors of each answer.

    A function is shared by all answers. An object with a method ``process`` may have a state, so each answer gets a deep copy.

    Raises:
        GenerationConfigError: an object cannot be copied.
    """
    return [[_guarded(each, prompt) for each in given] for _ in range(num_answers)] if given else []


def _guarded(given: Any, prompt: Sequence[int]) -> LogitsProcessor:
    if not callable(getattr(given, "process", None)):
        return _Guarded(_Function(given, prompt), _name_of(given))
    try:
        return _Guarded(copy.deepcopy(given), _name_of(given))
    except Exception as error:
        raise GenerationConfigError(
            f"the logits_processor {_name_of(given)} cannot be copied for each answer ({last_line(error)}): "
            "give it a method __deepcopy__"
        ) from error


def _name_of(given: Any) -> str:
    return str(getattr(given, "__qualname__", type(given).__qualname__))


class _Function:
    """A function of the tokens so far, int64 ``[n]``, and of the logits, float32 ``[vocab]``, which returns new logits.

    One that returns None has changed the logits in place.
    """

    def __init__(self, function: Callable[[Any, Any], Any], prompt: Sequence[int]) -> None:
        self._function = function
        self._history = TokenHistory(prompt)

    def process(self, logits: Logits) -> None:
        tokens = self._history.last(len(self._history)).astype(np.int64)
        changed = self._function(tokens, logits)
        if changed is None:
            return
        changed = np.asarray(changed, np.float32)
        if changed.shape != logits.shape:
            raise ValueError(f"it returned an array of shape {list(changed.shape)}, not {list(logits.shape)}")
        logits[:] = changed

    def accept(self, token: int) -> None:
        self._history.add(token)


class _Guarded:
    """Turns the exceptions of a user's processor into one of ours, checks its logits, and measures its time.

    Of the members of ``LogitsProcessor``, only ``process`` is needed.
    """

    def __init__(self, processor: Any, name: str) -> None:
        self._processor = processor
        self._name = name

    @property
    def remedy(self) -> str:
        usual = f"let the logits_processor {self._name} allow more tokens"
        return str(self._call(lambda: str(getattr(self._processor, "remedy", "")) or usual))

    @property
    def is_active(self) -> bool:
        return bool(self._call(lambda: getattr(self._processor, "is_active", True)))

    def process(self, logits: Logits) -> None:
        start = time.perf_counter()
        self._call(lambda: self._processor.process(logits))
        milliseconds = (time.perf_counter() - start) * 1e3
        if milliseconds > SLOW_MS and self._name not in _reported:
            _reported.add(self._name)
            log.warning(
                "the logits_processor %s took %.0f ms for one token: all requests wait meanwhile",
                self._name,
                milliseconds,
            )
        if np.isnan(logits).any() or np.isposinf(logits).any():
            raise GenerationConfigError(
                f"the logits_processor {self._name} made logits that are NaN or inf: use finite numbers, or -inf to forbid"
            )

    def accept(self, token: int) -> None:
        accept = getattr(self._processor, "accept", None)
        if accept is not None:
            self._call(lambda: accept(token))

    def _call(self, function: Callable[[], object]) -> object:
        try:
            return function()
        except BaseException as error:  # SystemExit and its like must not end the engine's thread, which serves others
            raise GenerationConfigError(
                f"the logits_processor {self._name} failed: {type(error).__name__}: {last_line(error)}"
            ) from error
