import pytest
from hypothesis import given
from hypothesis import strategies as st

from staticllm.config import StaticLLMConfig
from staticllm.core import Variant
from staticllm.errors import ConfigError
from staticllm.pipelines.costs import CostTable
from staticllm.pipelines.variants import choose_variants, plan_chunks

lengths = st.integers(1, 3000)


@given(lengths, st.integers(1, 600), st.sampled_from(["shared", "separate"]), st.data())
def test_every_prompt_has_a_plan_that_fits(max_prompt_len, min_response_len, mode, data):
    config = StaticLLMConfig(max_prompt_len=max_prompt_len, min_response_len=min_response_len)
    variants = choose_variants(config, mode)
    num_tokens = data.draw(st.integers(1, max_prompt_len))
    past = data.draw(st.integers(0, max_prompt_len - num_tokens))
    done = 0
    for variant, count in plan_chunks(past, num_tokens, variants, CostTable()):
        assert variant in variants and 1 <= count <= variant.rows and variant.capacity >= past + done
        done += count
    assert done == num_tokens


def test_default_ladders():
    assert [str(v) for v in choose_variants(StaticLLMConfig(), "separate")] == [
        *(f"generate[1x{c}]" for c in (256, 512, 1024, 1152)),
        *(f"prefill[{r}x{c}]" for r in (64, 1024) for c in (0, 1152)),
    ]
    shared = choose_variants(StaticLLMConfig(max_prompt_len=8192, min_response_len=128), "shared")
    assert sorted({v.rows for v in shared}) == [1, 16, 64, 256, 1024]
    assert sorted({v.capacity for v in shared if v.rows == 16}) == [0, 256, 512, 1024, 2048, 4096, 8192, 8320]
    assert min(v.capacity for v in shared if v.rows == 1024 and v.capacity) == 1024


def test_short_prompts_run_in_small_programs_and_long_ones_in_chunks():
    variants, costs = choose_variants(StaticLLMConfig(), "shared"), CostTable()
    assert plan_chunks(0, 5, variants, costs) == [(Variant(16, 0), 5)]
    assert plan_chunks(900, 10, variants, costs) == [(Variant(16, 1024), 10)]
    assert plan_chunks(250, 10, variants, costs) == [(Variant(16, 512), 10)], "the capacity that decoding will need"
    assert plan_chunks(0, 1000, variants, costs) == [(Variant(1024, 0), 1000)]
    assert plan_chunks(100, 1, variants, costs) == [(Variant(1, 256), 1)]


@pytest.mark.parametrize(
    ("seconds", "expected"), [({16: 1.0, 64: 1.5}, [(64, 20)]), ({16: 1.0, 64: 4.0}, [(16, 16), (16, 4)])]
)
def test_padding_is_weighed_against_another_call_by_measured_cost(seconds, expected):
    variants = [Variant(16, 0), Variant(16, 128), Variant(64, 0), Variant(64, 128)]
    plan = plan_chunks(0, 20, variants, lambda variant: seconds[variant.rows])
    assert [(variant.rows, count) for variant, count in plan] == expected


def test_ladders_of_the_user():
    config = StaticLLMConfig(
        max_prompt_len=100, min_response_len=28, prefill_rows=(8, 100), generate_capacities=(64, 128)
    )
    assert {str(v) for v in choose_variants(config, "separate")} == {
        "generate[1x64]", "generate[1x128]", "prefill[8x0]", "prefill[8x128]", "prefill[100x0]", "prefill[100x128]",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="its last size must be"):
        choose_variants(StaticLLMConfig(max_prompt_len=100, min_response_len=28, generate_capacities=(64,)), "shared")
    with pytest.raises(ConfigError, match="PREFILL_CAPACITIES ends at 0"):
        choose_variants(StaticLLMConfig(max_prompt_len=100, prefill_rows=(8,), prefill_capacities=(0,)), "shared")
