"""Shows a progress bar on stderr, drawn by ``tqdm``, for work that may take longer than two seconds, if stderr is a terminal."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from staticllm.core import ProgressEvent

if TYPE_CHECKING:
    from tqdm import tqdm

DELAY_SECONDS = 0.5
"""Work that takes less time than this shows no bar."""
TICK_SECONDS = 0.25
WITH_TOTAL = "{desc}: {n_fmt}/{total_fmt} {bar} {elapsed}"
WITH_FRACTION = "{desc}: {percentage:.1f}% {bar} {elapsed}"
WITHOUT_TOTAL = "{desc} … {elapsed}"
STAGES = {
    "download": "downloading, MB", "convert": "converting the model once", "read": "reading the model",
    "passes": "lowering the model", "compile": "compiling", "import": "importing blobs", "warm-up": "warming up",
    "export": "writing blobs",
}  # fmt: skip


class Progress:
    """One line on stderr with the current work, its progress and the elapsed time. Use ``progress`` to create one."""

    def __init__(self, text: str) -> None:
        self._start = time.time()
        self._lock = threading.Lock()
        self._is_closed = False
        self._bar: tqdm[Any] | None = None
        self._text = text
        self._num_done = 0.0
        self._total = 0

    def __call__(self, event: ProgressEvent) -> None:
        """Show one part of loading a model; pass this object as ``on_progress``."""
        if event.stage in STAGES and event.fraction:
            self.show(STAGES[event.stage], event.fraction, 1)
        elif event.stage in STAGES:
            self.show(STAGES[event.stage], event.index if event.is_done else event.index - 1, event.total)

    def show(self, text: str, num_done: float = 0, total: int = 0) -> None:
        """Show that ``num_done`` of ``total`` parts are done, or a fraction of one; else there is a clock alone."""
        with self._lock:
            self._text = text
            self._num_done = num_done
            self._total = total

    def write(self, line: str, err: bool = False) -> None:
        """Print a line on stdout or stderr; the bar stays below it."""
        with self._lock:
            if self._bar is not None:
                self._bar.clear()
            click.echo(line, err=err)

    def tick(self) -> None:
        """Draw the line with the elapsed time. Runs on the progress thread."""
        with self._lock:
            if self._is_closed:
                return
            bar: tqdm[Any] | None = self._bar
            if bar is None:
                from tqdm import tqdm  # when the first bar is drawn

                bar = tqdm(bar_format=WITHOUT_TOTAL, desc=self._text, leave=False, dynamic_ncols=True)
                bar.start_t = self._start
                self._bar = bar
            form = WITH_TOTAL if self._total > 1 else WITH_FRACTION if self._num_done else WITHOUT_TOTAL
            bar.bar_format = form
            bar.total = self._total
            bar.n = self._num_done
            bar.set_description_str(self._text)

    def close(self) -> None:
        """Clear the line and draw no more; called before the answer is printed."""
        with self._lock:
            self._is_closed = True
            if self._bar is not None:
                self._bar.close()


@contextmanager
def progress(text: str) -> Iterator[Progress]:
    """Show progress while a block runs, and clear the line at its end, also after an exception."""
    shown = Progress(text)
    if sys.stderr is None or not sys.stderr.isatty():
        yield shown
        return
    done = threading.Event()
    clock = threading.Thread(target=_tick, args=(shown, done), name="progress", daemon=True)
    clock.start()
    try:
        yield shown
    finally:
        done.set()
        clock.join()
        shown.close()


def _tick(shown: Progress, done: threading.Event) -> None:
    wait = DELAY_SECONDS
    while not done.wait(wait):
        shown.tick()
        wait = TICK_SECONDS
