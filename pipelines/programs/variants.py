"""Which variants exist: bucket lists derived from the lengths; the smallest that holds a call; the plan of a prompt's chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from staticllm.config import StaticLLMConfig
from staticllm.core import ModelShape, ProgramMode, Variant
from staticllm.errors import ConfigError

PREFILL_BUCKETS: dict[ProgramMode, tuple[int, ...]] = {"shared": (16, 64, 256), "separate": (64,)}
EXACT_BUCKETS: dict[ProgramMode, tuple[int, ...]] = {
    "shared": (2, 4, 8, 16, 32, 64, 128, 256, 512),
    "separate": (8, 64),
}
"""Where no row may be idle: any prompt in few calls, single rows at its end."""
MIXED_ROWS = (16, 32, 64, 128, 256)
MIXED_SEQUENCES, MORE_SEQUENCES = (2, 4, 8, 12, 16), 4
"""A mixed call is there for so many sequences, and for a full house and some prompts more: unused logits cost time too."""
LARGEST_CHUNK = 1024
SMALLEST_KV_LEN = 256


def choose_variants(config: StaticLLMConfig, mode: ProgramMode, shape: ModelShape | None = None) -> tuple[Variant, ...]:
    """All variants of a pipeline, those that decode first.

    Capacities: powers of two, then what one sequence can have (``max_seq_len``), then what all together can have
    (``kv_slots``); where a KV length costs no program of its own, every 256 rows.
    Decoding: one row; packed, one row a sequence: 2, 4, 8 … up to ``max_num_seqs`` (the last alone when each is a blob).
    Prefill: 16, 64, 256, then the longest prompt or 1024 rows (64 and that when each is a blob), of one sequence.
    Mixed, rows of many sequences, whatever phase they are in: 16 … 256, only where it costs no program.

    A model with recurrent states runs one sequence a call and no idle rows: its prompts are put together from more sizes. One
    without rows has one KV length.
    """
    total, num_seqs = config.num_kv_slots(mode), config.num_seqs(mode) if shape is None or shape.is_packable else 1
    needs_real_rows = shape is not None and shape.needs_real_rows
    if shape is not None and not shape.kv_states:
        return _of_one_kv_len(config, mode, shape.max_rows)
    if config.generate_kv_lens and config.generate_kv_lens[-1] != config.max_seq_len:
        raise ConfigError(
            f"GENERATE_KV_LENS ends at {config.generate_kv_lens[-1]}: its last size must be "
            f"MAX_PROMPT_LEN + MIN_RESPONSE_LEN = {config.max_seq_len}"
        )
    if mode == "shared":
        kv_lens = config.generate_kv_lens or _steps(config.max_seq_len)
        kv_lens = (*kv_lens, *(step for step in _steps(total) if step > config.max_seq_len))
    else:
        kv_lens = config.generate_kv_lens or _powers(SMALLEST_KV_LEN, config.max_seq_len)
        kv_lens = kv_lens if total == config.max_seq_len else (*kv_lens, total)
    sizes = [(1, 1), *((rows, rows) for rows in _packed_rows(num_seqs, mode))]
    packed_kv_lens = kv_lens if mode == "shared" else tuple(sorted({config.max_seq_len, total}))
    decoding = [
        Variant(rows, kv_len, sequences)
        for rows, sequences in sizes
        for kv_len in (kv_lens if rows == 1 else packed_kv_lens)
    ]
    prefill = _prefill_variants(config, mode, kv_lens, needs_real_rows)
    mixed = [
        Variant(rows, kv_len, sequences)
        for rows in (MIXED_ROWS if num_seqs > 1 and mode == "shared" else ())
        for sequences in (*(count for count in MIXED_SEQUENCES if count < num_seqs), num_seqs + MORE_SEQUENCES)
        for kv_len in (0, *kv_lens)
        if rows > sequences
    ]
    return tuple(dict.fromkeys((*decoding, *prefill, *mixed)))


def first_to_serve(variants: Iterable[Variant]) -> tuple[Variant, ...]:
    """The fewest that can run any prompt: single rows and the smallest chunk, both where they see everything."""
    known = list(variants)
    most = max(variant.kv_len for variant in known)
    alone = [variant for variant in known if variant.sequences == 1 and variant.kv_len == most]
    decoding = [variant for variant in alone if variant.rows == 1]
    chunks = sorted(variant for variant in alone if variant.rows > 1)
    return (*decoding, *chunks[:1])


def _of_one_kv_len(config: StaticLLMConfig, mode: ProgramMode, max_rows: int | None) -> tuple[Variant, ...]:
    """Variants of a model whose only states are recurrent: nothing in its programs depends on how much came before."""
    rows = config.prefill_rows or _prefill_rows(config.max_prompt_len, mode, needs_real_rows=True)
    sizes = [size for size in dict.fromkeys((1, *rows)) if max_rows is None or size <= max_rows]
    return tuple(Variant(size, config.num_kv_slots(mode)) for size in sizes)


def _prefill_variants(
    config: StaticLLMConfig, mode: ProgramMode, kv_lens: tuple[int, ...], needs_real_rows: bool
) -> list[Variant]:
    total = kv_lens[-1]
    rows = config.prefill_rows or _prefill_rows(config.max_prompt_len, mode, needs_real_rows)
    chosen = config.prefill_kv_lens or ((0, *kv_lens) if mode == "shared" else (0, total))
    if config.max_prompt_len > rows[-1] and chosen[-1] < config.max_prompt_len:
        raise ConfigError(
            f"PREFILL_KV_LENS ends at {chosen[-1]}: with chunks of {rows[-1]} the last chunk of a "
            f"prompt of {config.max_prompt_len} tokens needs more; add {config.max_seq_len}"
        )
    if chosen[-1] == config.max_seq_len:  # the rows of others lie beyond
        chosen = (*chosen, total)
    is_worth_it = config.prefill_kv_lens or mode == "separate"
    return [
        Variant(size, kv_len)
        for size in rows
        for kv_len in sorted(set(chosen))
        if size > 1 and (is_worth_it or kv_len >= size or kv_len == 0)
    ]


def _prefill_rows(max_prompt_len: int, mode: ProgramMode, needs_real_rows: bool) -> tuple[int, ...]:
    largest = min(max_prompt_len, LARGEST_CHUNK)
    if needs_real_rows:
        return tuple(rows for rows in EXACT_BUCKETS[mode] if rows <= largest) or (largest,)
    return (*(rows for rows in PREFILL_BUCKETS[mode] if rows < largest), largest)


def _packed_rows(num_seqs: int, mode: ProgramMode) -> tuple[int, ...]:
    if num_seqs == 1:
        return ()
    return (num_seqs,) if mode == "separate" else _powers(2, num_seqs)


def _steps(total: int) -> tuple[int, ...]:
    """Capacities that cost no program of their own: every 256 rows, every eighth from 2048 on, then ``total``."""
    buckets, step = [], SMALLEST_KV_LEN
    while step < total:
        buckets.append(step)
        step += max(SMALLEST_KV_LEN, step // 8 // SMALLEST_KV_LEN * SMALLEST_KV_LEN)
    return (*buckets, total)


def _powers(first: int, total: int) -> tuple[int, ...]:
    """``first`` and its doubles below ``total``, then ``total``."""
    buckets = []
    while first < total:
        buckets.append(first)
        first *= 2
    return (*buckets, total)


class VariantIndex:
    """The variants of a pipeline, ready to be asked which of them holds a call; ``needs_real_rows``: without an idle row.

    ``sizes`` are all ``(rows, sequences)``, ascending; ``widest`` maps rows to the most sequences of that many rows.
    """

    def __init__(self, variants: Iterable[Variant], needs_real_rows: bool = False) -> None:
        self.variants, self.needs_real_rows = tuple(variants), needs_real_rows
        buckets: dict[tuple[int, int], tuple[int, ...]] = {}
        for variant in sorted(self.variants):
            size = variant.rows, variant.sequences
            buckets[size] = (*buckets.get(size, ()), variant.kv_len)
        self._buckets = buckets
        self.sizes = tuple(sorted(buckets))
        widest = {rows: max(s for r, s in self.sizes if r == rows) for rows, _ in self.sizes}
        self.widest: Mapping[int, int] = MappingProxyType(widest)
        self.max_kv_len = max(variant.kv_len for variant in self.variants)

    def max_decoding(self, num_past: int) -> int:
        """The most sequences that can decode in one call over ``num_past`` arena slots. Programs that are still compiled
        in the background may leave the larger calls with the smaller KV lengths."""
        return max((min(size) for size, buckets in self._buckets.items() if buckets[-1] >= num_past), default=1)

    def smallest(self, num_rows: int, num_sequences: int, num_past: int, is_fresh: bool = False) -> Variant | None:
        """The fewest rows, then sequences, then KV length that hold a call over ``num_past`` arena slots; None if nothing does.

        ``is_fresh``: none of the sequences has a past, so that the arena need not be seen at all.
        """
        for rows, sequences in self.sizes:
            is_held = rows == num_rows if self.needs_real_rows else rows >= num_rows
            if is_held and sequences >= num_sequences:
                variant = self.at(rows, sequences, num_past, is_fresh)
                if variant is not None:
                    return variant
        return None

    def of_rows(self, rows: int, num_sequences: int, num_past: int, is_fresh: bool = False) -> Variant | None:
        """Among variants of exactly so many rows, the smallest that holds the sequences and shows the past."""
        for size, sequences in self.sizes:
            if size == rows and sequences >= num_sequences:
                variant = self.at(rows, sequences, num_past, is_fresh)
                if variant is not None:
                    return variant
        return None

    def at(self, rows: int, sequences: int, num_past: int, is_fresh: bool = False) -> Variant | None:
        """The variant of exactly this size with the smallest KV length that will do."""
        for kv_len in self._buckets.get((rows, sequences), ()):
            is_enough = kv_len >= num_past if kv_len else is_fresh or not num_past
            if is_enough:
                return Variant(rows, kv_len, sequences)
        return None


def plan_chunks(
    index: VariantIndex, cost: Callable[[Variant], float], num_tokens: int, num_past: int, is_fresh: bool = False
) -> list[tuple[Variant, int]]:
    """A cheap way to run ``num_tokens`` of one sequence over ``num_past`` arena slots: (variant, tokens in it), in order.

    Peels full chunks off, the largest that fits first, and weighs at each point whether to run all the rest, padded, in one
    call instead: 20 tokens run in 64 rows, or in 16 and 16, or in 16 and four single steps.
    """
    sizes = [rows for rows, sequences in index.sizes if sequences == 1]
    peeled: list[tuple[Variant, int]] = []
    spent, done = 0.0, 0
    best_cost, best = float("inf"), None
    while done < num_tokens:
        past = min(num_past + done, index.max_kv_len)  # holes below the highest row are filled first
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
