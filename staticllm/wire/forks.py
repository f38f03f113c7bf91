"""Gives objects new locks in a forked child: a thread that held an old one at the moment of the fork does not exist there."""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Renewable(Protocol):
    """An object with locks."""

    def renew(self) -> None:
        """Make its locks anew, and forget what threads of the parent were about to do. Must not wait."""
        ...


_renewables: weakref.WeakSet[Renewable] = weakref.WeakSet()


def renew_in_children(renewable: Renewable) -> None:
    """Call ``renew`` in every forked child, as long as the object lives."""
    _renewables.add(renewable)


def _renew_all() -> None:
    for each in list(_renewables):
        each.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)
