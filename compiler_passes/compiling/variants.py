"""Chooses the variants of a pipeline: buckets of rows, KV lengths and sequences, from the config and the model's shape."""

from __future__ import annotations

from collections.abc import Iterable

from staticllm.config import StaticLLMConfig
from staticllm.core import ModelShape, ProgramLayout, ProgramMode, Variant
from staticllm.errors import ConfigError

LEAST_ROWS, SIZES_PER_OCTAVE = 16, 8
"""Prompt sizes in shared programs: multiples of ``LEAST_ROWS``, ``SIZES_PER_OCTAVE`` between powers of two.

At most an eighth of the rows is padding, half of that on average. ``plan_chunks`` skips sizes that do not pay."""
SEPARATE_PREFILL = (64,)
EXACT_BUCKETS: dict[ProgramMode, tuple[int, ...]] = {
    "shared": (2, 4, 8, 16, 32, 64, 128, 256, 512),
    "separate": (8, 64),
}
"""Sizes for models that allow no idle rows: any prompt takes few calls, the last ones of single rows."""
MIXED_ROWS = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
DRAFT_ROWS = (2, 4, 8)
"""Rows of one sequence with logits after each, for checking drafts where decode steps have fewer rows (``shared`` only)."""
MIXED_SEQUENCES, MORE_SEQUENCES = (2, 4, 8, 12, 16), 4
"""Numbers of sequences of mixed calls, beside ``max_num_seqs`` + ``MORE_SEQUENCES``; unused logits cost time."""
BRANCHES = 64
"""Sequences of a call over pages, in which more cost nothing but their rows: the branches of a decision are many and short."""
LARGEST_CHUNK = 1024
SMALLEST_KV_LEN = 256
PAGED_KV_LEN = 1024
"""Least KV length of programs over pages. There, sizes only tell costs, which are learnt sooner for few of them."""
ROW_STEP = 16
"""On an NPU, calls are cheap if their rows, and rows and KV slots together, are multiples of this."""
FRESH_ROWS = (128, 512)
"""Rows of the first calls of prompts on an NPU, below the longest prompt. A few sizes without a past cost a prompt least: between
any two blocks of such a call a decode step can run, so that it may be long."""
SMALL_MIXED_ROWS, MIXED_BLOCK_ROWS = 64, 128
"""Rows of the other calls with prompts there. They decode as well: up to here, rows that decode cost nearly nothing more."""
PACKED_ROWS = 16
"""A step of 16 sequences costs 1.28 times as much as one of a single sequence, and of 2 or 4 hardly less."""
LEAST_DECODE_KV_LEN = 1152
"""Shorter KV lengths save 4 % of a decode step there; from this one on, twice as many slots cost 8 % to 50 % more."""


def choose_variants(
    config: StaticLLMConfig, mode: ProgramMode, shape: ModelShape | None = None, layout: ProgramLayout | None = None
) -> tuple[Variant, ...]:
    """Return all variants of a pipeline, those for decoding first.

    In ``shared`` mode a size costs no program, so there are many; in ``separate`` mode each variant is a program. In the layout
    ``blocks``, which is for NPUs, ``block_variants`` chooses, unless the model has recurrent states.
    - KV lengths: ``shared`` has steps of 256 slots, and of an eighth from 4096 slots on; ``separate`` has 256 and its doubles.
      Both end with ``max_seq_len``, the longest sequence, and with all slots of the arena. In ``separate`` mode only single
      rows have them all; other calls have only the largest ones.
    - Decoding has one row per sequence: 1, 2, 4, 8 … ``max_num_seqs`` rows (``separate``: 1 and ``max_num_seqs``).
    - Prefill of one sequence has 16, 32 … 128, 144 … 256, 288 … rows, up to the longest prompt or 1024 (``separate``: 64 and
      that). It also has the KV length 0, for the first call of a prompt.
    - Drafts of one sequence run in the sizes for decoding. In ``shared`` mode 2, 4 and 8 rows exist for them in any case.
    - Mixed calls, in which several sequences prefill or decode, have 16 … 256 rows (only ``shared``).

    A model with recurrent states runs one sequence per call without idle rows. Its sizes of prefill are such that full calls make
    up any prompt. A model without KV states has one KV length.

    Raises:
        ConfigError: ``GENERATE_KV_LENS`` or ``PREFILL_KV_LENS`` ends too low for the lengths.
    """
    total = config.num_kv_slots(mode)
    num_seqs = config.num_seqs(mode) if shape is None or shape.is_packable else 1
    needs_real_rows = shape is not None and shape.needs_real_rows
    if shape is not None and not shape.kv_states:
        return _of_one_kv_len(config, mode, shape.max_rows)
    if layout == "blocks" and not needs_real_rows:
        return block_variants(config, is_packable=shape is None or shape.is_packable)
    kv_lens = _powers(PAGED_KV_LEN, total) if layout == "paged" else _kv_lens(config, mode, total)
    sizes = [(1, 1), *((rows, rows) for rows in _packed_rows(num_seqs, mode))]
    packed_kv_lens = kv_lens if mode == "shared" else tuple(sorted({config.max_seq_len, total}))
    decoding = [
        Variant(rows, kv_len, sequences)
        for rows, sequences in sizes
        for kv_len in (kv_lens if rows == 1 else packed_kv_lens)
    ]
    drafting = [
        Variant(rows, kv_len, 1, rows - 1)
        for rows in DRAFT_ROWS
        for kv_len in kv_lens
        if mode == "shared" and (rows, rows) not in sizes and not needs_real_rows
    ]
    branches = (max(BRANCHES, num_seqs + MORE_SEQUENCES),) if layout == "paged" else ()
    prefill = _prefill_variants(config, mode, kv_lens, needs_real_rows)
    mixed = [
        Variant(rows, kv_len, sequences)
        for rows in (MIXED_ROWS if num_seqs > 1 and mode == "shared" else ())
        for sequences in (*(n for n in MIXED_SEQUENCES if n < num_seqs), num_seqs + MORE_SEQUENCES, *branches)
        for kv_len in (0, *kv_lens)
        if rows > sequences
    ]
    return tuple(dict.fromkeys((*decoding, *drafting, *prefill, *mixed)))


def block_variants(config: StaticLLMConfig, is_packable: bool = True) -> tuple[Variant, ...]:
    """Return the variants of programs in blocks, those for decoding first: few, since each takes seconds to compile.

    The compiler's schedules for one decoder block (``pipelines/simulator/npu_costs.py``) are the reasons
    (docs/lab/scheduling.md).

    - KV lengths are 1152 and its doubles below ``max_seq_len``, then that, and all slots of the arena, in multiples of 16.
    - Decoding has a single row, with one KV slot less, so that both together are a multiple of 16, and 16 rows (or the least
      multiple of 16 that holds all sequences). If sequences cannot share a call, a single row has all KV lengths as they are.
    - A prompt begins in 128, 512 or 1024 rows without a past, or in the least multiple of 16 that holds the longest prompt.
      It goes on in 128 rows, in which sequences decode as well; for ``max_seq_len`` 64 rows exist, too.

    A decode step can run between two blocks of a call only at the KV length of that call. So the prompts' KV lengths are those of
    the packed steps. Sizes that the user has set are kept as they are. Raises ``ConfigError`` as ``choose_variants``.
    """
    num_seqs = config.num_seqs("separate") if is_packable else 1
    total = _aligned(config.num_kv_slots("separate"))
    longest = _aligned(config.max_seq_len)
    given = config.generate_kv_lens and _kv_lens(config, "separate", total)
    kv_lens = given or tuple(dict.fromkeys((*_powers(LEAST_DECODE_KV_LEN, longest), total)))
    packed = _aligned(num_seqs) if num_seqs > 1 else 1
    if packed > 1:
        single = [Variant(1, kv_len if given else kv_len - 1) for kv_len in kv_lens if kv_len <= longest]
    else:
        single = [Variant(1, kv_len) for kv_len in kv_lens]
    decoding = [*single, *(Variant(packed, kv_len, packed) for kv_len in kv_lens if packed > 1)]
    if config.prefill_rows or config.prefill_kv_lens:
        return (*decoding, *_prefill_variants(config, "separate", kv_lens, needs_real_rows=False))
    largest = _aligned(min(config.max_prompt_len, LARGEST_CHUNK))
    fresh = [Variant(rows, 0) for rows in (*(rows for rows in FRESH_ROWS if rows < largest), largest)]
    sizes = [(SMALL_MIXED_ROWS, longest), *((MIXED_BLOCK_ROWS, kv_len) for kv_len in kv_lens)]
    past = [Variant(rows, kv_len, packed) for rows, kv_len in sizes if rows > packed]
    return tuple(dict.fromkeys((*decoding, *fresh, *past)))


def _aligned(count: int) -> int:
    return -(-count // ROW_STEP) * ROW_STEP


def _kv_lens(config: StaticLLMConfig, mode: ProgramMode, total: int) -> tuple[int, ...]:
    """Return the KV lengths of the variants for decoding, up to all ``total`` slots of the arena."""
    given = config.generate_kv_lens
    longest = config.max_seq_len
    if given and given[-1] != longest:
        raise ConfigError(
            f"GENERATE_KV_LENS ends at {given[-1]}: its last size must be MAX_PROMPT_LEN + MIN_RESPONSE_LEN = {longest}"
        )
    if mode == "shared":
        return (*(given or _steps(longest)), *(step for step in _steps(total) if step > longest))
    kv_lens = given or _powers(SMALLEST_KV_LEN, longest)
    return kv_lens if total == longest else (*kv_lens, total)


def first_to_serve(variants: Iterable[Variant]) -> tuple[Variant, ...]:
    """Return the fewest variants that can run any prompt: single rows and the smallest chunk, at the largest KV length."""
    known = list(variants)
    most = max(variant.kv_len for variant in known)
    widest = [variant for variant in known if variant.kv_len == most]
    alone = [variant for variant in widest if variant.sequences == 1]
    decoding = [variant for variant in alone if variant.rows == 1] or sorted(v for v in widest if v.phase == "generate")
    chunks = sorted(variant for variant in alone or widest if variant.rows > variant.sequences)
    return (*decoding[:1], *chunks[:1])


def _of_one_kv_len(config: StaticLLMConfig, mode: ProgramMode, max_rows: int | None) -> tuple[Variant, ...]:
    """Return the variants of a model whose only states are recurrent: its programs do not depend on the length of the past."""
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
    if chosen[-1] == config.max_seq_len:  # sequences may also have slots beyond
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
    return (
        *(rows for rows in (_prefill_buckets(largest) if mode == "shared" else SEPARATE_PREFILL) if rows < largest),
        largest,
    )


def _prefill_buckets(largest: int) -> tuple[int, ...]:
    """Return the sizes of prompts up to ``largest`` rows that shared programs have."""
    sizes = [LEAST_ROWS]
    while sizes[-1] < largest:
        octave = 1 << (sizes[-1].bit_length() - 1)
        sizes.append(sizes[-1] + max(LEAST_ROWS, octave // SIZES_PER_OCTAVE))
    return tuple(sizes)


def _packed_rows(num_seqs: int, mode: ProgramMode) -> tuple[int, ...]:
    if num_seqs == 1:
        return ()
    return (num_seqs,) if mode == "separate" else _powers(2, num_seqs)


def _steps(total: int) -> tuple[int, ...]:
    """Return KV lengths that need no program of their own: steps of 256 slots, from 4096 on of an eighth, then ``total``."""
    buckets = []
    step = SMALLEST_KV_LEN
    while step < total:
        buckets.append(step)
        step += max(SMALLEST_KV_LEN, step // 8 // SMALLEST_KV_LEN * SMALLEST_KV_LEN)
    return (*buckets, total)


def _powers(first: int, total: int) -> tuple[int, ...]:
    """Return ``first`` and its doubles below ``total``, then ``total``."""
    buckets = []
    while first < total:
        buckets.append(first)
        first *= 2
    return (*buckets, total)
