"""Describes the tokens of one device call, and holds the memory that the call reads and writes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from staticllm.core import KV_TYPE_BYTES, ModelShape, Variant, Work
from staticllm.ports import BLOCK_INDICES, BLOCK_INDICES_BEGINS, MAX_CONTEXT_LEN, PAST_LENS, SUBSEQUENCE_BEGINS

from .groups import HOST_TYPES, StateGroup, group_states, place_of
from .sequence import KVSequence


@dataclass(frozen=True)
class Segment:
    """The next tokens of one sequence in a step: ``tokens [count]`` int64, in consecutive rows.

    The program computes logits after the last ``num_logits`` of them. With ``to_host``, which needs an empty sequence, the keys
    and values do not enter the arena. With ``is_exact`` the results must not depend on what else the call has.
    """

    sequence: KVSequence
    tokens: NDArray[np.int64]
    num_logits: int = 1
    to_host: bool = False
    is_exact: bool = False

    def __post_init__(self) -> None:
        assert not (self.to_host and len(self.sequence)), "only a fresh sequence can go to the host"


class PageTables:
    """What a paged program must know of the n sequences of a step, int32. Writing another step of the same sizes moves no array.

    ``past_lens [n]``: the tokens that have run. ``subsequence_begins [n + 1]``: the first row of each, and the number of rows.
    ``block_indices``: the pages of all sequences, one after another; ``block_indices_begins [n + 1]``: where those of each begin.
    ``max_context_len []``: the tokens of the longest one, with its rows. The names are those of ``PagedAttentionExtension``.
    """

    def __init__(self, num_sequences: int) -> None:
        self._begins = np.zeros((3, num_sequences + 1), np.int32)
        self._blocks = np.zeros(1, np.int32)
        self.max_context_len = np.ones((), np.int32)
        self.num_logits = 0
        self.idle_page = 0
        """The page that belongs to no sequence."""
        self.write([0], [1], [np.zeros(1, np.intp)], 1)

    def write(
        self, past: Sequence[int], counts: Sequence[int], tables: Sequence[NDArray[np.intp]], num_logits: int
    ) -> None:
        """Write a step: of each sequence the tokens that have run, the rows, and the pages; and all rows with logits."""
        lens, begins, places = self._begins
        num = len(past)
        lens[:num] = past
        begins[1 : num + 1] = np.cumsum(counts)
        places[1 : num + 1] = np.cumsum([len(table) for table in tables])
        num_blocks = int(places[num])
        if num_blocks > len(self._blocks):
            self._blocks = np.zeros(2 * num_blocks, np.int32)
        np.concatenate(tables, out=self._blocks[:num_blocks], casting="unsafe")
        self.max_context_len[...] = (lens[:num] + np.diff(begins[: num + 1])).max()
        self.num_logits = num_logits
        self.sizes = int(begins[num]), num, num_blocks, num_logits, id(self._blocks)

    def stand_in(self, variant: Variant, page_size: int) -> None:
        """Write a step of no request, as large as a variant: it reads any pages, and writes only into the idle one."""
        num = variant.sequences
        rows = np.full(num, variant.rows // num)
        rows[0] += variant.rows - rows.sum()
        past = int(variant.past_in_pages) // page_size
        tables = [
            np.concatenate([np.arange(past) + index * past, np.full(-(-count // page_size), self.idle_page)])
            for index, count in enumerate(rows.tolist())
        ]
        self.write([past * page_size] * num, rows.tolist(), tables, variant.num_logits)

    @property
    def work(self) -> Work:
        """What the call does, in the parts of ``Variant.work_in_pages``."""
        num_rows, num, *_ = self.sizes
        past = self._begins[0, :num]
        rows = np.diff(self._begins[1, : num + 1])
        return 1.0, num_rows, float(rows @ (past + rows / 2)), int(past.sum()), self.num_logits

    @property
    def num_rows(self) -> int:
        """The rows of the step."""
        return self.sizes[0]

    def arrays(self) -> dict[str, NDArray[np.int32]]:
        """Return the memory of each port, by its name."""
        _, num, num_blocks, *_ = self.sizes
        lens, begins, places = self._begins
        return {
            PAST_LENS: lens[:num],
            SUBSEQUENCE_BEGINS: begins[: num + 1],
            BLOCK_INDICES: self._blocks[:num_blocks],
            BLOCK_INDICES_BEGINS: places[: num + 1],
            MAX_CONTEXT_LEN: self.max_context_len,
        }


@dataclass(frozen=True)
class Step:
    """One call of one variant: the segments fill its rows from the front, and idle rows follow."""

    variant: Variant
    segments: tuple[Segment, ...]

    def __post_init__(self) -> None:
        assert sum(len(segment.tokens) for segment in self.segments) <= self.variant.rows

    @property
    def is_exact(self) -> bool:
        """Whether results of a segment must not depend on the others."""
        return any(segment.is_exact for segment in self.segments)

    def placed(self) -> Iterator[tuple[int, Segment]]:
        """Yield each segment with its first row."""
        start = 0
        for segment in self.segments:
            yield start, segment
            start += len(segment.tokens)

    def logits(self) -> Iterator[slice]:
        """Yield for each segment the range of its rows in the program's logits."""
        start = 0
        for segment in self.segments:
            yield slice(start, start + segment.num_logits)
            start += segment.num_logits


class BufferPool:
    """Host memory for the largest variant. Variants of one pool never run at the same time, so all use the front of this memory.

    A call that runs between the blocks of another one needs memory of a second pool, with the ``adapters`` of the first.
    """

    def __init__(
        self, variants: Sequence[Variant], shape: ModelShape, adapters: dict[str, NDArray[Any]] | None = None
    ) -> None:
        self.shape = shape
        sizes = pool_sizes(variants)
        self.ids = np.zeros(sizes.rows, np.int64)
        self.positions = np.zeros(sizes.rows * max(shape.position_copies, 1), np.int64)
        self.logit_rows = np.zeros(sizes.num_logits, np.int64)
        self.logits = np.zeros(sizes.num_logits * shape.vocab_size, np.float32)
        masks = () if shape.page_size else shape.masks
        self.masks = {kind: np.zeros(sizes.mask_cells, np.float32) for kind in masks}  # each step paints its own
        self.key_positions = np.zeros(sizes.columns if shape.has_distances else 0, np.int32)
        self.query_positions = np.zeros(sizes.rows if shape.has_distances else 0, np.int32)
        self.adapter_scales = np.zeros(sizes.rows * shape.num_adapters, np.float32)
        self.rope_factors = np.zeros(sizes.rows if shape.rope_limits else 0, np.int32)
        self.cross_mask = np.zeros(sizes.rows * shape.cross_len, np.float32)
        self.pages = PageTables(max(variant.sequences for variant in variants))
        dtype = HOST_TYPES[shape.adapter_type]
        self.adapters: dict[str, NDArray[Any]] = adapters or {
            name: np.zeros(size, dtype) for name, size in adapter_sizes(shape).items()
        }
        self.presents = [np.zeros(math.prod(group.shape(sizes.rows)), group.dtype) for group in _written(shape)]


class StepBuffers:
    """The host memory of one variant's ports, which programs bind and ``KVCache`` fills.

    ``input_ids [1, S]`` and ``position_ids [..., S]`` int64, ``masks[kind] [1, 1, S, T+S]`` f32, ``logit_rows [R]`` int64,
    ``logits [1, R, vocab]`` f32, ``presents``: per group of states ``[n, heads, S, head_dim]``. ``adapter_scales
    [1, S, adapters]`` f32, and ``adapters``: port → the matrices of adapters, the same for all variants. ``cross_mask
    [1, 1, S, frames]`` f32, with cross-attention: of ``num_cross_windows`` places for windows, which are all places if
    ``sees_all_cross_windows``. ``rope_factors [1, S]``, ``key_positions [1, 1, 1, T+S]`` and ``query_positions [1, 1, S, 1]``
    int32, if the model takes them, else None. A call of a paged program has as many rows as tokens: it reads the front of these
    arrays, as ``pool.pages`` says.
    """

    def __init__(self, variant: Variant, pool: BufferPool) -> None:
        self.variant = variant
        self.pool = pool
        shape = pool.shape
        rows = variant.rows
        count = variant.num_logits
        lead = {0: (1,), 2: (1,), 3: (shape.position_copies, 1)}[shape.position_rank]
        self._groups = _written(shape)
        self.input_ids = _front(pool.ids, 1, rows)
        self.position_ids = _front(pool.positions, *lead, rows)
        self.masks = {kind: _front(cells, 1, 1, rows, variant.kv_len + rows) for kind, cells in pool.masks.items()}
        self.key_positions = _front(pool.key_positions, 1, 1, 1, variant.kv_len + rows) if shape.has_distances else None
        self.query_positions = _front(pool.query_positions, 1, 1, rows, 1) if shape.has_distances else None
        self.adapter_scales = _front(pool.adapter_scales, 1, rows, shape.num_adapters)
        self.rope_factors = _front(pool.rope_factors, 1, rows) if shape.rope_limits else None
        self.sees_all_cross_windows = True
        self.num_cross_windows = 0
        self.cross_mask: NDArray[np.float32] | None = None
        self.see_cross_windows(shape.num_cross_windows)
        self.adapters = pool.adapters
        self.logit_rows = _front(pool.logit_rows, count)
        self.logits = _front(pool.logits, 1, count, shape.vocab_size)
        self.presents: list[NDArray[Any]] = [
            _front(present, *group.shape(rows)) for present, group in zip(pool.presents, self._groups, strict=True)
        ]

    @property
    def work(self) -> Work | None:
        """What the next call does, where that is not all of the variant's work."""
        return self.pool.pages.work if self.pool.shape.page_size else None

    def stand_in(self) -> None:
        """Write what a call without a request needs, whatever else is left of the last step. No sequence's slots change."""
        self.logit_rows.fill(0)  # rows of a larger call may lie outside of this one
        if page_size := self.pool.shape.page_size:
            self.pool.pages.stand_in(self.variant, page_size)

    def see_cross_windows(self, num_cross_windows: int) -> None:
        """Give ``cross_mask`` the frames of the first ``num_cross_windows`` places, if the model has cross-attention."""
        shape = self.pool.shape
        if shape.cross_states and num_cross_windows != self.num_cross_windows:
            self.num_cross_windows = num_cross_windows
            frames = num_cross_windows * shape.cross_window_len
            self.cross_mask = _front(self.pool.cross_mask, 1, 1, self.variant.rows, frames)

    def present_of(self, index: int) -> NDArray[Any]:
        """Return the new rows of state ``index``: ``[1, heads, S, head_dim]``."""
        number, line = place_of(self._groups, index)
        return self.presents[number][line : line + 1]


def _written(shape: ModelShape) -> tuple[StateGroup, ...]:
    """Return the groups of states whose new rows a program returns; a paged one writes them into their pages."""
    return () if shape.page_size else group_states(shape.kv_states)


def adapter_sizes(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Return port → the shape of every input that holds matrices of adapters."""
    a = {group.a_name: (group.rank, group.in_size) for group in shape.adapted}
    return a | {group.b_name: (group.out_size, group.rank) for group in shape.adapted}


def _front(pool: NDArray[Any], *shape: int) -> NDArray[Any]:
    return pool[: math.prod(shape)].reshape(shape)


@dataclass(frozen=True)
class PoolSizes:
    """The largest number of rows, logits, mask columns and mask cells of any variant."""

    rows: int
    num_logits: int
    columns: int
    mask_cells: int


def pool_sizes(variants: Sequence[Variant]) -> PoolSizes:
    """Return the sizes of a pool that is large enough for each of ``variants``."""
    return PoolSizes(
        max(variant.rows for variant in variants),
        max(variant.num_logits for variant in variants),
        max(variant.kv_len + variant.rows for variant in variants),
        max(variant.rows * (variant.kv_len + variant.rows) for variant in variants),
    )


def buffer_bytes(variants: Sequence[Variant], shape: ModelShape) -> int:
    """Return the bytes that a pool for ``variants`` would take."""
    sizes = pool_sizes(variants)
    masks = sizes.mask_cells * 4 * (0 if shape.page_size else len(shape.masks))
    adapters = KV_TYPE_BYTES[shape.adapter_type] * sum(
        rows * columns for rows, columns in adapter_sizes(shape).values()
    )
    presents = 0 if shape.page_size else sizes.rows * shape.slot_bytes
    return adapters + masks + sizes.num_logits * shape.vocab_size * 4 + presents
