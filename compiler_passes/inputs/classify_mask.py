"""Classifies the mask of each layer by evaluating it on probe inputs.

Masks are evaluated, not matched as patterns, because exporters build the same mask in a dozen ways. The kinds are: causal, a
window of N tokens, or a table of the first position that each token sees (attention in chunks). The visible keys may have a bias:
linear in the distance with one slope per head (ALiBi), or a table with one value per key position (ALiBi in bf16).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray

from staticllm.core import EncoderMask, MaskKind
from staticllm.devices import get_core
from staticllm.errors import UnsupportedModelError
from staticllm.ports import ATTENTION_MASK, HIDDEN_BELOW, INPUT_IDS, INPUTS_EMBEDS, POSITION_IDS, VISIBLE

from ..graph.step_graph import part_of, upstream

STAGE = "expose_mask"
TABLE_STEP = 256  # tokens whose masks are evaluated at once
SHORTEST = 16
"""The fewest tokens for which masks are evaluated."""
BIAS_TOLERANCE = 1e-5  # of the largest bias: exporters compute it in f32
Mask = NDArray[np.float32]
Key = tuple[int, int]
Evaluate = Callable[..., list[Mask]]
"""Maps a probe, and a seed for the values of tokens and KV slots, to the values of all masks."""


@dataclass(frozen=True)
class BiasTable:
    """The bias of keys by their position: ``values [heads, positions]``. Tables with the same digest are equal."""

    digest: str
    values: Mask = field(compare=False, repr=False)


@dataclass(frozen=True)
class Seen:
    """The visible keys of a layer's mask, and their bias, if there is one (``slopes``, one per head, or a table)."""

    kind: MaskKind
    slopes: tuple[float, ...] = ()
    table: BiasTable | None = None

    @property
    def label(self) -> str:
        """The kind of the mask, as reports show it."""
        bias = " + ALiBi" if self.slopes else " + a bias of each key" if self.table else ""
        return self.kind.label + bias


@dataclass(frozen=True)
class MaskProbe:
    """One evaluation of the mask subgraphs: ``past`` KV slots, ``new`` tokens."""

    past: int
    new: int


def key_of(output: ov.Output) -> Key:
    """Return what identifies an output within its graph."""
    return output.get_node().get_instance_id(), output.get_index()


def classify(model: ov.Model, outputs: list[ov.Output], max_len: int) -> dict[Key, Seen]:
    """Classify each of the masks ``outputs``, for sequences of up to ``max_len`` tokens.

    None is evaluated for longer ones: a model may have no more positions.

    Raises:
        UnsupportedModelError: a mask is of an unknown kind, or the model has fewer positions; the message names it.
    """
    unique = {key_of(output): output for output in outputs}
    max_len = max(max_len, SHORTEST)
    probes = probes_of(max_len)
    evaluate = _evaluator(model, list(unique.values()))
    _check_positions(evaluate, max_len)
    values, others = ([evaluate(probe, seed) for probe in probes] for seed in (0, 1))
    kinds = {}
    for index, (key, output) in enumerate(unique.items()):
        if any(not np.array_equal(one[index], other[index]) for one, other in zip(values, others, strict=True)):
            name = output.get_node().get_friendly_name()
            raise UnsupportedModelError(STAGE, f"the mask {name!r} depends on the values of tokens or KV slots")
        found = classify_one(probes, [value[index] for value in values], _one_of(evaluate, index), max_len)
        if found is None:
            raise UnsupportedModelError(
                STAGE,
                f"the mask {output.get_node().get_friendly_name()!r} is of an unknown kind: it hides more than the tokens before "
                f"a first one, or its bias depends on more than distance or key (evaluated for up to {max_len} tokens)",
            )
        kinds[key] = found
    return kinds


def probes_of(max_len: int) -> list[MaskProbe]:
    """Return the probes by which a mask for up to ``max_len`` tokens is classified, of which the last two are the longest."""
    return [MaskProbe(0, 7), MaskProbe(3, 4), MaskProbe(max_len - 5, 5), MaskProbe(max_len - 1, 1)]


def _check_positions(evaluate: Evaluate, max_len: int) -> None:
    """Check that the masks of ``max_len`` tokens can be computed, which a table of fewer positions prevents.

    Raises:
        UnsupportedModelError: they cannot; the message says for how many tokens they can.
    """

    def can_evaluate(length: int) -> bool:
        try:
            for new in (1, 5):
                evaluate(MaskProbe(length - new, new))
        except RuntimeError:
            return False
        return True

    if can_evaluate(max_len) or not can_evaluate(SHORTEST):  # else it is another fault, which the first probe shows
        return
    low = SHORTEST
    high = max_len
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if can_evaluate(middle) else (low, middle)
    if not _are_known(evaluate, low):  # what is left of the table is one value, which fits any length
        low -= 1
    raise UnsupportedModelError(
        STAGE,
        f"the model has a table of positions for {low} tokens: load with MAX_PROMPT_LEN + MIN_RESPONSE_LEN of at most {low} "
        f"(here {max_len})",
    )


def _are_known(evaluate: Evaluate, length: int) -> bool:
    """Return whether all masks for this length are of known kinds."""
    probes = probes_of(length)
    values = [evaluate(probe) for probe in probes]
    masks = ([value[index] for value in values] for index in range(len(values[0])))
    found = [classify_one(probes, mask, _one_of(evaluate, index), length) for index, mask in enumerate(masks)]
    return all(each is not None for each in found)


def _one_of(evaluate: Evaluate, index: int) -> Callable[[MaskProbe], Mask]:
    return lambda probe: evaluate(probe)[index]


def classify_one(
    probes: list[MaskProbe], masks: list[Mask], evaluate: Callable[[MaskProbe], Mask], max_len: int
) -> Seen | None:
    """Classify one mask by its values on the probes, and on further probes if needed; return None if no kind fits."""
    window = _window_of(masks[2])
    slopes = _slopes_of(masks[2])
    linear = [_linear(probe, np.array(slopes or (0.0,))) for probe in probes]
    if _all_as_expected(probes, masks, window, linear):
        return Seen(MaskKind(window), slopes)
    if slopes:
        new = min(TABLE_STEP, max_len)
        table = _bias_of_keys(evaluate(MaskProbe(max_len - new, new)), max_len)
        if table is not None:
            biases = [
                np.broadcast_to(table[:, None, : p.past + p.new], (len(table), p.new, p.past + p.new)) for p in probes
            ]
            if _all_as_expected(probes, masks, window, biases):
                return Seen(MaskKind(window), table=BiasTable(_digest(table), table))
        return None
    first_seen = _first_seen(evaluate, max_len)
    if first_seen is None or not all(_begins_at(p, mask, first_seen) for p, mask in zip(probes, masks, strict=True)):
        return None
    return Seen(MaskKind(table=_digest(first_seen), first_seen=tuple(first_seen.tolist())))


def _first_seen(evaluate: Callable[[MaskProbe], Mask], max_len: int) -> NDArray[np.int64] | None:
    """Return the first position that each of ``max_len`` tokens sees, ``[max_len]``.

    Return None if a token does not see all positions from there to its own.
    """
    firsts = []
    for past in range(0, max_len, TABLE_STEP):
        total = min(past + TABLE_STEP, max_len)
        probe = MaskProbe(past, total - past)
        mask = evaluate(probe)
        if mask.size % (probe.new * total):
            return None
        firsts.append((mask.reshape(-1, probe.new, total)[0] >= HIDDEN_BELOW).argmax(axis=1))
        if not _begins_at(probe, mask, np.concatenate(firsts)):
            return None
    return np.concatenate(firsts)


def _begins_at(probe: MaskProbe, mask: Mask, first_seen: NDArray[np.int64]) -> bool:
    """Return whether a mask shows each token all positions from that in ``first_seen`` to its own, without a bias."""
    key = np.arange(probe.past + probe.new)[None]
    query = key[:, probe.past :].T
    expected = (key >= first_seen[query]) & (key <= query)
    if mask.size % expected.size:
        return False
    planes = mask.reshape(-1, *expected.shape)
    is_seen = planes >= HIDDEN_BELOW
    return bool((is_seen == expected).all() and (planes[is_seen] == VISIBLE).all())


def _bias_of_keys(mask: Mask, total: int) -> Mask | None:
    """Return the bias in the last row of a long probe, ``[heads, total]``; 0 where a key is hidden."""
    if mask.ndim < 2 or mask.shape[-1] != total:
        return None
    last = mask.reshape(-1, *mask.shape[-2:])[:, -1]
    return np.where(last >= HIDDEN_BELOW, last, 0).astype(np.float32)


def _digest(table: NDArray[np.generic]) -> str:
    return hashlib.sha256(np.ascontiguousarray(table).tobytes()).hexdigest()[:8]


def _evaluator(model: ov.Model, outputs: list[ov.Output]) -> Evaluate:
    """Compile the subgraphs of the masks on the CPU, and return a function from a probe to their values."""
    needed = {node.get_instance_id() for node in upstream([output.get_node() for output in outputs])}
    parameters = [node for node in model.get_parameters() if node.get_instance_id() in needed]
    compiled = get_core().compile_model(part_of(outputs, parameters), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def evaluate(probe: MaskProbe, seed: int = 0) -> list[NDArray[np.float32]]:
        random = np.random.default_rng(seed)
        feeds = [_probe_input(node, probe, random) for node in parameters]
        return [_additive(value) for value in compiled(feeds).values()]

    return evaluate


def _probe_input(parameter: ov.Node, probe: MaskProbe, random: np.random.Generator) -> NDArray[np.generic]:
    """Make the value of one parameter with ``past`` KV slots and ``new`` tokens. All tokens are real, and their ids random."""
    names = parameter.output(0).get_names()
    shape = parameter.get_partial_shape()
    dtype = parameter.get_element_type().to_dtype()
    if ATTENTION_MASK in names:
        return np.ones((1, probe.past + probe.new), dtype)
    if POSITION_IDS in names:
        positions = np.arange(probe.past, probe.past + probe.new, dtype=dtype)
        return np.broadcast_to(positions, [*(d.get_length() for d in list(shape)[:-1]), probe.new]).copy()
    tokens = probe.new if INPUT_IDS in names or INPUTS_EMBEDS in names else probe.past
    sizes = [d.get_length() if d.is_static else tokens for d in shape]
    return (
        random.integers(0, 50, sizes).astype(dtype)
        if np.dtype(dtype).kind in "iu"
        else random.random(sizes, np.float32).astype(dtype, copy=False)
    )


def _additive(value: NDArray[np.generic]) -> NDArray[np.float32]:
    if value.dtype == np.bool_:
        return np.where(value, VISIBLE, -np.inf).astype(np.float32)
    return np.asarray(value, np.float32)


def _all_as_expected(
    probes: list[MaskProbe], masks: list[Mask], window: int | None, biases: Sequence[NDArray[np.floating[Any]]]
) -> bool:
    for probe, mask, bias in zip(probes, masks, biases, strict=True):
        cells = visible_cells(probe.past, probe.new, window)
        planes = mask.reshape(-1, *cells.shape) if mask.size % cells.size == 0 else mask[None]
        if not _is_as_expected(planes, cells, bias):
            return False
    return True


def _is_as_expected(planes: NDArray[np.float32], cells: NDArray[np.bool_], bias: NDArray[np.floating[Any]]) -> bool:
    """Return whether a mask hides all cells but ``cells``, and whether the visible cells hold the bias.

    A constant per row is ignored, because a softmax drops it. ``planes [heads, new, past + new]``; one plane serves all heads.
    Without a bias the visible cells must hold exactly 0.
    """
    if planes.shape[1:] != cells.shape or len(planes) != len(bias) or not np.all(planes[:, ~cells] < HIDDEN_BELOW):
        return False
    if len(bias) == 1 and not bias.any():
        return bool(np.all(planes[:, cells] == VISIBLE))
    rest = np.where(cells, planes - bias, np.nan)
    spread = np.nanmax(rest, axis=2) - np.nanmin(rest, axis=2)
    return bool(np.all(spread <= BIAS_TOLERANCE * (1 + np.abs(bias).max())))


def _linear(probe: MaskProbe, slopes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return ``slope * (key - query)``, ``[heads, new, past + new]``."""
    query = np.arange(probe.past, probe.past + probe.new)[:, None]
    key = np.arange(probe.past + probe.new)[None, :]
    return slopes[:, None, None] * (key - query)


def _slopes_of(mask: NDArray[np.float32]) -> tuple[float, ...]:
    """Return the growth of each head's bias from one key to the next, in the last row of a long probe; () without a bias."""
    last = mask.reshape(-1, *mask.shape[-2:])[:, -1] if mask.ndim > 1 else mask[None]
    seen = last[0] >= HIDDEN_BELOW
    if not seen.any() or not last[:, seen].any():
        return ()
    places = np.flatnonzero(seen)
    first = int(places[0])
    final = int(places[-1])
    rise = (last[:, final].astype(np.float64) - last[:, first]) / max(final - first, 1)
    return tuple(float(np.float32(value)) for value in rise)


def _window_of(mask: NDArray[np.float32]) -> int | None:
    """Return the window in the last row of a long probe, in tokens; None if the row sees everything."""
    last = np.atleast_2d(mask.reshape(-1, mask.shape[-1]))[-1]
    seen = int(np.count_nonzero(last >= HIDDEN_BELOW))
    return None if seen in (0, last.size) else seen


def visible_cells(past: int, new: int, window: int | None) -> NDArray[np.bool_]:
    """Return which cells are visible, ``[new, past + new]``, by definition: token q sees k if k <= q and k > q - window."""
    kind = EncoderMask(None if window is None else window - 1, after=0)
    seen: NDArray[np.bool_] = kind.sees(np.arange(past + new) - np.arange(past, past + new)[:, None])
    return seen
