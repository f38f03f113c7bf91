"""Plots simulated runs with matplotlib (``pip install matplotlib``)."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from staticllm.errors import ConfigError, quoted
from staticllm.system.files import write_whole

from ..profiling.records import RequestRecord
from .summary import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BINS = 60
"""The number of bins of the throughput over time."""


def check_plot(path: str | os.PathLike[str]) -> None:
    """Check that a plot can be written to ``path``; called before the simulation.

    Raises:
        ConfigError: matplotlib is not installed or does not know this format, or the folder does not exist.
    """
    known = _matplotlib("figure").Figure().canvas.get_supported_filetypes()
    suffix = Path(path).suffix[1:].lower()
    if suffix not in known:
        raise ConfigError(f"cannot draw a file that ends in {suffix!r}: choose a path that ends in .png, .svg or .pdf")
    if not Path(path).resolve().parent.is_dir():
        raise ConfigError(f"the folder {quoted(Path(path).resolve().parent)} does not exist: make it first")


def plot_runs(runs: Mapping[str, Run], path: str | os.PathLike[str]) -> None:
    """Draw three panels, one colour per policy: TTFT by arrival, the distribution of times between tokens, tokens/s over time.

    Raises:
        ConfigError: matplotlib is not installed or does not know this format, or the file cannot be written.
    """
    figure = _matplotlib("figure").Figure(figsize=(15, 4.2), layout="constrained")
    first, gaps, rates = figure.subplots(1, 3)
    for name, run in runs.items():
        served = [request for request in run.requests if request.token_times]
        _plot_first_tokens(first, name, served)
        _plot_gaps(gaps, name, served)
        _plot_rates(rates, name, served)
    first.set(xlabel="arrival, s", ylabel="TTFT, s", title="Time to first token")
    gaps.set(xlabel="time since the previous token, ms", ylabel="share of tokens that take this long or longer")
    gaps.set(xscale="log", yscale="log", title="Time between tokens")
    rates.set(xlabel="time, s", ylabel="output tokens/s", title="Throughput")
    for axes in (first, gaps, rates):
        axes.grid(alpha=0.3)
    first.legend()
    _save(figure, path)


def _plot_first_tokens(axes: Axes, name: str, served: list[RequestRecord]) -> None:
    axes.plot(
        [request.arrival for request in served],
        [request.ttft or 0.0 for request in served],
        ".",
        markersize=4,
        label=name,
    )


def _plot_gaps(axes: Axes, name: str, served: list[RequestRecord]) -> None:
    gaps = np.sort([after - before for request in served for before, after in pairwise(request.token_times)]) * 1e3
    if gaps.size:
        axes.plot(gaps, 1 - np.arange(gaps.size) / gaps.size, label=name)


def _plot_rates(axes: Axes, name: str, served: list[RequestRecord]) -> None:
    times = [time for request in served for time in request.token_times]
    if times and max(times) > 0:
        counts, edges = np.histogram(times, BINS, (0.0, max(times)))
        axes.stairs(counts / np.diff(edges), edges, label=name)


def _matplotlib(module: str) -> Any:
    """Return a module of matplotlib.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import_module("matplotlib")
        return import_module(f"matplotlib.{module}")
    except ImportError:
        raise ConfigError("a picture needs matplotlib: pip install matplotlib") from None


def _save(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a figure of matplotlib, in the format of the file's ending; PNG without one.

    Raises:
        ConfigError: matplotlib does not know this format, or the file cannot be written.
    """
    picture = io.BytesIO()
    try:
        figure.savefig(picture, dpi=130, format=Path(path).suffix[1:] or "png")
        write_whole(path, picture.getvalue())
    except OSError as error:
        raise ConfigError(f"cannot write {quoted(path)} ({error.strerror}): choose another path") from error
    except ValueError:
        raise ConfigError(
            f"cannot draw a file that ends in {Path(path).suffix!r}: choose a path that ends in .png, .svg or .pdf"
        ) from None
