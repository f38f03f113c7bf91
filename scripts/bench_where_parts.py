"""Divides the time of a prompt, a turn and a decode step into nodes, the rest of calls, and the host; pipelines run in turns."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import compress, pairwise
from typing import Any, Literal, Protocol, SupportsInt, TypeAlias, TypeVar

import numpy as np
import openvino_genai as genai
from bench_where_nodes import NodeShare
from numpy.typing import NDArray

from staticllm.core import Variant
from staticllm.system.table import markdown

Prompt: TypeAlias = NDArray[np.int64]
Phase: TypeAlias = Literal["prefill", "turn", "decode"]
T = TypeVar("T")
CUT_MS = 2e-3
"""The most that the counters cut off the time of a node: a fraction of a microsecond of each run, and one of their mean."""


@dataclass(frozen=True)
class TokenRun:
    """One request, in seconds per token; the first token is the prompt's.

    ``wall`` is the time from the token before to this one at the reader, from the call of the pipeline for the first. ``own`` is
    the same by the pipeline's own record, and ``calls`` are the calls of the device for it, by that record. ``programs`` has the
    variants that ran for each token. ``before`` is the last call of the turn before, if there is one: a call that follows one of
    another size takes longer.
    """

    wall: Sequence[float]
    own: Sequence[float]
    calls: Sequence[float]
    programs: Sequence[tuple[Variant, ...]]
    before: tuple[Variant, ...] = ()

    @property
    def pauses(self) -> list[float]:
        """The seconds of each token without a call."""
        return [wall - calls for wall, calls in zip(self.wall, self.calls, strict=True)]


@dataclass(frozen=True)
class CountedCall:
    """What the counters of a program say of one call: the mean ms of the kinds of nodes.

    ``num_nodes`` are those that can run, of any time. ``mean_ms`` is that of the call with counters, over the same runs.
    """

    nodes: Sequence[NodeShare]
    num_nodes: float
    mean_ms: float


@dataclass(frozen=True)
class TimeParts:
    """Where the time of a decode step, or of a prompt or a turn to its first token, goes in one pipeline.

    ``nodes_ms`` and ``outside_ms`` are a call of the device, or the calls of a prompt, run alone: its nodes, and what else it
    takes. ``wall_ms`` is the time by the clock of a reader, and ``own_ms`` by the pipeline's own record, with ``own_calls_ms`` in
    calls. ``host_ms`` is what ``wall_ms`` has beside ``own_calls_ms``. The counters make a call longer by ``slowdown``, a share,
    and cut at most ``cut_ms`` off the nodes, which then are in ``outside_ms``. ``disturbance`` is the share by which the mean
    call with counters, over which they count, is longer than the fastest one. ``programs`` are the variants that ran.
    A turn follows ``past_len`` tokens, which are in the cache, and one of an answer, which runs with it.
    """

    pipeline: str
    phase: Literal["prefill", "turn", "decode"]
    prompt_len: int
    programs: tuple[str, ...]
    nodes_ms: float
    outside_ms: float
    host_ms: float
    wall_ms: float
    own_ms: float
    own_calls_ms: float
    slowdown: float
    disturbance: float
    cut_ms: float
    nodes: tuple[NodeShare, ...]
    past_len: int = 0

    @property
    def sum_ms(self) -> float:
        """The sum of the parts."""
        return self.nodes_ms + self.outside_ms + self.host_ms

    @property
    def deviation(self) -> float:
        """The difference of the sum from the wall time, as a share of it."""
        return self.sum_ms / self.wall_ms - 1

    def as_dict(self) -> dict[str, Any]:
        """Return the object that ``scripts/bench_where.py --json`` prints."""
        return {**asdict(self), "sum_ms": self.sum_ms, "deviation": self.deviation}


class Divisible(Protocol):
    """A pipeline whose time can be divided. ``name`` is the head of its column."""

    name: str

    def run(self, prompt: Prompt, num_new: int, past_len: int) -> TokenRun:
        """Run a request greedily, for exactly ``num_new`` tokens.

        The first ``past_len`` tokens of the prompt are an earlier turn: they are answered with one token before the time begins.
        """
        ...

    def repeat(self, run: TokenRun) -> Sequence[float]:
        """Run the calls of a request again, at its pace but without the pipeline; return the seconds of those for each token.

        They follow the call before them.
        """
        ...

    def count(self, run: TokenRun) -> Sequence[float]:
        """Run the same calls once more, in programs with counters; return the seconds of those for each token."""
        ...

    def counted(self, run: TokenRun, phase: Phase) -> CountedCall:
        """Return what was counted for the prompt, or for a mean decode step."""
        ...

    def forget(self) -> None: ...


class Reader(genai.StreamerBase):  # type: ignore[misc]
    """Notes the moment at which each token arrives."""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[float] = []

    def write(self, token: SupportsInt | Sequence[SupportsInt]) -> genai.StreamingStatus:
        self.times += [time.perf_counter()] * (len(token) if isinstance(token, Sequence) else 1)
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Receive no more."""


@dataclass
class Rounds:
    """What was measured of one pipeline: requests, and the seconds of the same calls alone.

    ``counts`` are the seconds of the calls of the fastest request, in programs with counters.
    """

    runs: list[TokenRun] = field(default_factory=list)
    repeats: list[Sequence[float]] = field(default_factory=list)
    counts: Sequence[Sequence[float]] = ()


def divide(
    pipelines: Sequence[Divisible],
    prompt_len: int,
    num_new: int,
    rounds: int,
    on_progress: Callable[[int, int], None] = lambda *_: None,
    past_len: int = 0,
) -> Iterator[TimeParts]:
    """Run prompts of random tokens in all pipelines in turn, and yield the parts of the prompt's time and of a decode step's.

    Without a second token only those of the prompt. With ``past_len`` only those of a later turn of ``prompt_len`` tokens, after
    as many tokens and their answer. A round before the first warms up.
    """
    found = [Rounds() for _ in pipelines]
    for number in range(rounds + 1):
        on_progress(number, rounds + 1)
        prompt = np.random.default_rng([number, prompt_len, past_len]).integers(8, 1000, past_len + prompt_len)
        for pipeline, each in zip(pipelines, found, strict=True):
            before = each.runs[-1] if each.runs and number % 2 == 0 else None
            run, repeat = _run_and_repeat(pipeline, prompt, num_new, past_len, before)
            each.runs.append(run)
            each.repeats.append(repeat)
    for each in found:
        del each.runs[0], each.repeats[0]
    first: Phase = "turn" if past_len else "prefill"
    phases: tuple[Phase, ...] = (first, "decode") if num_new > 1 and not past_len else (first,)
    for phase in phases:
        best = [fastest(each, phase) for each in found]
        # counted at the end, so that only programs of the divided requests are compiled once more
        counts = [[pipeline.count(run) for pipeline, run in zip(pipelines, best, strict=True)] for _ in range(rounds)]
        for pipeline, run, each, own in zip(pipelines, best, found, zip(*counts, strict=True), strict=True):
            counted = replace(each, counts=own)
            parts = parts_of(pipeline.name, phase, prompt_len, counted, pipeline.counted(run, phase))
            yield replace(parts, past_len=past_len)
            pipeline.forget()


def _run_and_repeat(
    pipeline: Divisible, prompt: Prompt, num_new: int, past_len: int, before: TokenRun | None
) -> tuple[TokenRun, Sequence[float]]:
    """Run a request, and its calls alone: after it, or before it, as those of the request ``before`` if these are the same calls.

    Whichever is second meets a machine that drifted on, so neither always is.
    """
    repeat = None if before is None else pipeline.repeat(before)
    run = pipeline.run(prompt, num_new, past_len)
    if repeat is None or before is None or before.programs != run.programs:
        repeat = pipeline.repeat(run)
    return run, repeat


def fastest(rounds: Rounds, phase: Phase) -> TokenRun:
    """Return the request with the least wall time, because other work on the machine only adds time.

    It is one of those whose programs ran in most rounds, so that their calls alone are known from several rounds too.
    """
    counts = Counter(_programs(run, phase) for run in rounds.runs)
    usual = [run for run in rounds.runs if counts[_programs(run, phase)] == max(counts.values())]
    return min(usual, key=lambda run: _of(run.wall, phase))


def parts_of(name: str, phase: Phase, prompt_len: int, rounds: Rounds, counted: CountedCall) -> TimeParts:
    """Return the parts of the fastest request's time.

    The host's part is the wall time less the calls that the pipeline recorded. The call alone is that of the request, times the
    median share, over the rounds of the same programs, that calls alone have of those in the request a moment before: a machine
    drifts more from round to round than the two differ. The nodes have the share of it that they have in the call with counters,
    which slow it down. If the call with counters is faster, because that program runs one size only and prepares its nodes once,
    they have that share of that call.
    """
    best = fastest(rounds, phase)
    alike = [_programs(run, phase) == _programs(best, phase) for run in rounds.runs]
    pairs = compress(zip(rounds.runs, rounds.repeats, strict=True), alike)
    share = statistics.median(_of(repeat, phase) / _of(run.calls, phase) for run, repeat in pairs)
    call = 1e3 * share * _of(best.calls, phase)
    counted_call = 1e3 * min(_of(each, phase) for each in rounds.counts)
    scale = min(call, counted_call) / counted.mean_ms
    nodes = tuple(replace(each, ms=each.ms * scale) for each in counted.nodes)
    return TimeParts(
        pipeline=name,
        phase=phase,
        prompt_len=prompt_len,
        programs=tuple(dict.fromkeys(map(str, _programs(best, phase)))),
        nodes_ms=sum(each.ms for each in nodes),
        outside_ms=call - sum(each.ms for each in nodes),
        host_ms=1e3 * (_of(best.wall, phase) - _of(best.calls, phase)),
        wall_ms=1e3 * _of(best.wall, phase),
        own_ms=1e3 * _of(best.own, phase),
        own_calls_ms=1e3 * _of(best.calls, phase),
        slowdown=counted_call / call - 1,
        disturbance=counted.mean_ms / counted_call - 1,
        cut_ms=CUT_MS * counted.num_nodes,
        nodes=nodes,
    )


def _of(seconds: Sequence[float], phase: Phase) -> float:
    """Return the value of the prompt, or the median of those of the tokens after it."""
    return statistics.median(_tokens(seconds, phase))


def _tokens(values: Sequence[T], phase: Phase) -> Sequence[T]:
    """Return the value of the prompt's token, or those of the tokens after it."""
    return values[1:] if phase == "decode" else values[:1]


def _programs(run: TokenRun, phase: Phase) -> tuple[Variant, ...]:
    return tuple(variant for each in _tokens(run.programs, phase) for variant in each)


def wait_until(moment: float) -> None:
    """Wait busily, as a host works between calls: the device's threads wake up later after a longer rest."""
    while time.perf_counter() < moment:
        pass


def between(start: float, times: Sequence[float]) -> list[float]:
    """Return the seconds from each moment to the next one."""
    return [after - before for before, after in pairwise([start, *times])]


def greedy(num_new: int) -> dict[str, Any]:
    """Return the options of a request for exactly ``num_new`` tokens that all pipelines take."""
    return {"max_new_tokens": num_new, "ignore_eos": True, "do_sample": False}


NUM_KINDS = 6
"""Kinds of nodes that a table shows one by one."""
MOST_DEVIATION = 0.03
MOST_DISTURBANCE = 0.5
NOTES = (
    "Wall time: by the clock of the reader of the tokens; the fastest of all rounds, as other work only adds time. Of a decode "
    "step it is the median of a request's steps.",
    "Host: the wall time less the calls that the pipeline itself recorded in that request (ours: the engine's trace; GenAI: "
    "perf_metrics). Readers take tokens: text is made on their threads, beside the calls.",
    "Nodes and outside of nodes: the same calls at the same pace without the pipeline, right after the request, or, in every "
    "other round, right before it, as the median share of those in it over all rounds. The nodes' share of a "
    "call is that in a program with PERF_COUNT (the lines below the tables compare its calls), less fractions of a µs.",
    "So the sum differs from the wall time by as much as the calls alone differ from those in the request.",
    "GenAI shows no program: its calls alone are an inference, from the same IR with the head cut to the last token, compiled by "
    "OpenVINO with the same properties. GenAI runs with ATTENTION_BACKEND=SDPA.",
)
"""How each figure of the tables is measured."""


def parts_tables(parts: Sequence[TimeParts]) -> list[str]:
    """Return a table for each phase and length of prompt, with the pipelines side by side, and what else is known of each."""
    groups: dict[str, list[TimeParts]] = {}
    for each in parts:
        groups.setdefault(_heading(each), []).append(each)
    lines = list[str]()
    for heading, found in groups.items():
        lines += [*_parts_table(heading, found), "", *map(_remark, found), ""]
    return [*lines, *NOTES[: 5 if any(len(found) > 1 for found in groups.values()) else 4]]


def _heading(parts: TimeParts) -> str:
    if parts.phase == "decode":
        return f"decode step after {parts.past_len + parts.prompt_len} tokens"
    after = f" after {parts.past_len}" if parts.past_len else ""
    return f"{'turn' if after else 'prompt'} of {parts.prompt_len} tokens{after}"


def _parts_table(heading: str, found: Sequence[TimeParts]) -> list[str]:
    head = [heading, *(text for each in found for text in (f"{each.pipeline}, ms", "share"))]
    kinds = [{node.kind: node.ms for node in each.nodes} for each in found]
    largest = sorted(set().union(*kinds), key=lambda kind: -max(ms.get(kind, 0.0) for ms in kinds))
    shown = largest[:NUM_KINDS]
    others = largest[NUM_KINDS:]
    values = {f"· {kind}": [ms.get(kind, 0.0) for ms in kinds] for kind in shown}
    if others:
        values[f"· {', '.join(others)}"] = [sum(ms.get(kind, 0.0) for kind in others) for ms in kinds]
    rows = {
        "nodes": [each.nodes_ms for each in found],
        **values,
        "outside of nodes": [each.outside_ms for each in found],
        "host": [each.host_ms for each in found],
        "sum": [each.sum_ms for each in found],
        "wall time": [each.wall_ms for each in found],
    }
    walls = [each.wall_ms for each in found]
    cells = [
        [name, *(text for ms, wall in zip(row, walls, strict=True) for text in (f"{ms:.3f}", f"{ms / wall:.1%}"))]
        for name, row in rows.items()
    ]
    cells.append(["sum less wall time", *(text for each in found for text in ("", f"{each.deviation:+.1%}"))])
    return markdown(head, cells)


def _remark(parts: TimeParts) -> str:
    programs = parts.programs if len(parts.programs) <= NUM_KINDS else (parts.programs[0], "…", parts.programs[-1])
    own = f"by its own record {parts.own_ms:.3f} ms, of these {parts.own_calls_ms:.3f} ms in calls"
    counters = f"calls with counters take {1 + parts.slowdown:.2f} times as long, and cut at most {parts.cut_ms:.3f} ms of nodes"
    text = f"{parts.pipeline}: {', '.join(programs)}; {own}; {counters}"
    if abs(parts.deviation) > MOST_DEVIATION:
        text += f"; more than {MOST_DEVIATION:.0%} off: work beside the calls disturbed them"
    if parts.disturbance > MOST_DISTURBANCE:
        text += (
            f"; other work made calls with counters {parts.disturbance:.0%} longer: their nodes' shares are uncertain"
        )
    return text
