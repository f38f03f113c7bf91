"""Tests the pass that makes adapters inputs: which layers it finds, which share inputs, and what other passes still do."""

from __future__ import annotations

import pytest
from support.models.lora_files import Lora

from staticllm.adapters.lora import read_adapter, shapes_of
from staticllm.compiler_passes.decoder import DECODER, with_adapters
from staticllm.compiler_passes.lower import lower
from staticllm.compiler_passes.pass_pipeline import LoweringOptions
from staticllm.compiler_passes.rewrites import expose_adapters
from staticllm.core import Variant
from staticllm.devices import get_core
from staticllm.ports import ADAPTER_SCALES

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")

MODULES = {
    "qwen2_moe": ("gate", "gate_proj", "q_proj"),
    "granitemoehybrid": ("in_proj", "input_linear"),
    "phi3": ("qkv_proj",),
    "bloom": ("dense_h_to_4h", "query_key_value"),
    "falcon": ("dense", "query_key_value"),
}


def lowered_with(path, tmp_path, *targets):
    loras = [Lora(path, target, rank=rank).save(tmp_path / str(rank)) for rank, target in enumerate(targets, 2)]
    layouts = tuple(tuple(shapes_of(read_adapter(lora))) for lora in loras)
    model = get_core().read_model(path / "openvino_model.xml")
    return lower(model, LoweringOptions(256, adapters=layouts), with_adapters(DECODER))


def notes_of(lowered, name):
    return next(report.notes for report in lowered.reports if report.name == name)


def test_layers_that_read_the_same_values_share_inputs(model_path, tmp_path):
    lowered = lowered_with(model_path("demo"), tmp_path, ALL[:7], ("v_proj",))
    groups = lowered.shape.adapted
    num_layers = sum(part.path.endswith("o_proj") for group in groups for part in group.parts)
    assert [len(group.parts) for group in groups[:4]] == [4, 1, 2, 1], "query, key and value; output; gate and up; down"
    assert len(groups) == 4 * num_layers
    first = groups[0]
    assert [(part.adapter, part.rank, part.first_column) for part in first.parts] == [
        (0, 2, 0),
        (0, 2, 2),
        (0, 2, 4),
        (1, 3, 6),
    ]
    assert first.columns == (0,) * 6 + (1,) * 3
    assert first.parts[2].first_row == first.parts[3].first_row


def test_projections_are_merged_all_the_same(model_path, tmp_path):
    path = model_path("demo")
    plain = lower(get_core().read_model(path / "openvino_model.xml"), LoweringOptions(256))
    lowered = lowered_with(path, tmp_path, ALL[:7])
    assert notes_of(lowered, "merge_projections") == notes_of(plain, "merge_projections")
    assert "became 0" not in notes_of(plain, "merge_projections")[0]


def test_programs_of_every_size_have_static_ports(zoo, tmp_path):
    lowered = lowered_with(zoo / "llama", tmp_path, ALL)
    for variant in (Variant(1, 64), Variant(16, 0), Variant(16, 64, 4), Variant(4, 64, 4)):
        model = lowered.specialise(variant)
        shapes = {port.get_any_name(): tuple(port.get_shape()) for port in model.inputs}
        assert shapes[ADAPTER_SCALES] == (1, variant.rows, 1)
        for group in lowered.shape.adapted:
            assert shapes[group.a_name] == (group.rank, group.in_size)
            assert shapes[group.b_name] == (group.out_size, group.rank)


def test_large_layers_have_inputs_of_their_own(zoo, tmp_path, monkeypatch):
    monkeypatch.setattr(expose_adapters, "LARGE_VALUES", 1)
    groups = lowered_with(zoo / "llama", tmp_path, ALL).shape.adapted
    assert all(len(group.parts) == 1 for group in groups)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_layers_are_found_by_the_graph(name, zoo, tmp_path):
    """Whatever a model calls its layers, and whatever stands between its weights and the product."""
    path = zoo / name
    targets = MODULES[name]
    lora = Lora(path, targets)
    lowered = lowered_with(path, tmp_path, targets)
    assert {part.path for group in lowered.shape.adapted for part in group.parts} == set(lora.matrices)
