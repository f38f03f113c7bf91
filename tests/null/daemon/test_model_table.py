"""Tests which models the daemon drops for others."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from staticllm.daemon.limits import DaemonLimits
from staticllm.daemon.models.table import ModelTable


@dataclass(frozen=True)
class Wanted:
    """An origin with this identity, whose weights have one byte."""

    key: tuple
    xml: Path = Path("model.xml")
    device: str = "CPU"
    num_bytes: int = 1

    def identity(self):
        return self.key


class Model:
    """A compiled model that notes in ``closed`` that it was closed."""

    mode = "plain"

    def __init__(self, key, closed):
        self.key = key
        self.closed = closed

    def close(self):
        self.closed.append(self.key)


@pytest.mark.parametrize("moments", [(1.0, 1.0), (1.0, 2.0), (2.0, 1.0)])
def test_the_model_that_was_given_back_first_makes_room_also_if_two_were_at_once(moments, monkeypatch):
    """The keys of a language model and of another one begin with values that have no order; the clock of Windows is coarse."""
    language, plain = ("language model", "folder"), (("model.xml", 1), "CPU")
    closed = []
    table = ModelTable(lambda origin, id: Model(origin.key, closed), DaemonLimits(model_bytes=2))
    for key in (language, plain):
        table.acquire(Wanted(key))
    for key, moment in zip((language, plain), moments, strict=True):
        monkeypatch.setattr("staticllm.daemon.models.table.time.monotonic", lambda moment=moment: moment)
        table.release(key)
    table.acquire(Wanted(("third",)))
    assert closed == [plain if moments[1] < moments[0] else language]
