"""What a policy sees (``View``) and what it answers (``Plan``): plain values, without access to the device.

Every request is in one of four states:

- *waiting*: it holds no KV slots. It has just arrived, or it was preempted.
- *prefilling*: some of its prompt has run and holds KV slots; the rest has to run.
- *running*: its prompt has run, and it decodes one token per call that it takes part in. At most ``max_num_seqs`` requests are
  running at a time.
- *swapped*: its prompt has run, but it does not decode. Its KV slots are in the host pool, or still in the arena while the host
  pool has no room.

With its last prompt token a prefilling request gets its first token. It is running from then on if fewer than ``max_num_seqs``
requests run and none is swapped; otherwise it is swapped, until a plan swaps it in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from staticllm.core import Variant
from staticllm.pipelines.programs.variant_index import VariantIndex


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
    """One request. Moments are seconds on the clock of ``View.now``.

    Attributes:
        id: Names the request in plans.
        state: One of the four states above.
        arrival: The moment at which it was submitted.
        num_tokens: Tokens that must have KV slots before the next token can be chosen. After a preemption these are the prompt
            and all tokens generated so far.
        num_computed: How many of them have KV slots, in the arena or in the host pool.
        own_slots: KV slots of the arena that would be free without this request. Slots that it shares with other requests do
            not count, nor do slots in the host pool.
        num_generated: Tokens that were generated so far.
        last_token_time: The moment of the last of them; None before the first.
        priority: A higher number goes first.
        deadline: The moment at which the request is ended, finished or not; None without one.
        in_arena: False if its KV slots are in the host pool; only a swapped request's can be.
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
    """What the device can run now, and what that costs.

    Attributes:
        index: The variants (programs of fixed shape) that are there.
        seconds: What one call of a variant takes, in seconds; measured, and updated with every call.
        high_slot: One more than the highest KV slot in use. A call over existing KV slots needs a variant with at least this
            ``kv_len``.
        is_complete: False while further programs are compiled in the background: larger calls may still be missing.
    """

    index: VariantIndex
    seconds: Callable[[Variant], float]
    high_slot: int = 0
    is_complete: bool = True

    def call(self, num_rows: int, num_sequences: int = 1, is_fresh: bool = False) -> Variant | None:
        """The smallest variant that holds ``num_rows`` tokens of ``num_sequences`` requests; None if there is none.

        ``is_fresh``: no request in the call has KV slots yet, so that the arena need not be read.
        """
        return self.index.smallest(num_rows, num_sequences, self.high_slot, is_fresh)

    @property
    def max_decoding(self) -> int:
        """The largest number of requests that one call can decode now."""
        return self.index.max_decoding(self.high_slot)


@dataclass(frozen=True)
class View:
    """The state of the engine at the moment at which a plan is asked for.

    Attributes:
        now: This moment, in seconds (``time.perf_counter``; the virtual clock in simulations).
        waiting, prefilling, running, swapped: The requests by state, each in the order in which they were submitted.
        max_num_seqs: The largest number of running requests (``MAX_NUM_SEQS``).
        free_slots: Free KV slots of the arena; every token that a call processes takes one.
        free_host_slots: Free KV slots of the host pool.
        device: What can run, and what it costs.
        ttft_ms: Target for the time to first token in ms (``TTFT_MS``); None without one.
        tpot_ms: Target for the time between two tokens of a request in ms (``TPOT_MS``); None without one.
    """

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
        """All requests: waiting, prefilling, running, swapped."""
        return (*self.waiting, *self.prefilling, *self.running, *self.swapped)

    @property
    def free_seqs(self) -> int:
        """How many more requests may be running."""
        return max(0, self.max_num_seqs - len(self.running))


@dataclass(frozen=True)
class Plan:
    """The next device call, and what happens before it. Requests are named by their ids.

    Attributes:
        decode: Running requests, or requests in ``swap_in``, that get one row of the call each.
        prefill: Pairs of a waiting or prefilling request and the number of its prompt tokens in the call.
        swap_in: Swapped requests that become running; their KV slots are copied into the arena if they are not there.
        swap_out: Running requests that become swapped; their KV slots are copied to the host pool.
        preempt: Requests that lose their KV slots and wait again; all their tokens are recomputed later.
    """

    decode: tuple[int, ...] = ()
    prefill: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[int, ...] = ()
    swap_out: tuple[int, ...] = ()
    preempt: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """Tokens in the call."""
        return len(self.decode) + sum(count for _, count in self.prefill)

    @property
    def num_sequences(self) -> int:
        """Requests in the call."""
        return len(self.decode) + len(self.prefill)


class Policy(Protocol):
    """Decides what runs next. It may keep state of its own."""

    def plan(self, view: View) -> Plan:
        """The next call.

        It is called before every device call, with at least one request in ``view``, and must return quickly: the device idles
        meanwhile. The plan must run something. A plan that breaks a rule (``validation.py``) never reaches the device.
        """
        ...
