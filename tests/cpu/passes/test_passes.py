"""Tests each pass alone: the graph computes the same values before and after it, in f32 on the CPU."""

from __future__ import annotations

from itertools import takewhile

import numpy as np
import openvino as ov
import pytest
from openvino import opset6
from openvino import opset13 as ops
from openvino.op.util import Variable, VariableInfo

from staticllm.compiler_passes.decoder import DECODER_UNMERGED
from staticllm.compiler_passes.graph.check_graph import check_graph, check_static
from staticllm.compiler_passes.graph.step_graph import StepGraph, evaluated, is_live, part_of
from staticllm.compiler_passes.inputs.classify_mask import Seen, visible_cells
from staticllm.compiler_passes.inputs.expose_mask import _with_bias, expose_mask
from staticllm.compiler_passes.lower import lower
from staticllm.compiler_passes.pass_pipeline import LoweringOptions, PassPipeline
from staticllm.compiler_passes.rewrites.decompose_attention import decompose_attention
from staticllm.compiler_passes.rewrites.group_queries import group_queries
from staticllm.compiler_passes.shapes.fix_shapes import bound_shapes, fix_shapes
from staticllm.compiler_passes.shapes.select_logits import select_logits
from staticllm.compiler_passes.states.keep_new_rows import keep_new_rows
from staticllm.compiler_passes.states.lift_state import lift_state
from staticllm.compiler_passes.states.store_kv_as import store_kv_as
from staticllm.core import KEY_POSITIONS, QUERY_POSITIONS, MaskKind, Variant
from staticllm.errors import UnsupportedModelError
from staticllm.pipelines.diagnostics.reference import EXACT
from staticllm.ports import HIDDEN

MODELS = [
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gpt2",
    "bloom",
]  # with and without grouped heads and windows, and every kind of positions
PAST, NEW = 40, 6
core = ov.Core()


QUICK = ("gemma2", "bloom")  # grouped heads, windows and rotary positions; slopes


@pytest.fixture(params=[name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS])
def model(request, zoo):
    model = core.read_model(zoo / request.param / "openvino_model.xml")
    model.set_friendly_name(request.param)
    return model


def lowered_until(model, stage):
    """Return a graph on which every pass before ``stage`` has run."""
    graph = StepGraph(model)
    PassPipeline(tuple(takewhile(lambda entry: entry.name != stage, DECODER_UNMERGED.passes))).run(
        graph, LoweringOptions(256)
    )
    return graph


_compiled_before: dict[tuple[str, str], ov.CompiledModel] = {}


def evaluate_before(stage, graph, feeds):
    """Return the outputs of the graph before ``stage``, which is compiled once because several tests begin with it."""
    key = (graph.model.get_friendly_name(), stage)
    if key not in _compiled_before:
        _compiled_before[key] = core.compile_model(graph.model.clone(), "CPU", EXACT)
    return infer(_compiled_before[key], feeds)


def evaluate(model, feeds):
    """Return the outputs by name. ``feeds`` may hold more inputs than the model takes."""
    return infer(core.compile_model(model, "CPU", EXACT), feeds)


def infer(compiled, feeds):
    names = {next(iter(port.get_names() & feeds.keys())) for port in compiled.inputs}
    results = compiled({name: feeds[name] for name in names})
    return {name: value for port, value in results.to_dict().items() for name in port.get_names()}


def feeds_for(graph, seed=0):
    """Return random slots of ``PAST`` tokens and new tokens, for every port that any stage has."""
    rng = np.random.default_rng(seed)
    feeds = {
        "input_ids": rng.integers(3, 1000, (1, NEW)),
        "attention_mask": np.ones((1, PAST + NEW), np.int64),
        "position_ids": np.arange(PAST, PAST + NEW)[None],
        "logit_rows": np.array([NEW - 1]),
        KEY_POSITIONS: np.arange(PAST + NEW, dtype=np.int32)[None, None, None],
        QUERY_POSITIONS: np.arange(PAST, PAST + NEW, dtype=np.int32)[None, None, :, None],
    }
    for kind in graph.masks:
        seen = visible_cells(PAST, NEW, kind.window)
        feeds[kind.port_name] = np.where(seen, 0, HIDDEN).astype(np.float32)[None, None]
    for index, state in enumerate(graph.states):
        shape = [dim.get_length() if dim.is_static else PAST for dim in state.past.get_partial_shape()]
        feeds[f"state.{index}"] = rng.normal(size=shape).astype(np.float32)
    return feeds


def rename_rows(graph, feeds):
    """Return the feeds under the names that ``keep_new_rows`` gives, and the map of results."""
    by_variable = {state.variable_id: index for index, state in enumerate(graph.states)}
    pairs = [(by_variable[state.variable_id], state) for state in graph.kv_states]
    return {**feeds, **{state.past_name: feeds[f"state.{index}"] for index, state in pairs}}, pairs


def same(actual, expected):
    assert actual.shape == expected.shape
    assert np.abs(actual - expected).max() <= 1e-5 * max(1.0, float(np.ptp(expected)))


def test_lift_state_turns_every_state_into_a_parameter_and_a_result(model, zoo, request, original):
    reference = original(zoo / request.node.callspec.params["model"])
    num_states = len(model.get_variables())
    graph = StepGraph(model)
    lift_state(graph)
    check_graph(graph, "lift_state")
    assert len(graph.states) == num_states
    assert not model.get_variables()
    assert "beam_idx" not in {name for port in model.inputs for name in port.get_names()}
    tokens, states = list(range(20, 20 + PAST + NEW)), {}
    feeds = {f"state.{i}": np.zeros([d.get_length() if d.is_static else 0 for d in s.past.get_partial_shape()], np.float32)
             for i, s in enumerate(graph.states)}  # fmt: skip
    lifted = core.compile_model(graph.model, "CPU", EXACT)
    for first, last in ((0, PAST), (PAST, PAST + NEW)):
        feeds |= {
            "input_ids": np.array([tokens[first:last]]),
            "attention_mask": np.ones((1, last), np.int64),
            "position_ids": np.arange(first, last)[None],
        }
        states = infer(lifted, feeds)
        same(states["logits"][0], reference.logits(tokens[first:last]))
        feeds |= {f"state.{i}": states[f"state.{i}.next"] for i in range(num_states)}


@pytest.mark.parametrize("name", ["granitemoehybrid", pytest.param("lfm2", marks=pytest.mark.slow)])
def test_lift_state_lifts_recurrent_states(name, zoo, original):
    """The lifted states are fed back by hand, and the outputs continue as those of the model."""
    reference, graph = original(zoo / name), StepGraph(core.read_model(zoo / name / "openvino_model.xml"))
    lift_state(graph)
    compiled = core.compile_model(graph.model, "CPU", EXACT)
    zeros = [[d.get_length() if d.is_static else 0 for d in s.past.get_partial_shape()] for s in graph.states]
    states = {f"state.{i}": np.zeros(shape, np.float32) for i, shape in enumerate(zeros)}
    position = 0
    for tokens in ([9, 8, 7, 6, 5], [40], [41]):
        position += len(tokens)
        feeds = {"input_ids": np.array([tokens]), "attention_mask": np.ones((1, position), np.int64), **states}
        result = {name: value for port, value in compiled(feeds).to_dict().items() for name in port.get_names()}
        same(result["logits"][0], reference.logits(tokens))
        states = {name: result[f"{name}.next"].copy() for name in states}


@pytest.mark.parametrize("is_initialised", [True, False])
def test_lift_state_lifts_any_state(is_initialised):
    """The state is a counter of shape [3], not a KV cache, with or without an initial constant."""
    info = VariableInfo()
    info.data_shape, info.data_type, info.variable_id = ov.PartialShape([3]), ov.Type.f32, "counter"
    variable = Variable(info)
    start = np.array([1, 2, 3], np.float32)
    x = ops.parameter([1, 3], ov.Type.f32, name="x")
    x.output(0).set_names({"x"})
    read = opset6.read_value(ops.constant(start), variable) if is_initialised else opset6.read_value(variable)
    total = ops.add(read, ops.squeeze(x, ops.constant(0)))
    result = ops.result(ops.multiply(total, ops.constant(np.float32(2))))
    result.output(0).set_names({"y"})
    graph = StepGraph(ov.Model([result], [opset6.assign(total, variable)], [x], "counter"))
    lift_state(graph)
    check_graph(graph, "lift_state")
    (state,) = graph.states
    assert state.past.get_partial_shape() == ov.PartialShape([3])
    assert (state.initial is None) != is_initialised
    if state.initial is not None:
        assert np.array_equal(state.initial.get_node().data, start)
    out = evaluate(graph.model, {"x": np.ones((1, 3), np.float32), "state.0": start})
    assert np.array_equal(out["state.0.next"], start + 1)
    assert np.array_equal(out["y"], 2 * (start + 1))


def test_keep_new_rows_returns_the_appended_rows(model):
    graph = lowered_until(model, "keep_new_rows")
    feeds = feeds_for(graph)
    before = evaluate_before("keep_new_rows", graph, feeds)
    keep_new_rows(graph)
    check_graph(graph, "keep_new_rows")
    feeds, pairs = rename_rows(graph, feeds)
    after = evaluate(graph.model, feeds)
    same(after["logits"], before["logits"])
    for index, state in pairs:
        same(after[state.present_name], before[f"state.{index}.next"][:, :, PAST:])
    assert [(s.layer, s.role) for s in graph.kv_states] == [
        (layer, role) for layer in range(len(graph.attentions())) for role in ("key", "value")
    ]


def test_expose_mask_keeps_the_outputs(model):
    graph = lowered_until(model, "expose_mask")
    feeds, _ = rename_rows(graph, feeds_for(graph))
    before = evaluate_before("expose_mask", graph, feeds)
    expose_mask(graph, 256)
    check_graph(graph, "expose_mask")
    after = evaluate(graph.model, feeds | feeds_for(graph))
    same(after["logits"], before["logits"])
    assert not is_live(graph.model, graph.parameter("attention_mask"))


def test_expose_mask_finds_windows(zoo):
    for name, expected in (("gemma2", ["window:32", "causal"] * 2), ("llama", ["causal"] * 3)):
        graph = lowered_until(core.read_model(zoo / name / "openvino_model.xml"), "select_logits")
        assert graph.layer_masks == expected
    graph = lowered_until(core.read_model(zoo / "gemma2" / "openvino_model.xml"), "expose_mask")
    expose_mask(graph, 16)
    assert graph.layer_masks == ["causal"] * 4, "a window longer than the KV length hides nothing"


def test_select_logits_returns_the_requested_rows(model):
    graph = lowered_until(model, "select_logits")
    feeds, _ = rename_rows(graph, feeds_for(graph))
    before = evaluate_before("select_logits", graph, feeds)["logits"]
    select_logits(graph)
    check_graph(graph, "select_logits")
    selecting = core.compile_model(graph.model, "CPU", EXACT)
    for rows in ([NEW - 1], [0, 3]):
        same(infer(selecting, feeds | {"logit_rows": np.array(rows)})["logits"], before[:, rows])
    assert "before" in graph.notes["select_logits"][0], "the head was not recognised"


def test_group_queries_computes_the_same_attention(model, request):
    graph = lowered_until(model, "group_queries")
    feeds, _ = rename_rows(graph, feeds_for(graph))
    before = evaluate_before("group_queries", graph, feeds)
    group_queries(graph)
    check_graph(graph, "group_queries")
    after = evaluate(graph.model, feeds)
    for name, value in before.items():
        same(after[name], value)
    is_grouped = graph.query_heads[0] != graph.kv_states[0].heads
    assert (graph.notes["group_queries"][-1].split()[0] != "0") == is_grouped


def test_decompose_attention_computes_the_same_attention(model):
    graph = lowered_until(model, "decompose_attention")
    feeds, _ = rename_rows(graph, feeds_for(graph))
    before = evaluate_before("decompose_attention", graph, feeds)
    num_layers = len(graph.attentions())
    decompose_attention(graph)
    check_graph(graph, "decompose_attention")
    after = evaluate(graph.model, feeds)
    for name, value in before.items():
        same(after[name], value)
    assert not graph.attentions()
    assert graph.notes["decompose_attention"] == [f"{num_layers} of {num_layers} layers decomposed"]


def test_attention_without_a_mask_is_left_to_the_plugin():
    ports = [ops.parameter([1, 2, NEW, 8], np.float32) for _ in range(3)]
    graph = StepGraph(ov.Model([ops.result(ops.scaled_dot_product_attention(*ports, causal=True))], ports))
    decompose_attention(graph)
    assert len(graph.attentions()) == 1
    assert "no mask input" in graph.notes["decompose_attention"][0]


def test_attention_with_a_sink_is_left_to_the_plugin(zoo):
    graph = lowered_until(core.read_model(zoo / "gpt_oss" / "openvino_model.xml"), "store_kv_as")
    assert {node.get_input_size() for node in graph.attentions()} == {6}
    assert all("an attention sink" in note for note in graph.notes["decompose_attention"][:-1])


@pytest.mark.parametrize(("kv_type", "tolerance"), [pytest.param("f32", 1e-5, marks=pytest.mark.slow), ("f16", 2e-2)])
def test_store_kv_as_changes_only_the_type_of_the_slots(model, kv_type, tolerance):
    graph = lowered_until(model, "store_kv_as")
    feeds, _ = rename_rows(graph, feeds_for(graph))
    before = evaluate_before("store_kv_as", graph, feeds)
    store_kv_as(graph, kv_type)
    check_graph(graph, "store_kv_as")
    stored = {name: value.astype(np.float16) for name, value in feeds.items() if name.startswith("past.")}
    after = evaluate(graph.model, feeds | (stored if kv_type == "f16" else {}))
    assert np.abs(after["logits"] - before["logits"]).max() <= tolerance * np.ptp(before["logits"])
    for state in graph.kv_states:
        assert after[state.present_name].dtype == (np.float16 if kv_type == "f16" else np.float32)


def test_u8_slots_differ_by_at_most_one_quantum(model):
    graph = lowered_until(model, "store_kv_as")
    feeds, _ = rename_rows(graph, feeds_for(graph))
    before = evaluate_before("store_kv_as", graph, feeds)
    slots = {state.past_name: feeds.pop(state.past_name) for state in graph.kv_states}
    store_kv_as(graph, "u8")
    check_graph(graph, "store_kv_as")
    for name, values in slots.items():
        low, high = values.min(-1, keepdims=True), values.max(-1, keepdims=True)
        unit = (high - low) / 255
        feeds |= {
            name: np.rint((values - low) / unit).astype(np.uint8),
            f"{name}.scale": np.concatenate([unit, low], -1),
        }
    after = evaluate(graph.model, feeds)
    assert np.abs(after["logits"] - before["logits"]).max() <= 2e-2 * np.ptp(before["logits"])
    own = [state for state in graph.kv_states if not state.is_scale]
    assert len(graph.kv_states) == 2 * len(own)
    for state in (state for state in own if state.layer == 0):  # later layers depend on the rounding of the first
        scale = after[f"{state.present_name}.scale"]
        assert after[state.present_name].dtype == np.uint8
        assert scale.dtype == np.float32
        values = after[state.present_name] * scale[..., :1] + scale[..., 1:]
        assert (np.abs(values - before[state.present_name]) <= scale[..., :1] * 0.51).all()


@pytest.mark.parametrize("kv_len", [PAST, 0])
def test_fix_shapes_and_bound_shapes_change_no_number(model, kv_len):
    graph = lowered_until(model, "fix_shapes")
    feeds, _ = rename_rows(graph, feeds_for(graph))
    if kv_len == 0:
        feeds = {name: value[:, :, :0] if name.startswith("past.") else value for name, value in feeds.items()}
        feeds |= {name: feeds[name][..., PAST:] for name in (KEY_POSITIONS, *(kind.port_name for kind in graph.masks))}
    before = evaluate(graph.model.clone(), feeds)
    static = fix_shapes(graph, Variant(NEW, kv_len))
    check_static(static, "fix_shapes", "it")
    assert any(name.startswith("past.") for port in static.inputs for name in port.get_names()) == bool(kv_len)
    bounded = bound_shapes(graph, [Variant(1, 0), Variant(NEW + 5, 2 * PAST)])
    for program in (static, bounded):
        after = evaluate(program, feeds)
        for name, value in before.items():
            same(after[name], value)


def test_compressed_weights_stay_compressed(model):
    """A pass that folds constants would turn int8 weights into f32, with five times the memory and reads."""

    def small_constants(model):
        constants = (node for node in model.get_ops() if node.get_type_name() == "Constant")
        return sorted(
            tuple(node.get_output_shape(0)) for node in constants
            if node.get_element_type() in (ov.Type.f16, ov.Type.i8, ov.Type.u8) and np.prod(node.get_output_shape(0)) > 256
        )  # fmt: skip

    before = small_constants(model)
    lowered = lower(model, LoweringOptions(256), DECODER_UNMERGED)
    assert len(before) > 10
    for program in (lowered.specialise(Variant(8, 32)), lowered.share((Variant(1, 32), Variant(8, 32)))):
        assert small_constants(program) == before


def test_grouped_heads_get_their_own_slopes():
    """Two query heads with different slopes share a key head, and each must keep its own bias after regrouping."""
    rng = np.random.default_rng(0)
    query, key, value = (ops.parameter([1, heads, NEW, 8], np.float32) for heads in (4, 2, 2))
    for name, port in zip("qkv", (query, key, value), strict=True):
        port.output(0).set_names({name})
    graph = StepGraph(ov.Model([], [query, key, value]))
    mask = graph.add_parameter("mask.causal", ov.PartialShape([1, 1, NEW, NEW]), ov.Type.f32)
    bias = _with_bias(graph, mask.output(0), Seen(MaskKind(), (0.5, 0.25, 0.125, 0.0625)), ov.Dimension(NEW))
    repeated = [
        ops.reshape(
            ops.broadcast(ops.unsqueeze(rows, np.array(2)), np.array([1, 2, 2, NEW, 8])),
            np.array([1, 4, NEW, 8]),
            False,
        )
        for rows in (key, value)
    ]
    attention = ops.scaled_dot_product_attention(query, *repeated, bias, causal=False)
    result = ops.result(attention)
    result.output(0).set_names({"out"})
    graph.model.add_results([result])
    feeds = {
        name: rng.normal(size=(1, heads, NEW, 8)).astype(np.float32) for name, heads in (("q", 4), ("k", 2), ("v", 2))
    }
    feeds |= {
        "mask.causal": np.where(visible_cells(0, NEW, None), 0, HIDDEN).astype(np.float32)[None, None],
        KEY_POSITIONS: np.arange(NEW, dtype=np.int32)[None, None, None],
        QUERY_POSITIONS: np.arange(NEW, dtype=np.int32)[None, None, :, None],
    }
    before = evaluate(graph.model.clone(), feeds)
    group_queries(graph)
    assert graph.notes["group_queries"][-1].startswith("1 of 1")
    same(evaluate(graph.model, feeds)["out"], before["out"])


def test_the_verifier_notices_a_missing_result(zoo):
    graph = lowered_until(core.read_model(zoo / "llama" / "openvino_model.xml"), "fix_shapes")
    graph.model.remove_result(graph.model.output("present.0.key").get_node())
    with pytest.raises(UnsupportedModelError, match=r"present\.0\.key has no output"):
        check_graph(graph, "test")


def test_the_verifier_notices_a_dynamic_shape(zoo):
    graph = lowered_until(core.read_model(zoo / "llama" / "openvino_model.xml"), "fix_shapes")
    with pytest.raises(UnsupportedModelError, match="still has the shape"):
        check_static(bound_shapes(graph, [Variant(1, 16), Variant(2, 32)]), "test", "it")


@pytest.mark.parametrize("kind", ["f32", "i64", "f16"])
def test_a_small_part_is_evaluated_as_a_program_computes_it(kind):
    given = ops.parameter([3, 5], ov.Type(np.float32 if kind == "f16" else {"f32": np.float32, "i64": np.int64}[kind]))
    data = ops.convert(given, kind) if kind == "f16" else given
    outputs = [
        ops.multiply(data, ops.convert(ops.constant(np.float16(0.3)), kind)),
        ops.reduce_max(data, ops.constant([1])),
    ]
    feed = (np.random.default_rng(3).standard_normal((3, 5)) * 9).astype(np.int64 if kind == "i64" else np.float32)
    found = evaluated(part_of([node.output(0) for node in outputs], [given]), [feed])
    program = ov.Core().compile_model(part_of([node.output(0) for node in outputs], [given]), "CPU", EXACT)
    for one, other in zip(found, program([feed]).values(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
        assert one.dtype == other.dtype


def test_a_part_of_unknown_sizes_is_compiled(monkeypatch):
    monkeypatch.setattr(ov.Model, "evaluate", lambda *_: pytest.fail("the library would corrupt memory"))
    given = ops.parameter([-1, 5], np.float32)
    (found,) = evaluated(part_of([ops.sin(given).output(0)], [given]), [np.ones((2, 5), np.float32)])
    np.testing.assert_allclose(found, np.sin(np.ones((2, 5))), rtol=1e-6)
