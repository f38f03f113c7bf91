from functools import cache
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from staticllm.compiler_passes.compiling.variants import choose_variants
from staticllm.config import StaticLLMConfig
from staticllm.core import Variant
from staticllm.errors import ConfigError
from staticllm.pipelines.costs.model import CostModel
from staticllm.pipelines.programs.variant_index import VariantIndex, plan_chunks
from staticllm.testing import fake_shape

lengths = st.integers(1, 3000)


@settings(deadline=None)
@given(lengths, st.integers(1, 600), st.sampled_from(["shared", "separate"]), st.data())
def test_every_prompt_has_a_plan_that_fits(max_prompt_len, min_response_len, mode, data):
    config = StaticLLMConfig(max_prompt_len=max_prompt_len, min_response_len=min_response_len)
    variants = choose_variants(config, mode)
    num_tokens = data.draw(st.integers(1, max_prompt_len))
    is_fresh = data.draw(st.booleans())
    past = data.draw(st.integers(0, config.num_kv_slots(mode) - num_tokens))
    done = 0
    for variant, count in plan_chunks(VariantIndex(variants), CostModel(), num_tokens, past, is_fresh):
        is_seen = variant.kv_len >= past + done or (is_fresh and not done and not variant.kv_len)
        assert variant in variants
        assert 1 <= count <= variant.rows
        assert is_seen
        done += count
    assert done == num_tokens


def test_default_buckets():
    assert [str(v) for v in choose_variants(StaticLLMConfig(programs="separate"), "separate")] == [
        *(f"generate[1x{c}]" for c in (256, 512, 1024, 1152, 2304)),
        *(f"generate[4x{c}x4]" for c in (1152, 2304)),
        *(f"prefill[{r}x{c}]" for r in (64, 1024) for c in (0, 2304)),
    ]
    alone = StaticLLMConfig(max_num_seqs=1)
    assert [str(v) for v in choose_variants(alone, "separate")] == [
        *(f"generate[1x{c}]" for c in (256, 512, 1024, 1152)),
        *(f"prefill[{r}x{c}]" for r in (64, 1024) for c in (0, 1152)),
    ]
    assert choose_variants(
        StaticLLMConfig(kv_slots=1152), "separate", fake_shape(is_packable=False)
    ) == choose_variants(alone, "separate"), "a model that cannot be packed has no packed programs"
    shared = choose_variants(StaticLLMConfig(max_prompt_len=8192, min_response_len=128, max_num_seqs=12), "shared")
    assert sorted({(v.rows, v.sequences) for v in shared if v.phase == "generate"}) == [
        (1, 1),
        (2, 2),
        (4, 4),
        (8, 8),
        (12, 12),
    ]
    rows = sorted({v.rows for v in shared if v.sequences == 1})
    assert rows == [1, *range(16, 128, 16), *range(128, 256, 16), *range(256, 512, 32), *range(512, 1025, 64)]
    assert sorted({v.sequences for v in shared if v.rows == 64}) == [1, 2, 4, 8, 16]
    assert max(v.kv_len for v in shared) == 4 * 8320
    assert 8320 in {v.kv_len for v in shared}
    assert min(v.kv_len for v in shared if v.rows == 1024 and v.kv_len) == 1024


def test_short_prompts_run_in_small_programs_and_long_ones_in_chunks():
    index, costs = VariantIndex(choose_variants(StaticLLMConfig(max_num_seqs=1), "shared")), CostModel()
    assert plan_chunks(index, costs, 5, 0, True) == [(Variant(16, 0), 5)]
    assert plan_chunks(index, costs, 10, 900) == [(Variant(16, 1024), 10)]
    assert plan_chunks(index, costs, 10, 900, True) == [(Variant(16, 0), 10)], (
        "slots of other requests need not be seen"
    )
    assert plan_chunks(index, lambda variant: 1.0, 1000, 0, True) == [(Variant(1024, 0), 1000)], "calls are what costs"
    assert plan_chunks(index, costs, 1, 100) == [(Variant(1, 256), 1)]


@pytest.mark.parametrize(
    ("seconds", "expected"), [({16: 1.0, 64: 1.5}, [(64, 20)]), ({16: 1.0, 64: 4.0}, [(16, 16), (16, 4)])]
)
def test_padding_is_weighed_against_another_call_by_measured_cost(seconds, expected):
    index = VariantIndex([Variant(16, 0), Variant(16, 128), Variant(64, 0), Variant(64, 128)])
    plan = plan_chunks(index, lambda variant: seconds[variant.rows], 20, 0, True)
    assert [(variant.rows, count) for variant, count in plan] == expected


def test_slots_that_leave_are_seen_by_the_first_chunk_only():
    index, seconds = VariantIndex([Variant(16, 64), Variant(16, 256), Variant(32, 0), Variant(32, 64), Variant(32, 256)]), {
        (16, 64): 1.0, (16, 256): 9.0, (32, 0): 3.0, (32, 64): 3.0, (32, 256): 9.0,
    }  # fmt: skip

    def plan(*arguments):
        return plan_chunks(index, lambda variant: seconds[variant.rows, variant.kv_len], *arguments)

    assert plan(48, 200, True) == [(Variant(32, 0), 32), (Variant(16, 256), 16)]
    assert plan(48, 200, True, 200) == [(Variant(32, 0), 32), (Variant(16, 64), 16)]
    assert plan(48, 200, False, 200) == [(Variant(32, 256), 32), (Variant(16, 64), 16)], "the first chunk sees them"


@settings(deadline=None)
@given(
    st.sets(st.integers(1, 24), min_size=1, max_size=5), st.integers(1, 32), st.booleans(), st.booleans(), st.integers()
)
def test_no_other_chunks_are_cheaper(sizes, num_tokens, needs_real_rows, is_fresh, seed):
    """All ways are compared with the plan's; a larger size may cost less, as with processors that compute in blocks."""
    sizes, random = sorted(sizes | ({1} if needs_real_rows else set())), Random(seed)
    index = VariantIndex([Variant(rows, kv_len) for rows in sizes for kv_len in (0, 16, 64)], needs_real_rows)
    seconds = {variant: random.uniform(1.0, 1.0 + variant.rows) for variant in index.variants}

    @cache
    def cheapest(done):
        if done == num_tokens:
            return 0.0
        ways = []
        for rows in sizes:
            variant = index.at(rows, 1, min(8 + done, 64), is_fresh and not done)
            rest = num_tokens - done
            if rows <= rest or not needs_real_rows:
                ways.append(seconds[variant] + cheapest(min(done + rows, num_tokens)))
        return min(ways)

    plan = plan_chunks(index, seconds.__getitem__, num_tokens, 8, is_fresh)
    assert sum(count for _, count in plan) == num_tokens
    assert sum(seconds[variant] for variant, _ in plan) == pytest.approx(cheapest(0))


def test_the_smallest_variant_that_holds_a_call():
    index = VariantIndex([Variant(1, 64), Variant(4, 64, 4), Variant(16, 0), Variant(16, 0, 4), Variant(16, 64, 4)])
    assert index.smallest(1, 1, 10) == Variant(1, 64)
    assert index.smallest(3, 3, 64) == Variant(4, 64, 4)
    assert index.smallest(3, 1, 10, is_fresh=True) == Variant(4, 64, 4)
    assert index.smallest(9, 1, 10, is_fresh=True) == Variant(16, 0)
    assert index.smallest(9, 2, 10) == Variant(16, 64, 4)
    assert index.smallest(2, 2, 65) is None
    assert index.smallest(9, 5, 10) is None
    assert index.max_decoding(0) == 4


def test_the_user_can_set_the_buckets():
    config = StaticLLMConfig(
        max_prompt_len=100, min_response_len=28, prefill_rows=(8, 100), generate_kv_lens=(64, 128), max_num_seqs=1
    )
    assert {str(v) for v in choose_variants(config, "separate")} == {
        "generate[1x64]", "generate[1x128]", "prefill[8x0]", "prefill[8x128]", "prefill[100x0]", "prefill[100x128]",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="its last size must be"):
        choose_variants(StaticLLMConfig(max_prompt_len=100, min_response_len=28, generate_kv_lens=(64,)), "shared")
    with pytest.raises(ConfigError, match="PREFILL_KV_LENS ends at 0"):
        choose_variants(StaticLLMConfig(max_prompt_len=100, prefill_rows=(8,), prefill_kv_lens=(0,)), "shared")


def test_a_prompt_that_fits_only_into_gaps_has_a_plan():
    index = VariantIndex([Variant(1, 64), Variant(16, 0), Variant(16, 64)])
    assert sum(count for _, count in plan_chunks(index, CostModel(), 30, num_past=60)) == 30


def test_variants_with_num_logits_are_found_only_by_with_logits():
    ordinary = [Variant(1, 64), Variant(4, 64, 4), Variant(16, 0), Variant(16, 64)]
    index = VariantIndex(
        [*ordinary, Variant(4, 64, extra_logits=3), Variant(4, 128, extra_logits=3), Variant(8, 512, 2, extra_logits=6)]
    )
    plain = VariantIndex(ordinary)
    assert (index.sizes, index.widest, index.max_kv_len) == (plain.sizes, plain.widest, plain.max_kv_len)
    assert index.smallest(2, 1, 100) is None
    assert index.smallest(4, 1, 10) == plain.smallest(4, 1, 10)
    assert index.max_decoding(0) == plain.max_decoding(0)
    assert index.with_logits(4, 1, 4, 10) == Variant(4, 64, extra_logits=3)
    assert index.with_logits(3, 1, 2, 100) == Variant(4, 128, extra_logits=3)
    assert index.with_logits(4, 2, 3, 10) == Variant(4, 64, 4), "one that has logits after four rows anyway"
    assert index.with_logits(9, 1, 2, 10) is None
    assert index.with_logits(1, 1, 1, 10) == Variant(1, 64)
    assert index.with_logits(9, 1, 1, 999, is_fresh=True) == Variant(16, 0)
