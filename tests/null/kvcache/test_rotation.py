"""Tests that rotary embeddings are found from keys alone, and that keys of other kinds are refused."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.quick import examples
from support.wine import IS_WINE

from staticllm.core import KVState
from staticllm.kvcache.groups import group_states
from staticllm.kvcache.rotation import find_rotations

pytestmark = pytest.mark.skipif(IS_WINE, reason="Wine's C runtime lacks what NumPy computes complex numbers with")
HEADS, HEAD_DIM = 2, 16


class Model:
    """Keys and values of a made-up model with rotary embeddings, by token and position."""

    def __init__(self, size, style, base, kv_type="f32", bias=0.0):
        self.states = [
            KVState(layer, role, f"{layer}.{role}", HEADS, HEAD_DIM, kv_type)
            for layer in range(2)
            for role in ("key", "value")
        ]
        self.size, self.style, self.bias = size, style, bias
        self.angles = base ** (-np.arange(size // 2) / (size // 2))

    def rows(self, token, position):
        rows = []
        for group in group_states(tuple(self.states)):
            array = np.zeros(group.shape(1), np.float32)
            for line, member in enumerate(group.members):
                state = self.states[member]
                raw = np.random.default_rng([token, member]).normal(size=(HEADS, HEAD_DIM)).astype(np.float32)
                array[line, :, 0] = self.turned(raw, position) if state.role == "key" else raw
            rows.append(encoded(array, self.states[0].kv_type))
        return rows

    def turned(self, raw, position):
        turned, half = raw.copy(), np.arange(self.size // 2)
        one, two = (half, half + self.size // 2) if self.style == "halves" else (2 * half, 2 * half + 1)
        pairs = (raw[..., one] + 1j * raw[..., two]) * np.exp(1j * self.angles * position)
        turned[..., one], turned[..., two] = pairs.real, pairs.imag
        return turned + self.bias * position


def encoded(array, kv_type):
    if kv_type == "bf16":
        return (np.ascontiguousarray(array).view(np.uint32) >> 16).astype(np.uint16)
    return array.astype(np.float16 if kv_type == "f16" else np.float32)


def decoded(array, kv_type):
    return (array.astype(np.uint32) << 16).view(np.float32) if kv_type == "bf16" else array.astype(np.float32)


@given(
    size=st.sampled_from([16, 12, 8, 4]),
    style=st.sampled_from(["halves", "neighbours"]),
    base=st.sampled_from([1e4, 5e5, 1e6]),
    kv_type=st.sampled_from(["f32", "f16", "bf16"]),
    start=st.integers(0, 1100),
    distance=st.integers(1, 1000),
)
@settings(max_examples=examples(60), deadline=None)
def test_keys_arrive_where_the_model_would_have_put_them(size, style, base, kv_type, start, distance):
    model = Model(size, style, base, kv_type)
    rotations = find_rotations(model.states, model.rows, [3, 5, 8], 1151)
    assert rotations is not None
    end = max(start - distance, 0)
    moved, expected = model.rows(11, start), model.rows(11, end)
    rotations.turn(moved, end - start)
    tolerance = {"f32": 2e-3, "f16": 1e-2, "bf16": 6e-2}[kv_type]
    for one, other in zip(moved, expected, strict=True):
        np.testing.assert_allclose(decoded(one, kv_type), decoded(other, kv_type), atol=tolerance * 4)


def test_keys_with_added_positions_are_refused():
    model = Model(16, "halves", 1e4, bias=0.05)
    assert find_rotations(model.states, model.rows, [3, 5, 8], 1151) is None


def test_keys_whose_angle_changes_with_the_length_are_refused():
    model = Model(16, "halves", 1e4)
    plain = model.turned
    model.turned = lambda raw, position: plain(raw, position if position < 512 else position * 0.7)
    assert find_rotations(model.states, model.rows, [3, 5, 8], 1151) is None


@pytest.mark.parametrize("kv_type", ["u8"])
def test_quantized_keys_are_refused(kv_type):
    model = Model(16, "halves", 1e4)
    model.states = [KVState(s.layer, s.role, s.variable_id, HEADS, HEAD_DIM, kv_type) for s in model.states]
    assert find_rotations(model.states, model.rows, [3, 5, 8], 1151) is None


def test_keys_without_positions_stay_as_they_are():
    model = Model(16, "halves", 1e4)
    model.turned = lambda raw, position: raw
    rotations = find_rotations(model.states, model.rows, [3, 5, 8], 1151)
    rows = model.rows(4, 0)
    rotations.turn(rows, -200)
    assert all(np.array_equal(one, other) for one, other in zip(rows, model.rows(4, 0), strict=True))
