"""Chooses the processor cores of CPU instances by WINDVE's rules, and binds threads to them (Linux)."""

from __future__ import annotations

import contextlib
import math
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from staticllm.errors import ConfigError, DeviceError
from staticllm.system.posix import affinity, set_affinity

SERVICE_SHARE = 0.25
"""The share of the cores that is kept for the service, as in the paper: tokenization, queues, and the host's work for the NPU."""
_SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True)
class Topology:
    """The processors that this process may use: ``nodes[n][c]`` holds the logical processors of one core of a NUMA node."""

    nodes: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def num_cores(self) -> int:
        """The number of cores; the logical processors of one core count once."""
        return sum(map(len, self.nodes))


def unsupported() -> str:
    """Return why threads cannot be bound to cores on this system; empty if they can."""
    if hasattr(os, "sched_setaffinity"):
        return ""
    return f"binding threads to cores is not supported on {sys.platform}: staticllm does it on Linux only"


def service_cores(topology: Topology, share: float = SERVICE_SHARE) -> int:
    """Return how many cores are kept for the service: a share of all, at least 1."""
    return max(1, math.ceil(topology.num_cores * share))


def instance_cores(topology: Topology, num_instances: int = 1, share: float = SERVICE_SHARE) -> list[list[int]]:
    """Return the logical processors of each CPU instance, from the top index down; empty if no core is left for an instance.

    The lowest cores stay with the service. An instance gets whole NUMA nodes, or cores of one node if no whole node is left for
    it, so its threads never read weights across part of a node. Instances get equally many nodes, or shares of the nodes.

    Raises:
        ConfigError: there are more instances than free cores.
    """
    if num_instances < 1:
        raise ConfigError(f"{num_instances} CPU instances: must be 1 or more")
    free = _without_service(topology, service_cores(topology, share))
    num_free = sum(map(len, free))
    if not num_free:
        return []
    if num_free < num_instances:
        raise ConfigError(
            f"{num_instances} CPU instances on {num_free} free cores ({topology.num_cores} less those of the service): "
            "use fewer instances"
        )
    whole = [node for node, full in zip(free, topology.nodes, strict=True) if node and len(node) == len(full)]
    if len(whole) >= num_instances:
        each = len(whole) // num_instances
        groups = [whole[max(0, len(whole) - each * (n + 1)) : len(whole) - each * n] for n in range(num_instances)]
        return [_processors(core for node in group for core in node) for group in groups]
    return _parts_of_nodes([node for node in free if node], num_instances)


def _without_service(topology: Topology, count: int) -> list[list[tuple[int, ...]]]:
    """Return the cores of each node without the lowest ``count`` cores of the machine."""
    lowest = set(sorted(core for node in topology.nodes for core in node)[:count])
    return [sorted(core for core in node if core not in lowest) for node in topology.nodes]


def _parts_of_nodes(nodes: Sequence[Sequence[tuple[int, ...]]], num_instances: int) -> list[list[int]]:
    """Return parts of nodes: each instance goes to the node with the most cores per instance, the top one first."""
    counts = [0] * len(nodes)
    for _ in range(num_instances):
        best = max(range(len(nodes)), key=lambda node: (len(nodes[node]) // (counts[node] + 1), node))
        counts[best] += 1
    parts = []
    for node, count in reversed(list(zip(nodes, counts, strict=True))):
        each = len(node) // count if count else 0
        parts += [_processors(node[len(node) - each * (n + 1) : len(node) - each * n]) for n in range(count)]
    return parts


def _processors(cores: Iterable[tuple[int, ...]]) -> list[int]:
    return sorted(processor for core in cores for processor in core)


def read_topology(system: Path = _SYSTEM) -> Topology:
    """Return the topology of this machine, without processors that this process may not use.

    Without NUMA information there is one node. Read once at start: nothing here watches the machine.

    Raises:
        DeviceError: threads cannot be bound to cores on this system.
    """
    allowed = current_processors()
    nodes = []
    for folder in sorted((system / "node").glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        nodes.append(_cores(_read_list(folder / "cpulist") & allowed, system))
    found = tuple(node for node in nodes if node)
    missing = allowed - {processor for node in found for core in node for processor in core}
    return Topology((*found, _cores(missing, system)) if missing else found)


def current_processors() -> set[int]:
    """Return the logical processors that this thread may use.

    Raises:
        DeviceError: the system does not tell.
    """
    if (found := affinity()) is None:
        raise DeviceError(unsupported())
    return found


def bind(processors: Iterable[int]) -> None:
    """Bind the calling thread, and threads that it starts later, to these logical processors.

    A process that calls this first binds all its threads. Threads that run already, such as OpenVINO's, stay where they are.

    Raises:
        ConfigError: there is no processor in the list, or the system does not know one.
        DeviceError: threads cannot be bound to cores on this system.
    """
    wanted = sorted(set(processors))
    reason = unsupported()
    if reason:
        raise DeviceError(reason)
    if not wanted:
        raise ConfigError("binding to no processor: give the indices of one or more")
    if sys.platform == "linux":
        before = current_processors()
        with contextlib.suppress(OSError, OverflowError, ValueError):
            set_affinity(0, wanted)
        missing = sorted(set(wanted) - current_processors())
        if missing:  # the system binds to those of a list that it has
            set_affinity(0, before)
            which = f"processor {missing[0]}" if len(missing) == 1 else f"processors {missing[0]} to {missing[-1]}"
            raise ConfigError(f"{which} cannot be used here; there are {', '.join(map(str, sorted(before)))}")


def bind_process(processors: Iterable[int]) -> None:
    """Bind all threads of this process, also those that run already, such as numpy's. Call it before OpenVINO is loaded.

    Raises:
        ConfigError, DeviceError: as for ``bind``.
    """
    wanted = set(processors)
    bind(wanted)
    if sys.platform == "linux":
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                set_affinity(int(task.name), wanted)


def _cores(processors: set[int], system: Path) -> tuple[tuple[int, ...], ...]:
    """Return the processors grouped by core: hyper-threads of one core have indices far apart on many machines."""
    cores = set()
    for processor in processors:
        siblings = _read_list(system / "cpu" / f"cpu{processor}" / "topology" / "thread_siblings_list") & processors
        cores.add(tuple(sorted(siblings | {processor})))
    return tuple(sorted(cores))


def _read_list(path: Path) -> set[int]:
    """Return the numbers of a list like ``0-3,8``; empty if it cannot be read."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return set()
    return parse_list(text) or set()


def parse_list(text: str) -> set[int] | None:
    """Return the numbers of a list like ``0-3,8``; None if it is not one."""
    numbers: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part.strip(), re.ASCII)
        if not match or int(match[1]) > int(match[2] or match[1]):
            return None
        numbers |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return numbers
