"""Tests the pass that lets each row choose the RoPE factors of its own text, on graphs of many forms."""

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops
from support.models.longrope import growing, make_longrope, stepped

from staticllm.compiler_passes.decoder import DECODER, DECODER_NPU, DECODER_NPU_WIDE
from staticllm.compiler_passes.graph.step_graph import StepGraph, consumers
from staticllm.compiler_passes.inputs.expose_factors import expose_factors
from staticllm.compiler_passes.lower import lower
from staticllm.compiler_passes.pass_pipeline import LoweringOptions
from staticllm.core import Variant
from staticllm.devices import get_core
from staticllm.errors import UnsupportedModelError
from staticllm.pipelines.diagnostics.reference import EXACT, StatefulReference
from staticllm.ports import HIDDEN, POSITION_IDS

LIMITS = (40, 70)
PLATFORM_SCALES = "narrow_scales"
"""The pass of NPUs that rounds scales to f16."""


@pytest.fixture(scope="module")
def longrope(zoo, tmp_path_factory):
    return make_longrope(zoo / "llama", tmp_path_factory.mktemp("models") / "longrope", stepped(*LIMITS))


def read(path):
    return get_core().read_model(path / "openvino_model.xml")


def prompt_feeds(model, tokens, factors):
    """Return the inputs of a program without a past for a text, whose rows take these factors."""
    count = len(tokens)
    causal = np.where(np.tri(count, dtype=bool), 0.0, HIDDEN).astype(np.float32)
    known = {
        "input_ids": np.array([tokens]), "position_ids": np.arange(count)[None], "logit_rows": np.array([count - 1]),
        "rope_factors": np.full((1, count), factors, np.int32), "mask.causal": causal[None, None],
    }  # fmt: skip
    names = [(port, name) for port in model.inputs for name in port.get_names()]
    return {name: known.get(name, np.zeros(port.get_shape(), np.float32)) for port, name in names}


@pytest.mark.parametrize(
    "passes", [DECODER, DECODER_NPU.without(PLATFORM_SCALES), DECODER_NPU_WIDE.without(PLATFORM_SCALES)]
)
@pytest.mark.parametrize(("length", "factors"), [(40, 0), (41, 1), (70, 1), (71, 2)])
def test_programs_of_each_set_of_factors_compute_what_one_call_computes(length, factors, passes, longrope, prompt_of):
    lowered = lower(read(longrope), LoweringOptions(128), passes)
    model = lowered.specialise(Variant(length, 0))
    tokens = prompt_of(length)
    program = get_core().compile_model(model, "CPU", dict(EXACT, KV_CACHE_PRECISION="f32"))
    found = program(prompt_feeds(program, tokens, factors))["logits"][0, 0]
    expected = StatefulReference(longrope).logits(tokens)[-1]
    assert np.abs(found - expected).max() <= 2e-5 * np.ptp(expected)
    wrong = program(prompt_feeds(program, tokens, (factors + 1) % 3))["logits"][0, 0]
    assert np.abs(wrong - expected).max() > 1e-3 * np.ptp(expected)


def angles_of(rank, reduce_axes, keep_dims, choose):
    """Return a graph that computes angles ``[S]`` of positions with factors that ``choose`` makes of the largest position."""
    positions = ops.parameter([*[1] * (rank - 1), -1] if rank < 3 else [3, 1, -1], ov.Type.i64)
    positions.output(0).set_names({POSITION_IDS})
    largest = ops.reduce_max(positions, np.array(reduce_axes), keep_dims)
    scalar = ops.reshape(
        ops.reduce_max(largest, np.arange(rank if keep_dims else rank - len(reduce_axes)), False), [1], False
    )
    flat = ops.reshape(ops.gather(positions, np.int64(0), np.int64(0)) if rank == 3 else positions, [-1], False)
    angles = ops.multiply(ops.convert(flat, "f32"), choose(ops.convert(scalar, "f32")))
    result = ops.result(ops.unsqueeze(ops.sin(angles), np.int64(0)))
    return StepGraph(ov.Model([result], [positions]))


def limits_of(graph, max_len):
    expose_factors(graph, max_len)
    return graph.rope_limits


@pytest.mark.parametrize("limit", [1, 2, 3, 17, 63, 64, 65, 1023, 4096])
def test_every_limit_is_found(limit):
    def choose(largest):
        return ops.select(ops.greater_equal(largest, np.float32(limit)), np.float32(0.5), np.float32(1.0))

    found = limits_of(angles_of(2, [0, 1], False, choose), 5000)
    assert found == ((limit,) if limit > 1 else ())  # a single token has no angle that could differ
    assert limits_of(angles_of(2, [0, 1], False, choose), limit) == ()


@pytest.mark.parametrize(
    ("rank", "axes", "keep_dims"), [(2, [1], False), (2, [1], True), (3, [0, 1, 2], False), (3, [2], True)]
)
def test_the_largest_position_may_be_reduced_in_any_way(rank, axes, keep_dims):
    def choose(largest):
        return ops.select(ops.greater(largest, np.float32(19)), np.float32(0.5), np.float32(1.0))

    assert limits_of(angles_of(rank, axes, keep_dims, choose), 64) == (20,)


def test_factors_of_every_length_are_refused_and_limits_below_are_not():
    def choose(largest):
        return ops.divide(np.float32(30), ops.maximum(largest, np.float32(30)))

    with pytest.raises(UnsupportedModelError, match=r"above 31 tokens .* of at most 31 \(here 40\)"):
        limits_of(angles_of(2, [0, 1], False, choose), 40)
    assert limits_of(angles_of(2, [0, 1], False, choose), 31) == ()


def test_a_table_as_long_as_the_call_is_no_limit():
    """Its first entries are the same for all lengths, so rows of several texts read one table."""

    def choose(largest):
        count = ops.convert(ops.reduce_max(largest, np.int64(0), False), "i64")
        table = ops.range(np.int64(0), ops.add(count, np.int64(1)), np.int64(1), "f32")
        return ops.gather(table, np.array([0]), np.int64(0))

    graph = angles_of(2, [0, 1], False, choose)
    assert limits_of(graph, 300) == ()
    (positions,) = graph.model.get_parameters()
    used = {node.get_instance_id() for node in graph.model.get_ordered_ops()}
    readers = [node for node in consumers(positions.output(0)) if node.get_instance_id() in used]
    assert [node.get_type_name() for node in readers] == ["Reshape"]


def test_a_length_that_changes_other_data_than_positions_is_refused(zoo):
    model = read(zoo / "llama")
    (positions,) = [node for node in model.get_parameters() if POSITION_IDS in node.output(0).get_names()]
    largest = ops.convert(ops.reduce_max(positions, np.array([0, 1]), False), "f32")
    head = next(node for node in reversed(model.get_ordered_ops()) if node.get_type_name() == "MatMul")
    head.input(0).replace_source_output(ops.multiply(head.input_value(0), ops.add(largest, np.float32(1))).output(0))
    with pytest.raises(UnsupportedModelError, match=r"expose_factors: Multiply .* not positions alone"):
        lower(model, LoweringOptions(128))


def test_models_without_a_length_in_their_factors_are_left_alone(zoo):
    lowered = lower(read(zoo / "llama"), LoweringOptions(128), DECODER)
    assert lowered.shape.rope_limits == ()
    assert not any("rope_factors" in port.get_names() for port in lowered.graph.model.inputs)
    (report,) = [report for report in lowered.reports if report.name == "expose_factors"]
    assert not report.notes


def test_growing_factors_are_those_of_a_whole_model(zoo, tmp_path):
    path = make_longrope(zoo / "qwen3", tmp_path / "growing", growing(50))
    with pytest.raises(UnsupportedModelError, match="above 50 tokens"):
        lower(read(path), LoweringOptions(64))
    lowered = lower(read(path), LoweringOptions(50))
    (position_ids,) = [p for p in lowered.graph.model.get_parameters() if POSITION_IDS in p.output(0).get_names()]
    assert "ReduceMax" not in {node.get_type_name() for node in consumers(position_ids.output(0))}


def is_above(limit):
    return lambda positions: ops.greater_equal(positions, np.int64(limit))


def as_length(value):
    return ops.convert(ops.reshape(value, np.array([], np.int64), False), "f32")


def largest(value):
    return as_length(ops.reduce_max(value, np.array([0, 1]), False))


def input_of(model, name):
    return next(node for node in model.get_parameters() if name in node.output(0).get_names())


OF_POSITIONS = {
    "selected": lambda model, rows: largest(ops.select(is_above(-1)(rows), ops.add(rows, np.int64(1)), rows)),
    "any": lambda model, rows: ops.multiply(
        ops.convert(ops.reduce_logical_or(is_above(40)(rows), np.array([0, 1]), False), "f32"), np.float32(41)
    ),
    "counted": lambda model, rows: ops.multiply(largest(ops.convert(is_above(40)(rows), "i64")), np.float32(41)),
    "rounded": lambda model, rows: ops.add(largest(ops.floor(ops.convert(rows, "f32"))), np.float32(1)),
    "absolute": lambda model, rows: largest(ops.abs(ops.add(rows, np.int64(1)))),
    "repeated": lambda model, rows: largest(ops.tile(ops.add(rows, np.int64(1)), np.array([2, 1]))),
    "joined": lambda model, rows: largest(ops.concat([ops.add(rows, np.int64(1)), np.array([[0]])], 1)),
}  # fmt: skip
"""Lengths of a call that are made of positions otherwise than as their largest one."""
OF_SIZES = {
    "size of mask": lambda model, rows: as_length(
        ops.gather(ops.shape_of(input_of(model, "attention_mask")), np.int64(1), np.int64(0))
    ),
    "sum of mask": lambda model, rows: as_length(
        ops.reduce_sum(input_of(model, "attention_mask"), np.array([0, 1]), False)
    ),
    "counts of mask": lambda model, rows: largest(ops.cum_sum(input_of(model, "attention_mask"), np.int64(1))),
    "number of tokens": lambda model, rows: as_length(
        ops.gather(ops.shape_of(input_of(model, "input_ids")), np.int64(1), np.int64(0))
    ),
    "number of positions": lambda model, rows: as_length(ops.gather(ops.shape_of(rows), np.int64(1), np.int64(0))),
}
"""Lengths of a call that no positions tell."""


@pytest.mark.parametrize("form", OF_POSITIONS)
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_length_may_be_made_of_positions_in_any_way(name, form, zoo, tmp_path, prompt_of):
    path = make_longrope(zoo / name, tmp_path / form, stepped(40), length_of=OF_POSITIONS[form])
    lowered = lower(read(path), LoweringOptions(128))
    assert lowered.shape.rope_limits == (40,)
    for length, factors in ((40, 0), (41, 1)):
        program = get_core().compile_model(
            lowered.specialise(Variant(length, 0)), "CPU", dict(EXACT, KV_CACHE_PRECISION="f32")
        )
        tokens = prompt_of(length)
        expected = StatefulReference(path).logits(tokens)[-1]
        assert np.abs(
            program(prompt_feeds(program, tokens, factors))["logits"][0, 0] - expected
        ).max() <= 2e-5 * np.ptp(expected)


@pytest.mark.parametrize("form", OF_SIZES)
def test_a_length_that_positions_do_not_tell_is_refused_above_the_limit(form, zoo, tmp_path):
    path = make_longrope(zoo / "llama", tmp_path / form, stepped(40), length_of=OF_SIZES[form])
    with pytest.raises(UnsupportedModelError, match=r"(expose_positions|prove_rows): .* computes with the number of"):
        lower(read(path), LoweringOptions(128))
    assert lower(read(path), LoweringOptions(40)).shape.rope_limits == ()


def test_the_message_has_the_most_tokens_for_which_rows_do_not_depend_on_others(zoo, tmp_path):
    path = make_longrope(zoo / "llama", tmp_path / "model", stepped(77), length_of=OF_SIZES["number of positions"])
    with pytest.raises(UnsupportedModelError, match=r"above 77 tokens: .* of at most 77 \(here 3000\)"):
        lower(read(path), LoweringOptions(3000))


@pytest.mark.parametrize("mix", ["sum of earlier ones", "next one"])
def test_a_row_whose_angles_depend_on_the_positions_of_others_is_refused(mix, zoo):
    """No value of the whole call is between them, so that it could be an input of each row."""
    model = read(zoo / "llama")
    positions = input_of(model, POSITION_IDS)
    readers = positions.output(0).get_target_inputs()
    if mix == "next one":
        padded = ops.concat([positions, np.array([[0]])], 1)
        mixed = ops.slice(padded, np.array([1]), np.array([1 << 30]), np.array([1]), np.array([1]))
    else:
        mixed = ops.cum_sum(ops.floor(ops.convert(positions, "f32")), np.int64(1))
        mixed = ops.convert(mixed, "i64")
    for port in readers:
        port.replace_source_output(mixed.output(0))
    with pytest.raises(UnsupportedModelError, match=r"prove_rows: .* positions of other tokens"):
        lower(model, LoweringOptions(128))
