"""Tests lowered encoders: packed texts get the vectors of each text alone through the original model, in f32 on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from support.encoders.encoder_models import (
    HEADS,
    Alone,
    Packed,
    Placed,
    TinyEncoder,
    a_text,
    a_variant,
    alibi_of_keys,
    by_distance,
    some_texts,
    symmetric_alibi,
    unpack,
)

from staticllm.compiler_passes.lower_encoder import lower_encoder
from staticllm.core import EncoderMask
from staticllm.devices import get_core
from staticllm.pipelines.diagnostics.reference import EXACT
from staticllm.pipelines.embedding.packing.encoder_buffers import positions_of

FULL, CAUSAL, LOCAL = EncoderMask(), EncoderMask(after=0), EncoderMask(8, 8)
EXPORTED = {
    "bert": (FULL,), "mpnet": (FULL,), "modernbert": (FULL, LOCAL), "qwen3": (CAUSAL,), "xlm_roberta_scores": (FULL,),
}  # fmt: skip
MORE = {
    **dict.fromkeys(
        (
            "xlm_roberta", "distilbert", "deberta", "jina_v3", "t5", "roformer", "bert_scores", "roberta", "electra",
            "albert", "nomic_bert", "eurobert",
        ),
        (FULL,),
    ),
    "modernbert_scores": (FULL, LOCAL),
}  # fmt: skip
OWN = {"alibi": TinyEncoder(by_distance(symmetric_alibi)), "alibi_of_keys": TinyEncoder(alibi_of_keys)}
NAMES = [*EXPORTED, *OWN, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]
FIRST_POSITIONS = {"roberta": 2, "xlm_roberta": 2, "xlm_roberta_scores": 2, "mpnet": 2}
TOLERANCE = 1e-6
"""Between vectors of length 1. Scores are not normalised: twice this, of the largest."""


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """A function from a name to a lowered encoder and the original."""
    known = {}

    def encoder(name):
        if name not in known:
            known[name] = (
                lower_encoder(read(name, tmp_path_factory.mktemp(name))),
                Alone(read(name, tmp_path_factory.mktemp(name))),
            )
        return known[name]

    return encoder


@pytest.fixture(scope="module")
def packed_of(encoders):
    """A function from a name to its program of the usual variant, which is compiled once."""
    known = {}

    def of(name):
        if name not in known:
            known[name] = Packed(encoders(name)[0], a_variant())
        return known[name]

    return of


def read(name, folder):
    return OWN[name].model() if name in OWN else get_core().read_model(unpack(name, folder))


def difference(vectors, texts, alone, pooling):
    expected = [alone(text.ids, pooling, text.types) for text in texts]
    return float(np.abs(np.array(expected) - vectors).max())


@pytest.mark.parametrize("name", NAMES)
def test_packed_texts_get_the_vectors_of_each_text_alone(name, encoders):
    lowered, alone = encoders(name)
    rng = np.random.default_rng(sum(map(ord, name)))
    for variant in (a_variant(texts=8), a_variant(texts=2), a_variant(batch=4, texts=20)):
        program = Packed(lowered, variant)
        texts = some_texts(rng, lowered.shape, variant)
        for pooling in [lowered.shape.pooling] if lowered.shape.pooling else ["mean", "first", "last"]:
            vectors = program(texts, pooling)
            worst = difference(vectors, zeroed(texts, lowered.shape), alone, pooling)
            scale = 2 * max(1, np.abs(vectors).max()) if lowered.shape.output == "scores" else 1
            assert worst <= TOLERANCE * scale


def zeroed(texts, shape):
    """Return the texts as a model without token types sees them."""
    if shape.has_token_types:
        return texts
    return [type(text)(text.ids, text.sequence, text.start, np.zeros_like(text.types)) for text in texts]


@pytest.mark.parametrize("name", NAMES)
def test_the_shape_says_what_the_host_must_feed(name, encoders):
    shape = encoders(name)[0].shape
    assert set(shape.masks) == set({**EXPORTED, **MORE}.get(name, (FULL,)))
    assert shape.is_packable
    assert shape.first_position == FIRST_POSITIONS.get(name, 0)
    assert shape.has_positions == (name not in ("t5", "alibi"))
    assert shape.has_token_types == (name == "bert_scores")
    assert (shape.output == "scores") == name.endswith("_scores")
    assert shape.pooling == {"bert_scores": "first", "xlm_roberta_scores": "first", "modernbert_scores": "mean"}.get(
        name
    )
    tables = {"mpnet": 138, "xlm_roberta": 138, "xlm_roberta_scores": 138, "roberta": 138}
    learned = ("bert", "distilbert", "deberta", "bert_scores", "electra", "albert", "jina_v3", "nomic_bert")
    assert shape.max_rows == tables.get(name, 140 if name in learned else 512)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ids", [[5, 1, 1, 6, 7, 1], [1], [1, 1, 9], [9, 8, 7, 1]])
def test_a_padding_token_inside_of_a_text_has_the_position_that_the_original_gives_it(name, ids, encoders, packed_of):
    (lowered, alone), packed = encoders(name), packed_of(name)
    first = FIRST_POSITIONS.get(name, 0)
    assert lowered.shape.skipped_id == (first - 1 if first else None)
    text = Placed(np.array(ids), 0, 0, np.zeros(len(ids), np.int64))
    pooling = lowered.shape.pooling or "mean"
    found = packed([text], pooling)[0]
    assert np.abs(found - alone(text.ids, pooling)).max() <= 2 * TOLERANCE
    np.testing.assert_array_equal(positions_of(lowered.shape, text.ids), packed._positions(ids))


@pytest.mark.parametrize("name", ["bert", "modernbert", "deberta", "qwen3", "alibi"])
def test_a_vector_is_bit_identical_whatever_shares_the_call(name, encoders):
    lowered, _ = encoders(name)
    program = Packed(lowered, a_variant(batch=2))
    rng = np.random.default_rng(5)
    text = a_text(rng, 7, 1, 9)
    vectors = []
    for _ in range(4):
        others = [
            a_text(rng, length, sequence, start) for length, sequence, start in ((9, 1, 0), (24, 0, 0), (3, 1, 16))
        ]
        vectors.append(program([others[0], text, *others[1:]], "mean", idle=int(rng.integers(5, 99)))[1])
    for vector in vectors[1:]:
        assert vector.tobytes() == vectors[0].tobytes()


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_one_program_with_bounded_sizes_serves_several_variants(name, encoders):
    lowered, alone = encoders(name)
    variants = (a_variant(8, 1, 2), a_variant(24, 4, 12), a_variant(16, 2, 4))
    program = Packed(lowered, variants[0])
    program.program = get_core().compile_model(lowered.share(variants), "CPU", EXACT)
    rng = np.random.default_rng(3)
    for variant in variants:
        program.variant = variant
        texts = zeroed(some_texts(rng, lowered.shape, variant), lowered.shape)
        assert difference(program(texts, "mean"), texts, alone, "mean") <= TOLERANCE


def test_a_static_program_with_as_many_rows_as_heads_is_refused(encoders):
    """OpenVINO's CPU plugin computes wrong values there; a program of several variants is right."""
    lowered, alone = encoders("modernbert")
    assert lowered.shape.unsafe_rows == (HEADS,)
    with pytest.raises(ValueError, match=r"encode\[1x4,texts=2\] has as many rows as the model has heads"):
        lowered.specialise(a_variant(HEADS, 1, 2))
    program = Packed(lowered, a_variant(8, 1, 2))
    program.variant, rng = a_variant(HEADS, 1, 2), np.random.default_rng(4)
    program.program = get_core().compile_model(
        lowered.share((a_variant(HEADS, 1, 2), a_variant(8, 1, 2))), "CPU", EXACT
    )
    texts = zeroed([a_text(rng, 3), a_text(rng, 1, 0, 3)], lowered.shape)
    assert difference(program(texts, "mean"), texts, alone, "mean") <= TOLERANCE


MISTAKES = {
    "a position that is one too large": ("xlm_roberta", "position_ids", (0, slice(9, 16)), 1),
    "positions that begin at 0 instead of 2": ("xlm_roberta", "position_ids", (0, slice(9, 16)), -2),
    "positions that go on from the text before": ("qwen3", "position_ids", (0, slice(9, 10)), 9),
    "a cell of another text": ("bert", "mask.full", (0, 0, 12, 3), 65504),
    "a cell of a later token": ("qwen3", "mask.causal", (0, 0, 10, 12), 65504),
    "a cell outside of the window": ("modernbert", "mask.local:8", (0, 0, 9, 18), 65504),
    "a cell that is hidden": ("t5", "mask.full", (0, 0, 10, 12), -65504),
    "a token type": ("bert_scores", "token_type_ids", (0, 12), 1),
    "a row of another text": ("mpnet", "pool", (1, 3), 0.1),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_of_the_host_shows(mistake, encoders, packed_of):
    name, port, place, amount = MISTAKES[mistake]
    (lowered, alone), program = encoders(name), packed_of(name)
    rng = np.random.default_rng(1)
    texts = zeroed([a_text(rng, 9), a_text(rng, 12, 0, 9)], lowered.shape)
    pooling = lowered.shape.pooling or "mean"
    feeds = program.feeds(texts, pooling)
    assert difference(program.run(feeds)[:2], texts, alone, pooling) <= TOLERANCE * 10
    feeds[port][place] += amount
    assert difference(program.run(feeds)[:2], texts, alone, pooling) > 100 * TOLERANCE
