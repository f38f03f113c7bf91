"""Which tests run with ``--all`` only because they take long: those named in ``slow_tests.txt``, beside those marked ``slow``.

The list is measured: ``python scripts/test.py --write-slow`` runs the tests that are not marked and writes it anew. A line is a
module, or a function of one with all its parameters.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

import pytest

LIST = Path(__file__).with_suffix(".txt")
MODULE_SECONDS = 2.0
"""A module that takes no longer than this is quick with all its tests."""
FUNCTION_SECONDS = 0.5
"""In other modules, functions that take longer than this are slow."""
REST_SECONDS = 3.0
"""A module whose other functions and fixtures still take longer than this is slow as a whole."""


@cache
def slow_tests() -> frozenset[str]:
    """Return the lines of the list."""
    return frozenset(LIST.read_text(encoding="utf-8").split())


def is_listed(nodeid: str, listed: frozenset[str]) -> bool:
    """Tell whether the test is slow by the list, itself or with its module."""
    return nodeid.partition("::")[0] in listed or nodeid.partition("[")[0] in listed


_TEST = re.compile(r"^((?:@.*\n|[ )\]}].*\n|#.*\n)*)(?:async )?def (test_\w+)", re.MULTILINE)
"""A test at the top level of a module, with the lines of its decorators before it."""


def is_slow_module(name: str, text: str, listed: frozenset[str]) -> bool:
    """Tell by its text whether all tests of a module are slow, so that nothing of it has to be imported."""
    if name in listed or "\npytestmark = pytest.mark.slow\n" in text:
        return True
    tests = _TEST.findall(text)
    if not tests or "\nclass Test" in text:
        return False
    return all(f"{name}::{test}" in listed or "@pytest.mark.slow\n" in before for before, test in tests)


def choose_slow(seconds: Mapping[tuple[str, str], float]) -> list[str]:
    """Return the lines for measured seconds of each (module, function). Fixtures have an empty name of a function."""
    modules: dict[str, dict[str, float]] = defaultdict(dict)
    for (module, function), spent in seconds.items():
        modules[module][function] = spent
    chosen = []
    for module, functions in sorted(modules.items()):
        if sum(functions.values()) <= MODULE_SECONDS:
            continue
        slow = {name for name, spent in functions.items() if name and spent > FUNCTION_SECONDS}
        rest = sum(spent for name, spent in functions.items() if name not in slow)
        chosen += [module] if rest > REST_SECONDS else sorted(f"{module}::{name}" for name in slow)
    return chosen


class Stopwatch:
    """Measures the tests of a run, also those of other processes, and writes the list when it ends."""

    def __init__(self) -> None:
        self.seconds: dict[tuple[str, str], float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        module, _, function = report.nodeid.partition("::")
        self.seconds[module, function.partition("[")[0] if report.when == "call" else ""] += report.duration

    def pytest_sessionfinish(self) -> None:
        write(choose_slow(self.seconds))


def write(lines: Iterable[str]) -> None:
    LIST.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8", newline="\n")
