"""Predicts how long a device takes for a set of texts, from their tokens and from the shapes of its programs."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from staticllm.core import EncoderVariant
from staticllm.errors import ConfigError, PromptError

LENGTH = 75
"""Tokens of the texts with which WINDVE measures, and to which ``Line`` refers."""


class Load(Protocol):
    """Texts that would run together on one device. Adding a text never lowers ``seconds``, which are 0 without texts."""

    @property
    def seconds(self) -> float: ...

    def seconds_with(self, num_tokens: int) -> float:
        """Return the predicted seconds of all texts and of one more."""
        ...

    def add(self, num_tokens: int) -> None: ...


NewLoad = Callable[[], Load]
"""Makes an empty load for one device."""
Costs = Mapping[EncoderVariant, float]
"""Seconds per call of each variant."""


def load_of(costs: Costs, is_packable: bool) -> NewLoad:
    """Return what predicts the seconds of texts by the cheapest variant of each batch and length.

    Without ``is_packable`` a text takes a whole row.
    """
    seconds: dict[tuple[int, int], float] = {}
    for variant, cost in costs.items():
        size = variant.batch, variant.rows
        seconds[size] = min(seconds.get(size, float("inf")), cost)
    shapes = ShapeCosts(seconds)
    return shapes.new_load if is_packable else lambda: _WholeRows(shapes)


class _WholeRows:
    """The load of a model that holds one text per row."""

    def __init__(self, shapes: ShapeCosts) -> None:
        self._shapes = shapes
        self._load = shapes.new_load()

    @property
    def seconds(self) -> float:
        return self._load.seconds

    def seconds_with(self, num_tokens: int) -> float:
        return self._load.seconds_with(self._shapes.row_len_of(num_tokens))

    def add(self, num_tokens: int) -> None:
        self._load.add(self._shapes.row_len_of(num_tokens))


@dataclass(frozen=True)
class Line:
    """A device's latency as the paper models it (equation 12): ``alpha`` seconds per query of 75 tokens, plus ``beta`` per batch.

    A query of L tokens costs ``alpha * (L / 75) ** exponent``. With exponent 0 only their number counts, as in the paper.
    """

    alpha: float
    beta: float
    exponent: float = 0.0

    def seconds(self, concurrency: float, num_tokens: int = LENGTH) -> float:
        """Return the seconds of a batch of ``concurrency`` queries of ``num_tokens`` each."""
        scale: float = (num_tokens / LENGTH) ** self.exponent
        return self.alpha * concurrency * scale + self.beta

    def new_load(self) -> Load:
        """Return an empty load that is predicted by this line."""
        return _LineLoad(self)


class _LineLoad:
    def __init__(self, line: Line) -> None:
        self._line = line
        self._scaled = 0.0  # seconds without beta
        self._is_empty = True

    @property
    def seconds(self) -> float:
        return 0.0 if self._is_empty else self._scaled + self._line.beta

    def seconds_with(self, num_tokens: int) -> float:
        return self._scaled + self._line.seconds(1, num_tokens)

    def add(self, num_tokens: int) -> None:
        self._scaled = self.seconds_with(num_tokens) - self._line.beta
        self._is_empty = False


class ShapeCosts:
    """Seconds per call of programs with shapes ``[batch, row_len]``, whose rows hold several short texts each.

    Texts go into rows of the cheapest length per token, and longer texts into rows of the shortest length that holds them. The
    rows of one length run in the cheapest sequence of calls. A single row runs at the cheapest shape that holds its texts.
    """

    def __init__(self, seconds: Mapping[tuple[int, int], float]) -> None:
        """Take ``seconds`` per call of each ``(batch, row_len)``.

        Raises:
            ConfigError: there is no shape, or a size or a time is not positive.
        """
        if not seconds:
            raise ConfigError("costs of no shape: give the seconds of at least one [batch, row_len]")
        for (batch, row_len), cost in seconds.items():
            if batch < 1 or row_len < 1 or not 0 < cost < float("inf"):
                raise ConfigError(f"shape [{batch}, {row_len}] costs {cost:g} s: sizes and seconds must be more than 0")
        self._calls: dict[int, list[tuple[int, float]]] = {}
        for (batch, row_len), cost in sorted(seconds.items()):
            self._calls.setdefault(row_len, []).append((batch, cost))
        self.row_lens = sorted(self._calls)
        self._rows = {row_len: [0.0] for row_len in self.row_lens}
        per_token = {
            row_len: min(cost / batch for batch, cost in self._calls[row_len]) / row_len for row_len in self._calls
        }
        self._common = min(self.row_lens, key=lambda row_len: (per_token[row_len], row_len))

    def row_len_of(self, num_tokens: int) -> int:
        """Return the length of the rows into which a text of ``num_tokens`` goes.

        Raises:
            PromptError: no row holds it.
        """
        if num_tokens <= self._common:
            return self._common
        place = bisect_left(self.row_lens, num_tokens)
        if place == len(self.row_lens):
            raise PromptError(f"a text of {num_tokens} tokens, the longest row holds {self.row_lens[-1]}: truncate it")
        return self.row_lens[place]

    def seconds(self, row_len: int, num_rows: int) -> float:
        """Return the seconds of ``num_rows`` rows of this length in the cheapest sequence of calls."""
        known = self._rows[row_len]
        while len(known) <= num_rows:
            known.append(min(cost + known[max(0, len(known) - batch)] for batch, cost in self._calls[row_len]))
        return known[num_rows]

    def seconds_of_one_row(self, num_tokens: int) -> float:
        """Return the seconds of texts of ``num_tokens`` together that share one row."""
        return min(self.seconds(row_len, 1) for row_len in self.row_lens[bisect_left(self.row_lens, num_tokens) :])

    def new_load(self) -> Load:
        """Return an empty load that is predicted by these costs."""
        return _PackedLoad(self)


class _PackedLoad:
    """Places texts into rows by best fit, in the order in which they are added."""

    def __init__(self, costs: ShapeCosts) -> None:
        self._costs = costs
        self.free: dict[int, list[int]] = {
            row_len: [] for row_len in costs.row_lens
        }  # free tokens of each row, ascending
        self._num_rows = 0
        self._num_tokens = 0
        self._seconds = 0.0  # of all rows, each at its length

    @property
    def seconds(self) -> float:
        return self._seconds if self._num_rows != 1 else self._costs.seconds_of_one_row(self._num_tokens)

    def seconds_with(self, num_tokens: int) -> float:
        row_len = self._costs.row_len_of(num_tokens)
        free = self.free[row_len]
        is_new = not free or free[-1] < num_tokens
        if self._num_rows + is_new == 1:
            return self._costs.seconds_of_one_row(self._num_tokens + num_tokens)
        return self._seconds + self._of_new_row(row_len, len(free)) if is_new else self._seconds

    def add(self, num_tokens: int) -> None:
        row_len = self._costs.row_len_of(num_tokens)
        free = self.free[row_len]
        place = bisect_left(free, num_tokens)
        if place == len(free):
            self._seconds += self._of_new_row(row_len, len(free))
            self._num_rows += 1
        left = free.pop(place) if place < len(free) else row_len
        insort(free, left - num_tokens)
        self._num_tokens += num_tokens

    def _of_new_row(self, row_len: int, num_rows: int) -> float:
        """Return the seconds that one more row adds to ``num_rows`` of its length."""
        return self._costs.seconds(row_len, num_rows + 1) - self._costs.seconds(row_len, num_rows)
