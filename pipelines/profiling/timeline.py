"""Draws a trace as a picture: the rows of every device call, the history of each request, KV slots and queues over time."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from staticllm.errors import ConfigError
from staticllm.files import write_whole
from staticllm.pipelines.profiling.records import JobRecord, RequestRecord, StepRecord
from staticllm.pipelines.profiling.request_spans import Kind, Span, spans_of
from staticllm.pipelines.profiling.trace import Trace

Box: TypeAlias = tuple[float, float, float, float]  # left, right, bottom, top
Clock: TypeAlias = Callable[[float], float]  # from seconds to the unit of the time axis

COLOURS: dict[Kind, str] = {"queued": "#e3cf94", "prefill": "#d1603d", "decode": "#2f6f9f", "swapped": "#a592c4"}
PADDING, JOBS, SLOTS, WAITING, INK = "#dcdcdc", "#c9b8e0", "#5d9c7b", "#b8901f", "#333333"
END_MARKS = {"stop": "o", "length": "D", "cancelled": "x", "deadline": "s", "error": "X"}
TRACK = 0.76
"""The height of a track, as a share of the distance between two."""
MAX_NAMED_TRACKS = 40
LINEAR_ROWS = 32
"""The most rows per call on a linear axis; with more, the axis has a square root scale, or decode steps would be hairlines."""


@dataclass(frozen=True)
class TimeAxis:
    """The time axis of a picture: it starts at ``first`` (seconds), has ``factor`` units per second and ends at ``end`` units."""

    first: float
    factor: float
    unit: str
    end: float

    def place(self, seconds: float) -> float:
        """Return the place of a moment on the axis, in units."""
        return (seconds - self.first) * self.factor


def draw(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a picture of a trace in the format of the file's ending: PNG, SVG or PDF.

    Raises:
        ConfigError: matplotlib is not installed, nothing was recorded, or the file cannot be written.
    """
    if not trace.steps:
        raise ConfigError("the trace holds no device calls: record while requests are served")
    figure_module = matplotlib("figure")
    spans = spans_of(trace.steps, trace.requests)
    heights = [2.4, min(8.0, 0.8 + 0.17 * max(len(spans), 6)), 1.9]
    figure = figure_module.Figure(figsize=(13, sum(heights) + 1.0), layout="constrained")
    calls, middle, counts = figure.subplots(3, 1, sharex=True, height_ratios=heights)
    axis = _time_axis([*trace.steps, *trace.jobs], spans)
    clock = axis.place
    _draw_calls(calls, trace.steps, trace.jobs, clock)
    _draw_spans(middle, spans, clock)
    _mark_preemptions(middle, list(spans), trace.steps, clock)
    _mark_ends(middle, list(spans), trace.requests, clock)
    _draw_counts(counts, trace.steps, clock)
    counts.set_xlabel(f"time, {axis.unit}")
    counts.set_xlim(-0.005 * axis.end, 1.005 * axis.end)
    figure.suptitle(_title(trace), fontsize=11, color=INK)
    save_figure(figure, path)


def matplotlib(module: str) -> Any:
    """Return a module of matplotlib.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import_module("matplotlib")
        return import_module(f"matplotlib.{module}")
    except ImportError:
        raise ConfigError("a picture needs matplotlib: pip install matplotlib") from None


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a figure of matplotlib, in the format of the file's ending; PNG without one.

    Raises:
        ConfigError: matplotlib does not know this format, or the file cannot be written.
    """
    picture = io.BytesIO()
    try:
        figure.savefig(picture, dpi=130, format=Path(path).suffix[1:] or "png")
        write_whole(path, picture.getvalue())
    except OSError as error:
        raise ConfigError(f"cannot write {str(path)!r} ({error.strerror}): choose another path") from error
    except ValueError:
        raise ConfigError(
            f"cannot draw a file that ends in {Path(path).suffix!r}: choose a path that ends in .png, .svg or .pdf"
        ) from None


def _time_axis(calls: Sequence[StepRecord | JobRecord], spans: Mapping[int, list[Span]]) -> TimeAxis:
    """Return the axis from the first to the last moment of the trace, in ms, or in seconds if the trace takes 10 s or more."""
    every = [span for own in spans.values() for span in own]
    first = min(*(call.start for call in calls), *(span.start for span in every))
    last = max(*(call.end for call in calls), *(span.end for span in every))
    factor, unit = (1e3, "ms") if last - first < 10 else (1.0, "s")
    return TimeAxis(first, factor, unit, (last - first) * factor)


def _title(trace: Trace) -> str:
    tokens = sum(len(request.token_times) for request in trace.requests)
    dropped = f" (the oldest {trace.num_dropped} records are lost)" if trace.num_dropped else ""
    return f"{len(trace.steps)} device calls, {len(trace.requests)} requests ended, {tokens} tokens{dropped}"


def _draw_calls(axes: Any, steps: Sequence[StepRecord], jobs: Sequence[JobRecord], clock: Clock) -> None:
    """Draw one bar per call: decode rows at the bottom, prefill rows above them, padding on top. Jobs have their full height."""
    boxes: dict[str, list[Box]] = {"decode": [], "prefill": [], "padding": []}
    for step in steps:
        left, right, bottom = clock(step.start), clock(step.end), 0
        parts = {"decode": step.decode_rows, "prefill": step.prefill_rows, "padding": step.padding_rows}
        for name, count in parts.items():
            if count:
                boxes[name].append((left, right, bottom, bottom + count))
            bottom += count
    colours: dict[str, str] = {"decode": COLOURS["decode"], "prefill": COLOURS["prefill"], "padding": PADDING}
    for name, colour in colours.items():
        _fill(axes, boxes[name], colour, f"{name} rows" if name != "padding" else name)
    tallest = max(step.variant.rows for step in steps)
    _fill(axes, [(clock(job.start), clock(job.end), 0, tallest * 1.05) for job in jobs], JOBS, "other models")
    if tallest > LINEAR_ROWS:
        axes.set_yscale("function", functions=(lambda rows: np.sqrt(np.maximum(rows, 0)), np.square))
        axes.set_yticks([0, *(4**power for power in range(10) if 4**power < tallest / 1.5), tallest])
    axes.set_ylim(0, tallest * 1.05)
    axes.set_ylabel("rows of the call" + (", root scale" if tallest > LINEAR_ROWS else ""))
    _finish(axes, "device calls")


def _draw_spans(axes: Any, spans: Mapping[int, list[Span]], clock: Clock) -> None:
    boxes: dict[Kind, list[Box]] = {kind: [] for kind in COLOURS}
    for place, own in enumerate(spans.values()):
        for span in own:
            low = place - TRACK / 2
            boxes[span.kind].append((clock(span.start), clock(span.end), low, low + TRACK))
    for kind, colour in COLOURS.items():
        _fill(axes, boxes[kind], colour, kind)
    axes.set_ylim(len(spans) - 0.4, -0.6)
    every = -(-len(spans) // MAX_NAMED_TRACKS)
    axes.set_yticks(range(0, len(spans), every), [str(number) for number in list(spans)[::every]], fontsize=7)
    axes.set_ylabel("request")


def _mark_ends(axes: Any, numbers: list[int], requests: Sequence[RequestRecord], clock: Clock) -> None:
    places = {number: place for place, number in enumerate(numbers)}
    for reason, mark in END_MARKS.items():
        ends = [(clock(r.ended), places[r.id]) for r in requests if r.reason == reason and r.ended and r.id in places]
        if ends:
            axes.plot(*zip(*ends, strict=True), mark, color=INK, markersize=2.5, label=f"end: {reason}", clip_on=False)
    _finish(axes, "requests (white: in no call)")


def _mark_preemptions(axes: Any, numbers: list[int], steps: Sequence[StepRecord], clock: Clock) -> None:
    places = {number: place for place, number in enumerate(numbers)}
    marks = [(clock(step.start), places[number]) for step in steps for number in step.preempted]
    if marks:
        axes.plot(*zip(*marks, strict=True), "v", color=INK, markersize=3.5, label="preempted", clip_on=False)


def _draw_counts(axes: Any, steps: Sequence[StepRecord], clock: Clock) -> None:
    """Draw KV slots in use on the left axis and requests on the right one; both stay constant between two calls."""
    moments = [*(clock(step.start) for step in steps), clock(steps[-1].end)]
    slots = [step.slots_in_use for step in steps]
    axes.fill_between(
        moments, [*slots, slots[-1]], step="post", color=SLOTS, alpha=0.5, linewidth=0, label="slots in use"
    )
    axes.set_ylim(0, max(1, *slots) * 1.1)
    axes.set_ylabel("KV slots in use")
    right = axes.twinx()
    waiting, swapped = [step.num_waiting for step in steps], [step.num_swapped for step in steps]
    for name, counts, colour in (("waiting", waiting, WAITING), ("swapped", swapped, COLOURS["swapped"])):
        right.step(moments, [*counts, counts[-1]], where="post", color=colour, linewidth=1.5, label=name)
    right.set_ylim(0, max(1, *waiting, *swapped) * 1.1)
    right.set_ylabel("requests")
    right.yaxis.get_major_locator().set_params(integer=True)
    right.spines["top"].set_visible(False)
    _finish(axes, "KV slots and queues", right)


def _fill(axes: Any, boxes: list[Box], colour: str, label: str) -> None:
    """Draw all boxes of one colour as one object, because a trace has thousands of boxes."""
    corners = [[(left, low), (right, low), (right, high), (left, high)] for left, right, low, high in boxes]
    polygons = matplotlib("collections").PolyCollection
    # unsnapped, so that calls narrower than a pixel blend instead of forming a moiré pattern
    axes.add_collection(polygons(corners, facecolors=colour, linewidths=0, snap=False, label=label), autolim=False)


def _finish(axes: Any, title: str, right: Any = None) -> None:
    """Add title, grid and legend to a panel. The legend is beside the panel, where it hides nothing."""
    axes.set_title(title, loc="left", fontsize=10, color=INK)
    axes.grid(axis="x", color="#eeeeee", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines["top"].set_visible(False)
    axes.spines["right"].set_visible(right is not None)
    handles, labels = axes.get_legend_handles_labels()
    if right is not None:
        more = right.get_legend_handles_labels()
        handles, labels = handles + more[0], labels + more[1]
    axes.legend(
        handles, labels, frameon=False, fontsize=8, borderaxespad=0, loc="upper left", bbox_to_anchor=(1.05, 1.0)
    )
