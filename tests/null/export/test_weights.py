"""Tests the types of exported weights: the defaults of each device, and one line for what is impossible."""

from __future__ import annotations

import pytest

from staticllm.errors import ConfigError
from staticllm.export.weights import WeightFormat, weights_for


@pytest.mark.parametrize(
    ("device", "is_decoder", "asked", "found"),
    [
        ("NPU", True, {}, WeightFormat("int4", 128, True)),
        ("NPU", True, {"kind": "int8"}, WeightFormat("int8", -1, True)),
        ("NPU", True, {"group_size": -1}, WeightFormat("int4", -1, True)),
        ("NPU", True, {"is_symmetric": False}, WeightFormat("int4", 128, False)),
        ("NPU", False, {}, WeightFormat("f16")),
        ("CPU", True, {}, WeightFormat("int8", -1, False)),
        ("CPU", True, {"kind": "int4"}, WeightFormat("int4", 128, False)),
        ("CPU", True, {"is_symmetric": True}, WeightFormat("int8", -1, True)),
        ("CPU", False, {"kind": "int8"}, WeightFormat("int8", -1, False)),
        ("GPU", True, {"kind": "f32"}, WeightFormat("f32")),
    ],
)
def test_what_is_left_out_is_chosen(device, is_decoder, asked, found):
    assert weights_for(device, is_decoder, **asked) == found


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"kind": "f16", "group_size": 64}, "--group-size needs weights of int4 or int8, and these have f16"),
        ({"kind": "f32", "is_symmetric": True}, "--symmetric or --asymmetric needs"),
        ({"kind": "int8", "group_size": 64}, "--group-size 64 is for int4"),
        ({"group_size": 0}, "--group-size 0 is impossible: give 16, 32"),
        ({"group_size": 100}, "or -1 for one group per channel"),
        ({"group_size": -2}, "--group-size -2 is impossible"),
        ({"group_size": 10**40}, "is impossible"),
    ],
)
def test_impossible_values_get_one_line(asked, words):
    with pytest.raises(ConfigError) as error:
        weights_for("NPU", True, **asked)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_symmetric_weights_have_a_symmetric_backup():
    """Embeddings with zero points would cost an NPU what symmetric matrices save."""
    assert weights_for("NPU", True).compression["backup_precision"] == "int8_sym"
    assert weights_for("CPU", True, "int4").compression["backup_precision"] == "int8_asym"
    assert weights_for("CPU", True, "f16").compression is None
