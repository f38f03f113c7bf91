"""A policy receives a ``View`` and returns a ``Plan``, both plain values without access to the device.

Every request has one of four statuses:

- *waiting*: it holds no KV slots. It has just arrived, or it was preempted.
- *prefilling*: some of its prompt has run or was cached, and holds KV slots; the rest has to run.
- *running*: its prompt has run, and it decodes one token in each call that it is part of. At most ``max_num_seqs`` requests are
  running at a time.
- *swapped*: its prompt has run, but it does not decode. Its KV slots are in the host pool, or still in the arena while the host
  pool has no room.

In addition to requests, there may be *jobs*: device calls of other models, such as the packed texts of an embedding pipeline. A
policy whose attribute ``plans_jobs`` is True gets them in ``View.jobs`` and runs one with ``Plan.job``. For every other policy,
``JobScheduler`` decides whether a job runs before it asks the policy.

A client outside the engine chooses the tokens of *client sequences*. A sequence is a request of the view while it has to run
tokens that its client sent; it is running if this is one token and a place is free. After that it is *idle*, until the client
sends more tokens. An idle sequence keeps its KV slots, which count as free: the engine takes slots from the sequence that has
been idle longest. Idle sequences do not count as running, so that several can share a place. ``View.free_places`` is the number
of places that are left for requests that keep theirs.

Work has one of two classes. A user waits for *reactive* work; *proactive* work (an agent, an index) uses the remaining
capacity. Requests with a priority below 0 are proactive, and so are jobs with a priority of 0 or below, such as documents.
While both classes have requests, the policy gets only the reactive requests, and the planner adds proactive requests where they
keep the bounds. A policy whose attribute ``plans_classes`` is True gets all requests and plans both classes.

When its last prompt token has run, a prefilling request gets its first token. From then on it is running if fewer than
``max_num_seqs`` requests run and none is swapped; otherwise it is swapped, until a plan swaps it in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from staticllm.core import Variant

from ..programs.variant_index import VariantIndex

PROACTIVE_PRIORITY = -1
"""The priority of proactive requests that ask for no other one; all below 0 are proactive."""


class RequestStatus(StrEnum):
    """The status of a request; equal to its lower-case name."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    RUNNING = "running"
    SWAPPED = "swapped"

    __hash__ = str.__hash__  # Enum's own is a function of Python, called for each request in each step

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True)
class RequestView:
    """One request. Moments are seconds on the clock of ``View.now``."""

    id: int
    """The number that identifies the request in plans."""
    status: RequestStatus
    """One of the four above."""
    arrival: float
    """The moment at which it was submitted."""
    num_tokens: int
    """The number of tokens that must have KV slots before the next token can be chosen. After a preemption these are
    the prompt and all tokens generated so far."""
    num_computed: int = 0
    """The number of these tokens that have KV slots, in the arena or in the host pool."""
    own_slots: int = 0
    """The number by which ``free_slots`` would grow without this request. Slots that it shares with other requests do
    not count, nor do slots in the host pool."""
    num_generated: int = 0
    """The number of tokens generated so far."""
    last_token_time: float | None = None
    """The moment of the last generated token; None before the first."""
    priority: int = 0
    """Requests with a higher priority go first."""
    deadline: float | None = None
    """The moment at which the request is ended, finished or not; None without one."""
    in_arena: bool = True
    """False if its KV slots are in the host pool, which is possible only for a swapped request."""
    is_client_driven: bool = False
    """Whether a client or a beam search chooses its next token. It leaves its place among the running requests after
    each token."""

    @property
    def num_left(self) -> int:
        """The number of tokens to run before the next one can be chosen; 1 while decoding."""
        return self.num_tokens - self.num_computed

    @property
    def is_proactive(self) -> bool:
        """Whether nobody waits for it: its class of work, which follows from its priority."""
        return self.priority < 0


@dataclass(frozen=True)
class Device:
    """The variants that the device can run now, and their costs."""

    index: VariantIndex
    """The variants (programs of fixed shape) that are compiled."""
    seconds: Callable[[Variant], float]
    """Returns the duration of one call of a variant in seconds; it is measured, and updated with every call."""
    high_slot: int = 0
    """One more than the highest KV slot in use. A call over existing KV slots needs a variant with at least this
    ``kv_len``."""
    is_complete: bool = True
    """False while further programs are compiled in the background: larger calls may still be missing."""
    swap_seconds: float = 0.0
    """The time in seconds in which one KV slot is copied between the arena and the host pool; 0 before the first
    time."""
    leaving_slots: int = 0
    """How many of the KV slots in use hold ended conversations that are offloaded while the first chunk of a prompt
    runs, if more chunks follow."""
    num_blocks: int = 1
    """In how many blocks a call runs, between two of which a decode step may run; 1 if a call runs in one piece."""
    overrun: float = 1.0
    """How many times ``seconds`` the slowest calls take now; 1 where costs are exact."""

    def call(self, num_rows: int, num_sequences: int = 1, is_fresh: bool = False) -> Variant | None:
        """Return the smallest variant for ``num_rows`` tokens of ``num_sequences`` requests; None if there is none.

        ``is_fresh`` means that no request in the call has KV slots yet, so that the call does not read the arena.
        """
        return self.index.smallest(num_rows, num_sequences, self.high_slot, is_fresh)

    @property
    def max_decoding(self) -> int:
        """The largest number of requests that one call can decode now."""
        return self.index.max_decoding(self.high_slot)


@dataclass(frozen=True)
class JobView:
    """The next device call of another model that shares the device: it runs alone, in one piece, and holds no KV slots."""

    id: int
    """The number that identifies the source of such calls in plans; at most one call of each source is in a view."""
    seconds: float
    """The expected duration of the call."""
    arrival: float
    """The moment at which the oldest part of it was submitted, on the clock of ``View.now``."""
    priority: int = 0
    """Jobs and requests with a higher priority go first."""
    deadline: float | None = None
    """The moment at which the first part of it is given up; None without one."""

    @property
    def is_proactive(self) -> bool:
        """Whether its class of work is proactive: no user waits for it. Documents have priority 0, queries 1."""
        return self.priority <= 0


@dataclass(frozen=True)
class IdleView:
    """A client request whose client chooses the next tokens. Moments are seconds on the clock of ``View.now``."""

    id: int
    """The number that it has in plans when it comes back."""
    since: float
    """The moment at which the client got the logits."""
    ready_at: float | None
    """The moment by which its next tokens are expected; None if it cannot be known."""
    num_computed: int = 0
    """The number of its tokens that have KV slots in the arena."""
    priority: int = 0
    """As in ``RequestView``."""


@dataclass(frozen=True)
class TokenBound:
    """The longest time for which prompts, jobs and calls of other programs may delay the next tokens of running requests.

    It is ``TPOT_MS``, or without that target the longer one of ``steps`` decode steps and ``seconds``.
    """

    steps: float
    seconds: float

    def of(self, step_seconds: float, tpot_ms: float | None = None) -> float:
        """Return the longest time between two tokens in seconds, if a decode step takes ``step_seconds``."""
        return max(self.steps * step_seconds, self.seconds) if tpot_ms is None else tpot_ms / 1e3


OWN_BOUND = TokenBound(4.0, 0.1)
"""The bound for a model that a single program uses."""
SHARED_BOUND = TokenBound(2.5, 0.04)
"""The bound in the daemon: shorter, because the delaying prompt or call is another program's."""


@dataclass(frozen=True)
class View:
    """The state of the engine when it needs a plan. Requests of one status stand in the order of submission."""

    now: float
    """This moment, in seconds (``time.perf_counter``; the virtual clock in simulations)."""
    waiting: tuple[RequestView, ...]
    """Requests of which no token has run."""
    prefilling: tuple[RequestView, ...]
    """Requests of whose prompt a part has run."""
    running: tuple[RequestView, ...]
    """Requests that get one row in each decode step."""
    swapped: tuple[RequestView, ...]
    """Requests whose prompt has run and that wait outside the running set."""
    max_num_seqs: int
    """The largest number of running requests (``MAX_NUM_SEQS``)."""
    free_slots: int
    """The number of free KV slots of the arena; every token that a call processes takes one."""
    free_host_slots: int
    """The number of free KV slots of the host pool."""
    device: Device
    """The variants that can run, and their costs."""
    ttft_ms: float | None = None
    """Target for the time to first token in ms (``TTFT_MS``); None without one."""
    tpot_ms: float | None = None
    """Target for the time between two tokens of a request in ms (``TPOT_MS``); None without one."""
    gap_ms: float | None = None
    """The longest time in ms that a swapped request should wait for its next token (``GAP_MS``); None for no bound."""
    jobs: tuple[JobView, ...] = ()
    """The jobs that wait; empty for policies without ``plans_jobs``."""
    idle: tuple[IdleView, ...] = ()
    """The client sequences whose clients choose the next tokens, those that have been idle longest first."""
    token_bound: TokenBound = OWN_BOUND
    """The bound on the time between two tokens of a request."""

    @property
    def requests(self) -> tuple[RequestView, ...]:
        """All requests: waiting, prefilling, running, swapped."""
        return (*self.waiting, *self.prefilling, *self.running, *self.swapped)

    @property
    def has_both_classes(self) -> bool:
        """Whether there are reactive and proactive requests."""
        return len({request.is_proactive for request in self.requests}) > 1

    def of_class(self, is_proactive: bool) -> View:
        """Return the view with the requests of one class only."""

        def kept(requests: tuple[RequestView, ...]) -> tuple[RequestView, ...]:
            return tuple(request for request in requests if request.is_proactive is is_proactive)

        return replace(
            self,
            waiting=kept(self.waiting),
            prefilling=kept(self.prefilling),
            running=kept(self.running),
            swapped=kept(self.swapped),
        )

    @property
    def free_seqs(self) -> int:
        """The number of further requests that may be running."""
        return max(0, self.max_num_seqs - len(self.running))

    @property
    def free_places(self) -> int:
        """The number of further requests that may be running until they end, when those that have begun are.

        Client requests leave their places after each token, so they count as one: the last place is theirs.
        """
        num_placed = sum(not request.is_client_driven for request in (*self.running, *self.swapped, *self.prefilling))
        has_client_driven = any(request.is_client_driven for request in (*self.running, *self.swapped))
        return max(0, self.max_num_seqs - num_placed - has_client_driven)


@dataclass(frozen=True)
class Plan:
    """The next device call, and the changes before it. Requests are given by their ids."""

    decode: tuple[int, ...] = ()
    """Running requests, or requests in ``swap_in``, each with one row in the call."""
    prefill: tuple[tuple[int, int], ...] = ()
    """Pairs of a waiting or prefilling request and the number of its prompt tokens in the call."""
    swap_in: tuple[int, ...] = ()
    """Swapped requests that become running; their KV slots are copied into the arena if they are not there."""
    swap_out: tuple[int, ...] = ()
    """Running requests that become swapped; their KV slots are copied to the host pool."""
    preempt: tuple[int, ...] = ()
    """Requests that lose their KV slots and wait again; all their tokens are recomputed later."""
    job: int | None = None
    """The id of the job that runs; such a plan has nothing else. None for a call of requests."""
    wait_until: float | None = None
    """The moment until which the device waits for idle requests; such a plan has nothing else. The policy is asked
    again then, or when a request or a job arrives. The planner decides about it for the shipped policies."""

    @property
    def num_rows(self) -> int:
        """The number of tokens in the call."""
        return len(self.decode) + sum(count for _, count in self.prefill)

    @property
    def num_sequences(self) -> int:
        """The number of requests in the call."""
        return len(self.decode) + len(self.prefill)


@dataclass(frozen=True)
class CallView:
    """A device call that runs in blocks, at a moment between two of them, at which the device is free."""

    variant: Variant
    """The program of the call."""
    seconds: float
    """The expected duration of the whole call without others, in seconds."""
    num_blocks: int
    """The number of its blocks."""
    num_done: int
    """The number of its blocks that have run."""
    num_inserted: int
    """The number of decode steps that have run between its blocks."""
    steps: tuple[Variant, ...]
    """The variants that can decode now, ascending by rows. They see all slots of the arena, and leave each where it
    is."""
    prompt_start: float
    """The moment at which the first call of its oldest prompt began."""
    prompt_seconds: float
    """The device time that the calls of this prompt have taken, those of the blocks that have run included."""
    is_proactive: bool = False
    """Whether nobody waits for any of its prompts."""

    @property
    def block_seconds(self) -> float:
        """The expected duration of one block, in seconds."""
        return self.seconds / self.num_blocks

    @property
    def max_decoding(self) -> int:
        """The largest number of requests that can decode now in one step."""
        return max((variant.rows for variant in self.steps), default=0)

    def step(self, num_requests: int) -> Variant | None:
        """Return the smallest variant that decodes this many requests now; None if there is none."""
        return next((variant for variant in self.steps if variant.rows >= num_requests), None)


class Policy(Protocol):
    """Decides which requests are in the next device call. A policy may keep state of its own.

    Every plan is checked against the rules in ``pipelines/scheduling/plans.py``; one that breaks a rule never runs.

    A policy may also have a method ``between_blocks(view: View, call: CallView) -> Plan | None``. It is called between two blocks
    of a call that runs in blocks, if requests outside this call are running and a step of them can run there. ``view`` has only
    the requests outside the call. The method returns a plan that only decodes running requests, or None to go on with the call.
    For a policy without it, ``pipelines/scheduling/between_blocks.py`` decides.
    """

    def plan(self, view: View) -> Plan:
        """Return the next call, with at least one token in it, or with a job; or a moment until which the device waits.

        It is called before every device call, with at least one request or job in ``view``. It must return quickly, because the
        device idles meanwhile.
        """
        ...
