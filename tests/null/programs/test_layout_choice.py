"""Which variants share a program: by the size of the weights and MEMORY_LIMIT_MB, by estimate."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from staticllm.compiler_passes.compiling import layout
from staticllm.compiler_passes.compiling.layout import (
    BASE_BYTES,
    HIDDEN_VALUES,
    INNER_VALUES,
    PACKED_SHARE,
    PROGRAM_BYTES,
    is_worth_a_copy,
    may_have_few_rows,
    program_layout,
    with_host_slots,
    with_own_lengths,
)
from staticllm.config import StaticLLMConfig
from staticllm.errors import ConfigError

WEIGHTS = 500 << 20
SLOT_BYTES = 48 * 2 * 64 * 4  # 24 layers, keys and values of two heads in f32
WIDTHS = (896, 4864)


@pytest.fixture
def model(monkeypatch):
    """Make every model one of these sizes; call it to change the bytes of its weights."""
    monkeypatch.setattr(layout, "kv_shapes", lambda *arguments: [(2, 64)] * 48)
    monkeypatch.setattr(layout, "model_widths", lambda path: WIDTHS)

    def of(weights):
        monkeypatch.setattr(layout, "weights_size", lambda *arguments: weights)

    of(WEIGHTS)
    return of


@pytest.fixture
def chosen(model):
    def chosen(weights=WEIGHTS, device="CPU", **values):
        model(weights)
        return program_layout(device, Path(), StaticLLMConfig(**values))

    return chosen


def needed_mb(copies, weights=WEIGHTS, rows=1024, **values):
    """Return the estimate in MB: base, activations, KV slots with one sequence in the host pool, and programs."""
    config = StaticLLMConfig(**values)
    slots = config.num_kv_slots("shared") + config.max_seq_len + rows
    activations = 4 * rows * (HIDDEN_VALUES * WIDTHS[0] + INNER_VALUES * WIDTHS[1])
    programs = copies * (PROGRAM_BYTES + int(PACKED_SHARE * weights))
    return -(-(BASE_BYTES + activations + slots * SLOT_BYTES + programs) // 10**6)


def test_a_layout_is_kept_if_it_fits_into_the_limit(chosen):
    assert chosen() == "few_rows"
    assert chosen(memory_limit_mb=needed_mb(2)) == "few_rows"
    assert chosen(memory_limit_mb=needed_mb(2) - 1) == "shared"
    assert chosen(memory_limit_mb=needed_mb(1)) == "shared"
    small = 100 << 20
    assert chosen(small, memory_limit_mb=needed_mb(2, small)) == "phases"
    assert chosen(small, memory_limit_mb=needed_mb(2, small) - 1) == "shared"


def test_small_models_have_a_third_program_where_it_is_wanted_and_fits(chosen):
    small = 100 << 20
    limit = needed_mb(3, small)
    chosen(small)

    def may(layout="phases", device="CPU", **values):
        return may_have_few_rows(layout, device, Path(), StaticLLMConfig(**values), "f32")

    assert may()
    assert may(memory_limit_mb=limit)
    assert not may(memory_limit_mb=limit - 1)
    assert not may(programs="phases")
    assert not may(device="GPU")
    assert not may(layout="shared")
    assert may(layout="few_rows", programs="few_rows")


def test_a_limit_that_one_program_exceeds_is_refused_with_both_numbers_and_remedies(chosen):
    needed = needed_mb(1)
    with pytest.raises(
        ConfigError,
        match=rf"^MEMORY_LIMIT_MB={needed - 1}: .* about {needed} MB with one program: raise the limit, or lower KV_SLOTS",
    ) as caught:
        chosen(memory_limit_mb=needed - 1)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changes", [{"max_num_seqs": 1}, {"max_prompt_len": 512}, {"prefill_rows": [256]}])
def test_each_remedy_lowers_what_is_needed(chosen, changes):
    with pytest.raises(ConfigError):
        chosen(memory_limit_mb=needed_mb(1) - 10)
    assert chosen(memory_limit_mb=needed_mb(1) - 10, **changes) == "shared"


def test_the_users_layout_is_not_changed_but_refused(chosen):
    needed = needed_mb(2)
    assert chosen(programs="few_rows", memory_limit_mb=needed) == "few_rows"
    with pytest.raises(ConfigError, match=f"about {needed} MB with PROGRAMS=few_rows"):
        chosen(programs="few_rows", memory_limit_mb=needed - 1)


def test_more_slots_need_more_memory(chosen):
    limit = needed_mb(2)
    assert chosen(memory_limit_mb=limit, kv_slots=15_000) == "shared"
    assert chosen(memory_limit_mb=limit, kv_slots=15_000, kv_cache_precision="u8") == "few_rows"


def test_the_host_pool_gets_what_the_limit_leaves(model):
    def slots(limit, **values):
        config = StaticLLMConfig(memory_limit_mb=limit, **values)
        return with_host_slots("CPU", Path(), config, "f32").num_host_slots

    longest, default = StaticLLMConfig().max_seq_len, StaticLLMConfig().num_host_slots
    assert slots(None) == default
    assert longest <= slots(needed_mb(1)) <= longest + 10**6 // SLOT_BYTES
    assert slots(needed_mb(1) + 100) - slots(needed_mb(1)) == pytest.approx(100 * 10**6 / SLOT_BYTES, abs=2)
    assert slots(10 * needed_mb(2)) == default
    assert slots(10 * needed_mb(2), host_kv_slots=7) == 7
    with pytest.raises(ConfigError, match="MEMORY_LIMIT_MB"):
        slots(needed_mb(1) - 1)
    config = with_host_slots("CPU", Path(), StaticLLMConfig(memory_limit_mb=needed_mb(1) + 100), "f32")
    assert program_layout("CPU", Path(), config) == "shared"


@pytest.mark.parametrize(
    ("megabytes", "speedup", "is_worth"),
    [
        (494, 1.19, True),  # 0.84 of a token's time, as measured with AVX-512 and VNNI
        (494, 1.0, False),  # without VNNI both programs compute the same
        (494, 1.09, False),
        (1000, 1.19, False),
        (1000, 1.4, True),
        (494, 0.9, False),
    ],
)
def test_a_second_program_must_pay_for_its_copy_of_the_weights(megabytes, speedup, is_worth):
    assert is_worth_a_copy(megabytes * 10**6, speedup) == is_worth


def test_other_devices_have_no_limit(chosen):
    assert chosen(device="NPU", memory_limit_mb=1) == "blocks"
    assert chosen(programs="separate", memory_limit_mb=1) == "separate"


@pytest.mark.parametrize("value", [0, -5, "much", 1.5])
def test_an_impossible_limit_is_refused(value):
    with pytest.raises(ConfigError, match="MEMORY_LIMIT_MB="):
        StaticLLMConfig(memory_limit_mb=value)


@pytest.fixture
def own(model, monkeypatch):
    """The lengths of a sequence on a CPU where so many bytes of memory are free, and the model has so many positions."""

    def own(free=10**9, positions=4096, device="CPU", given=(), **values):
        monkeypatch.setattr(layout.psutil, "virtual_memory", lambda: SimpleNamespace(available=free))
        monkeypatch.setattr(layout, "max_positions", lambda *arguments: positions)
        return with_own_lengths(device, Path(), StaticLLMConfig(**values), "f32", given)

    return own


def test_without_lengths_the_model_decides_how_long_a_sequence_is(own):
    config = own(free=10**11)
    assert (config.max_seq_len, config.kv_slots) == (4096, 16 * 4096)
    assert config.host_kv_slots == 16 * 1152
    assert own(free=10**11, positions=None).max_seq_len == 32768
    assert own(free=10**12, positions=10**7).max_seq_len == 1 << 17


def test_without_lengths_memory_decides_where_it_is_less(own):
    config = own(free=10**8 * 3, positions=32768)
    assert config.max_seq_len == config.kv_slots == 10**8 // SLOT_BYTES
    assert config.host_kv_slots == 10**8 // 2 // SLOT_BYTES
    assert own(free=10**6).max_seq_len == 1152, "never less than before"
    limited = own(free=10**11, positions=10**6, memory_limit_mb=2000)
    assert 1152 < limited.max_seq_len < 2000 * 10**6 // 3 // SLOT_BYTES


@pytest.mark.parametrize(
    "changes",
    [
        {"given": ("max_prompt_len",), "max_prompt_len": 64},
        {"given": ("prefill_rows",), "prefill_rows": (16,)},
        {"device": "NPU"},
        {"device": "GPU"},
        {"programs": "separate"},
        {"programs": "blocks"},
        {"blob_path": "set"},
    ],
)
def test_lengths_that_are_given_or_compiled_stay(own, changes):
    values = {name: value for name, value in changes.items() if name not in ("given", "device")}
    assert own(free=10**11, **changes) == StaticLLMConfig(**values)


def test_given_slots_bound_a_sequence(own):
    config = own(free=10**11, kv_slots=2000, given=("kv_slots",))
    assert (config.max_seq_len, config.kv_slots) == (2000, 2000)


def test_a_prompt_leaves_room_for_one_token_or_for_those_that_are_asked(own):
    config = own(free=10**11)
    assert (config.max_prompt_len, config.min_response_len) == (4095, 1)
    config = own(free=10**11, min_response_len=500, given=("min_response_len",))
    assert (config.max_prompt_len, config.min_response_len) == (3596, 500)
