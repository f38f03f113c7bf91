"""Which variants share a program: by the size of the weights and MEMORY_LIMIT_MB, by estimate."""

from pathlib import Path

import pytest

from staticllm.config import StaticLLMConfig
from staticllm.errors import ConfigError
from staticllm.pipelines.programs import layout
from staticllm.pipelines.programs.layout import BASE_BYTES, PACKED_SHARE, program_layout

WEIGHTS = 500 << 20
SLOT_BYTES = 48 * 2 * 64 * 4  # 24 layers, keys and values of two heads in f32


@pytest.fixture
def chosen(monkeypatch):
    monkeypatch.setattr(layout, "kv_shapes", lambda path: [(2, 64)] * 48)

    def chosen(weights=WEIGHTS, device="CPU", **values):
        monkeypatch.setattr(layout, "weights_size", lambda path, weights_path: weights)
        return program_layout(device, Path(), StaticLLMConfig(**values))

    return chosen


def needed_mb(copies, slots, weights=WEIGHTS):
    return -(-(BASE_BYTES + copies * int(PACKED_SHARE * weights) + slots * SLOT_BYTES) // 10**6)


def test_a_layout_is_kept_if_it_fits_into_the_limit(chosen):
    slots = StaticLLMConfig().num_kv_slots("shared")
    assert chosen() == "few_rows"
    assert chosen(memory_limit_mb=needed_mb(2, slots)) == "few_rows"
    assert chosen(memory_limit_mb=needed_mb(2, slots) - 1) == "shared"
    assert chosen(memory_limit_mb=needed_mb(1, slots)) == "shared"
    small = 100 << 20
    assert chosen(small, memory_limit_mb=needed_mb(2, slots, small)) == "phases"
    assert chosen(small, memory_limit_mb=needed_mb(2, slots, small) - 1) == "shared"


def test_a_limit_that_one_program_exceeds_is_refused_with_both_numbers(chosen):
    needed = needed_mb(1, StaticLLMConfig().num_kv_slots("shared"))
    with pytest.raises(
        ConfigError, match=rf"MEMORY_LIMIT_MB={needed - 1}: .* about {needed} MB with one program: raise"
    ):
        chosen(memory_limit_mb=needed - 1)


def test_the_users_layout_is_not_changed_but_refused(chosen):
    needed = needed_mb(2, StaticLLMConfig().num_kv_slots("shared"))
    assert chosen(programs="few_rows", memory_limit_mb=needed) == "few_rows"
    with pytest.raises(ConfigError, match=f"about {needed} MB with PROGRAMS=few_rows"):
        chosen(programs="few_rows", memory_limit_mb=needed - 1)


def test_more_slots_need_more_memory(chosen):
    limit = needed_mb(2, StaticLLMConfig().num_kv_slots("shared"))
    assert chosen(memory_limit_mb=limit, kv_slots=15_000) == "shared"
    assert chosen(memory_limit_mb=limit, kv_slots=15_000, kv_cache_precision="u8") == "few_rows"


def test_other_devices_have_no_limit(chosen):
    assert chosen(device="NPU", memory_limit_mb=1) == "separate"
    assert chosen(programs="separate", memory_limit_mb=1) == "separate"


@pytest.mark.parametrize("value", [0, -5, "much", 1.5])
def test_an_impossible_limit_is_refused(value):
    with pytest.raises(ConfigError, match="MEMORY_LIMIT_MB="):
        StaticLLMConfig(memory_limit_mb=value)
