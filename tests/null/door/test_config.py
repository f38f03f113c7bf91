import warnings

import numpy as np
import pytest

from staticllm.config import StaticLLMConfig, is_whole
from staticllm.errors import ConfigError
from staticllm.pipelines.scheduling.planner import POLICIES, make_policy
from staticllm.pipelines.scheduling.policies import policy_names
from staticllm.properties import ResolvedConfig, resolve

SUPPORTED = {"INFERENCE_PRECISION_HINT", "NUM_STREAMS", "CACHE_DIR"}


def read(**properties):
    return resolve(properties, SUPPORTED).config


LONG = "x" * 100_000


def test_genai_names_and_typed_fields_give_the_same_config():
    config = read(MAX_PROMPT_LEN=300, MIN_RESPONSE_LEN=50, KV_CACHE_PRECISION="f16", INFERENCE_PRECISION_HINT="f32",
                  PREFILL_CONFIG={"NUM_STREAMS": 1}, PROGRAMS="shared")  # fmt: skip
    assert config == StaticLLMConfig(
        max_prompt_len=300, min_response_len=50, kv_cache_precision="f16", programs="shared",
        device_properties={"INFERENCE_PRECISION_HINT": "f32"}, prefill_config={"NUM_STREAMS": 1},
    )  # fmt: skip
    assert config.max_seq_len == 350


@pytest.mark.parametrize("name", ["MAX_PROMPT_LEN", "MIN_RESPONSE_LEN"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "x", None, True, float("nan"), 10**9])
def test_lengths_that_are_not_positive_integers_are_refused(name, value):
    with pytest.raises(ConfigError, match=rf"{name}=.*must be a whole number from 1") as caught:
        read(**{name: value})
    assert str(caught.value).count("\n") == 0
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("properties", "message"),
    [
        ({"MAX_PROMT_LEN": 5}, "unknown property 'MAX_PROMT_LEN': did you mean 'MAX_PROMPT_LEN'"),
        ({"XYZZY": 5}, "unknown property 'XYZZY'"),
        ({"PROGRAMS": "both"}, "PROGRAMS='both': must be one of"),
        ({"KV_CACHE_PRECISION": "u4"}, "KV_CACHE_PRECISION='u4': must be one of f32, f16, bf16, u8"),
        ({"PREFILL_CONFIG": {"NUM_STREAM": 1}}, "unknown property 'NUM_STREAM': did you mean 'NUM_STREAMS'"),
        ({"PREFILL_CONFIG": 5}, "must be a dict"),
        ({"PREFILL_ROWS": [16, 0]}, "PREFILL_ROWS=0: must be a whole number from 1"),
        ({"PREFILL_ROWS": [4096]}, "PREFILL_ROWS has 4096, more than MAX_PROMPT_LEN=1024"),
        ({"GENERATE_KV_LENS": [9999]}, "more than MAX_PROMPT_LEN"),
        ({"GENERATE_KV_LENS": []}, "is empty"),
        ({"PREFILL_HINT": "FAST"}, "PREFILL_HINT='FAST': must be one of"),
        ({"ATTENTION_BACKEND": "x"}, "ATTENTION_BACKEND is not supported"),
        ({"BLOB_PATH": 5}, "BLOB_PATH=5: must be the path"),
        ({"EXPORT_BLOB": "maybe"}, "EXPORT_BLOB='maybe': must be YES or NO"),
        ({"CACHE_MODE": "FAST"}, "CACHE_MODE='FAST': must be one of"),
        ({"CACHE_LIMIT_GB": 0}, "CACHE_LIMIT_GB=0: must be a number of GB"),
        ({"CACHE_ENCRYPTION_CALLBACKS": len}, "must be two functions"),
        ({"KV_CACHE_PRECISION": LONG}, "must be one of f32, f16, bf16, u8"),
        ({"WEIGHTS_DECRYPTION_CALLBACK": LONG}, "must be a function from bytes to bytes"),
    ],
)  # fmt: skip
def test_bad_properties_are_refused_in_one_line(properties, message):
    with pytest.raises(ConfigError) as caught:
        read(**properties)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_npuw_hints_choose_buckets():
    assert read(PREFILL_HINT="STATIC", MAX_PROMPT_LEN=512).prefill_rows == (512,)
    assert read(GENERATE_HINT="FAST_COMPILE").generate_kv_lens == (1152,)
    assert read(PREFILL_HINT="DYNAMIC", GENERATE_HINT="BEST_PERF") == StaticLLMConfig()


def test_explicit_properties_are_known_even_if_they_equal_the_default():
    given = resolve({"MAX_PROMPT_LEN": 1024, "NUM_STREAMS": 1, "PREFILL_HINT": "STATIC"}, SUPPORTED)
    assert given.explicit == {"max_prompt_len", "prefill_rows", "device_properties"}
    assert ResolvedConfig.of(StaticLLMConfig(max_prompt_len=1024, kv_slots=2304)).explicit == {"kv_slots"}


def test_each_module_in_the_folder_of_policies_is_one_that_the_config_accepts():
    assert policy_names()[0] == StaticLLMConfig().scheduler
    assert set(policy_names()) >= {"dynamic", "fcfs", "prefill_first", "decode_first", "chunked", "ratio"}
    for name in policy_names():
        policy = make_policy(StaticLLMConfig(scheduler=name).scheduler)
        assert type(policy) is POLICIES[name]
        assert callable(policy.plan)


def test_npuw_properties_are_ignored_with_a_warning():
    with pytest.warns(UserWarning, match="NPUW_DEVICES controls NPUW"):
        assert read(NPUW_DEVICES="CPU") == StaticLLMConfig()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(MAX_PROMPT_LEN=64)


@pytest.mark.parametrize("value", [True, 1.0, "1", None, float("nan"), np.float32(1), 0, 5])
def test_neither_truth_values_nor_fractions_nor_numbers_outside_the_bounds_are_whole(value):
    assert not is_whole(value, 1, 4)


@pytest.mark.parametrize("value", [1, 4, np.int64(2), np.int16(3)])
def test_whole_numbers_of_numpy_are_whole(value):
    assert is_whole(value, 1, 4)
    assert is_whole(-value)
