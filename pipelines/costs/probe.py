"""Measures the costs of variants while the engine is idle."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import ClassVar, Protocol

from staticllm.core import Clock, Variant
from staticllm.system.posix import after_fork
from staticllm.system.processor_use import ProcessorUse

from ...kvcache.step import StepBuffers
from .model import CostModel

logger = logging.getLogger(__name__)

FAR_KV_LEN, FAR_RATIO, MANY_ROWS = 1024, 4, 256
MAX_SECONDS = 0.15
"""Longest call that is measured, in seconds: arriving requests wait for it. Calls cannot be cancelled, because the CPU plugin
then fails in later calls of the same program with other sizes (docs/decisions.md)."""
NUM_CHECKED, DRIFT = 3, 1.25
"""Adopted costs that are measured again in the first pause, and the factor by which a cost may differ from its measurement."""
SLOWER = 1.1
"""A call that takes this many times as long as a larger one is measured a second time."""
FIRST_CALLS, MOST_CALLS = 16, 1024
"""Calls between two measurements of all costs: the first number doubles each time, up to the second."""
IDLE_SECONDS = 0.5
"""Seconds without work after which the engine measures costs."""
SERIES_SECONDS = 2.0
"""Seconds of measurements after which the engine pauses again, to see what else runs in this process."""
LONGEST_SECONDS = 30.0
"""The longest pause."""
BUSY, SHARE_WHILE_BUSY = 0.25, 0.1
"""Others that use more than the first share of the processors leave the second share of the time to measurements, which would
slow them, and measure wrong."""


class Measurable(Protocol):
    """A program that can run without a request, with whatever its buffers hold."""

    @property
    def buffers(self) -> StepBuffers: ...

    def run(self) -> float: ...


class CostProbe:
    """The variants of a pipeline whose costs are worth measuring, in the order of their use. Runs on the engine's thread.

    Nothing is committed, so the KV cache does not change. The costs of all other variants are estimated from these. Costs of an
    earlier process are kept: ``NUM_CHECKED`` of them are measured, and all are doubted if most of these differ by more than
    ``DRIFT``. So are all if the calls of requests take longer or shorter than measured by that factor: other work ran beside the
    measurement, or the machine runs at another speed, and variants that are never chosen would keep a wrong cost. A machine may
    be slow for seconds although nothing else runs. So in the end, calls that took ``SLOWER`` times as long as a larger one are
    measured a second time, and the lower value counts.
    """

    def __init__(self, programs: Mapping[Variant, Measurable], costs: CostModel[Variant]) -> None:
        self._programs = programs
        self._costs = costs
        self._is_paused = False
        self._on_done: Callable[[], None] = lambda: None
        self._num_measured = 0
        self._todo: list[Variant] = []
        self._unchecked: list[Variant] | None = None
        self._ratios: list[float] = []
        self._quick: list[Variant] = []
        self._is_second_time = False  # whether those in the list have been measured before
        self._measured: dict[Variant, float] = {}
        self._num_calls = 0
        self._least_calls = FIRST_CALLS

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do now: to measure, or to tell that all was measured."""
        return self._is_paused or not (self._todo or self._num_measured)

    def pause(self) -> None:
        """Measure nothing until ``resume``: programs are compiled beside the engine."""
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    def when_done(self, call: Callable[[], None]) -> None:
        """Call this when nothing is left to measure, if something was measured."""
        self._on_done = call

    @property
    def num_left(self) -> int:
        """The number of variants that are left to measure."""
        return len(self._todo)

    def choose(self, variants: Iterable[Variant]) -> None:
        """Measure those of ``variants`` that are worth it and whose costs are not stable, and check some that were adopted."""
        wanted = worth_measuring(variants)
        adopted = self._costs.adopted
        if adopted and self._unchecked is None:
            self._unchecked = [each for each in wanted if each in adopted and self._costs(each) <= MAX_SECONDS]
            self._unchecked = self._unchecked[:NUM_CHECKED]
        by_rows = {
            variant.rows: variant for variant in sorted(wanted, reverse=True) if variant.rows > variant.sequences
        }
        self._quick = [by_rows[rows] for rows in sorted(by_rows)[:2]]
        checked = self._unchecked or ()
        left = {*checked, *self._todo} if self._is_second_time else {*checked}
        self._is_second_time = False
        self._measured = {each: known for each, known in self._measured.items() if self._costs.is_stable(each)}
        todo = [each for each in reversed(wanted) if each in left or not self._costs.is_stable(each)]
        self._todo = sorted(todo, key=lambda each: self._costs(each) <= MAX_SECONDS)  # the last one is the next

    def note_call(self, variant: Variant) -> None:
        """Compare the cost of a variant after a request's call with its measurement; measure all again if it has changed."""
        self._num_calls += 1
        measured = self._measured.get(variant)
        if measured is None or self._num_calls < self._least_calls:
            return
        ratio = self._costs(variant) / measured
        if max(ratio, 1 / ratio) > DRIFT:
            logger.info("%s takes %.2f times its measured seconds: all costs are measured again", variant, ratio)
            self._num_calls = 0
            self._least_calls = min(2 * self._least_calls, MOST_CALLS)
            self._doubt(self._measured)

    def measure_next(self, is_needed: Callable[[], bool]) -> None:
        """Time the next variant, and add its cost. If ``is_needed`` is true between its runs, it is tried again later.

        A variant that fails is left out: the requests that use it will report the error.
        """
        if self._todo:
            self._measure(self._todo[-1], is_needed)
        if self._num_measured and not self._todo:
            self._num_measured = 0
            try:
                self._on_done()
            except Exception:  # costs are only estimates: the engine's thread must go on
                logger.warning("the measured costs could not be kept", exc_info=True)

    def seconds_of(self, variant: Variant) -> float:
        """Time a variant as ``measure_next`` does, without adding its cost.

        Raises:
            Exception: the device failed.
        """
        seconds = self.timed(variant, lambda: False)
        assert seconds is not None
        return seconds

    def _measure(self, variant: Variant, is_needed: Callable[[], bool]) -> None:
        if self._costs.least(variant) > MAX_SECONDS and not self._is_second_time:
            self._end(variant)
            return
        try:
            seconds = self.timed(variant, is_needed)
        except Exception:
            logger.warning("the cost of %s could not be measured", variant, exc_info=True)
            self._end(variant)
            return
        if seconds is not None:
            self._num_measured += 1
            if self._is_second_time:
                seconds = min(seconds, self._measured[variant])
            ratio = seconds / self._costs(variant)
            self._costs.set(variant, seconds)
            self._measured[variant] = seconds
            self._end(variant)
            if self._unchecked and variant in self._unchecked:
                self._unchecked.remove(variant)
                self._check(max(ratio, 1 / ratio))

    def _end(self, variant: Variant) -> None:
        """Take a variant from the list. After the last one, list those to be measured a second time."""
        left = [each for each in self._todo if each != variant]
        if not left and not self._is_second_time:
            self._is_second_time = True
            left = self.slower_than_larger()
        self._todo = left  # at once: other threads ask how many are left

    def slower_than_larger(self) -> list[Variant]:
        """Return the variants that took longer than one with at least as many rows, slots and logits in the same phase."""
        return [
            variant
            for variant, seconds in self._measured.items()
            if any(
                seconds > SLOWER * others and other.phase == variant.phase and _does_more(other, variant)
                for other, others in self._measured.items()
            )
        ]

    def _check(self, ratio: float) -> None:
        """Note by which factor a cost of an earlier process was wrong; after the last one, doubt the others if most were."""
        self._ratios.append(ratio)
        if not self._unchecked and statistics.median(self._ratios) > DRIFT:
            self._doubt(self._costs.adopted)

    def _doubt(self, variants: Iterable[Variant]) -> None:
        """Measure these variants again in the next pause."""
        for variant in list(variants):
            self._costs.doubt(variant)
        self.choose(self._programs)

    def timed(self, variant: Variant, is_needed: Callable[[], bool]) -> float | None:
        """Return the seconds of a run after a call like those that it usually follows; None if the device is needed.

        A program prepares its nodes again for other sizes than those of its last call. Decode steps follow each other, but a
        chunk of a prompt follows a call of another size. The first run at a size prepares more, and does not count; of the
        others the fastest one does, because whatever else runs on the machine only adds time.
        """
        before = variant if variant.rows == variant.sequences else self._other(variant)
        seconds = []
        for each in (variant, before, variant, before, variant):
            if is_needed():
                return None
            taken = timed_run(self._programs[each])
            if each == variant:
                seconds.append(taken)
        return min(seconds[1:])

    def _other(self, variant: Variant) -> Variant:
        """Return a variant with other sizes that takes little time."""
        others = (each for each in self._quick if each.rows != variant.rows)
        return next(others, variant)


class Rests:
    """The pauses of one engine, before and between measurements. For its thread.

    In a pause the engine does nothing, so whatever uses the processors then is other work: of other processes, of other
    pipelines in this one, or of the program itself. Between measurements only other processes can be told from the engine.
    """

    _measuring: ClassVar = threading.Lock()  # of all engines of this process

    @classmethod
    def forget_others(cls) -> None:
        """Forget the measurements of other engines, of which a forked child has none."""
        cls._measuring = threading.Lock()

    def __init__(self, clock: Clock = time.perf_counter) -> None:
        self.use = ProcessorUse()
        self._clock = clock
        self._until = 0.0  # before this moment, only costs that somebody waits for are measured
        self._start: float | None = None  # of the first measurement after the pause

    def begin(self) -> None:
        """Begin a pause. Work may end it early, so that no measurement follows."""
        self._start = None
        self.use.begin()

    def seconds(self, is_awaited: bool = False) -> float:
        """Return how long the pause should be, in seconds. It is short if somebody waits for the costs (``is_awaited``)."""
        return IDLE_SECONDS if is_awaited else max(IDLE_SECONDS, self._until - self._clock())

    def measure(self, run: Callable[[], None], is_awaited: bool = False) -> bool:
        """Run a measurement, after a pause or another one, and return whether the engine must pause before the next.

        It need not if somebody waits for the costs, whatever else runs. Otherwise it measures nothing while another engine of
        this process does: each would slow the other.
        """
        measuring = self._measuring
        if not (is_alone := measuring.acquire(blocking=False)) and not is_awaited:
            return True
        try:
            return self._measure(run, is_awaited)
        finally:
            if is_alone:
                measuring.release()

    def _measure(self, run: Callable[[], None], is_awaited: bool) -> bool:
        is_busy = self.use.share(with_own=self._start is None) > BUSY and not is_awaited
        begin = self._clock()
        if self._start is None:
            self._start = begin
        run()
        end = self._clock()
        if is_busy:
            self._until = end + min(LONGEST_SECONDS, (end - begin) * (1 - SHARE_WHILE_BUSY) / SHARE_WHILE_BUSY)
        return not is_awaited and (is_busy or end - self._start > SERIES_SECONDS)


after_fork(Rests.forget_others)


def _does_more(one: Variant, other: Variant) -> bool:
    return all(more >= less for more, less in zip(one.work, other.work, strict=True))


def timed_run(program: Measurable) -> float:
    """Run a program without a request, and return the seconds that it took. Nothing of its results is kept."""
    program.buffers.stand_in()
    return program.run()


def worth_measuring(variants: Iterable[Variant]) -> list[Variant]:
    """Return the variants from which the costs of all others follow, those that are used most first.

    These are, of every number of rows, prompts without a past, decoding, and mixed calls with the most sequences. The last two
    and prompts of up to ``MANY_ROWS`` rows are measured over few slots, and over ``FAR_KV_LEN`` or ``FAR_RATIO`` times as many.
    """
    known = [variant for variant in variants if variant.num_logits == variant.sequences]
    most: dict[int, int] = {}
    kv_lens: dict[tuple[int, int], list[int]] = {}
    for variant in sorted(known, key=lambda variant: variant.kv_len):
        if variant.rows > variant.sequences:
            most[variant.rows] = max(variant.sequences, most.get(variant.rows, 0))
        kv_lens.setdefault((variant.rows, variant.sequences), []).append(variant.kv_len)

    def turn(variant: Variant) -> int | None:
        if variant.sequences == 1 and not variant.kv_len:
            return 0
        seen = [kv_len for kv_len in kv_lens[variant.rows, variant.sequences] if kv_len]
        if not seen or variant.kv_len not in (
            seen[0],
            next((kv_len for kv_len in seen if kv_len >= max(FAR_KV_LEN, FAR_RATIO * seen[0])), seen[-1]),
        ):
            return None
        if variant.rows == variant.sequences:
            return 1
        is_worth_it = variant.rows <= MANY_ROWS if variant.sequences == 1 else variant.sequences == most[variant.rows]
        return 2 if is_worth_it else None

    turns = {variant: found for variant in known if (found := turn(variant)) is not None}
    return sorted(turns, key=lambda variant: (turns[variant], variant.rows, variant.kv_len))
