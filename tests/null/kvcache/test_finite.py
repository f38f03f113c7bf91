"""Tests ``is_finite`` for every element type of KV slots."""

import numpy as np
import pytest

from staticllm.kvcache.finite import is_finite

BF16 = {"nan": 0x7FC0, "inf": 0x7F80, "-inf": 0xFF80, "most": 0x7F7F, "-0": 0x8000, "least": 0x0001}


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_floats_are_found(dtype, bad):
    values = np.full((2, 3, 4, 5), np.finfo(dtype).max, dtype)
    assert is_finite(values)
    assert is_finite(-values)
    values[1, 2, 3, 4] = bad
    assert not is_finite(values)
    assert is_finite(values[:, :, :3])


@pytest.mark.parametrize("name", sorted(BF16))
def test_non_finite_bf16_bits_are_found(name):
    values = np.zeros((1, 2, 3), np.uint16)
    values[0, 1, 2] = BF16[name]
    assert is_finite(values) is (name not in ("nan", "inf", "-inf"))


def test_integers_and_empty_arrays_are_finite():
    assert is_finite(np.full(3, 255, np.uint8))
    assert is_finite(np.zeros((1, 0, 4), np.float32))
