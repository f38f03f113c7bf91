"""What crosses the boundary of an engine, as plain values: a request, and the outputs that answer it."""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import count
from typing import Any, TypeAlias

from staticllm.core import FinishReason
from staticllm.errors import GenerationConfigError, from_wire, shown, to_wire
from staticllm.system.typed import typed

from ...kvcache.sequence import Conditions
from ..generation.beam_search import BeamParams
from ..generation.drafts import DraftParams
from ..generation.grammar import Grammar
from ..generation.grammar_mask import Grammars
from ..generation.options.table import SamplingParams
from ..generation.sampler import TopTokens
from ..generation.speech_rules import SpeechRules
from .overflow import OverflowRule

Decode: TypeAlias = Callable[[list[int]], str]
"""Makes text of token ids."""
_numbers = count(1)


def new_id() -> int:
    """Return a number that no other request or sequence of this process has."""
    return next(_numbers)


MAX_PRIORITY = 1 << 31
"""The highest priority of a request; the lowest one is its negative."""


def check_priority(priority: object) -> None:
    """Raise ``GenerationConfigError`` if a caller's priority is no whole number up to ``MAX_PRIORITY``."""
    if not isinstance(priority, int) or abs(priority) > MAX_PRIORITY:
        raise GenerationConfigError(
            f"priority={shown(priority)}: must be a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}"
        )


@dataclass(frozen=True)
class EngineRequest:
    """One prompt and its generation options, as plain values that can be sent to another process.

    Args:
        prompt: Token ids.
        sampling: How tokens are chosen.
        seed: Seed of the random numbers of the first answer; answer ``i`` has ``seed + i``.
        num_sequences: Number of answers; the prompt runs once, and the answers share its slots.
        max_new_tokens: The most tokens per answer; None if only the slots limit them.
        stop_token_ids: Tokens that end an answer; the first ``min_new_tokens`` tokens cannot be one of them.
        late_token_ids: Other tokens that the first ``min_new_tokens`` tokens cannot be: those that end no answer because of
            ``ignore_eos``.
        min_new_tokens: The fewest tokens per answer.
        priority: Requests with a higher priority are served first; those below 0 are proactive.
        deadline: The ``time.perf_counter`` moment at which the request ends, finished or not; None without one.
        overflow: The rule for a conversation that fills its slots.
        beams: The parameters of a beam search; None for one token at a time. Its answers are the ``num_sequences`` best.
        stop_strings: Texts that end a beam. Those of other answers are found by the reader.
        drafts: How its tokens are drafted; None without drafts.
        grammar: What each answer must look like; None for free text.
        rules: Whisper's rules for the text of a window; None for text that is not about speech.
        adapters: The factor of each adapter that the model was loaded with; empty if the request uses none.
        cross_window: The number of the window that cross-attention sees (``CrossBank``); 0 without one. It stays in its process.
        owner: The client of the daemon that pays for its device time; 0 without one. It stays in its process.
        id: The request's number.
        arrival: The ``time.perf_counter`` moment of its arrival.
    """

    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    num_sequences: int = 1
    max_new_tokens: int | None = None
    stop_token_ids: frozenset[int] = frozenset()
    late_token_ids: frozenset[int] = frozenset()
    min_new_tokens: int = 0
    priority: int = 0
    deadline: float | None = None
    overflow: OverflowRule = "stop"
    beams: BeamParams | None = None
    stop_strings: tuple[str, ...] = ()
    drafts: DraftParams | None = None
    grammar: Grammar | None = None
    rules: SpeechRules | None = None
    adapters: tuple[float, ...] = ()
    cross_window: int = 0
    owner: int = 0
    id: int = field(default_factory=new_id)
    arrival: float = field(default_factory=time.perf_counter)

    @property
    def conditions(self) -> Conditions:
        """What its keys and values depend on beside tokens and positions."""
        return Conditions(self.adapters, self.cross_window)

    def to_dict(self) -> dict[str, Any]:
        """Return the request as a dict of JSON types.

        The id, the owner and the window are this process's own and are left out. Moments become seconds from now, since the
        clocks of processes may differ.
        """
        plain = {**asdict(self), "prompt": list(self.prompt), "stop_token_ids": sorted(self.stop_token_ids)}
        plain["adapters"] = list(self.adapters)
        plain["late_token_ids"] = sorted(self.late_token_ids)
        del plain["id"], plain["owner"], plain["cross_window"]
        now = time.perf_counter()
        for name in ("arrival", "deadline"):
            plain[name] = None if plain[name] is None else plain[name] - now
        return plain

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> EngineRequest:
        """Return the request that ``to_dict`` described, with an id of this process.

        Raises:
            ValueError: a field is missing, unknown or of a wrong type.
        """
        own = ("id", "owner", "cross_window")  # those of another process could be taken here
        plain = {"arrival": 0.0, **{name: value for name, value in values.items() if name not in own}}
        request = typed(plain, cls)
        if unknown := sorted(_unknown_fields(plain, request)):
            raise ValueError(f"unknown fields {unknown}")
        now = time.perf_counter()
        deadline = None if request.deadline is None else request.deadline + now
        return replace(request, arrival=request.arrival + now, deadline=deadline)


def _unknown_fields(values: Mapping[str, Any], made: Any) -> set[str]:
    """Return the names in ``values`` that ``made``, the dataclass that they became, does not have."""
    known = {field.name for field in fields(made)}
    nested = [name for name in known & set(values) if isinstance(values[name], dict)]
    return (set(values) - known).union(*(_unknown_fields(values[name], getattr(made, name)) for name in nested))


@dataclass(frozen=True)
class EngineText:
    """What an engine needs of the tokenizer: ``decode`` to find the stop strings of beams, ``grammars`` to compile grammars."""

    decode: Decode
    grammars: Grammars


@dataclass(frozen=True)
class CompileTimes:
    """What the grammar of a request took to compile, and the preparation of its compiler, in seconds."""

    seconds: float
    init_seconds: float
    compiler: str = "llguidance"


@dataclass(frozen=True)
class TokenOutput:
    """One chosen token of answer ``index``.

    ``logprob`` is its log-probability (as in ``SampledToken``), ``time`` the moment of the choice (``time.perf_counter``), and
    ``sampling_seconds`` the duration of the choice. ``device_seconds`` is the time of the device calls since the previous token
    (for the first one, those of the prompt); ``num_cached`` is the number of prompt tokens that the prefix cache had.
    ``num_recomputed`` tokens have run again up to now, because the model took other RoPE factors for the longer text.
    ``num_drafted`` tokens of drafts were checked since the previous token, and ``num_accepted`` of them accepted. The draft model
    took ``draft_seconds`` for them. ``own_seconds`` is the part of ``device_seconds`` by the answer's rows in each call; None for
    the answers of a beam search. ``top`` has the most likely tokens (as in ``SampledToken``).
    """

    id: int
    logprob: float
    time: float
    sampling_seconds: float
    index: int = 0
    device_seconds: float = 0.0
    num_cached: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    draft_seconds: float = 0.0
    own_seconds: float | None = None
    num_recomputed: int = 0
    top: TopTokens = ()


@dataclass(frozen=True)
class Finished:
    """The last output of answer ``index``. ``error`` is the exception that ended it, if one did.

    ``is_found`` is False for an answer of a beam search that found fewer than were requested.
    """

    reason: FinishReason
    error: BaseException | None = None
    index: int = 0
    is_found: bool = True


Output = TokenOutput | Finished


def output_to_dict(output: Output) -> dict[str, Any]:
    """Return an output as a dict of JSON types."""
    if isinstance(output, TokenOutput):
        return asdict(output)
    error = None if output.error is None else to_wire(output.error)
    return {"reason": str(output.reason), "error": error, "index": output.index, "is_found": output.is_found}


def output_from_dict(values: Mapping[str, Any]) -> Output:
    """Return the output that ``output_to_dict`` described. An error of an unknown class is of the nearest known base.

    Raises:
        TypeError, KeyError, ValueError: it is not one.
    """
    if "id" in values:
        top = tuple((int(token), float(logprob)) for token, logprob in values.get("top", ()))
        return TokenOutput(**{**values, "top": top})
    error = None if values["error"] is None else from_wire(values["error"])
    return Finished(FinishReason(values["reason"]), error, values["index"], values["is_found"])


Listener = Callable[[Output], None]


class OutputQueue:
    """Passes outputs from the engine's thread to one reader. Listeners receive every output on the engine's thread."""

    def __init__(self) -> None:
        self.outputs: deque[Output] = deque()
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()  # one for each output, to wait for
        self._listeners: tuple[Listener, ...] = ()
        self.compile_times: CompileTimes | None = None  # of the request's grammar; set when it is submitted

    def put(self, output: Output) -> None:
        """Add an output, wake the reader and call the listeners. Runs on the engine's thread."""
        self.outputs.append(output)
        self._news.put(None)
        for listener in self._listeners:
            listener(output)

    def get(self, timeout: float | None = None) -> Output | None:
        """Return the next output; None if there is none within ``timeout`` seconds. Runs on the reader's thread."""
        return self.take() if self.wait(timeout) else None

    def take(self) -> Output:
        """Return the next output, which ``wait`` has found."""
        return self.outputs.popleft()

    def wait(self, timeout: float | None = None) -> bool:
        """Return whether there is an output within ``timeout`` seconds. It stays: Ctrl-C while waiting loses nothing."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self.outputs:
            left = None if until is None else until - time.monotonic()
            if left is not None and left <= 0:
                return False
            with suppress(queue.Empty):
                self._news.get(timeout=left)  # perhaps that of an output which was taken without waiting
        return True

    def add_listener(self, listener: Listener) -> None:
        """Call ``listener`` with every output from now on."""
        self._listeners = (*self._listeners, listener)

    def remove_listener(self, listener: Listener) -> None:
        """Stop calling ``listener``."""
        self._listeners = tuple(other for other in self._listeners if other is not listener)
