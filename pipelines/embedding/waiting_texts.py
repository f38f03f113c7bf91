"""The texts of one priority that wait for a device: a backlog in the order of arrival, and the calls that are planned."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from staticllm.core import EncoderVariant
from staticllm.pipelines.embedding.embedding_request import EmbeddingRequest
from staticllm.pipelines.embedding.packing.continued_text import ContinuedText
from staticllm.pipelines.embedding.packing.plan_calls import PackedCall
from staticllm.pipelines.embedding.packing.tokenized_text import TokenizedText

Drop = Callable[[EmbeddingRequest, int], None]
"""Gets a request that nobody waits for, or whose deadline has passed, and how many of its texts do not wait any more."""


@dataclass(frozen=True)
class WaitingText:
    """One text of a request."""

    request: EmbeddingRequest
    index: int

    @property
    def tokens(self) -> TokenizedText:
        """The token ids."""
        return self.request.texts[self.index]

    @property
    def order(self) -> tuple[int, int]:
        """The key by which texts are sorted by arrival."""
        return self.request.id, self.index

    def is_over(self, now: float) -> bool:
        """Whether nobody waits for the text any more at the moment ``now``."""
        return self.request.is_over or self.request.is_late(now)


@dataclass
class _Rest:
    """The texts of a request from ``first`` on: a large request is added and dropped in no time."""

    request: EmbeddingRequest
    first: int = 0

    @property
    def num_texts(self) -> int:
        return len(self.request.texts) - self.first


class Backlog:
    """The texts of one priority that are in no call yet."""

    def __init__(self) -> None:
        self._returned: deque[WaitingText] = (
            deque()
        )  # from a plan that was given up; all of them arrived before the others
        self._rests: deque[_Rest] = deque()

    def __bool__(self) -> bool:
        return bool(self._returned or self._rests)

    @property
    def arrival(self) -> float:
        """The moment at which the first text arrived."""
        return (self._returned[0] if self._returned else self._rests[0]).request.arrival

    @property
    def requests(self) -> Iterator[EmbeddingRequest]:
        """The requests; some may be named several times."""
        yield from (text.request for text in self._returned)
        yield from (rest.request for rest in self._rests)

    def add(self, request: EmbeddingRequest) -> None:
        """Append the texts of a request."""
        self._rests.append(_Rest(request))

    def put_back(self, texts: Iterable[WaitingText]) -> None:
        """Put texts that were taken before the others again."""
        self._returned.extendleft(sorted(texts, key=lambda text: text.order, reverse=True))

    def take(self, most: int, now: float, drop: Drop) -> list[WaitingText]:
        """Remove and return at most ``most`` texts that somebody waits for."""
        taken: list[WaitingText] = []
        while self._returned and len(taken) < most:
            text = self._returned.popleft()
            if text.is_over(now):
                drop(text.request, 1)
            else:
                taken.append(text)
        while self._rests and len(taken) < most:
            rest = self._rests[0]
            if rest.request.is_over or rest.request.is_late(now):
                drop(rest.request, rest.num_texts)
                self._rests.popleft()
                continue
            end = min(len(rest.request.texts), rest.first + most - len(taken))
            taken += [WaitingText(rest.request, index) for index in range(rest.first, end)]
            rest.first = end
            if not rest.num_texts:
                self._rests.popleft()
        return taken

    def purge(self, now: float, drop: Drop) -> None:
        """Drop all requests that nobody waits for."""
        living = deque[_Rest]()
        for rest in self._rests:
            if rest.request.is_over or rest.request.is_late(now):
                drop(rest.request, rest.num_texts)
            else:
                living.append(rest)
        self._rests = living


class PlannedCall(NamedTuple):
    """A call and its texts, in the order of the call, or one text and its progress, which runs in calls of its own."""

    call: PackedCall | None
    texts: list[WaitingText]
    chunk: ContinuedText | None = None


@dataclass
class Plan:
    """The next calls of one priority.

    ``alone`` are a text that has begun to run in chunks, and texts whose vectors were not finite beside others: they run first,
    each in calls of its own. ``variants`` are those that the other calls were planned with. A plan that ``is_stale`` is made
    again, together with texts that came later.
    """

    alone: deque[PlannedCall] = field(default_factory=deque)
    calls: deque[PlannedCall] = field(default_factory=deque)
    variants: Sequence[EncoderVariant] = ()
    is_stale: bool = False

    def __bool__(self) -> bool:
        return bool(self.alone or self.calls)

    @property
    def head(self) -> PlannedCall:
        """The call that runs next."""
        return self.alone[0] if self.alone else self.calls[0]

    def pop(self) -> PlannedCall:
        """Remove and return the call that runs next."""
        return self.alone.popleft() if self.alone else self.calls.popleft()

    @property
    def texts(self) -> Iterator[WaitingText]:
        """All texts."""
        yield from (text for planned in (*self.alone, *self.calls) for text in planned.texts)

    def clear(self) -> list[WaitingText]:
        """Remove all calls but those of ``alone``, and return their texts."""
        texts = [text for planned in self.calls for text in planned.texts]
        self.calls.clear()
        self.is_stale = False
        return texts
