"""Serves a stateful language model to programs that run it themselves: their requests share the calls of our engine."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import openvino as ov

from staticllm.compiler_passes.graph.exported_inputs import ATTENTION_MASK, BEAM_IDX
from staticllm.config import StaticLLMConfig
from staticllm.core import Variant
from staticllm.daemon.packed.packed_call import PackedCall, UnusualCallError, logs_of, read_call
from staticllm.daemon.packed.replay import Array, OriginalModel, Replay, RowLog
from staticllm.devices import get_core, supported_properties
from staticllm.errors import ClosedError, UnsupportedModelError
from staticllm.model_dir import MODEL_XML, forget_in_memory, keep_in_memory, max_positions, read_model
from staticllm.pipelines.engine.engine import Engine
from staticllm.pipelines.engine.fed.sequence import FedSequence, Feed
from staticllm.pipelines.engine.fed.state import FeedResult, Wanted
from staticllm.pipelines.engine.options import options_of
from staticllm.pipelines.programs.build import compile_all, make_runner
from staticllm.pipelines.programs.compile_plan import prepare
from staticllm.pipelines.scheduling.interface import Policy
from staticllm.pipelines.scheduling.planner import make_policy
from staticllm.ports import INPUT_IDS, LOGITS, POSITION_IDS
from staticllm.properties import resolve

log = logging.getLogger(__name__)
Result = TypeVar("Result")

MAX_LEN, MAX_RESPONSE = 4096, 128
"""The most tokens of a sequence in our engine, and how many of these are not part of the longest prompt."""
MAX_LOGIT_ROWS = 64
"""The most rows of a call with logits after every row: each takes 4 bytes per word of the vocabulary."""
TAKEN_INPUTS = frozenset((INPUT_IDS, ATTENTION_MASK, POSITION_IDS, BEAM_IDX))


@dataclass(frozen=True)
class CallTimes:
    """What a call took, in seconds: on the device, and before its first device call."""

    device_seconds: float = 0.0
    queued_seconds: float = 0.0


class PackedModel:
    """A stateful language model that serves infer requests of the original's form. Any thread may call.

    ``reason`` says why every request runs on the original model; None if requests run in ``engine``. ``max_len`` is the largest
    number of tokens of a sequence in the engine; a longer one goes on in the original model.

    Args:
        xml: The IR. Its directory needs no tokenizer.
        device: A device of OpenVINO.
        config: OpenVINO's properties, as a program would pass them to ``compile_model``, and properties of ours.
        weights: The weights file, if it is not beside the IR.
        policy: A scheduling policy; None for ``dynamic``.

    Raises:
        ModelError: a file is missing or damaged.
        ConfigError: a property is unknown or impossible.
        DeviceError: the device is missing, or refused a program.
    """

    def __init__(
        self,
        xml: str | Path,
        device: str,
        config: Mapping[str, Any],
        weights: str | Path | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.device = device
        self.engine: Engine | None = None
        self.reason: str | None = None
        self.max_len = self.vocab_size = 0
        self._lock = threading.Lock()  # of the original model, if there is no engine
        core, xml = get_core(), Path(xml)
        weights = Path(weights) if weights is not None else xml.with_suffix(".bin")
        self._weights = None if xml.name == MODEL_XML else np.memmap(weights, np.uint8, "c")
        directory = _directory_of(xml, self._weights)
        try:
            model = read_model(core, directory, str(weights))
            native = {name: value for name, value in config.items() if name in supported_properties(core, device)}
            self._original = OriginalModel(model, core, device, native)
            self.reason = _reason_against(model)
            if self.reason is None:
                self._start(directory, device, _config_of(directory, device, config, weights), policy)
        except UnsupportedModelError as error:
            self.reason = str(error)
        finally:
            forget_in_memory(directory)
        if self.reason is not None:
            log.info("%s runs as it is: %s", xml, self.reason)

    def open(self, priority: int = 0) -> PackedRequest:
        """Return a new infer request. Requests of a higher ``priority`` go first."""
        return PackedRequest(self, priority)

    def replay(self) -> Replay:
        """Return a request on the original model, to be used only inside ``run_alone``."""
        return Replay(self._original)

    def run_alone(self, function: Callable[[], Result]) -> Result:
        """Call ``function`` while no call of the engine runs."""
        if self.engine is not None:
            return self.engine.run_between_steps(function)
        with self._lock:
            return function()

    def close(self) -> None:
        """End the engine and release the programs. Calls that wait end with a ``ClosedError``."""
        if self.engine is not None:
            self.engine.close()
        self._original.close()
        self._weights = None

    def _start(self, directory: Path, device: str, config: StaticLLMConfig, policy: Policy | None) -> None:
        core, plan = prepare(directory, device, config)
        shape = plan.lowered.shape
        if shape.needs_real_rows:
            self.reason = "it has recurrent states, which cannot be shared or cut"
            return
        variants = (*plan.variants, *with_all_logits(plan.variants))
        with plan.weights.released():
            programs = compile_all(core, plan.restricted(variants))
            runner = make_runner(programs)
        self.program = next(iter(programs.compiled.values()))
        self.max_len, self.vocab_size = config.max_seq_len, shape.vocab_size
        self.engine = Engine(
            runner, policy or make_policy(config.scheduler), options_of(config, shape, plan.options.mode)
        )


def with_all_logits(variants: Sequence[Variant]) -> tuple[Variant, ...]:
    """Return the variants of prompts again, with logits after every row; in a shared program they cost nothing."""
    return tuple(
        replace(variant, extra_logits=variant.rows - variant.sequences)
        for variant in variants
        if variant.sequences < variant.rows <= MAX_LOGIT_ROWS
    )


class PackedRequest:
    """An infer request of one client on a ``PackedModel``. One thread at a time may call.

    Each row of a batch is a sequence of the engine. A call that the engine cannot serve as the original would goes to a replay
    on the original model, and so do all later calls until ``reset_state``. ``fallback`` is the reason; None in the engine.
    """

    def __init__(self, model: PackedModel, priority: int = 0) -> None:
        self._model, self.priority = model, priority
        self.fallback = model.reason
        self.times = CallTimes()
        self._sequences: list[FedSequence] = []
        self._logs: list[RowLog] = []
        self._apart: dict[int, int] = {}  # the columns of calls with hidden tokens
        self._replay: Replay | None = None
        self._fed: Sequence[FedSequence] = ()  # by the call in progress
        self._is_cancelled = False
        self._is_running = threading.Lock()

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
            logits = self._on_original(lambda replay: replay.infer(inputs))
            return logits[:, -1:] if wanted == "last" else logits

    def reset_state(self) -> None:
        """Forget all tokens. The sequences stay cached for later ones that begin alike."""
        with self._is_running:
            self._close_sequences(self._sequences, is_reusable=True)
            self._sequences, self._logs, self._apart = [], [], {}
            if self._replay is not None and self._model.reason is None:
                self._replay = None
            elif self._replay is not None:
                self._model.run_alone(self._replay.reset_state)
            self.fallback = self._model.reason

    def state_names(self) -> list[str]:
        """Return the names of the original's states."""
        return [str(name) for name in self._on_states(lambda states: [state.name for state in states])]

    def get_state(self, index: int) -> Array:
        """Return the value of a state of the original."""
        values: Array = self._on_states(lambda states: states[index].state.data.copy())
        return values

    def set_state(self, index: int, values: Array) -> None:
        """Set the value of a state of the original."""

        def change(states: list[Any]) -> None:
            states[index].state = ov.Tensor(np.array(values))

        self._on_states(change)

    def reset_one_state(self, index: int) -> None:
        """Set one state of the original back."""
        self._on_states(lambda states: states[index].reset())

    def cancel(self) -> None:
        """End the call in the engine before the next device call; later ones there fail. Any thread may call."""
        self._is_cancelled = True
        self._close_sequences(self._fed, is_reusable=False)

    def close(self) -> None:
        """Release the sequences. A second call does nothing."""
        self._close_sequences(self._sequences, is_reusable=True)
        self._sequences, self._replay = [], None

    def _checked(self, inputs: Mapping[str, Array], wanted: Wanted) -> PackedCall:
        return read_call(inputs, self._logs, self._model.max_len, self._model.vocab_size, wanted)

    def _in_engine(self, call: PackedCall) -> Array:
        """Run a checked call in the engine.

        Raises:
            UnusualCallError: the engine failed; the request is as it was before the call.
        """
        engine = self._model.engine
        assert engine is not None, "there is no engine"
        sequences, unused = self._continued(call, engine)
        self._fed = sequences
        try:
            if self._is_cancelled:
                raise ClosedError("the request was cancelled")
            results = _feed(engine, sequences, call)
        except BaseException:  # closed, or interrupted while the feeds are in progress
            self._fall_back("a call was interrupted")
            self._close_sequences(sequences, is_reusable=False)
            raise
        failed = next((result.error for result in results if result is not None and result.error is not None), None)
        if failed is not None:
            self._close_sequences([*sequences, *unused], is_reusable=False)
            self._sequences = []
            if self._is_cancelled:
                raise failed
            raise UnusualCallError(f"the engine failed: {failed}") from failed
        self._close_sequences(unused, is_reusable=False)
        if any(not all(row.mask) for row in call.rows):
            first = len(self._logs[0].ids) if self._logs else 0
            self._apart[first] = first + len(call.rows[0].ids)
        self._sequences, self._logs = sequences, logs_of(call, self._logs)
        done = [result for result in results if result is not None]
        self.times = CallTimes(
            max((result.device_seconds for result in done), default=0.0),
            max((result.queued_seconds for result in done), default=0.0),
        )
        if not all(result.is_finite for result in done):  # these are the answer; what follows is the original's
            self._fall_back("its logits are not finite")
        return _placed(call, results, self._model.vocab_size)

    def _continued(self, call: PackedCall, engine: Engine) -> tuple[list[FedSequence], list[FedSequence]]:
        """Return the sequence that each row continues, and the sequences that none does."""
        if not self._sequences:
            return [engine.open_fed(self.priority) for _ in call.rows], []
        free = list(self._sequences)
        last_use = {row.source: index for index, row in enumerate(call.rows)}
        continued = [
            free[row.source] if last_use[row.source] == index else free[row.source].fork()
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

        def run() -> Result:
            began = time.perf_counter()
            if self._replay is None:
                replay = self._model.replay()
                replay.repeat(self._logs, self._apart)
                self._replay = replay
            result = function(self._replay)
            self.times = CallTimes(time.perf_counter() - began, began - asked)
            return result

        return self._model.run_alone(run)

    def _on_states(self, function: Callable[[list[Any]], Result]) -> Result:
        with self._is_running:
            if self.fallback is None:
                self._fall_back("the program reads its states")
            return self._on_original(lambda replay: function(replay.states))

    def _close_sequences(self, sequences: Sequence[FedSequence], is_reusable: bool) -> None:
        for sequence in sequences:
            sequence.close(is_reusable)


def _feed(engine: Engine, sequences: Sequence[FedSequence], call: PackedCall) -> list[FeedResult | None]:
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


def _placed(call: PackedCall, results: Sequence[FeedResult | None], vocab_size: int) -> Array:
    """Return the logits ``[B, S, V]`` or ``[B, 1, V]``, each row at the place of its token."""
    given = [result.logits for result in results if result is not None and result.logits is not None]
    if len(given) == 1 == len(call.rows) and given[0].shape[0] == call.num_columns:
        return given[0][None]
    logits = np.zeros((len(call.rows), call.num_columns, vocab_size), np.float32)
    for lines, row, result in zip(logits, call.rows, results, strict=True):
        if result is not None and result.logits is not None:
            lines[list(row.columns) if call.wanted == "all" else slice(-1, None)] = result.logits
    return logits


def _reason_against(model: ov.Model) -> str | None:
    """Return why a model cannot run in our engine, by its ports; None if it may."""
    inputs = {port.get_any_name() for port in model.inputs}
    outputs = [port.get_any_name() for port in model.outputs]
    if not {INPUT_IDS, ATTENTION_MASK, BEAM_IDX} <= inputs or not inputs <= TAKEN_INPUTS:
        return f"its inputs are {', '.join(sorted(inputs))}: must be {', '.join(sorted(TAKEN_INPUTS))}"
    if outputs != [LOGITS]:
        return f"its outputs are {', '.join(outputs)}: must be {LOGITS} alone"
    return None if model.get_variables() else "it has no states"


def _directory_of(xml: Path, data: Array | None) -> Path:
    """Return a model directory for an IR of any name: its own folder, or a name for the model in memory.

    ``data [n]`` u8 are its weights; whoever compiles the model must keep them, because the graph refers to them.
    """
    if data is None:
        return xml.parent
    return keep_in_memory(xml.read_text(encoding="utf-8"), ov.Tensor(data, shared_memory=True))


def _config_of(directory: Path, device: str, config: Mapping[str, Any], weights: Path) -> StaticLLMConfig:
    """Return the config of the engine: the client's properties, and lengths that the model was made for."""
    properties = dict(config)
    longest = min(max_positions(directory) or MAX_LEN, MAX_LEN)
    response = min(MAX_RESPONSE, max(1, longest // 8))
    properties.setdefault("MIN_RESPONSE_LEN", response)
    properties.setdefault("MAX_PROMPT_LEN", max(1, longest - response))
    resolved = resolve(properties, supported_properties(get_core(), device)).config
    return replace(resolved, weights_path=str(weights)) if directory.is_dir() else resolved
