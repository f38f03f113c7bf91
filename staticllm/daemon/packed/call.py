"""Reads a call on a stateful language model as tokens for the sequences of an engine, if that is what it means."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from staticllm.compiler_passes.graph.exported_inputs import ATTENTION_MASK, BEAM_IDX
from staticllm.daemon.packed.replay import Array, RowLog
from staticllm.errors import PromptError
from staticllm.pipelines.engine.client_sequences.state import Wanted
from staticllm.ports import INPUT_IDS, POSITION_IDS


class UnusualCallError(Exception):
    """A call that only the original model can run; the text says what is unusual."""


@dataclass(frozen=True)
class PackedRow:
    """One row of a batch: it continues row ``source`` of the last call with ``tokens``, which are at ``columns`` of the call."""

    source: int
    tokens: tuple[int, ...]
    columns: tuple[int, ...]
    ids: tuple[int, ...]
    mask: tuple[bool, ...]


@dataclass(frozen=True)
class PackedCall:
    """A call: its rows, and the number of columns of its logits."""

    rows: tuple[PackedRow, ...]
    num_columns: int
    wanted: Wanted


@dataclass(frozen=True)
class EngineLimits:
    """What an engine can run as the original does.

    Attributes:
        max_len: The largest number of tokens of a sequence.
        vocab_size: The number of token ids.
        reach: The number of columns from which on a token may not see all before it; None if it always does.
    """

    max_len: int
    vocab_size: int
    reach: int | None = None


def read_call(inputs: Mapping[str, Array], logs: Sequence[RowLog], limits: EngineLimits, wanted: Wanted) -> PackedCall:
    """Return what a call means for the sequences with these ``logs``; there are none after a reset.

    Tokens that the mask hides, such as those of left padding, are dropped: no other token sees them, and positions do not
    count them. Windows of the original count them, so that such tokens inside a row are unusual there. Raises
    ``UnusualCallError`` (the call means something else) and ``PromptError`` (``beam_idx`` names a row that the last call
    did not have; the original would read foreign memory).
    """
    missing = {INPUT_IDS, ATTENTION_MASK, BEAM_IDX} - inputs.keys()
    if missing:
        raise UnusualCallError(f"it has no {' and no '.join(sorted(missing))}")
    ids = inputs[INPUT_IDS]
    mask = inputs[ATTENTION_MASK]
    beams = inputs[BEAM_IDX]
    sources = _sources(beams, ids, len(logs))
    past = _past_mask(logs, sources)
    if mask.shape != (ids.shape[0], past.shape[1] + ids.shape[1]):
        expected = [ids.shape[0], past.shape[1] + ids.shape[1]]
        raise UnusualCallError(f"the mask has the shape {list(mask.shape)} instead of {expected}")
    shown = mask == 1
    if not (shown | (mask == 0)).all():
        raise UnusualCallError("the mask has values other than 0 and 1")
    if not np.array_equal(shown[:, : past.shape[1]], past):
        raise UnusualCallError("the mask shows or hides earlier tokens")
    _check_positions(inputs.get(POSITION_IDS), shown, ids.shape[1])
    new = shown[:, past.shape[1] :]
    if wanted == "last" and not new[:, -1].all():
        raise UnusualCallError("the last token of a row is hidden, and only its logits are wanted")
    if (longest := int(shown.sum(1).max())) > limits.max_len:
        raise UnusualCallError(f"a sequence of {longest} tokens, the engine has room for {limits.max_len}")
    if limits.reach is not None and _has_gap(shown, limits.reach):
        raise UnusualCallError("a row has hidden tokens inside, and the model counts them in its windows")
    if ((ids < 0) | (ids >= limits.vocab_size))[new].any():
        raise UnusualCallError(f"a token id is outside the vocabulary of {limits.vocab_size}")
    rows = tuple(_row(source, line, seen) for source, line, seen in zip(sources, ids, new, strict=True))
    return PackedCall(rows, 1 if wanted == "last" else ids.shape[1], wanted)


def logs_of(call: PackedCall, logs: Sequence[RowLog]) -> list[RowLog]:
    """Return the logs of the rows after a call."""
    continued = [logs[row.source].copy() if logs else RowLog() for row in call.rows]
    for log, row in zip(continued, call.rows, strict=True):
        log.ids.extend(row.ids)
        log.mask.extend(row.mask)
    return continued


def _sources(beams: Array, ids: Array, num_logs: int) -> list[int]:
    """Return the row of the last call that each row continues; its own after a reset."""
    if ids.ndim != 2 or not ids.size or beams.shape != (ids.shape[0],) or ids.dtype.kind not in "iu":
        raise UnusualCallError(f"input_ids {list(ids.shape)} {ids.dtype} with beam_idx {list(beams.shape)}")
    limit = num_logs or ids.shape[0]
    sources = [int(beam) for beam in beams]
    bad = next((source for source in sources if not 0 <= source < limit), None)
    if bad is not None:
        raise PromptError(f"beam_idx has {bad}, the batch before had {limit} rows: must be from 0 to {limit - 1}")
    return sources


def _past_mask(logs: Sequence[RowLog], sources: Sequence[int]) -> Array:
    """Return the mask ``[B, P]`` of the tokens before the call."""
    if not logs:
        return np.zeros((len(sources), 0), np.bool_)
    return np.array([logs[source].mask for source in sources], np.bool_)


def _has_gap(shown: Array, reach: int) -> bool:
    """Return whether a row has more than ``reach`` columns from its first to its last token, and hidden ones among them."""
    seen = shown.any(1)
    num_columns = shown.shape[1]
    spans = np.where(seen, num_columns - shown.argmax(1) - shown[:, ::-1].argmax(1), 0)
    return bool(((spans > reach) & (spans > shown.sum(1))).any())


def _check_positions(positions: Array | None, shown: Array, num_columns: int) -> None:
    """Check that the new tokens have the positions that their places in the mask give them."""
    if positions is None:
        return
    expected = (np.cumsum(shown, axis=1) - 1)[:, -num_columns:]
    if positions.ndim < 2 or positions.shape[-2:] != expected.shape:
        raise UnusualCallError(f"position_ids have the shape {list(positions.shape)} instead of {list(expected.shape)}")
    if (positions != expected)[..., shown[:, -num_columns:]].any():
        raise UnusualCallError("position_ids are not those of the mask")


def _row(source: int, ids: Array, shown: Array) -> PackedRow:
    columns = np.flatnonzero(shown)
    tokens = tuple(ids[columns].tolist())
    return PackedRow(source, tokens, tuple(columns.tolist()), tuple(ids.tolist()), tuple(shown.tolist()))
