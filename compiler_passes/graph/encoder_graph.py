"""The graph of an encoder that passes change: a model without states, and what the passes found in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import openvino as ov

from staticllm.core import EncoderMask, Pooling

from .step_graph import StepGraph


@dataclass
class EncoderGraph(StepGraph):
    """An encoder on its way from an exported IR to a packed program. Passes change it in place.

    ``max_rows``, of the base class, is the most rows of any program.
    """

    original: ov.Model = field(kw_only=True)
    """A copy of the model as it was exported."""
    encoder_masks: list[EncoderMask] = field(default_factory=list)
    first_position: int = 0
    skipped_id: int | None = None  # tokens that are not counted in positions
    has_scores: bool = False  # whether the model has one vector of scores per text
    is_pooled: bool = (
        False  # whether the model has one embedding per text; else, without scores, a hidden state per token
    )
    pooling: Pooling | None = None
    head: Literal["none", "cut", "tokens"] = "none"  # what became of the head of a causal language model
    is_batchable: bool = True  # whether a call may have several sequences
    reasons: list[str] = field(default_factory=list)  # why texts cannot share a sequence
    counters: list[str] = field(default_factory=list)  # nodes that compute with the number of rows
    shares_prefixes: bool = False  # whether texts of a sequence can share the rows of a common beginning
    joins: list[ov.Node] = field(default_factory=list)  # for each state, what appends new rows to it; empty if unknown
    continued: ov.Model | None = None  # the graph whose calls continue a text, with ports for its earlier rows

    @property
    def is_per_text(self) -> bool:
        """Whether the model has one vector per text, of scores or an embedding, else one per token."""
        return self.has_scores or self.is_pooled

    @property
    def num_rows(self) -> int:
        """The most rows of any program."""
        assert self.max_rows is not None
        return self.max_rows

    def limit_rows(self, rows: int) -> None:
        """Allow no program with more rows than this."""
        self.max_rows = min(self.num_rows, rows)

    def keep_texts_apart(self, stage: str, reason: str) -> None:
        """Allow only one text per sequence, and note the reason."""
        self.is_packable = False
        self.reasons.append(reason)
        self.note(stage, f"one text per sequence: {reason}")

    def keep_calls_apart(self, stage: str, reason: str) -> None:
        """Allow only one text per call, and note the reason."""
        self.is_batchable = False
        self.keep_texts_apart(stage, reason)
        self.note(stage, "one sequence per call, for the same reason")
