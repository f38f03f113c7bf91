"""The fraction of a whole load that is done, from the events of its parts."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace

from staticllm.core import OnProgress, ProgressEvent, Stage
from staticllm.errors import ConfigError, shown

SHARES: Mapping[str, float] = {
    "download": 60,
    "convert": 25,
    "read": 3,
    "passes": 8,
    "compile": 35,
    "warm-up": 15,
    "export": 5,
}
"""What a stage takes of a load, in the order of the stages; those that do not come leave their shares to the later ones."""
ALIKE: Mapping[Stage, Stage] = {"import": "compile", "verify": "export"}
"""Stages that stand where others do."""
FIRST_LIMIT = 0.98
"""The fraction at the end of the programs that are expected: something may follow before the model can serve."""


def check_receiver(on_progress: object) -> None:
    """Check what receives the events of a load, before anything is loaded.

    Raises:
        ConfigError: it cannot be called.
    """
    if on_progress is not None and not callable(on_progress):
        raise ConfigError(f"on_progress={shown(on_progress)}: must be a function of one ProgressEvent, or None")


class LoadProgress:
    """Sets the ``fraction`` of each event, and hands it on. It never falls.

    ``num_loads``: how often the stages are expected to come, for example once for each device. One more, for a device in place of
    one that refused, takes half of what is left.
    """

    def __init__(self, on_progress: OnProgress | None, num_loads: int = 1) -> None:
        self._on_progress = on_progress
        self._num_loads = num_loads
        self._num_begun = 0
        self._thread = threading.get_ident()
        self._held: ProgressEvent | None = None  # ``ready`` of the first of several models
        self._place = len(SHARES)  # of the stage in SHARES
        self._done = 0.0  # of the stage
        self._begin = 0.0  # the fractions at which the stage begins and ends
        self._end = 0.0
        self._limit = 0.0
        self._fraction = 0.0

    def __call__(self, event: ProgressEvent) -> None:
        """Hand an event on. Raises what the receiver raises."""
        is_ready = event.stage == "ready"
        if (
            is_ready
            and self._held is None
            and self._num_begun < self._num_loads
            and threading.get_ident() == self._thread
        ):
            self._held = event
        elif self._on_progress is not None:
            self._on_progress(replace(event, fraction=self._fraction_at(event)))

    def finish(self, event: ProgressEvent | None = None) -> None:
        """Hand on ``ready``: the event, or the one that was held back until another model was loaded too."""
        if (ready := event or self._held) is not None:
            self._held = ready
            self(ready)

    def _fraction_at(self, event: ProgressEvent) -> float:
        if threading.get_ident() != self._thread:  # what is loaded in the background does not count
            return self._fraction
        if event.stage == "ready":
            self._fraction = 1.0
        stage = ALIKE.get(event.stage, event.stage)
        if stage in SHARES and self._fraction < 1:
            part = 1.0 if event.is_done else event.part
            done = min((event.index - 1 + part) / max(event.total, 1), 1.0)
            self._enter(list(SHARES).index(stage), done)
            if stage == "warm-up":
                done **= 0.5  # the first run packs the weights, and takes longest
            self._fraction = max(self._fraction, self._begin + (self._end - self._begin) * done)
        return self._fraction

    def _enter(self, place: int, done: float) -> None:
        """Note the place of the stage that runs, how much of it is ``done``, and what it may take of the rest."""
        is_again = place == self._place and done < self._done
        self._done = done
        if place == self._place and not is_again:
            return
        if place < self._place or is_again:
            self._num_begun += 1
            limit = self._num_begun / self._num_loads * FIRST_LIMIT
            is_expected = self._num_begun <= self._num_loads and limit > self._fraction
            self._limit = limit if is_expected else (self._fraction + 1) / 2
        self._place = place
        self._begin = self._fraction
        first, *others = list(SHARES.values())[place:]
        self._end = self._begin + (self._limit - self._begin) * first / sum((first, *others))
