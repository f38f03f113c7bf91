"""The logits processor of grammars: it forbids every token that the grammar does not allow next."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from staticllm.errors import GenerationConfigError
from staticllm.pipelines.generation.structured.compiler import MaskTimes
from staticllm.pipelines.generation.structured.matcher import Matcher

FEW = 4096
"""With at most this many allowed tokens, their logits are gathered; with more, the others are overwritten."""


@dataclass(frozen=True)
class Mask:
    """The tokens that may follow: ``few`` ids if they are few, otherwise all but ``forbidden``, bool ``[vocab]``."""

    few: NDArray[np.intp] | None
    forbidden: NDArray[np.bool_] | None = None


class GrammarMask:
    """Forbids the tokens that a grammar does not allow. It belongs to one answer.

    ``prepare`` finds the next mask while the device runs; otherwise ``process`` does. Special tokens among
    ``stop_token_ids`` are allowed where the answer may end. Any other one is text, which is allowed where the grammar allows it.
    """

    remedy = "let the grammar allow more, or raise top_k and the like"
    is_active = True

    def __init__(
        self,
        matcher: Matcher,
        stop_token_ids: Collection[int],
        special: Collection[int],
        vocab_size: int,
        times: MaskTimes | None = None,
    ) -> None:
        self._matcher, self._times = matcher, times or MaskTimes()
        ends = {token for token in stop_token_ids if token < vocab_size and token in special}
        if not ends:
            raise GenerationConfigError(
                "a grammar without a token that ends the answer: set eos_token_id, or stop_token_ids with a special token"
            )
        self._ends = np.array(sorted(ends), np.intp)
        self._mask: Mask | None = None
        self._forced: list[int] = []  # tokens that must follow, the next one first
        self._accepted: list[int] = []  # chosen tokens that the matcher does not know yet
        self._error: GenerationConfigError | None = None

    def clone(self) -> GrammarMask:
        """Return a processor at the same place of the same grammar, for another answer that begins alike."""
        copy = object.__new__(GrammarMask)
        copy.__dict__.update(self.__dict__)
        copy._matcher, copy._forced, copy._accepted = self._matcher.clone(), list(self._forced), list(self._accepted)
        return copy

    def prepare(self) -> None:
        """Find the mask of the next token, while the device computes its logits."""
        begin = time.perf_counter()
        if self._is_ready():
            return
        self._find()
        self._times.num_hidden += 1
        self._times.hidden += time.perf_counter() - begin

    def process(self, logits: NDArray[np.float32]) -> None:
        """Set the logits ``[vocab]`` of forbidden tokens to -inf.

        Raises:
            GenerationConfigError: the grammar became too complex.
        """
        if not self._is_ready():
            begin = time.perf_counter()
            self._find()
            self._times.num_exposed += 1
            self._times.exposed += time.perf_counter() - begin
        if self._error is not None:
            raise self._error
        mask = self._mask
        few = np.array(self._forced[:1], np.intp) if self._forced else None if mask is None else mask.few
        if few is not None:
            kept = logits[few]
            logits.fill(-np.inf)
            logits[few] = kept
        else:
            assert mask is not None
            assert mask.forbidden is not None
            np.copyto(logits, -np.inf, where=mask.forbidden)

    def accept(self, token: int) -> None:
        """Go on by the token that was chosen; the matcher learns of it with the next mask."""
        if token in self._ends:
            return
        self._accepted.append(token)
        self._forced = self._forced[1:] if self._forced[:1] == [token] else []
        self._mask = None

    def forced_tokens(self, limit: int) -> list[int]:
        """Return at most ``limit`` tokens that must follow, whatever the logits are; the end of the answer counts too."""
        if not self._is_ready():
            self._find()
        forced = list(self._forced)
        if not forced and self._error is None and self._matcher.is_at_end and len(self._ends) == 1:
            forced = [int(self._ends[0])]
        return forced[:limit]

    def _is_ready(self) -> bool:
        return self._mask is not None or bool(self._forced) or self._error is not None

    def _find(self) -> None:
        """Find the tokens that must follow, or else the mask. An error is kept for ``process``, which ends only this answer."""
        try:
            if self._accepted:
                accepted, self._accepted = self._accepted, []
                self._matcher.accept(accepted)
            self._forced = self._matcher.forced()
            if not self._forced:
                allowed = self._matcher.allowed()
                allowed[self._ends] = self._matcher.can_end
                few = np.flatnonzero(allowed) if np.count_nonzero(allowed) <= FEW else None
                self._mask = Mask(few, None if few is not None else ~allowed)
        except GenerationConfigError as error:
            self._error = error
