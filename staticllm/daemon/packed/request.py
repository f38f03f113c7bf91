"""An infer request of a program on a stateful model: sequences of our engine, or a replay on the original model.

A call is read as tokens for sequences, if that is what it means.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import numpy as np

from staticllm.daemon.infer_request import CallResult
from staticllm.daemon.packed.replay import Array, Caller, Replay, RowLog
from staticllm.daemon.sharing.device_scheduler import ClientId, DeviceCall
from staticllm.errors import PromptError
from staticllm.pipelines.engine.client_sequences.sequence import ClientSequence, Feed
from staticllm.pipelines.engine.client_sequences.state import FeedResult, Wanted
from staticllm.pipelines.engine.engine import Engine
from staticllm.ports import ATTENTION_MASK, BEAM_IDX, INPUT_IDS, POSITION_IDS


class UnusualCallError(Exception):
    """A call that only the original model can run; the text says what is unusual."""


@dataclass(frozen=True)
class PackedRow:
    """One row of a batch: it continues row ``parent`` of the last call with ``tokens``, which are at ``columns`` of the call."""

    parent: int
    tokens: tuple[int, ...]
    columns: tuple[int, ...]
    ids: tuple[int, ...]
    mask: tuple[bool, ...]


@dataclass(frozen=True)
class TensorCall:
    """A call: its rows, and the number of columns of its logits."""

    rows: tuple[PackedRow, ...]
    num_columns: int
    wanted: Wanted


@dataclass(frozen=True)
class EngineLimits:
    """What an engine can run as the original does."""

    max_len: int
    """The largest number of tokens of a sequence."""
    vocab_size: int
    """The number of token ids."""
    reach: int | None = None
    """The number of columns from which on a token may not see all before it; None if it always does."""


def read_call(inputs: Mapping[str, Array], logs: Sequence[RowLog], limits: EngineLimits, wanted: Wanted) -> TensorCall:
    """Return what a call means for the sequences with these ``logs``; there are none after a reset.

    Tokens that the mask hides, such as those of left padding, are dropped: no other token sees them, and positions do not
    count them. Windows of the original count them, so that such tokens inside a row are unusual there.

    Raises:
        UnusualCallError: the call means something else.
        PromptError: ``beam_idx`` names a row that the last call did not have; the original would read foreign memory.
    """
    missing = {INPUT_IDS, ATTENTION_MASK, BEAM_IDX} - inputs.keys()
    if missing:
        raise UnusualCallError(f"it has no {' and no '.join(sorted(missing))}")
    ids = inputs[INPUT_IDS]
    mask = inputs[ATTENTION_MASK]
    beams = inputs[BEAM_IDX]
    parents = _parents(beams, ids, len(logs))
    past = _past_mask(logs, parents)
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
    rows = tuple(_row(parent, line, seen) for parent, line, seen in zip(parents, ids, new, strict=True))
    return TensorCall(rows, 1 if wanted == "last" else ids.shape[1], wanted)


def logs_of(call: TensorCall, logs: Sequence[RowLog]) -> list[RowLog]:
    """Return the logs of the rows after a call."""
    continued = [logs[row.parent].copy() if logs else RowLog() for row in call.rows]
    for log, row in zip(continued, call.rows, strict=True):
        log.ids.extend(row.ids)
        log.mask.extend(row.mask)
    return continued


def _parents(beams: Array, ids: Array, num_logs: int) -> list[int]:
    """Return the row of the last call that each row continues; its own after a reset."""
    if ids.ndim != 2 or not ids.size or beams.shape != (ids.shape[0],) or ids.dtype.kind not in "iu":
        raise UnusualCallError(f"input_ids {list(ids.shape)} {ids.dtype} with beam_idx {list(beams.shape)}")
    limit = num_logs or ids.shape[0]
    parents = [int(beam) for beam in beams]
    bad = next((parent for parent in parents if not 0 <= parent < limit), None)
    if bad is not None:
        raise PromptError(f"beam_idx has {bad}, the batch before had {limit} rows: must be from 0 to {limit - 1}")
    return parents


def _past_mask(logs: Sequence[RowLog], parents: Sequence[int]) -> Array:
    """Return the mask ``[B, P]`` of the tokens before the call."""
    if not logs:
        return np.zeros((len(parents), 0), np.bool_)
    return np.array([logs[parent].mask for parent in parents], np.bool_)


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


def _row(parent: int, ids: Array, shown: Array) -> PackedRow:
    columns = np.flatnonzero(shown)
    tokens = tuple(ids[columns].tolist())
    return PackedRow(parent, tokens, tuple(columns.tolist()), tuple(ids.tolist()), tuple(shown.tolist()))


log = logging.getLogger(__name__)
Result = TypeVar("Result")


class Packed(Protocol):
    """What a request uses of its model: ``PackedModel`` describes it."""

    engine: Engine | None
    reason: str | None
    limits: EngineLimits
    input_names: tuple[str, ...]

    def replay(self, caller: Caller) -> Replay:
        """Return a request on the original model."""
        ...


class PackedRequest:
    """An infer request of one client on a ``PackedModel``. One thread at a time may call.

    Each row of a batch is a sequence of the engine. A call that the engine cannot serve as the original would goes to a replay
    on the original model, and so do all later calls until ``reset_state``. ``fallback`` is the reason; None in the engine. A
    replay is compiled and runs on the calling thread; its calls take turns with those of the engine.
    """

    def __init__(self, model: Packed, client: ClientId | None = None) -> None:
        self.model = model
        self._caller = Caller(client)
        self.fallback = model.reason
        self.times = DeviceCall()
        self._sequences: list[ClientSequence] = []
        self._logs: list[RowLog] = []
        self._apart: dict[int, int] = {}  # the columns of calls with hidden tokens
        self._replay: Replay | None = None
        self._in_call: Sequence[ClientSequence] = ()  # of the call in progress
        self._is_running = threading.Lock()

    def set_priority(self, priority: int) -> None:
        """Change the priority, also of a call that runs; requests of a higher one go first. Any thread may call."""
        if priority == self._caller.priority:
            return
        self._caller.priority = priority
        for sequence in {*self._sequences, *self._in_call}:
            sequence.set_priority(priority)
        if self._in_call and self.model.engine is not None:
            self.model.engine.hurry(priority, self._client_number)

    def call(self, inputs: Mapping[int, Array], priority: int, wants_last: bool) -> CallResult:
        self.set_priority(priority)
        names = self.model.input_names
        named = {names[index]: array for index, array in inputs.items() if 0 <= index < len(names)}
        logits = self.infer(named, "last" if wants_last else "all")
        return CallResult([logits], self.times)

    def infer(self, inputs: Mapping[str, Array], wanted: Wanted = "all") -> Array:
        """Run a call of the original's inputs, and return its logits.

        Args:
            inputs: ``input_ids [B, S]``, ``attention_mask [B, P+S]``, ``position_ids [B, S]`` and ``beam_idx [B]``.
            wanted: Which logits are returned: after all tokens, ``[B, S, V]``, or after the last one, ``[B, 1, V]``.

        The rows of tokens that the mask hides are zeros.

        Raises:
            PromptError: ``beam_idx`` names a row that the last call did not have.
            RuntimeError: OpenVINO refused the inputs.
            ClosedError: the model was closed, or the request was cancelled.
        """
        with self._is_running:
            if self.fallback is None:
                try:
                    return self._in_engine(self._checked(inputs, wanted))
                except UnusualCallError as error:
                    self._fall_back(str(error))
                finally:
                    self._in_call = ()
            return self._on_original(lambda replay: replay.infer(inputs, wanted))

    def reset(self) -> None:
        """Forget all tokens. The sequences stay cached for later ones that begin alike."""
        with self._is_running:
            self._close_sequences(self._sequences, is_reusable=True)
            self._sequences = []
            self._logs = []
            self._apart = {}
            if self._replay is not None and self.model.reason is None:
                self._replay = None
            elif self._replay is not None:
                self._replay.reset()
            self.fallback = self.model.reason

    def state_names(self) -> list[str]:
        return [str(name) for name in self._on_states(lambda replay: [state.name for state in replay.states()])]

    def get_state(self, index: int) -> Array:
        values: Array = self._on_states(lambda replay: replay.states()[index].state.data.copy())
        return values

    def set_state(self, index: int, values: Array) -> None:
        self._on_states(lambda replay: replay.set_state(index, values))

    def write_state(self, index: int, values: Array) -> None:
        self._on_states(lambda replay: replay.write_state(index, values))

    def reset_state(self, index: int) -> None:
        self._on_states(lambda replay: replay.reset_state(index))

    def profile(self) -> list[dict[str, object]]:
        """Raise a ``RuntimeError``: the nodes of our programs are not those of the client's model."""
        raise RuntimeError("the model shares calls with other programs: profile it without the daemon, or with --exact")

    def cancel(self) -> None:
        """End the call before its next device call; later ones fail. Any thread may call."""
        self._caller.is_cancelled = True
        self._close_sequences(self._in_call, is_reusable=False)

    def close(self) -> None:
        self._close_sequences(self._sequences, is_reusable=True)
        self._sequences = []
        self._replay = None

    @property
    def _client_number(self) -> int:
        return 0 if self._caller.client is None else self._caller.client.number

    def _checked(self, inputs: Mapping[str, Array], wanted: Wanted) -> TensorCall:
        return read_call(inputs, self._logs, self.model.limits, wanted)

    def _in_engine(self, call: TensorCall) -> Array:
        """Run a checked call in the engine. Raises ``UnusualCallError``."""
        engine = self.model.engine
        assert engine is not None, "there is no engine"
        sequences, unused = self._continued(call, engine)
        self._in_call = sequences
        for sequence in sequences:  # the priority may have changed since they were opened
            sequence.set_priority(self._caller.priority)
        try:
            self._caller.check()
            results = _feed(engine, sequences, call)
        except BaseException:  # closed, or interrupted while the feeds are in progress
            self._fall_back("a call was interrupted")
            self._close_sequences(sequences, is_reusable=False)
            raise
        failed = next((result.error for result in results if result is not None and result.error is not None), None)
        if failed is not None:
            self._close_sequences([*sequences, *unused], is_reusable=False)
            self._sequences = []
            if self._caller.is_cancelled:
                raise failed
            raise UnusualCallError(f"the engine failed: {failed}") from failed
        self._close_sequences(unused, is_reusable=False)
        if any(not all(row.mask) for row in call.rows):
            first = len(self._logs[0].ids) if self._logs else 0
            self._apart[first] = first + len(call.rows[0].ids)
        self._sequences = sequences
        self._logs = logs_of(call, self._logs)
        done = [result for result in results if result is not None]
        self.times = DeviceCall(
            max((result.queued_seconds for result in done), default=0.0),
            max((result.device_seconds for result in done), default=0.0),
        )
        if not all(result.is_finite for result in done):  # these are the answer; what follows is the original's
            self._fall_back("its logits are not finite")
        return _placed(call, results, self.model.limits.vocab_size)

    def _continued(self, call: TensorCall, engine: Engine) -> tuple[list[ClientSequence], list[ClientSequence]]:
        """Return the sequence that each row continues, and the sequences that none does."""
        if not self._sequences:
            return [ClientSequence(engine, self._caller.priority, self._client_number) for _ in call.rows], []
        free = list(self._sequences)
        last_use = {row.parent: index for index, row in enumerate(call.rows)}
        continued = [
            free[row.parent] if last_use[row.parent] == index else free[row.parent].fork()
            for index, row in enumerate(call.rows)
        ]
        return continued, [sequence for index, sequence in enumerate(free) if index not in last_use]

    def _fall_back(self, reason: str) -> None:
        """Go on in the original model, until the next reset."""
        log.info("a request goes on in the original model: %s", reason)
        self.fallback = reason
        self._close_sequences(self._sequences, is_reusable=False)
        self._sequences = []

    def _on_original(self, function: Callable[[Replay], Result]) -> Result:
        """Call ``function`` with the request on the original, whose states are those of all calls so far."""

        asked = time.perf_counter()
        replay = self._replay
        used_before = 0.0 if replay is None else replay.device_seconds
        if replay is None:
            replay = self.model.replay(self._caller)
            replay.repeat(self._logs, self._apart)
            self._replay = replay
        result = function(replay)
        seconds = replay.device_seconds - used_before
        self.times = DeviceCall(max(0.0, time.perf_counter() - asked - seconds), seconds)
        return result

    def _on_states(self, function: Callable[[Replay], Result]) -> Result:
        with self._is_running:
            if self.fallback is None:
                self._fall_back("the program reads its states")
            return self._on_original(function)

    def _close_sequences(self, sequences: Sequence[ClientSequence], is_reusable: bool) -> None:
        for sequence in sequences:
            sequence.close(is_reusable)


def _feed(engine: Engine, sequences: Sequence[ClientSequence], call: TensorCall) -> list[FeedResult | None]:
    """Feed all rows together, and wait for their results; None for a row without tokens."""
    results: list[FeedResult | None] = [None] * len(call.rows)
    fed = [index for index, row in enumerate(call.rows) if row.tokens]
    is_done = threading.Semaphore(0)

    def on_done(index: int, result: FeedResult) -> None:
        results[index] = result
        is_done.release()

    engine.feed(
        [Feed(sequences[index], call.rows[index].tokens, partial(on_done, index), call.wanted) for index in fed]
    )
    for _ in fed:
        is_done.acquire()
    return results


def _placed(call: TensorCall, results: Sequence[FeedResult | None], vocab_size: int) -> Array:
    """Return the logits ``[B, S, V]`` or ``[B, 1, V]``, each row at the place of its token."""
    given = [result.logits for result in results if result is not None and result.logits is not None]
    if len(given) == 1 == len(call.rows) and given[0].shape[0] == call.num_columns:
        return given[0][None]
    logits = np.zeros((len(call.rows), call.num_columns, vocab_size), np.float32)
    for lines, row, result in zip(logits, call.rows, results, strict=True):
        if result is not None and result.logits is not None:
            lines[list(row.columns) if call.wanted == "all" else slice(-1, None)] = result.logits
    return logits
