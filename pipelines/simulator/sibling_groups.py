"""Requests of several sequences in simulations: answers that go on by themselves, and beams that wait for each other."""

from __future__ import annotations

from dataclasses import dataclass, field

from staticllm.pipelines.scheduling.request_table import RequestInfo


@dataclass
class SiblingGroup:
    """The sequences of one request, which ran its prompt of ``num_prompt`` tokens once and share its slots.

    As in the engine, these count as own slots of none until one sequence alone has them. ``sharing`` holds the sequences in the
    table whose first tokens are these slots. ``waiting`` holds beams that have run, until all have; their slots may be evicted,
    so they do not count as sharing.
    """

    num_prompt: int
    are_beams: bool
    members: set[int] = field(default_factory=set)
    sharing: dict[int, RequestInfo] = field(default_factory=dict)
    waiting: dict[int, RequestInfo] = field(default_factory=dict)
    _waiting_sharing: set[int] = field(default_factory=set)

    def share(self, info: RequestInfo) -> None:
        """Add a sequence whose first tokens are the slots of the prompt."""
        self.members.add(info.id)
        self.sharing[info.id] = info
        self._count_own()

    def leave(self, info: RequestInfo) -> int:
        """Record that a sequence in the table loses its slots. Return how many arena slots become free.

        Without the last one that shares the prompt, waiting beams lose theirs, too.
        """
        freed = info.own_slots
        if self.sharing.pop(info.id, None) is not None:
            if not self.sharing and self._waiting_sharing:
                return freed + self.evict() - self.num_prompt
            self._count_own()
        return freed

    def wait(self, info: RequestInfo) -> None:
        """Let a beam that has run wait for the others."""
        self.waiting[info.id] = info
        if self.sharing.pop(info.id, None) is not None:
            self._waiting_sharing.add(info.id)
            self._count_own()

    @property
    def is_complete(self) -> bool:
        """Whether every beam has run."""
        return bool(self.waiting) and len(self.waiting) == len(self.members)

    def release(self, now: float, num_places: int) -> list[RequestInfo]:
        """Return the beams, which have all run, each with one more token; the first ``num_places`` may run at once."""
        back: list[RequestInfo] = []
        for known in self.waiting.values():
            info = RequestInfo(known.id, known.arrival, known.num_tokens + 1, known.priority, is_fed=True)
            info.come_back(known.num_computed, now, len(back) < num_places)
            if known.id in self._waiting_sharing:
                self.sharing[known.id] = info
            back.append(info)
        self.waiting.clear()
        self._waiting_sharing.clear()
        self._count_own()
        return back

    @property
    def num_evictable(self) -> int:
        """The slots that become free without the waiting beams."""
        tails = sum(
            info.num_computed - (self.num_prompt if info.id in self._waiting_sharing else 0)
            for info in self.waiting.values()
        )
        return tails + (self.num_prompt if self._waiting_sharing and not self.sharing else 0)

    def evict(self) -> int:
        """Take the slots of the waiting beams, which run again. Return how many arena slots become free."""
        freed = self.num_evictable
        for info in self.waiting.values():
            info.num_computed = 0
            info.set_own_slots(0)
        self._waiting_sharing.clear()
        return freed

    def _count_own(self) -> None:
        shared = self.num_prompt if len(self.sharing) > 1 else 0
        for info in self.sharing.values():
            info.set_own_slots(info.num_computed - shared)
