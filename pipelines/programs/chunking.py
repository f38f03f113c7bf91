"""Plans the chunks of a prompt: which variants run it, and how many tokens each of them processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from staticllm.core import Variant
from staticllm.pipelines.programs.variant_index import VariantIndex


def plan_chunks(
    index: VariantIndex, cost: Callable[[Variant], float], num_tokens: int, num_past: int, is_fresh: bool = False
) -> list[tuple[Variant, int]]:
    """Return a cheap way to run ``num_tokens`` of one sequence over ``num_past`` arena slots: (variant, tokens in it), in order.

    Full chunks are split off, the largest that fits first. At each point the cost of running the whole rest, padded, in one call
    is compared: 20 tokens run in 64 rows, or in 16 and 16, or in 16 and four single rows.
    """
    sizes = [rows for rows, sequences in index.sizes if sequences == 1]
    peeled: list[tuple[Variant, int]] = []
    spent, done = 0.0, 0
    best_cost, best = float("inf"), None
    while done < num_tokens:
        past = min(num_past + done, index.max_kv_len)  # free slots below the highest used slot are filled first
        rest, first = num_tokens - done, is_fresh and not done
        holding = [size for size in sizes if size == rest or (size > rest and not index.needs_real_rows)]
        padded = _first(index.at(size, 1, past, first) for size in holding)
        if padded is not None and spent + cost(padded) < best_cost:
            best_cost, best = spent + cost(padded), [*peeled, (padded, rest)]
        full = _first(index.at(size, 1, past, first) for size in reversed(sizes) if size <= rest)
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
