"""Tests that programs in the forms for NPUs compute what the original models compute, and hold their weights once."""

from __future__ import annotations

import gc

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops
from support.models.compressed_weights import compress

from staticllm.compiler_passes.decoder import DECODER, DECODER_NPU, DECODER_NPU_WIDE, FEW_ROWS, decoder_passes
from staticllm.compiler_passes.lower import lower
from staticllm.compiler_passes.pass_pipeline import LoweringOptions
from staticllm.core import KEY_POSITIONS, QUERY_POSITIONS, Variant
from staticllm.errors import UnsupportedModelError
from staticllm.pipelines.diagnostics.reference import EXACT
from staticllm.ports import HIDDEN

ZOO = (
    "arcee", "bloom", "codegen", "cohere", "falcon", "gemma2", "gemma3_text", "glm4", "gpt2", "gpt_neox", "gpt_oss",
    "granitemoehybrid", "lfm2", "llama", "mistral", "olmo2", "opt", "phi3", "qwen2", "qwen2_moe", "qwen3", "smollm3",
    "stablelm", "starcoder2",
)  # fmt: skip
QUICK = ("gemma2", "qwen2_moe", "lfm2")  # windows and soft caps; experts; recurrent states
PAST = 40
VARIANTS = (Variant(FEW_ROWS, PAST), Variant(FEW_ROWS + 5, PAST))
"""One row, whose projections are merged; more rows, whose projections are apart."""
core = ov.Core()


def cases(names):
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


def compressed_cases():
    """All kinds of weights in the few models, and one kind in each of the others, in turns."""
    kinds = [("u8", 0), ("u4", 0), ("u4", 16), ("i4", 16), ("i8", 0)]
    yield from ((name, *each) for name in QUICK for each in kinds)
    others = [name for name in ZOO if name not in QUICK]
    yield from (
        pytest.param(name, *kinds[place % len(kinds)], marks=pytest.mark.slow) for place, name in enumerate(others)
    )


class Original:
    """The original model after ``PAST`` tokens, and what it computes for the next ones."""

    def __init__(self, program, tokens, new):
        request = program.create_infer_request()
        self._names = {name for port in program.inputs for name in port.get_names()}
        self._run(request, tokens[:PAST], 0)
        self.before = self._states(request)
        self.logits = self._run(request, tokens[PAST : PAST + new], PAST)
        self.after = self._states(request)

    def _run(self, request, tokens, start):
        stop = start + len(tokens)
        feeds = {
            "input_ids": np.array([tokens]),
            "attention_mask": np.ones((1, stop), np.int64),
            "position_ids": np.arange(start, stop)[None],
            "beam_idx": np.zeros(1, np.int32),
            "cache_position": np.arange(start, stop),
        }
        request.infer({name: value for name, value in feeds.items() if name in self._names})
        return request.get_tensor("logits").data.copy()

    @staticmethod
    def _states(request):
        return {state.name: state.state.data.copy() for state in request.query_state()}


def feeds_for(lowered, original, tokens, variant):
    """Return the inputs of a program after ``PAST`` tokens of an original."""
    rows = variant.rows
    places = np.arange(PAST, PAST + rows)
    feeds = {
        "input_ids": np.array([tokens[PAST : PAST + rows]]),
        "position_ids": places[None],
        "logit_rows": np.arange(rows)[-variant.num_logits :],
        KEY_POSITIONS: np.arange(PAST + rows, dtype=np.int32)[None, None, None],
        QUERY_POSITIONS: places.astype(np.int32)[None, None, :, None],
    }
    for kind in lowered.shape.masks:
        seen = [[kind.first(query) <= key <= query for key in range(PAST + rows)] for query in places]
        feeds[kind.port_name] = np.where(seen, 0, HIDDEN).astype(np.float32)[None, None]
    states = (*lowered.shape.kv_states, *lowered.shape.recurrent_states)
    return feeds | {state.past_name: original.before[state.variable_id] for state in states}


def run(model, feeds):
    compiled = core.compile_model(model, "CPU", EXACT)
    results = compiled({name: feeds[name] for port in compiled.inputs for name in port.get_names() & feeds.keys()})
    return {name: value for port, value in results.to_dict().items() for name in port.get_names()}


def largest_error(lowered, model, original, tokens, variant):
    """Return the largest difference from the original, relative to the range of each output: logits, keys, values, states."""
    found = run(model, feeds_for(lowered, original, tokens, variant))
    wanted = {"logits": original.logits[:, variant.rows - variant.num_logits : variant.rows]}
    wanted |= {s.present_name: original.after[s.variable_id][:, :, PAST:] for s in lowered.shape.kv_states}
    wanted |= {s.present_name: original.after[s.variable_id] for s in lowered.shape.recurrent_states}
    assert all(found[name].shape == value.shape for name, value in wanted.items())
    return max(np.abs(found[name] - value).max() / max(np.ptp(value), 1e-3) for name, value in wanted.items())


def tokens_for(variant):
    return [int(token) for token in np.random.default_rng(3).integers(20, 900, PAST + variant.rows)]


EXACT_SCALES = DECODER_NPU.without("narrow_scales")
"""The same without the pass that rounds scales to f16."""


def check(path, tolerance, kind="", group=0, scale_type="f32", passes=EXACT_SCALES):
    """Compare the programs of all ``VARIANTS`` with the original, whose weights may be compressed. Return the lowered model."""
    model = core.read_model(path / "openvino_model.xml")
    if kind:
        assert compress(model, kind, group, scale_type) > 4
    program = core.compile_model(model.clone(), "CPU", EXACT)
    originals = {variant: Original(program, tokens_for(variant), variant.rows) for variant in VARIANTS}
    lowered = lower(model, LoweringOptions(256), passes)
    for variant, original in originals.items():
        own = lowered.specialise(variant)
        assert largest_error(lowered, own, original, tokens_for(variant), variant) <= tolerance, variant
    return lowered


@pytest.mark.parametrize("name", cases(ZOO))
def test_programs_compute_what_the_original_computes(zoo, name):
    check(zoo / name, 2e-5)


@pytest.mark.parametrize("name,kind,group", list(compressed_cases()))
def test_programs_of_compressed_models_compute_what_the_original_computes(zoo, name, kind, group):
    """In f32, ``i + d`` is exact, so only the order of sums differs, of which those with zero points far away are large."""
    check(zoo / name, 2e-4, kind, group)


@pytest.mark.parametrize("kind,group", [("u8", 0), ("i4", 0), ("u4", 16), ("i4", 16)])
def test_scales_in_f16_differ_by_their_rounding(zoo, kind, group):
    lowered = check(zoo / "llama", 2e-3, kind, group, passes=DECODER_NPU)
    scales = [node for node in constants(lowered.graph.model) if list(node.get_output_shape(0))[-1:] == [1]]
    assert {node.get_element_type() for node in scales if node.get_byte_size() >= 64} == {ov.Type.f16}


def with_a_size_that_depends_on_values(model):
    """Let the head of a model read hidden states to which the sum of some of them was added, as experts' tokens are picked."""
    head = next(node for node in reversed(model.get_ordered_ops()) if node.get_type_name() == "MatMul")
    hidden = head.input_value(0)
    flat = ops.reshape(hidden, np.array([-1]), special_zero=False)
    places = ops.reshape(ops.non_zero(ops.greater(flat, ops.constant(np.float32(0)))), np.array([-1]), False)
    kept = ops.gather(flat, places, ops.constant(0))
    written = ops.scatter_elements_update(kept, np.array([0]), np.array([0], np.float32), np.int64(0))
    head.input(0).replace_source_output(ops.add(hidden, ops.reduce_sum(written, 0)).output(0))
    model.validate_nodes_and_infer_types()
    return model


def test_a_size_that_depends_on_values_is_refused_in_one_line_with_the_remedy(zoo):
    model = with_a_size_that_depends_on_values(core.read_model(zoo / "llama" / "openvino_model.xml"))
    lowered = lower(model, LoweringOptions(256), DECODER_NPU)
    words = r"^fix_shapes: NonZero '\S+' still has the shape \[1,\.\.64\] in generate\[1x40\]: .*PROGRAMS=shared$"
    with pytest.raises(UnsupportedModelError, match=words):
        lowered.specialise(Variant(1, PAST))


def notes_of(lowered, name):
    return [note for report in lowered.reports if report.name == name for note in report.notes]


def test_no_weights_have_zero_points_afterwards(zoo):
    lowered = check(zoo / "qwen2", 2e-4, "u8")
    assert notes_of(lowered, "shift_zero_points") == ["22 of 22 compressed matrices lost their zero points"]
    kinds = {node.get_element_type().get_type_name() for node in constants(lowered.specialise(VARIANTS[0]))}
    assert "u8" not in kinds


def constants(model):
    return [node for node in model.get_ordered_ops() if node.get_type_name() == "Constant"]


def memory_of(model, at_least=64):
    """Return the bytes that the large constants of a model lie in: the numbers of all of them."""
    found = [node for node in constants(model) if node.get_byte_size() >= at_least]
    ranges = [(node.data.ctypes.data, node.get_byte_size()) for node in found]
    return {byte for start, size in ranges for byte in range(start, start + size)}


def products(model):
    return sum(node.get_type_name() == "MatMul" for node in model.get_ordered_ops())


@pytest.mark.parametrize("kind,group", [("", 0), ("u8", 0), ("u4", 0), ("i4", 16)])
def test_programs_with_merged_and_with_separate_projections_share_their_weights(zoo, kind, group):
    model = core.read_model(zoo / "qwen2" / "openvino_model.xml")
    if kind:
        compress(model, kind, group)
    lowered = lower(model, LoweringOptions(256), DECODER_NPU)
    few, many = lowered.specialise(Variant(1, PAST)), lowered.specialise(Variant(FEW_ROWS + 4, PAST))
    weights = memory_of(lowered.graph.model)
    new = memory_of(few, 256) - weights
    assert not new, "a program has weights of its own"
    assert not memory_of(many, 256) - weights
    layers = 3
    apart = 3 if not group else 0  # query, key, value and gate, up become 2 matrices; those in groups are merged in all
    assert products(many) - products(few) == layers * apart
    assert not kind or memory_of(few) & memory_of(many)


@pytest.mark.parametrize("kind", ["u8", "u4"])
def test_the_memory_of_weights_lives_as_long_as_a_program_of_them(zoo, kind):
    def programs():
        model = core.read_model(zoo / "qwen2" / "openvino_model.xml")
        compress(model, kind)
        lowered = lower(model, LoweringOptions(256), DECODER_NPU)
        program = core.compile_model(zoo / "qwen2" / "openvino_model.xml", "CPU", EXACT)
        original = Original(program, tokens_for(VARIANTS[0]), 1)
        feeds = feeds_for(lowered, original, tokens_for(VARIANTS[0]), VARIANTS[0])
        return lowered.specialise(VARIANTS[0]).clone(), feeds, run(lowered.specialise(VARIANTS[0]), feeds)["logits"]

    model, feeds, expected = programs()
    gc.collect()
    others = [np.full(size, 251, np.uint8) for size in (512, 1024, 2048, 4096, 8192) for _ in range(200)]
    assert np.array_equal(run(model, feeds)["logits"], expected)
    assert others


def test_devices_have_their_own_passes():
    assert decoder_passes("NPU") is decoder_passes("NPU.0", "3720") is decoder_passes("NPU", "6000") is DECODER_NPU
    assert decoder_passes("NPU", "4000") is decoder_passes("NPU", "5010") is DECODER_NPU_WIDE
    assert decoder_passes("CPU") is DECODER
    assert "group_queries" not in {entry.name for entry in DECODER_NPU.passes}
    assert DECODER_NPU.without("gate_last").variant_passes == DECODER_NPU.variant_passes
