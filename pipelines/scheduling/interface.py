"""What a policy sees and what it answers: plain values, no access to the device.

A request is *waiting* (no rows yet), *prefilling* (some rows, more of its prompt to run), *running* (prefilled, in one of
``max_num_seqs`` running requests) or *swapped out* (prefilled, no slot). When the last prompt token has run, the request has its
first token; it takes a slot if one is free and nobody is swapped out, else it is swapped out until a plan resumes it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from staticllm.core import Variant
from staticllm.pipelines.programs.variants import VariantIndex


class RequestStatus(str, Enum):
    """Where a request stands; equal to its lower-case name."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    SWAPPED = "swapped"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class RequestView:
    """One request. Times are seconds on the clock of ``View.now``.

    ``num_tokens`` are those that must run before the next one can be chosen, ``num_computed`` of them have. A request that was
    preempted has all its tokens, those generated included, to run again. ``own_slots`` would be free if it were gone: not those
    that it shares with others, nor those of a swapped out request outside the arena (``in_arena`` is False).
    """

    id: int
    state: RequestStatus
    arrival: float
    num_tokens: int
    num_computed: int = 0
    own_slots: int = 0
    num_generated: int = 0
    last_token_time: float | None = None
    priority: int = 0
    deadline: float | None = None
    in_arena: bool = True

    @property
    def num_left(self) -> int:
        """Tokens to run before the next one can be chosen; 1 while decoding."""
        return self.num_tokens - self.num_computed


@dataclass(frozen=True)
class Device:
    """The programs of the device and what each costs, measured and kept current. ``high_slot``: arena slots in use reach here.

    ``is_complete`` is False while further programs are compiled in the background: the larger calls may still be missing.
    """

    index: VariantIndex
    seconds: Callable[[Variant], float]
    high_slot: int = 0
    is_complete: bool = True

    def call(self, num_rows: int, num_sequences: int = 1, is_fresh: bool = False) -> Variant | None:
        """The smallest variant that holds such a call; ``is_fresh`` if no sequence in it has rows. None if nothing does."""
        return self.index.smallest(num_rows, num_sequences, self.high_slot, is_fresh)

    @property
    def max_decoding(self) -> int:
        """The most sequences that one call can decode now."""
        return self.index.max_decoding(self.high_slot)


@dataclass(frozen=True)
class View:
    """The moment at which a plan is asked for. Requests are listed in the order of their arrival."""

    now: float
    waiting: tuple[RequestView, ...]
    prefilling: tuple[RequestView, ...]
    running: tuple[RequestView, ...]
    swapped: tuple[RequestView, ...]
    max_num_seqs: int
    free_slots: int
    free_host_slots: int
    device: Device
    ttft_ms: float | None = None
    tpot_ms: float | None = None

    @property
    def requests(self) -> tuple[RequestView, ...]:
        return (*self.waiting, *self.prefilling, *self.running, *self.swapped)

    @property
    def free_seqs(self) -> int:
        return max(0, self.max_num_seqs - len(self.running))


@dataclass(frozen=True)
class Plan:
    """The next call of the device, and what happens before it.

    ``decode``: running (or just resumed) requests that get a row. ``prefill``: ``(request, tokens)`` pairs. All of them
    share one call. ``swap_in``: swapped out requests that take a slot; ``swap_out``: running ones that leave theirs, their rows
    wait outside the arena; ``preempt``: requests that lose their rows and wait again, to be computed anew.
    """

    decode: tuple[int, ...] = ()
    prefill: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[int, ...] = ()
    swap_out: tuple[int, ...] = ()
    preempt: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        return len(self.decode) + sum(count for _, count in self.prefill)

    @property
    def num_sequences(self) -> int:
        return len(self.decode) + len(self.prefill)


class Policy(Protocol):
    """Decides what runs next.

    ``plan`` is called before every device call, with at least one request in the view, and must return at once a plan
    that runs something. It may keep state of its own. A plan that breaks a rule (``rules.py``) never reaches the device.
    """

    def plan(self, view: View) -> Plan: ...
