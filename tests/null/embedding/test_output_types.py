"""Tests the output types against their published definition, one value at a time, and sentence-transformers if installed."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from staticllm.errors import ConfigError
from staticllm.pipelines.embedding.output_types import (
    ENOUGH_VECTORS,
    OUTPUT_TYPES,
    as_vectors,
    check_output_type,
    convert,
    own_ranges,
    ranges_of,
)

VALUES = st.floats(-1, 1, width=16)
SEVERAL = arrays(np.float32, st.tuples(st.integers(2, 6), st.integers(1, 19)), elements=VALUES)


def one_value(value, least, greatest, kind):
    """The step of 255 that a value lies in; a range of no width has steps of width 1."""
    step = np.float32(np.float32(greatest - least) / np.float32(255)) or np.float32(1)
    place = min(max(math.floor(np.float32(value - least) / step), 0), 255)
    return place if kind == "uint8" else place - 128


def bits(row):
    """Eight values to a number, the first in the highest bit; missing ones count as 0."""
    marks = [int(value > 0) for value in row]
    marks += [0] * (-len(marks) % 8)
    return [int("".join(map(str, marks[start : start + 8])), 2) for start in range(0, len(marks), 8)]


@given(SEVERAL, st.sampled_from(["int8", "uint8"]))
def test_steps_of_the_range_follow_the_definition(vectors, kind):
    least, greatest = vectors.min(axis=0), vectors.max(axis=0)
    expected = [
        [one_value(value, low, high, kind) for value, low, high in zip(row, least, greatest, strict=True)]
        for row in vectors
    ]
    found = convert(vectors, kind, ranges_of(vectors))
    assert found.dtype == np.dtype(kind)
    np.testing.assert_array_equal(found, expected)


@given(SEVERAL)
def test_bits_follow_the_definition(vectors):
    expected = np.array([bits(row) for row in vectors])
    np.testing.assert_array_equal(convert(vectors, "ubinary"), expected)
    np.testing.assert_array_equal(convert(vectors, "binary"), expected - 128)
    assert convert(vectors, "ubinary").dtype == np.uint8
    assert convert(vectors, "binary").dtype == np.int8


def test_the_greatest_and_the_least_value_and_those_outside():
    ranges = np.array([[-55.0, 0.0], [200.0, 0.0]], np.float32)  # a step of 1, and no range
    vectors = np.array([[-55.0, 0.0], [200.0, 0.0], [-56.0, -1.0], [1e9, 300.0]], np.float32)
    assert convert(vectors, "uint8", ranges).tolist() == [[0, 0], [255, 0], [0, 0], [255, 255]]
    assert convert(vectors, "int8", ranges).tolist() == [[-128, -128], [127, -128], [-128, -128], [127, 127]]


def test_bits_of_known_vectors():
    vectors = np.array([[1, -1, 1, 1, 0, 0, 0, 1], [-1] * 8], np.float32)
    assert convert(vectors, "ubinary").tolist() == [[0b10110001], [0]]
    assert convert(vectors, "binary").tolist() == [[0b10110001 - 128], [-128]]
    assert convert(np.ones((1, 9), np.float32), "ubinary").tolist() == [[255, 128]]


@pytest.mark.parametrize("kind", OUTPUT_TYPES)
def test_no_vectors_have_the_shape_and_type_of_many(kind):
    many, none = (convert(np.zeros((count, 12), np.float32), kind, np.zeros((2, 12), np.float32)) for count in (3, 0))
    assert none.shape == (0, many.shape[1])
    assert none.dtype == many.dtype


def test_few_vectors_without_calibration_are_warned_about_and_one_is_refused():
    with pytest.warns(UserWarning, match="the ranges of int8 and uint8 are those of 3 vectors"):
        own_ranges(np.eye(3, dtype=np.float32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        own_ranges(np.eye(ENOUGH_VECTORS, dtype=np.float32))
    with pytest.raises(ConfigError, match="1 vectors have none: give a calibration"):
        convert(np.ones((1, 3), np.float32), "int8")


@pytest.mark.parametrize(
    ("kind", "calibration", "message"),
    [
        ("int4", None, "output_type='int4': must be one of 'float32', 'int8'"),
        ("binary", np.zeros((2, 4)), "calibration is for int8 and uint8, output_type is binary"),
        ("int8", np.zeros((2, 3)), r"calibration has the shape \[2, 3\]: must be \[n, 4\]"),
        ("int8", np.zeros((1, 4)), r"calibration has the shape \[1, 4\]"),
        ("int8", np.zeros(4), r"calibration has the shape \[4\]"),
    ],
)
def test_a_type_or_calibration_that_does_not_fit_is_refused(kind, calibration, message):
    with pytest.raises(ConfigError, match=message):
        check_output_type(kind, calibration, 4)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_ranges_that_are_not_finite_are_refused(value):
    with pytest.raises(ConfigError, match="not finite"):
        ranges_of(np.array([[0.0, 1.0], [0.5, value]], np.float32))


def test_a_calibration_of_lists_is_one_of_an_array():
    given = [[0.0, 1.0], (2, 3), np.array([4.0, -1.0])]
    np.testing.assert_array_equal(ranges_of(as_vectors(given)), [[0, -1], [4, 3]])
    half = np.ones((2, 3), np.float16)
    assert as_vectors(half) is half, "a mapped file is not copied"


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ([[1.0], [1.0, 2.0]], "list"),
        ([["a", "b"], ["c", "d"]], "list"),
        ([[1j, 2], [3, 4]], "list"),
        ([[10**400], [1]], "list"),
        ([[{}], [2]], "list"),
        (np.zeros((2, 2), "M8[s]"), "ndarray"),
        (object(), "object"),
    ],
)
def test_a_calibration_that_is_no_array_of_numbers_gets_one_line(given, kind):
    with pytest.raises(ConfigError, match=f"calibration is a {kind} of which numpy makes no array of numbers") as error:
        as_vectors(given)
    assert "\n" not in str(error.value)


def test_values_beyond_float32_are_refused_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ConfigError, match="not finite"):
            ranges_of(np.array([[1e300, 1.0], [0.0, 2.0]]))


@pytest.fixture(scope="module")
def peer():
    return pytest.importorskip("sentence_transformers.util.quantization", reason="pip install '.[embed-test]'")


@given(vectors=SEVERAL, kind=st.sampled_from(OUTPUT_TYPES), is_calibrated=st.booleans())
def test_sentence_transformers_computes_the_same(peer, vectors, kind, is_calibrated):
    ranges = np.array([vectors.min(axis=0) / 2, vectors.max(axis=0)]) if is_calibrated else None
    expected = peer.quantize_embeddings(vectors, kind, ranges=ranges)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = convert(vectors, kind, None if ranges is None else ranges.astype(np.float32))
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)
