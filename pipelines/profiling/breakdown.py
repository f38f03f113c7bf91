"""Divides the time per token into the device call and the parts of the host's work around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from staticllm.pipelines.profiling.records import StepRecord

PARTS = ("device", "plan", "prepare", "commit", "sampling", "other")


@dataclass(frozen=True)
class Breakdown:
    """The mean ms per call over the ``num_calls`` calls of one kind ("prefill" or "decode"), by the names in ``PARTS``.

    The part "other" is the time between two calls that no other part measures: waking up, admitting requests, keeping records.
    """

    kind: str
    num_calls: int
    ms: dict[str, float]

    @property
    def total_ms(self) -> float:
        """The sum of all parts, in ms per call."""
        return sum(self.ms.values())


def breakdowns_of(steps: Sequence[StepRecord]) -> list[Breakdown]:
    """Return a breakdown of the calls with prompts and one of the calls that only decode, if there are such calls."""
    others = [0.0, *(max(0.0, _between(before, after)) for before, after in pairwise(steps))]
    kinds: dict[str, list[tuple[StepRecord, float]]] = {"prefill": [], "decode": []}
    for step, other in zip(steps, others, strict=False):
        if step.host is not None:
            kinds["prefill" if step.prefill else "decode"].append((step, other))
    return [Breakdown(kind, len(found), _means(found)) for kind, found in kinds.items() if found]


def _between(before: StepRecord, after: StepRecord) -> float:
    """Return the seconds between two calls that no part measures; 0.0 if the second call decodes nothing.

    In that case the engine may have been idle before it.
    """
    if before.host is None or after.host is None or not after.decode:
        return 0.0
    known = before.host.commit + before.host.sampling + after.host.plan + after.host.prepare
    return after.start - before.end - known


def _means(found: list[tuple[StepRecord, float]]) -> dict[str, float]:
    sums = dict.fromkeys(PARTS, 0.0)
    for step, other in found:
        assert step.host is not None
        host = step.host
        parts = (step.seconds, host.plan, host.prepare, host.commit, host.sampling, other)
        for name, seconds in zip(PARTS, parts, strict=True):
            sums[name] += seconds
    return {name: 1e3 * seconds / len(found) for name, seconds in sums.items()}


def table(breakdowns: Sequence[Breakdown]) -> str:
    """Return a table for the terminal with one column per kind of call and one line per part.

    Detokenization is not a part: it runs on the readers' threads, while the device runs.
    """
    lines = ["ms/call  " + "".join(f"{f'{p.kind} ({p.num_calls})':>22}" for p in breakdowns)]
    for part in PARTS:
        lines.append(f"{part:<9}" + "".join(f"{p.ms[part]:>14.3f}{_share(p, part):>8}" for p in breakdowns))
    lines.append(f"{'together':<9}" + "".join(f"{p.total_ms:>14.3f}{'':>8}" for p in breakdowns))
    return "\n".join(lines)


def _share(breakdown: Breakdown, part: str) -> str:
    return f"{breakdown.ms[part] / breakdown.total_ms:.1%}" if breakdown.total_ms else "-"
