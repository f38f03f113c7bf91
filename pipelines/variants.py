"""Which variants exist: ladders derived from the lengths, and the plan of a prompt's chunks over them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from staticllm.config import StaticLLMConfig
from staticllm.core import ProgramMode, Variant
from staticllm.errors import ConfigError

PREFILL_LADDER: dict[ProgramMode, tuple[int, ...]] = {"shared": (16, 64, 256), "separate": (64,)}
LARGEST_CHUNK = 1024
SMALLEST_CAPACITY = 256


def choose_variants(config: StaticLLMConfig, mode: ProgramMode) -> tuple[Variant, ...]:
    """All variants of a pipeline, small ones first.

    Prefill rows: 16, 64, 256, then the longest prompt or 1024 (64 and that when each program is a blob of its own).
    Prefill capacities: 0 (no past), the total, and where a capacity costs no program of its own those of the generate
    variants. Generate capacities: powers of two, then the total.
    """
    prefill_rows = config.prefill_rows or _prefill_rows(config.max_prompt_len, mode)
    generate_capacities = config.generate_capacities or _powers(SMALLEST_CAPACITY, 2, config.capacity)
    prefill_capacities = config.prefill_capacities or _prefill_capacities(mode, generate_capacities)
    if generate_capacities[-1] != config.capacity:
        raise ConfigError(
            f"GENERATE_CAPACITIES ends at {generate_capacities[-1]}: its last size must be "
            f"MAX_PROMPT_LEN + MIN_RESPONSE_LEN = {config.capacity}"
        )
    if config.max_prompt_len > prefill_rows[-1] and prefill_capacities[-1] < config.max_prompt_len:
        raise ConfigError(
            f"PREFILL_CAPACITIES ends at {prefill_capacities[-1]}: with chunks of {prefill_rows[-1]} the last chunk of a "
            f"prompt of {config.max_prompt_len} tokens needs more; add {config.capacity}"
        )
    prefill = [
        Variant(rows, capacity)
        for rows in prefill_rows
        for capacity in prefill_capacities
        if rows > 1 and (config.prefill_capacities or capacity >= rows or capacity in (0, config.capacity))
    ]
    return (*(Variant(1, capacity) for capacity in generate_capacities), *prefill)


def _prefill_rows(max_prompt_len: int, mode: ProgramMode) -> tuple[int, ...]:
    largest = min(max_prompt_len, LARGEST_CHUNK)
    return (*(rows for rows in PREFILL_LADDER[mode] if rows < largest), largest)


def _prefill_capacities(mode: ProgramMode, generate_capacities: tuple[int, ...]) -> tuple[int, ...]:
    return (0, *generate_capacities) if mode == "shared" else (0, generate_capacities[-1])


def _powers(first: int, factor: int, total: int) -> tuple[int, ...]:
    ladder = []
    while first < total:
        ladder.append(first)
        first *= factor
    return (*ladder, total)


Cost = Callable[[Variant], float]


def smallest_for(variants: Sequence[Variant], rows: int, num_past: int) -> Variant | None:
    """Among variants of exactly ``rows``, the one of the smallest capacity that shows ``num_past`` rows."""
    fitting = [v for v in variants if v.rows == rows and v.capacity >= num_past]
    return min(fitting, key=lambda v: v.capacity, default=None)


def _chunk_variant(variants: Sequence[Variant], rows: int, num_past: int, num_tokens: int) -> Variant | None:
    """For a chunk: none of the past if there is none, else the capacity that the rows need after it, if there is one.

    Decoding then goes on at the same capacity, and the arena is not re-strided at the hand-over.
    """
    roomy = smallest_for(variants, rows, num_past + min(num_tokens, rows)) if num_past else None
    return roomy or smallest_for(variants, rows, num_past)


def plan_chunks(num_past: int, num_tokens: int, variants: Sequence[Variant], cost: Cost) -> list[tuple[Variant, int]]:
    """A cheap way to run ``num_tokens`` after ``num_past`` rows: (variant, tokens in it), in order.

    Peels full chunks off, the largest that fits first, and weighs at each point whether to run all the rest, padded, in one
    call instead: 20 tokens run in 64 rows, or in 16 and 16, or in 16 and four single steps.
    """
    sizes = sorted({variant.rows for variant in variants})
    peeled: list[tuple[Variant, int]] = []
    spent, done = 0.0, 0
    best_cost, best = float("inf"), None
    while done < num_tokens:
        past, rest = num_past + done, num_tokens - done
        padded = _first(_chunk_variant(variants, size, past, rest) for size in sizes if size >= rest)
        if padded is not None and spent + cost(padded) < best_cost:
            best_cost, best = spent + cost(padded), [*peeled, (padded, rest)]
        full = _first(_chunk_variant(variants, size, past, size) for size in reversed(sizes) if size <= rest)
        if full is None:
            break
        peeled.append((full, full.rows))
        spent, done = spent + cost(full), done + full.rows
    if best is None or (done == num_tokens and spent < best_cost):
        best = peeled
    assert sum(count for _, count in best) == num_tokens, "no variant holds the prompt"
    return best


def _first(options: Iterable[Variant | None]) -> Variant | None:
    return next((option for option in options if option is not None), None)
