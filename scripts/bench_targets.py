"""The targets of ``bench.py``: medians of the ratios of each round, in one run."""

from __future__ import annotations

from dataclasses import dataclass

from bench_figures import BEST, Figure, Figures, is_rate

SHARED = "ours shared"
SLOWER = 1.15
"""How much slower the one-copy layout may be than the fastest one."""


@dataclass(frozen=True)
class Target:
    """A target: ``mine`` as a share of ``other`` is at most ``limit``, or at least that for throughput.

    ``other`` is None if ``mine`` itself has the limit.
    """

    mine: Figure
    other: Figure | None
    limit: float


@dataclass(frozen=True)
class Judged:
    """A target and what was found: ``ratio`` is None if it was not measured, ``best`` names the setting of ``best genai``."""

    target: Target
    ratio: float | None
    best: str | None = None

    @property
    def is_least(self) -> bool:
        return is_rate(self.target.mine.measure)

    @property
    def is_met(self) -> bool:
        if self.ratio is None:
            return False
        return self.ratio >= self.target.limit if self.is_least else self.ratio <= self.target.limit


def _against(peer: str, limits: dict[str, float], mine: str = "ours") -> list[Target]:
    return [Target(Figure(measure, mine), Figure(measure, peer), limit) for measure, limit in limits.items()]


TIMES = ("ttft_16", "ttft_128", "ttft_512", "ttft_1000", "ttft_turn", "tpot_128", "tpot_1000")
RATES = ("clients_4", "clients_8", "clients_16")
OWN = (
    Target(Figure("tpot_128"), Figure("read_ms"), 1.30),
    Target(Figure("tpot_kv_len", "kv_len 4096"), Figure("tpot_kv_len", "kv_len 512"), 1.3),
    Target(Figure("host_ms"), None, 0.20),
)
ONE_COPY = (
    *_against(BEST, {"peak_mb": 1.25}, SHARED),
    *_against("ours", dict.fromkeys(TIMES, SLOWER), SHARED),
    *_against("ours", dict.fromkeys(RATES, 1 / SLOWER), SHARED),
)
INT8 = (
    *_against(
        BEST,
        {
            "ttft_16": 0.95, "ttft_128": 0.92, "ttft_512": 0.95, "ttft_1000": 0.9, "ttft_turn": 0.9, "tpot_128": 0.95,
            "tpot_1000": 0.95, "clients_1": 1.0, "clients_4": 1.15, "clients_8": 1.10, "clients_16": 1.10, "load_s": 1.3,
            "peak_mb": 1.2,
        },
    ),
    *_against(
        "npuw",
        {
            "ttft_16": 0.07, "ttft_128": 0.18, "ttft_512": 0.62, "ttft_1000": 1.0, "ttft_turn": 0.10, "tpot_128": 0.42,
            "tpot_1000": 0.48, "clients_8": 9.0, "load_s": 0.4, "peak_mb": 0.8,
        },
    ),
)  # fmt: skip
INT4 = tuple(_against(BEST, dict.fromkeys((*TIMES, "clients_1", *RATES), 1.0)))
TARGETS = {"qwen2-0.5b": (*INT8, *ONE_COPY, *OWN), "llama-1b": (*INT4, *ONE_COPY, *OWN), "qwen2.5-3b": INT4}
"""The targets of each model of ``make_bench_model.py``."""


def judge(figures: Figures, model: str) -> list[Judged]:
    """Return the targets of a model that were measured."""
    found = []
    for target in TARGETS[model]:
        mine, other = target.mine, target.other
        ratio = figures.median(mine.measure, mine.peer) if other is None else figures.ratio(mine, other)
        best = figures.best(other.measure) if other is not None and other.peer == BEST else None
        found.append(Judged(target, ratio, best))
    return [each for each in found if each.ratio is not None]
