"""Tests the costs that the NPU compiler's schedule predicts, and the programs in blocks that are chosen by them."""

import json

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from staticllm.cli import cli
from staticllm.compiler_passes.compiling.variants import block_variants, choose_variants, first_to_serve
from staticllm.config import StaticLLMConfig
from staticllm.core import Variant
from staticllm.pipelines.programs.variant_index import VariantIndex, plan_chunks
from staticllm.pipelines.simulator.npu_costs import INT8, INT8_HEAD, NPU_COSTS, NpuCosts
from staticllm.testing import fake_shape

COSTS = NPU_COSTS["npu-4000"]
SCHEDULE = NpuCosts(INT8, INT8_HEAD, COSTS.aligned, call_seconds=0.0)
"""The costs of the schedule alone."""


def us(rows, kv_len, costs=SCHEDULE):
    """Return the microseconds of one block."""
    variant = Variant(rows, kv_len)
    return (costs(variant) - costs.tail_seconds(variant)) / 24 * 1e6


def test_entries_of_the_table_are_kept_and_others_lie_between_them():
    for rows, line in INT8.items():
        for kv_len, entry in line.items():
            assert us(rows, kv_len) == pytest.approx(entry)
    assert us(256, (256 + 1152) // 2) == pytest.approx((2076.6 + 2754.8) / 2)
    assert us(192, 1152) == pytest.approx((1366.9 + 2754.8) / 2)
    assert us(100, 1152) == us(112, 1152), "rows are padded to a multiple of 16"
    assert us(1, 1151) == pytest.approx(409.1), "a single row and its slots together are a multiple of 16"


@settings(deadline=None)
@given(st.sampled_from(sorted(NPU_COSTS)), st.integers(1, 2048), st.integers(0, 16384), st.integers(1, 64))
def test_costs_are_positive_and_finite(name, rows, kv_len, num_logits):
    assert 0 < NPU_COSTS[name](Variant(rows, kv_len, min(rows, num_logits))) < 100


def test_parts_cost_the_host_time_and_blocks_of_several_layers_less():
    variant = Variant(16, 1152, 16)
    assert COSTS(variant) - SCHEDULE(variant) == pytest.approx(25 * 20e-6)
    pairs = NpuCosts(INT8, INT8_HEAD, {}, num_blocks=12)
    assert COSTS(variant) - pairs(variant) == pytest.approx(12 * 20e-6)
    assert pairs.divided.num_blocks == 12
    assert pairs.divided.tail(variant) == pytest.approx(2902.5e-6 + 20e-6)


def test_default_sizes_are_few():
    assert [str(v) for v in choose_variants(StaticLLMConfig(), "separate", None, "blocks")] == [
        "generate[1x1151]", "generate[16x1152x16]", "generate[16x2304x16]",
        "prefill[128x0]", "prefill[512x0]", "prefill[1024x0]",
        "prefill[64x1152x16]", "prefill[128x1152x16]", "prefill[128x2304x16]",
    ]  # fmt: skip
    alone = [str(v) for v in block_variants(StaticLLMConfig(max_num_seqs=1))]
    assert alone == [
        "generate[1x1152]", "prefill[128x0]", "prefill[512x0]", "prefill[1024x0]", "prefill[64x1152]", "prefill[128x1152]",
    ]  # fmt: skip
    unpackable = fake_shape(is_packable=False)
    assert all(v.sequences == 1 for v in choose_variants(StaticLLMConfig(), "separate", unpackable, "blocks"))
    recurrent = fake_shape(is_recurrent=True)
    exact = choose_variants(StaticLLMConfig(), "separate", recurrent, "blocks")
    assert exact == choose_variants(StaticLLMConfig(), "separate", recurrent), "idle rows would change the states"


def test_sizes_of_the_user_are_kept():
    config = StaticLLMConfig(
        max_prompt_len=100, min_response_len=28, prefill_rows=(16, 100), generate_kv_lens=(64, 128)
    )
    assert {(v.rows, v.kv_len) for v in block_variants(config)} == {
        (1, 64), (1, 128), (16, 64), (16, 128), (16, 256), (100, 0), (16, 0), (100, 256),
    }  # fmt: skip


@settings(deadline=None)
@given(st.integers(1, 6000), st.integers(1, 600), st.integers(1, 40), st.booleans(), st.data())
def test_sizes_suit_the_compiler_and_hold_every_call(max_prompt_len, min_response_len, max_num_seqs, is_packable, data):
    config = StaticLLMConfig(
        max_prompt_len=max_prompt_len, min_response_len=min_response_len, max_num_seqs=max_num_seqs
    )
    variants = block_variants(config, is_packable)
    index = VariantIndex(variants)
    num_seqs = max_num_seqs if is_packable else 1
    assert len(variants) <= 20
    assert index.max_kv_len >= config.num_kv_slots("separate")
    for variant in variants:
        if num_seqs > 1:
            assert (variant.rows + variant.kv_len) % 16 == 0
        if variant.rows > 1:
            assert variant.rows % 16 == variant.kv_len % 16 == 0
    past = data.draw(st.integers(0, config.num_kv_slots("separate") - 1))
    assert index.smallest(num_seqs, num_seqs, past) is not None, "all sequences decode in one call"
    steps = {variant.kv_len for variant in index.decoding}
    assert {v.kv_len for v in variants if v.kv_len} - {kv_len - 1 for kv_len in steps} <= steps, (
        "steps fit between blocks"
    )
    num_tokens = data.draw(st.integers(1, max_prompt_len))
    room = config.num_kv_slots("separate") - num_tokens
    is_fresh = data.draw(st.booleans())
    chunks = plan_chunks(index, COSTS, num_tokens, data.draw(st.integers(0, room)), is_fresh)
    assert sum(count for _, count in chunks) == num_tokens
    assert set(first_to_serve(variants)) <= set(variants)
    assert {v.phase for v in first_to_serve(variants)} == {"generate", "prefill"}


def simulated(*arguments):
    found = CliRunner().invoke(cli, ["simulate", "--json", "-n", "6", "--prompt", "600", "--output", "40", *arguments])
    assert found.exit_code == 0, found.output
    return json.loads(found.stdout)


def test_the_command_line_simulates_an_npu():
    npu = simulated("--costs", "npu-4000", "--policy", "fcfs", "--rate", "1", "--tpot-ms", "60")
    whole = simulated("--costs", "npu-4000", "--policy", "fcfs", "--rate", "1", "--tpot-ms", "60", "--blocks", "1")
    int4 = simulated("--costs", "npu-4000-int4", "--policy", "fcfs", "--rate", "1", "--tpot-ms", "60")
    slow = simulated("--costs", "npu-4000", "--policy", "fcfs", "--rate", "1", "--tpot-ms", "60", "--call-us", "200")
    assert npu["fcfs"]["longest_gap_ms"] < 75 < whole["fcfs"]["longest_gap_ms"]
    assert int4["fcfs"]["decode_tpot_ms"] < npu["fcfs"]["decode_tpot_ms"] < slow["fcfs"]["decode_tpot_ms"]


def test_any_costs_can_be_divided_into_blocks():
    given_costs = ("--weights-ms", "10", "--row-ms", "0.2", "--policy", "fcfs", "--rate", "1", "--tpot-ms", "40")
    assert (
        simulated(*given_costs, "--blocks", "24")["fcfs"]["longest_gap_ms"]
        < simulated(*given_costs)["fcfs"]["longest_gap_ms"]
    )


def test_a_mistake_is_one_line():
    found = CliRunner().invoke(cli, ["simulate", "--costs", "npu-4000", "--call-us", "-1"])
    assert found.exit_code == 2
    assert "--call-us -1: must be 0 or more" in found.output
    found = CliRunner().invoke(cli, ["simulate", "--costs", "npu-9000"])
    assert found.exit_code == 1
    assert "npu-9000" in found.output
