"""The queue of one device: texts with a limit on their latency, bulk texts behind them, and the batch that runs."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import chain, islice

from staticllm.errors import BusyError, PromptError

from ...scheduling.device_share import TimeCredit
from ..embedding_request import EmbeddingRequest
from ..packing.chunks import ContinuedText
from ..packing.tokenized_text import TokenizedText
from .loads import NewLoad

QUERY, DOCUMENT = 1, 0
"""Priorities. Texts from ``QUERY`` on have the latency limit T; lower ones are bulk work, which runs only when no query waits."""
_TYPICAL_TOKENS, _TYPICAL_TEXTS = 64, 32
"""The batch from which the seconds per token of bulk texts are taken."""


@dataclass(eq=False, slots=True)
class Query:
    """What policies see of a text. Times are seconds of one clock."""

    id: int
    """Unique among the texts in a queue."""
    arrival: float
    num_tokens: int
    priority: int = QUERY
    """Higher ones go first."""
    deadline: float | None = None
    """After it the caller no longer wants the result."""


@dataclass(eq=False, slots=True)
class QueuedText(Query):
    """One text of a request."""

    request: EmbeddingRequest = field(kw_only=True)
    index: int = field(kw_only=True)
    num_failures: int = 0
    """The calls that failed with it."""
    chunk: ContinuedText | None = None
    """Its progress, if it runs in several calls."""
    is_done: bool = False
    """Whether its vector is there, and its batch still runs."""

    @classmethod
    def of(cls, request: EmbeddingRequest, index: int, id: int) -> QueuedText:
        """Return the text with this index of a request."""
        num_tokens = len(request.texts[index])
        return cls(id, request.arrival, num_tokens, request.priority, request.deadline, request=request, index=index)

    @property
    def tokens(self) -> TokenizedText:
        return self.request.texts[self.index]

    @property
    def runs_alone(self) -> bool:
        """Whether no other text may share its calls."""
        return self.chunk is not None or self.num_failures > 0


@dataclass(frozen=True)
class Busy:
    """The answer to a text that no device can take: after ``retry_after`` seconds one should; infinite if none ever will."""

    retry_after: float
    reason: str

    def error(self) -> BusyError:
        return BusyError(self.reason, self.retry_after)


class Health(Enum):
    """Whether a device takes texts. One that rests tries to recover so seldom that no text waits for it."""

    ALIVE = "alive"
    RECOVERING = "recovering"
    RESTING = "resting"
    DEAD = "dead"


@dataclass(frozen=True)
class DeviceState:
    """The queue of one device at a moment: its texts that wait and that run, and how many were embedded since it was loaded."""

    name: str
    num_waiting: int
    num_running: int
    num_embedded: int
    depth: int
    """The most texts in the queue under WINDVE's policies; 0 under others."""
    health: str
    is_shared: bool
    """Whether its calls are jobs of an engine."""

    @classmethod
    def of(cls, queue: DeviceQueue) -> DeviceState:
        return cls(
            queue.name,
            queue.num_waiting,
            len(queue.running),
            queue.num_embedded,
            queue.depth,
            queue.health.value,
            queue.is_shared,
        )


class TimedTexts:
    """Texts that have a limit, the moment by which they must end. All of them run as one batch, whose ``load`` is predicted."""

    def __init__(self, new_load: NewLoad) -> None:
        self._texts: dict[int, tuple[Query, float]] = {}
        self._new_load = new_load
        self._oldest_limit = math.inf
        self.load = new_load()

    def __len__(self) -> int:
        return len(self._texts)

    def __iter__(self) -> Iterator[Query]:
        return (query for query, _ in self._texts.values())

    @property
    def oldest_limit(self) -> float:
        """The moment by which all of them must end; infinite without any."""
        return self._oldest_limit

    def add(self, query: Query, limit: float) -> None:
        self._texts[query.id] = (query, limit)
        self.load.add(query.num_tokens)
        self._oldest_limit = min(self._oldest_limit, limit)

    def remove(self, query: Query) -> bool:
        """Remove a text; return whether it was here."""
        if self._texts.pop(query.id, None) is None:
            return False
        self.reload(self._new_load)
        return True

    def reload(self, new_load: NewLoad) -> None:
        """Predict the seconds of the batch anew, from now on with ``new_load``."""
        texts = self._texts.values()
        self._texts = {}
        self._new_load = new_load
        self.load = new_load()
        self._oldest_limit = math.inf
        for query, limit in texts:
            self.add(query, limit)


class BulkTexts:
    """Texts without a limit, in order of priority and arrival."""

    def __init__(self) -> None:
        self._texts: dict[int, OrderedDict[int, Query]] = {}
        self._count = 0
        self.num_tokens = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Query]:
        return (query for priority in self.priorities for query in self._texts[priority].values())

    def __contains__(self, query: Query) -> bool:
        return query.id in self._texts.get(query.priority, {})

    @property
    def priorities(self) -> list[int]:
        """The priorities of the texts, the highest first."""
        return sorted(self._texts, reverse=True)

    def first(self, priority: int, most: int) -> list[Query]:
        """Return the first ``most`` texts of a priority."""
        return list(islice(self._texts.get(priority, {}).values(), most))

    def oldest_below(self, priority: int) -> Query | None:
        firsts = (next(iter(texts.values())) for level, texts in self._texts.items() if level < priority)
        return min(firsts, key=lambda query: query.arrival, default=None)

    def add(self, query: Query) -> None:
        self._texts.setdefault(query.priority, OrderedDict())[query.id] = query
        self._count += 1
        self.num_tokens += query.num_tokens

    def add_first(self, query: Query) -> None:
        """Add a text before the others of its priority."""
        self.add(query)
        self._texts[query.priority].move_to_end(query.id, last=False)

    def remove(self, query: Query) -> bool:
        """Remove a text; return whether it was here."""
        found = self._texts.get(query.priority, OrderedDict())
        if found.pop(query.id, None) is None:
            return False
        self._count -= 1
        self.num_tokens -= query.num_tokens
        if not found:
            del self._texts[query.priority]
        return True


class DeviceQueue:
    """What waits for one device and what runs on it. Policies read it; only ``TextQueue`` changes it.

    The ``timed`` texts run first, the ``bulk`` texts beside and behind them. ``depth``: the most texts in this queue under
    ``Windve``.
    """

    def __init__(self, name: str, new_load: NewLoad, depth: int = 0) -> None:
        self.name = name
        self.depth = depth
        self.new_load = new_load
        self.health = Health.ALIVE
        self.problem: Exception | None = None
        self.num_embedded = 0
        self.is_shared = False
        self.timed = TimedTexts(new_load)
        self.bulk = BulkTexts()
        self._credit = TimeCredit()
        self._running: tuple[Query, ...] = ()
        self._end = 0.0
        self._alone: dict[int, float] = {}
        self._seconds_per_token = _seconds_per_token(new_load)

    @property
    def is_alive(self) -> bool:
        return self.health is Health.ALIVE

    @property
    def may_work(self) -> bool:
        """Whether the device works, or is about to work again."""
        return self.health in (Health.ALIVE, Health.RECOVERING)

    @property
    def num_waiting(self) -> int:
        """The number of texts that have not begun."""
        return len(self.timed) + len(self.bulk)

    @property
    def running(self) -> tuple[Query, ...]:
        return self._running

    @property
    def waiting_seconds(self) -> float:
        return self.timed.load.seconds + self.bulk_seconds(0)

    def left(self, now: float) -> float:
        """Return the predicted seconds until the running batch ends.

        A batch that has exceeded its prediction by some seconds is expected to run for as many more.
        """
        return abs(self._end - now) if self._running else 0.0

    def alone(self, num_tokens: int) -> float:
        """Return the predicted seconds of one text by itself."""
        if num_tokens not in self._alone:
            self._alone[num_tokens] = self.new_load().seconds_with(num_tokens)
        return self._alone[num_tokens]

    def bulk_seconds(self, num_tokens: int) -> float:
        """Return the predicted seconds of the bulk texts and of ``num_tokens`` more."""
        return (self.bulk.num_tokens + num_tokens) * self._seconds_per_token

    def waiting(self) -> Iterator[Query]:
        """Return what waits, in the order in which it would run."""
        return chain(self.timed, self.bulk)

    def push(self, query: Query, limit: float | None) -> None:
        """Append a text: a timed one if it has a ``limit``, else bulk work."""
        if limit is None:
            self.bulk.add(query)
        else:
            self.timed.add(query, limit)

    def remove(self, query: Query) -> bool:
        """Remove a text that waits; return whether it did."""
        return self.timed.remove(query) or self.bulk.remove(query)

    def replace_costs(self, new_load: NewLoad) -> None:
        """Predict with other costs from now on. The end of the running batch stays as predicted."""
        self.new_load = new_load
        self._alone = {}
        self._seconds_per_token = _seconds_per_token(new_load)
        self.timed.reload(new_load)

    def begin(self, now: float, most_seconds: float) -> tuple[Query, ...]:
        """Start a batch: all timed texts, then bulk work while all take ``most_seconds`` at most and no limit is missed."""
        assert not self._running, f"{self.name} runs a batch"
        timed = self.timed
        load = timed.load
        room = min(most_seconds, timed.oldest_limit - now)
        self.timed = TimedTexts(self.new_load)
        filled: list[Query] = []
        for query in self.bulk:
            if (timed or filled) and load.seconds_with(query.num_tokens) > room:
                break
            load.add(query.num_tokens)
            filled.append(query)
        for query in filled:
            self.bulk.remove(query)
        self._running = (*timed, *filled)
        self._share(filled, load.seconds)
        self._end = now + load.seconds
        return self._running

    def finish(self) -> tuple[Query, ...]:
        batch = self._running
        self._running = ()
        return batch

    def clear(self) -> tuple[Query, ...]:
        """Remove and return everything: the running batch, then what waits."""
        everything = (*self._running, *self.waiting())
        self._running = ()
        self.bulk = BulkTexts()
        self.timed = TimedTexts(self.new_load)
        self._credit = TimeCredit()
        return everything

    def _share(self, filled: list[Query], seconds: float) -> None:
        """Give the oldest texts behind those of the batch places in the next one, as far as they are due after its ``seconds``.

        They become timed texts without a limit, so later queries are admitted only beside them. Without this, queries that
        always wait would leave bulk work no room. ``filled``: the texts of the batch for which no place had been kept.
        """
        first = max((query.priority for query in self._running), default=0)
        self._credit.lead(seconds, is_followed=self.bulk.oldest_below(first) is not None)
        self._credit.pay(sum(map(self._price, (query for query in filled if query.priority < first))))
        while (query := self.bulk.oldest_below(first)) is not None and self._credit.covers(self._price(query)):
            self._credit.pay(self._price(query))
            self.bulk.remove(query)
            self.push(query, math.inf)

    def _price(self, query: Query) -> float:
        return query.num_tokens * self._seconds_per_token


def _seconds_per_token(new_load: NewLoad, num_tokens: int = _TYPICAL_TOKENS) -> float:
    """Return the seconds per token of a typical batch, with shorter texts if no program holds texts of ``num_tokens``."""
    typical = new_load()
    try:
        for _ in range(_TYPICAL_TEXTS):
            typical.add(num_tokens)
    except PromptError:
        if num_tokens == 1:
            raise
        return _seconds_per_token(new_load, num_tokens // 2)
    return typical.seconds / (_TYPICAL_TEXTS * num_tokens)
