"""WINDVE's cost model: how many machines embed a given load within a latency limit, and what the CPUs beside them save."""

from __future__ import annotations

import math
from dataclasses import dataclass

from staticllm.errors import ConfigError

_EPSILON = 1e-9


@dataclass(frozen=True)
class Machines:
    """Machines for a load, as a real number as in the paper and as whole machines, and what the latter cost per hour."""

    exact: float
    whole: int
    price: float


@dataclass(frozen=True)
class DeploymentCost:
    """Machines whose main device works alone, those whose CPU helps, and the ``saving``, a share of the exact number."""

    alone: Machines
    together: Machines
    saving: float


def saving(main: float, helping: float) -> float:
    """Return the share of machines that helping devices save: ``helping / (main + helping)``.

    It is the same for a deployment by peak concurrency (equation 6) and by average throughput (equation 5). A throughput that is
    22.9 % higher saves 18.6 %, not 22.9 %; the paper takes the one for the other.
    """
    return helping / (main + helping) if main + helping else 0.0


def peak_cost(num_queries: float, main: int, helping: int, price: float = 0.0, num_devices: int = 1) -> DeploymentCost:
    """Return the machines for ``num_queries`` at once (equation 6): one embeds ``main``, or ``main + helping``, within the limit.

    ``price`` is that of one device per hour, ``num_devices`` how many one machine has.

    Raises:
        ConfigError: a number is negative, or the main device embeds no query within the limit.
    """
    return _cost("queries at once", num_queries, main, helping, price * num_devices)


def average_cost(rate: float, main: float, helping: float, price: float = 0.0, num_devices: int = 1) -> DeploymentCost:
    """Return the machines for ``rate`` queries per second on average (equation 5). ``main`` and ``helping`` are rates as well.

    Which rates decides what the machines are for: the queue depth over the limit is the paper's load in lockstep, and
    ``sustained_rate`` is for queries that arrive evenly, of which fewer end within the limit.

    Raises:
        ConfigError: as for ``peak_cost``.
    """
    return _cost("queries per second", rate, main, helping, price * num_devices)


def _cost(unit: str, load: float, main: float, helping: float, price: float) -> DeploymentCost:
    for name, value in (("load", load), ("main device", main), ("helping devices", helping), ("price", price)):
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name}: {value:g} {unit if name != 'price' else 'per hour'}: must be 0 or more")
    if not main:
        raise ConfigError(f"the main device embeds 0 {unit} within the limit: raise the limit or use a faster device")
    return DeploymentCost(_machines(load, main, price), _machines(load, main + helping, price), saving(main, helping))


def _machines(load: float, each: float, price: float) -> Machines:
    whole = math.ceil(load / each - _EPSILON)
    return Machines(load / each, whole, whole * price)
