"""The book: who waits, who runs, who is swapped out. The engine keeps it beside the device, the simulator beside a clock."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from staticllm.pipelines.scheduling.interface import Device, RequestView, State, View


@dataclass
class RequestInfo:
    """One request in the request table. ``own_slots`` and ``in_arena`` are kept by whoever owns the rows."""

    id: int
    arrival: float
    num_tokens: int
    priority: int = 0
    deadline: float | None = None
    state: State = "waiting"
    num_computed: int = 0
    own_slots: int = 0
    num_generated: int = 0
    last_token_time: float | None = None
    in_arena: bool = True
    _shown: RequestView | None = field(default=None, repr=False)

    def change(self, **values: object) -> None:
        """Set fields; the view of this request is made anew."""
        for name, value in values.items():
            setattr(self, name, value)
        self._shown = None

    @property
    def shown(self) -> RequestView:
        """What a policy sees."""
        if self._shown is None:
            self._shown = RequestView(
                self.id, self.state, self.arrival, self.num_tokens, self.num_computed, self.own_slots,
                self.num_generated, self.last_token_time, self.priority, self.deadline, self.in_arena,
            )  # fmt: skip
        return self._shown


@dataclass(frozen=True)
class Limits:
    """What a view tells besides requests: slots and targets."""

    max_num_seqs: int
    ttft_ms: float | None = None
    tpot_ms: float | None = None


class RequestTable:
    """Requests and their states; nothing here touches rows or a device."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._entries: dict[int, RequestInfo] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[RequestInfo]:
        return iter(self._entries.values())

    def __getitem__(self, request: int) -> RequestInfo:
        return self._entries[request]

    def add(self, entry: RequestInfo) -> None:
        self._entries[entry.id] = entry

    def remove(self, request: int) -> None:
        del self._entries[request]

    def clear(self) -> None:
        self._entries.clear()

    def count(self, state: State) -> int:
        return sum(entry.state == state for entry in self._entries.values())

    def ids(self, state: State) -> tuple[int, ...]:
        return tuple(entry.id for entry in self._entries.values() if entry.state == state)

    def view(self, now: float, free_slots: int, free_host_slots: int, device: Device) -> View:
        """What a policy sees now."""
        groups: dict[State, list[RequestView]] = {"waiting": [], "prefilling": [], "running": [], "swapped": []}
        for entry in self._entries.values():
            groups[entry.state].append(entry.shown)
        return View(
            now,
            tuple(groups["waiting"]),
            tuple(groups["prefilling"]),
            tuple(groups["running"]),
            tuple(groups["swapped"]),
            self.limits.max_num_seqs,
            free_slots,
            free_host_slots,
            device,
            self.limits.ttft_ms,
            self.limits.tpot_ms,
        )

    @property
    def has_free_seq(self) -> bool:
        """Whether a prompt that ends now may decode: a slot is free, and nobody is swapped out who would come first."""
        return self.count("running") < self.limits.max_num_seqs and not self.count("swapped")

    def preempt(self, request: int) -> None:
        """Its rows are gone; all its tokens run again."""
        self[request].change(state="waiting", num_computed=0, own_slots=0, in_arena=True)

    def swap_out(self, request: int) -> None:
        self[request].change(state="swapped")

    def swap_in(self, request: int) -> None:
        self[request].change(state="running", in_arena=True)

    def ran(self, request: int, count: int) -> bool:
        """``count`` more tokens have rows. True if the next token can be chosen now."""
        entry = self[request]
        state: State = "prefilling" if entry.state == "waiting" else entry.state
        own_slots = entry.own_slots + (count if entry.in_arena else 0)
        entry.change(num_computed=entry.num_computed + count, own_slots=own_slots, state=state)
        return entry.num_computed == entry.num_tokens

    def chose(self, request: int, now: float) -> None:
        """A token was chosen; whoever finished a prompt with it takes a slot, if one is free and nobody is swapped out."""
        entry = self[request]
        state = entry.state
        if state == "prefilling":
            state = "running" if self.has_free_seq and entry.in_arena else "swapped"
        entry.change(
            state=state, num_tokens=entry.num_tokens + 1, num_generated=entry.num_generated + 1, last_token_time=now
        )
