"""Proves that a lowered encoder computes what the original does, by running both once.

Texts of different lengths are run alone through the original, and together through the lowered graph. Everything that could mix
texts or misplace them, in whatever form it is written, shows as a difference, up to a distance of ``MOST_ROWS``. Layers that only
repeat earlier ones are left out.

Where no token sees later ones, texts that begin alike are run once more, with one copy of the rows of their beginning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.core import EncoderMask
from staticllm.devices import get_core
from staticllm.errors import UnsupportedModelError
from staticllm.ports import ATTENTION_MASK, HIDDEN, INPUT_IDS, POOL, POSITION_IDS, TOKEN_TYPE_IDS

from ..graph.control_values import EXACT, random_ids, run_with
from ..graph.distinct_part import distinct_end
from ..graph.encoder_graph import EncoderGraph
from ..graph.step_graph import part_of
from .expose_encoder_mask import visible

STAGE = "prove_packing"
MOST_ROWS = 512
"""The most rows of a sequence that are run."""
TOLERANCE = 1e-4
"""Of the largest value. In f32 the differences of a right graph are some 1e-6, those of a wrong one some 1e-2."""
Vectors = NDArray[np.float32]


@dataclass(frozen=True)
class Layouts:
    """The lengths of texts, by sequence, for sequences of ``rows`` rows."""

    rows: int
    shared: tuple[tuple[int, ...], ...]
    """Several texts per sequence, with idle rows at the end and without."""
    apart: tuple[tuple[int, ...], ...]
    """One text in each."""
    branches: tuple[tuple[int, int], ...]
    """The lengths of texts in one sequence, and how many of its first rows each one shares with the text before it."""

    @classmethod
    def of(cls, rows: int) -> Layouts:
        """Return layouts in which tokens of two texts are at every distance below ``rows``."""
        half = rows // 2
        third = rows // 3
        quarter = rows // 4
        early = rows - rows * 2 // 5
        late = rows * 2 // 5
        shared = ((half, min(1, rows - half - third), third), (early, late))
        left = rows - half - third
        branches = ((half, 0), (quarter + third, quarter), (quarter + left + third // 3, quarter + third // 3))
        return cls(
            rows,
            tuple(tuple(length for length in lengths if length) for lengths in shared),
            ((max(half, 1),), (rows,)),
            branches if third >= 3 else (),
        )


@dataclass(frozen=True)
class ProofText:
    """A text in a call: its sequence, the rows of it that hold its tokens, and the tokens."""

    sequence: int
    rows: NDArray[np.intp]
    ids: NDArray[np.int64]
    num_shared: int = 0
    """How many of its first rows are those of the text before it."""


def prove_packing(graph: EncoderGraph) -> None:
    """Compare texts alone through the original with texts together, or with one text per sequence.

    ``graph.shares_prefixes`` is set if texts may also share the rows of a common beginning.

    Raises:
        UnsupportedModelError: even one text per sequence differs from the original.
    """
    if graph.counters:
        _prove_sizes(graph)
        return
    known = Layouts.of(min(graph.num_rows, MOST_ROWS))
    layouts = [known.shared, known.apart] if graph.is_packable else [known.apart]
    texts = [_placed(graph, layout) for layout in layouts]
    original, lowered = _distinct_parts(graph)
    expected = run_alone(graph, original, [text for found in texts for text in found])
    program = get_core().compile_model(lowered, "CPU", EXACT)
    worst = 0.0
    for layout, found in zip(layouts, texts, strict=True):
        wanted = expected[: len(found)]
        expected = expected[len(found) :]
        worst = _difference(wanted, _together(graph, program, found, known.rows))
        if worst <= TOLERANCE:
            how = "several texts" if layout is known.shared else "one text"
            graph.note(STAGE, f"{how} per sequence: within {worst:.0e} of the original")
            if layout is known.shared and known.branches and all(kind.after == 0 for kind in graph.encoder_masks):
                _prove_branches(graph, original, program, known)
            return
        if layout is known.shared:
            graph.keep_texts_apart(STAGE, f"together they differ by {worst:.0e} of the largest value")
    node = graph.model.get_results()[0].input_value(0).get_node()
    raise UnsupportedModelError(
        STAGE,
        f"{node.get_type_name()} {node.get_friendly_name()!r} differs by {worst:.0e} of the largest value from the original even "
        f"for one text per sequence: the tokens of a text are mixed with others in another way than by attention",
    )


def _prove_sizes(graph: EncoderGraph) -> None:
    """Compare single texts in many numbers of rows with the original, because the graph computes with that number.

    No program has more rows than were compared.

    Raises:
        UnsupportedModelError: a text gets other values in more rows.
    """
    graph.limit_rows(MOST_ROWS)
    original, lowered = _distinct_parts(graph)
    program = get_core().compile_model(lowered, "CPU", EXACT)
    texts = {rows: _placed(graph, _single(rows)) for rows in _sizes(graph.num_rows)}
    expected = run_alone(graph, original, [text for found in texts.values() for text in found])
    worst = 0.0
    for rows, found in texts.items():
        wanted = expected[: len(found)]
        expected = expected[len(found) :]
        worst = max(worst, _difference(wanted, _together(graph, program, found, rows)))
    if worst > TOLERANCE:
        raise UnsupportedModelError(
            STAGE,
            f"{graph.counters[0]}: a text in more rows differs by {worst:.0e} of the largest value from the original",
        )
    graph.note(
        STAGE, f"one text in {len(texts)} numbers of rows up to {graph.num_rows}: within {worst:.0e} of the original"
    )


def _single(rows: int) -> list[tuple[int, ...]]:
    """Return layouts of one text per sequence of ``rows`` rows: of one token, of some, of more than half, and of all."""
    return [(length,) for length in sorted({1, max(rows // 5, 1), rows // 2 + 1, rows})]


def _sizes(most: int) -> list[int]:
    """Return numbers of rows up to ``most``, each about 1.4 times the one before, even and odd ones."""
    sizes = {most}
    for power in range(2, most.bit_length()):
        sizes |= {size for size in (1 << power, (3 << power) // 2 + 1) if size < most}
    return sorted(sizes)


def _prove_branches(graph: EncoderGraph, original: ov.Model, program: ov.CompiledModel, layouts: Layouts) -> None:
    """Find out whether texts may share the rows of a common beginning: not if a bias goes by the distance of rows, say."""
    texts = list[ProofText]()
    start = 0
    for length, num_shared in layouts.branches:
        own = length - num_shared
        before = texts[-1] if texts else ProofText(0, np.arange(0), np.arange(0))
        rows = np.concatenate((before.rows[:num_shared], np.arange(start, start + own)))
        ids = np.concatenate((before.ids[:num_shared], random_ids(graph.original, (own,), seed=10 + len(texts))))
        texts.append(ProofText(0, rows, ids, num_shared))
        start += own
    worst = _difference(run_alone(graph, original, texts), _together(graph, program, texts, layouts.rows))
    graph.shares_prefixes = worst <= TOLERANCE
    how = "run once" if graph.shares_prefixes else "not shared"
    graph.note(STAGE, f"common beginnings of texts are {how}: within {worst:.0e} of the original")


def _placed(graph: EncoderGraph, layout: Sequence[Sequence[int]]) -> list[ProofText]:
    found: list[ProofText] = []
    for sequence, lengths in enumerate(layout):
        start = 0
        for length in lengths:
            rows = np.arange(start, start + length)
            found.append(ProofText(sequence, rows, random_ids(graph.original, (length,), seed=len(found))))
            start += length
    return found


def _distinct_parts(graph: EncoderGraph) -> tuple[ov.Model, ov.Model]:
    """Return the same part of the original and of the lowered graph, or both as a whole."""
    end = None if graph.is_per_text else distinct_end(graph.model)
    same = [] if end is None else [node for node in graph.original.get_ops() if _is_same(node, end)]
    if end is None or len(same) != 1:
        return graph.original, graph.model
    graph.note(STAGE, f"run up to {end.get_friendly_name()!r}: what follows repeats it")
    return _until(graph.original, same[0]), _until(graph.model, end)


def _is_same(node: ov.Node, other: ov.Node) -> bool:
    return bool(node.get_friendly_name() == other.get_friendly_name() and node.get_type_name() == other.get_type_name())


def _until(model: ov.Model, end: ov.Node) -> ov.Model:
    """Return a copy of a model whose only output is that of ``end``."""
    place = next(
        index for index, node in enumerate(model.get_ordered_ops()) if node.get_instance_id() == end.get_instance_id()
    )
    copy = model.clone()
    return part_of([copy.get_ordered_ops()[place].output(0)], copy.get_parameters())


def run_alone(graph: EncoderGraph, original: ov.Model, texts: Sequence[ProofText]) -> list[Vectors]:
    """Return what the original computes for each text: the hidden states ``[length, width]``, or the scores ``[1, labels]``.

    The longest text is the first to run: OpenVINO 2026.4's fused attention without a mask, if it has seen one token before
    anything else, computes wrong values for longer texts on a CPU.
    """
    program = get_core().compile_model(original, "CPU", EXACT)
    found: dict[int, Vectors] = {}
    for index in sorted(range(len(texts)), key=lambda index: -len(texts[index].ids)):
        ids = texts[index].ids[None]
        positions = graph.first_position + np.arange(ids.shape[1])[None]
        types = np.zeros_like(ids)
        feeds = {INPUT_IDS: ids, ATTENTION_MASK: types + 1, TOKEN_TYPE_IDS: types, POSITION_IDS: positions}
        values = run_with(program, feeds)
        found[index] = np.array(values[0]).reshape(-1, values[0].shape[-1])
    return [found[index] for index in range(len(texts))]


def _together(graph: EncoderGraph, program: ov.CompiledModel, texts: Sequence[ProofText], rows: int) -> list[Vectors]:
    """Return what the lowered graph computes for each text in sequences of ``rows`` rows, as ``run_alone`` does."""
    if not graph.is_batchable:
        return [_in_one_call(graph, program, [replace(text, sequence=0)], rows)[0] for text in texts]
    return _in_one_call(graph, program, texts, rows)


def _in_one_call(
    graph: EncoderGraph, program: ov.CompiledModel, texts: Sequence[ProofText], rows: int
) -> list[Vectors]:
    """Return what the lowered graph computes for texts in one call."""
    batch = 1 + texts[-1].sequence
    feeds = {
        INPUT_IDS: random_ids(graph.original, (batch, rows), seed=99),
        TOKEN_TYPE_IDS: np.zeros((batch, rows), np.int64),
    }
    feeds[POSITION_IDS] = np.full((batch, rows), graph.first_position)
    pool = np.zeros((len(texts), batch * rows), np.float32)
    for index, text in enumerate(texts):
        feeds[INPUT_IDS][text.sequence, text.rows] = text.ids
        feeds[POSITION_IDS][text.sequence, text.rows] = graph.first_position + np.arange(len(text.ids))
        pool[index, text.sequence * rows + text.rows] = _weights(graph, len(text.ids))
    masks = {kind.port_name: _mask(kind, batch, texts, rows) for kind in graph.encoder_masks}
    values = run_with(program, {**feeds, **masks, POOL: pool})[0]
    if graph.is_per_text:
        return [np.array(value).reshape(1, -1) for value in values]
    return [np.array(values[text.sequence, text.rows]) for text in texts]


def _mask(kind: EncoderMask, batch: int, texts: Sequence[ProofText], rows: int) -> Vectors:
    """Return the mask ``[batch, 1, rows, rows]`` of texts: idle rows see themselves."""
    sees = np.broadcast_to(np.eye(rows, dtype=np.bool_), (batch, rows, rows)).copy()
    for text in texts:
        own = text.rows[text.num_shared :]
        sees[text.sequence][np.ix_(own, text.rows)] = visible(kind, len(text.ids))[text.num_shared :]
    return np.where(sees, 0, HIDDEN).astype(np.float32)[:, None]


def _weights(graph: EncoderGraph, length: int) -> Vectors:
    if graph.pooling == "mean":
        return np.full(length, 1 / length, np.float32)
    weights = np.zeros(length, np.float32)
    weights[0 if graph.pooling == "first" else -1] = 1
    return weights


def _difference(expected: Sequence[Vectors], actual: Sequence[Vectors]) -> float:
    scale = max(float(np.abs(value).max()) for value in expected)
    worst = max(float(np.abs(one - other).max()) for one, other in zip(expected, actual, strict=True))
    return worst / scale if np.isfinite(worst) and scale else np.inf
