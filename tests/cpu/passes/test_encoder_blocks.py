"""Encoders in blocks compute the vectors of the originals, and their passes for NPUs change no more than f16 does."""

from __future__ import annotations

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops
from support.encoders.encoder_models import ARCHIVES, Alone, Packed, TinyEncoder, some_texts, unpack
from support.models.compressed_weights import compress

from staticllm.compiler_passes.blocks.split import Splitter
from staticllm.compiler_passes.compiling.chain_compiler import ChainCompiler, UncompiledChain
from staticllm.compiler_passes.compiling.dry_run import run_apart
from staticllm.compiler_passes.encoder import ENCODER_NPU
from staticllm.compiler_passes.graph.step_graph import StepGraph
from staticllm.compiler_passes.lower_encoder import lower_encoder
from staticllm.compiler_passes.pass_pipeline import EncoderOptions
from staticllm.compiler_passes.rewrites.halve_weights import halve_weights
from staticllm.core import EncoderVariant
from staticllm.devices import get_core
from staticllm.errors import UnsupportedModelError
from staticllm.pipelines.diagnostics.half_precision import round_to_f16
from staticllm.pipelines.diagnostics.reference import EXACT
from staticllm.pipelines.embedding.encoder_calls import random_texts

ARCHITECTURES = sorted(path.stem for path in ARCHIVES.glob("*.zip") if path.stem not in ("bert_tokenizer", "convbert"))
OPTIONS = {"qwen3_scores": EncoderOptions(score_tokens=(5, 6))}
VARIANTS = (EncoderVariant(1, 32, 4), EncoderVariant(2, 64, 8))
HALVED = 4e-3
"""Largest difference of numbers of vectors of length 1, and of scores as a share of their range, between f16 weights and f32."""


def uncompiled(lowered, variant):
    return UncompiledChain(lambda: lowered.specialise(variant), variant.rows, "CPU", EXACT, str(variant))


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    def of(name):
        return get_core().read_model(unpack(name, tmp_path_factory.mktemp(name)))

    return of


@pytest.fixture(scope="module")
def lowered_of(read):
    """A function from a name, and whether it is for NPUs, to the lowered encoder, made once."""
    known = {}

    def of(name, is_npu=False):
        if (name, is_npu) not in known:
            passes = {"passes": ENCODER_NPU} if is_npu else {}
            known[name, is_npu] = lower_encoder(read(name), OPTIONS.get(name), **passes)
        return known[name, is_npu]

    return of


def feeds_of(lowered, variant):
    names = {name for port in lowered.specialise(variant).inputs for name in port.get_names()}
    return {name: value for name, value in random_texts(lowered.shape, variant).items() if name in names}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_blocks_give_the_vectors_of_the_original(name, read, lowered_of):
    """The whole programs are compared with texts alone, and chains with the same texts through the original."""
    lowered, alone = lowered_of(name), Alone(read(name))
    chains = ChainCompiler()
    random = np.random.default_rng(3)
    for variant in VARIANTS:
        chain = chains.compile(uncompiled(lowered, variant))
        packed = Packed(lowered, variant)
        texts = some_texts(random, lowered.shape, variant)
        pooling = lowered.shape.pooling or "last"
        feeds = packed.feeds(texts, pooling)
        (found,) = run_apart(chain, feeds).values()
        if name in ("qwen3_scores", "qwen3_with_past"):  # their originals give all logits, and have states
            expected = packed.run(feeds)[: len(texts)]
        else:
            types = [text.types if lowered.shape.has_token_types else 0 * text.types for text in texts]
            expected = np.array(
                [alone(text.ids, pooling, each) for text, each in zip(texts, types, strict=True)]
            ).reshape(len(texts), -1)
        assert np.abs(found[: len(texts)] - expected).max() <= 2e-6 * max(1, np.abs(expected).max()), variant


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_layers_that_are_alike_are_one_part(name, lowered_of):
    chain = Splitter().split(lowered_of(name).specialise(VARIANTS[0]))
    counts = [[call.part for call in chain.calls].count(part) for part in range(len(chain.parts))]
    assert chain.parts[0].place == "host"
    assert counts[0] == 1
    assert counts.count(2) == 1, "what both layers have in common is one part"


@pytest.mark.parametrize("kind", ["f32", "u8"])
@pytest.mark.parametrize("name", ["bert", "modernbert", "qwen3_with_past", "xlm_roberta_scores", "t5", "nomic_bert"])
def test_passes_for_npus_change_a_vector_by_the_rounding_of_weights(name, kind, read, lowered_of):
    def compressed():
        found = read(name)
        assert compress(found, kind)
        return found

    if kind == "f32":
        usual, lowered = lowered_of(name), lowered_of(name, is_npu=True)
    else:
        usual, lowered = lower_encoder(compressed()), lower_encoder(compressed(), passes=ENCODER_NPU)
    assert usual.shape == lowered.shape
    variants = [VARIANTS[0], *([EncoderVariant(1, 32, 1, 64)] if lowered.continued else [])]
    for variant in variants:
        feeds = feeds_of(usual, variant)
        whole = get_core().compile_model(usual.specialise(variant), "CPU", EXACT)
        (expected, *_) = run_apart(whole, feeds).values()
        chain = ChainCompiler().compile(uncompiled(lowered, variant))
        (found, *_) = run_apart(chain, feeds).values()
        assert np.abs(expected - found).max() <= HALVED * max(1, np.ptp(expected)), variant
        masks = [kind for kind in types_of_wires(chain) if kind == "f16"]
        assert masks, "layers read masks as f16"


def types_of_wires(chain):
    return [wire.element_type.get_type_name() for wire in chain.plan.wires]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_vectors_hold_in_f16(name, lowered_of):
    """Idle rows and hidden cells too: every number that is computed is rounded, and no vector is far from that in f32."""
    lowered = lowered_of(name, is_npu=True)
    variant = VARIANTS[0]
    feeds = feeds_of(lowered, variant)
    (expected, *_) = run_apart(get_core().compile_model(lowered.specialise(variant), "CPU", EXACT), feeds).values()
    rounded = lowered.specialise(variant)
    assert round_to_f16(rounded) > 10
    (found, *_) = run_apart(get_core().compile_model(rounded, "CPU", EXACT), feeds).values()
    assert np.isfinite(found).all()
    assert 0 < np.abs(expected - found).max() <= 1e-2 * max(1, np.ptp(expected))


def test_a_model_without_a_part_for_the_host_is_refused_by_name():
    x = ops.parameter([1, 4, 8], ov.Type.f32)
    x.output(0).set_names({"pool"})
    with pytest.raises(UnsupportedModelError, match="split: no value depends on the tokens alone") as error:
        Splitter().split(ov.Model([ops.result(ops.relu(x))], [x]))
    assert "\n" not in str(error.value)


def weights_of(*values, ids=True):
    """Return a graph whose token table and matrices are the given ones, and a table of angles."""
    tokens = ops.parameter([1, 3], ov.Type.i64)
    tokens.output(0).set_names({"input_ids"})
    positions = ops.parameter([1, 3], ov.Type.i64)
    positions.output(0).set_names({"position_ids"})
    table, *matrices = map(ops.constant, values)
    x = ops.gather(table, tokens, ops.constant(0))
    for matrix in matrices:
        x = ops.matmul(x, ops.transpose(matrix, np.array([1, 0])), False, False)
    angles = ops.gather(ops.constant(np.full((40, 64), 0.1, np.float32)), positions, ops.constant(0))
    return StepGraph(ov.Model([ops.result(ops.add(x, angles))], [tokens, positions]))


def test_weights_are_halved_that_f16_can_hold():
    random = np.random.default_rng(0)
    table, small, large = (random.standard_normal((64, 64)).astype(np.float32) for _ in range(3))
    large[0, 0] = 1e5
    graph = weights_of(table, small, large)
    halve_weights(graph)
    kinds = {
        (node.get_element_type().get_type_name(), tuple(node.get_output_shape(0)))
        for node in graph.model.get_ordered_ops()
        if node.get_type_name() == "Constant" and len(node.get_output_shape(0)) == 2
    }
    assert kinds == {("f16", (64, 64)), ("f32", (64, 64)), ("f32", (40, 64))}, "the host reads angles in f32"
    assert graph.notes["halve_weights"] == ["2 weights are f16, 1 are too large for it"]
    ids = np.array([[5, 0, 63]])
    found = get_core().compile_model(graph.model, "CPU", EXACT)([ids, np.array([[5, 0, 39]])])[0]
    expected = table.astype(np.float16).astype(np.float32)[ids] @ small.astype(np.float16).astype(np.float32).T
    np.testing.assert_allclose(found, expected @ large.T + 0.1, rtol=1e-5, atol=1e-2)


def test_an_encoder_of_many_layers_has_one_block():
    lowered = lower_encoder(TinyEncoder(layers=5).model(), passes=ENCODER_NPU)
    chain = Splitter().split(lowered.specialise(VARIANTS[0]))
    counts = [[call.part for call in chain.calls].count(part) for part in range(len(chain.parts))]
    assert max(counts) >= 4
    assert len(chain.parts) <= 4
