"""docs/contract.md describes the ports that ``staticllm/ports.py`` defines: the same names, axes and types."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from staticllm.core import (
    AdaptedGroup,
    AdaptedPart,
    EncoderMask,
    EncoderShape,
    EncoderVariant,
    KVState,
    MaskKind,
    ModelShape,
    RecurrentState,
)
from staticllm.ports import (
    EMBEDDINGS,
    ENCODER_PORTS,
    LOGITS,
    PORTS,
    SCORES,
    encoder_input_names,
    encoder_shape_of,
    find_encoder_port,
    find_port,
    input_names,
    present_names,
)

CALL_AXES = {"S", "T", "R", "T+S", "B", "B*S"}
TYPES = {"f32": "float32", "i64": "int64", "i32": "int32"}
EXAMPLES = {"kind": "causal", "layer": "0", "n": "0", "i": "0"}
"""What stands for the parts of a name that a model decides."""
KV = [KVState(0, role, "v", 1, 2, is_scale=is_scale) for role in ("key", "value") for is_scale in (False, True)]
CROSS = [KVState(0, role, "c", 1, 2, is_cross=True) for role in ("key", "value")]
STATE = RecurrentState(0, "s", (1, 2))


class Row(NamedTuple):
    """A row of a table: names of ports, the axes of each shape in it (none if the model alone decides), and the type."""

    names: list[str]
    shapes: list[list[str]]
    type: str


@pytest.fixture(scope="module")
def page(root):
    return (root / "docs" / "contract.md").read_text(encoding="utf-8")


def rows_of(page, heading):
    section = page.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    for names, shapes, kind, _ in (map(str.strip, line.strip("|").split("|")) for line in lines):
        yield Row(names_of(names), [found.split(", ") for found in re.findall(r"`\[(.*?)\]`", shapes)], kind)


def names_of(cell):
    """`past.<layer>.key`, `.value` → past.0.key, past.0.value: a name that begins with a dot replaces as many parts."""
    first, *others = re.findall("`(.*?)`", re.sub("<(.*?)>", lambda found: EXAMPLES[found[1]], cell))
    return [first, *(first.rsplit(".", other.count("."))[0] + other for other in others)]


@pytest.mark.parametrize(
    ("heading", "find"),
    [
        ("Inputs", find_port),
        ("Outputs", find_port),
        ("Paged programs", find_port),
        ("Encoder programs", find_encoder_port),
    ],
)
def test_a_documented_port_has_the_axes_and_the_type_of_its_definition(page, heading, find):
    for row in rows_of(page, heading):
        for name in row.names:
            port = find(name)
            assert port is not None, f"no port has the name {name}"
            for axes in row.shapes:
                own = tuple(axis if axis in CALL_AXES else "" for axis in axes[-len(port.axes) :])
                assert own == tuple(axis if axis in CALL_AXES else "" for axis in port.axes), name
            assert row.shapes or not CALL_AXES & set(port.axes), f"{name} has no shape"
            assert not port.dtype or np.dtype(port.dtype) == TYPES[row.type], name


def test_all_ports_are_documented_as_inputs_or_outputs(page):
    inputs, outputs = (
        [name for row in rows_of(page, heading) for name in row.names] for heading in ("Inputs", "Outputs")
    )
    adapted = (AdaptedGroup(0, 2, 2, (AdaptedPart(0, "p", 1, 0, 0),)),)
    shape = ModelShape(
        tuple(KV), (MaskKind(),), 9, 2, has_distances=True, recurrent_states=(STATE,), num_adapters=1, adapted=adapted,
        cross_states=tuple(CROSS), cross_window_len=5, num_cross_windows=2, rope_limits=(8,),
    )  # fmt: skip
    assert sorted(inputs) == sorted(input_names(shape))
    assert sorted(outputs) == sorted([LOGITS, EMBEDDINGS, *(state.present_name for state in (*KV, STATE))])
    pages = [name for row in rows_of(page, "Paged programs") for name in row.names]
    unpaged = {shape.masks[0].port_name, *(state.past_name for state in KV)}
    paged = replace(shape, kv_states=(KV[0], KV[2]), page_size=32)
    assert sorted(pages) == sorted(input_names(paged) - (input_names(shape) - unpaged))
    assert {find_port(name) for name in inputs + outputs + pages} == set(PORTS)


def test_all_ports_of_encoders_are_documented(page):
    documented = [name for row in rows_of(page, "Encoder programs") for name in row.names]
    kind = EncoderMask(after=0)
    shape = EncoderShape("scores", 3, (kind,), 64, has_token_types=True, past=((2, 8),))
    assert sorted(documented) == sorted([*encoder_input_names(shape), *present_names(shape), EMBEDDINGS, SCORES])
    assert {find_encoder_port(name) for name in documented} == set(ENCODER_PORTS)
    assert "position_ids" not in encoder_input_names(EncoderShape("scores", 3, (kind,), 64, has_positions=False))


def test_the_ports_of_encoders_have_the_shapes_of_a_variant():
    shape, variant = EncoderShape("embeddings", 8, (EncoderMask(),), 64), EncoderVariant(2, 16, 5)
    shapes = {name: encoder_shape_of(name, shape, variant) for name in (*encoder_input_names(shape), EMBEDDINGS)}
    assert shapes == {
        "input_ids": (2, 16), "position_ids": (2, 16), "mask.full": (2, 1, 16, 16), "pool": (5, 32), "embeddings": (5, 8),
    }  # fmt: skip
    with pytest.raises(KeyError, match="past"):
        encoder_shape_of("past.0.key", shape, variant)


def test_the_ports_of_continued_texts_have_the_shapes_of_a_variant():
    shape, variant = (
        EncoderShape("embeddings", 8, (EncoderMask(after=0),), 64, past=((2, 4),)),
        EncoderVariant(1, 16, 1, 32),
    )
    names = (*encoder_input_names(shape), *present_names(shape))
    shapes = {name: encoder_shape_of(name, shape, variant) for name in names}
    assert shapes == {
        "input_ids": (1, 16), "position_ids": (1, 16), "mask.causal": (1, 1, 16, 48), "pool": (1, 16), "kept_rows": (16,),
        "past.0": (1, 2, 32, 4), "present.0": (1, 2, 16, 4),
    }  # fmt: skip
    whole = EncoderVariant(3, 16, 1)
    assert [encoder_shape_of(name, shape, whole) for name in ("past.0", "present.0", "kept_rows")] == [
        (3, 2, 0, 4), (3, 2, 0, 4), (0,)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "label", "seen"),
    [
        (EncoderMask(), "full", range(-9, 10)),
        (EncoderMask(after=0), "causal", range(-9, 1)),
        (EncoderMask(2, 0), "window:3", range(-2, 1)),
        (EncoderMask(2, 2), "local:2", range(-2, 3)),
    ],
)
def test_a_kind_of_mask_sees_what_its_label_says(kind, label, seen):
    assert kind.label == label
    assert [distance for distance in range(-9, 10) if kind.sees(distance)] == list(seen)
