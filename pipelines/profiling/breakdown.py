"""Where a token's time goes: the device, and what the host does around it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from staticllm.pipelines.profiling.records import StepRecord

PARTS = ("device", "plan", "prepare", "commit", "sampling", "other")


@dataclass(frozen=True)
class Profile:
    """Means over the calls of one kind, in ms. ``other`` is what lies between two calls and is none of the host's parts:
    waking up, letting requests in, keeping records."""

    kind: str
    num_calls: int
    ms: dict[str, float]

    @property
    def total_ms(self) -> float:
        return sum(self.ms.values())


def profile_of(steps: Sequence[StepRecord]) -> list[Profile]:
    """Of calls with prompts in them, and of those that only decode; a kind of which there was none is left out."""
    others = [0.0, *(max(0.0, _between(before, after)) for before, after in pairwise(steps))]
    kinds: dict[str, list[tuple[StepRecord, float]]] = {"prefill": [], "decode": []}
    for step, other in zip(steps, others, strict=False):
        if step.host is not None:
            kinds["prefill" if step.prefill else "decode"].append((step, other))
    return [Profile(kind, len(found), _means(found)) for kind, found in kinds.items() if found]


def _between(before: StepRecord, after: StepRecord) -> float:
    """The gap before a call, without the parts that are known; 0 where nobody was there to be served meanwhile."""
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


def table(profiles: Sequence[Profile]) -> str:
    """For a terminal: a column a kind of call, a line a part. Text is not among them: readers make it, beside the device."""
    lines = ["ms a call" + "".join(f"{f'{p.kind} ({p.num_calls})':>22}" for p in profiles)]
    for part in PARTS:
        lines.append(f"{part:<9}" + "".join(f"{p.ms[part]:>14.3f}{_share(p, part):>8}" for p in profiles))
    lines.append(f"{'together':<9}" + "".join(f"{p.total_ms:>14.3f}{'':>8}" for p in profiles))
    return "\n".join(lines)


def _share(profile: Profile, part: str) -> str:
    return f"{profile.ms[part] / profile.total_ms:.1%}" if profile.total_ms else "-"
