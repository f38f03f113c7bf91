"""How properties are read: those of one device, numbers and truth values in any form, names in another case, devices."""

from __future__ import annotations

import pickle

import pytest

from staticllm.config import StaticLLMConfig
from staticllm.devices import named_devices
from staticllm.errors import ConfigError, DeviceError, PromptTooLongError
from staticllm.properties import as_number, resolve, with_own

DEVICE = ("INFERENCE_PRECISION_HINT", "INFERENCE_NUM_THREADS", "SUPPORTED_PROPERTIES", "PERF_COUNT")
F32 = {"INFERENCE_PRECISION_HINT": "f32"}


@pytest.mark.parametrize(
    "given, device, expected",
    [
        ({"CPU": F32}, "CPU", F32),
        ('{"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}', "CPU", F32),
        ({"cpu": F32}, "CPU", F32),
        ({"GPU": {"NO_SUCH": 1}, "NPU": {"MAX_PROMPT_LEN": 64}}, "CPU", {}),
        ({"NPU": {"MAX_PROMPT_LEN": 64}}, "NPU", {"MAX_PROMPT_LEN": 64}),
        ({"GPU": {"a": 1, "b": 1}, "GPU.1": {"a": 2}, "GPU.0": {"a": 3}}, "GPU.1", {"a": 2, "b": 1}),
        ({"GPU.0": {"a": 3}}, "GPU", {}),
        ({}, "CPU", {}),
        ("", "CPU", {}),
        ("{}", "CPU", {}),
    ],
)
def test_a_device_has_its_own_properties(given, device, expected):
    assert with_own({"DEVICE_PROPERTIES": given}, device) == expected
    common = {"INFERENCE_PRECISION_HINT": "f16", "a": 0, "c": 5, "DEVICE_PROPERTIES": given}
    assert with_own(common, device) == {"INFERENCE_PRECISION_HINT": "f16", "a": 0, "c": 5, **expected}


@pytest.mark.parametrize(
    "given", [5, "x", "[]", [F32], {"CPU": 5}, {"CPU": '{"a": 1}'}, {"GPU": 5}, {5: {}}, F32, None, True]
)
def test_properties_of_devices_have_a_form(given):
    with pytest.raises(ConfigError, match="DEVICE_PROPERTIES=") as error:
        with_own({"DEVICE_PROPERTIES": given}, "CPU")
    assert "\n" not in str(error.value)


def test_properties_of_devices_are_not_in_themselves():
    with pytest.raises(
        ConfigError, match=r"^DEVICE_PROPERTIES in those of 'CPU': give the properties of CPU there directly$"
    ):
        with_own({"DEVICE_PROPERTIES": {"GPU": {}, "cpu": {"DEVICE_PROPERTIES": {"CPU": F32}}}}, "GPU")


def test_a_hint_names_what_the_caller_takes_and_never_the_same_name_again():
    with pytest.raises(ConfigError, match=r"^unknown property 'MAX_LENGHT'$"):
        resolve({"MAX_LENGHT": 5}, DEVICE)
    with pytest.raises(ConfigError, match=r"^unknown property 'MAX_LENGHT': did you mean 'max_length'\?$"):
        resolve({"MAX_LENGHT": 5}, DEVICE, ("max_length", "LATENCY_MS"))
    with pytest.raises(ConfigError, match=r"^LATENCY_MS cannot be given here: it is an option of a pipeline"):
        resolve({"LATENCY_MS": 5}, DEVICE, ("max_length", "LATENCY_MS"))
    with pytest.raises(ConfigError, match=r"^MAX_PROMPT_LEN cannot be given here"):
        resolve({"PREFILL_CONFIG": {"MAX_PROMPT_LEN": 5}}, DEVICE)


@pytest.mark.parametrize("name", ["MAX_PROMPT_LEN", "MIN_RESPONSE_LEN"])
def test_lengths_are_no_texts_as_in_genai(name):
    with pytest.raises(ConfigError, match=f"{name}='128': must be a whole number"):
        resolve({name: "128"})


@pytest.mark.parametrize("value", [128, 128.0])
def test_a_whole_float_is_a_whole_number(value):
    found = resolve({"MAX_PROMPT_LEN": value}).config.max_prompt_len
    assert found == 128
    assert type(found) is int
    with pytest.raises(ConfigError, match=r"MAX_PROMPT_LEN=128.5: must be a whole number"):
        resolve({"MAX_PROMPT_LEN": 128.5})


SWITCHES = [
    name for name, value in vars(StaticLLMConfig()).items() if isinstance(value, bool) or name == "background_compile"
]


@pytest.mark.parametrize("name", SWITCHES)
def test_every_switch_takes_every_form(name):
    assert len(SWITCHES) == 6
    for value in (True, "YES", "yes", "true", "True", "1"):
        assert getattr(resolve({name.upper(): value}).config, name) is True
    for value in (False, "NO", "no", "FALSE", "0"):
        assert getattr(resolve({name.upper(): value}).config, name) is False
    for value in ("x", "", 1, 0, 2.0, [], "YESS"):
        with pytest.raises(ConfigError, match=f"{name.upper()}=.*must be YES or NO"):
            resolve({name.upper(): value})


NUMBERS = {"max_num_seqs": 2, "kv_slots": 4096, "host_kv_slots": 0, "max_waiting": 5,
           "memory_limit_mb": 900, "cache_limit_gb": 2, "ttft_ms": 50, "tpot_ms": 5, "gap_ms": 7, "kv_cache_gb": 1}  # fmt: skip


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_may_be_written_as_text(name):
    assert getattr(resolve({name.upper(): str(NUMBERS[name])}).config, name) == NUMBERS[name]
    for value in ("x", "", "nan", "-1", "1e999", "9" * 5000, "64 MB"):
        with pytest.raises(ConfigError, match=name.upper()):
            resolve({name.upper(): value})
    assert resolve({"PREFILL_HINT": "STATIC", "MAX_PROMPT_LEN": 64}).config.prefill_rows == (64,)
    assert resolve({"KV_CACHE_PRECISION": "U8"}).config.kv_cache_precision == "u8"


def test_only_texts_of_numbers_become_numbers():
    assert [as_number(each) for each in ("64", "2.5", "x", "", None, True, 3)] == [64, 2.5, "x", "", None, True, 3]


@pytest.mark.parametrize(
    "name, near",
    [
        ("max_prompt_len", "MAX_PROMPT_LEN"), ("Max_Prompt_Len", "MAX_PROMPT_LEN"), ("prefill_hint", "PREFILL_HINT"),
        ("MAX_PROMT_LEN", "MAX_PROMPT_LEN"), ("inference_num_threads", "INFERENCE_NUM_THREADS"), ("perf_count", "PERF_COUNT"),
        ("device_properties", "DEVICE_PROPERTIES"), ("DEVICE_PROPERTY", "DEVICE_PROPERTIES"), ("cache_dir", "CACHE_DIR"),
        ("Adapters", "adapters"), ("DRAFT_MODEL", "draft_model"), ("prefix-caching", "PREFIX_CACHING"),
    ],
)  # fmt: skip
def test_a_misspelled_name_gets_the_nearest_one(name, near):
    with pytest.raises(ConfigError, match=f"unknown property '{name}': did you mean '{near}'"):
        resolve({name: 64}, DEVICE)


@pytest.mark.parametrize(
    "text, available, expected",
    [
        ("cpu", ["CPU"], ["CPU"]), ("npu, Cpu", ["CPU"], ["NPU", "CPU"]), ("AUTO", ["CPU", "GPU.0"], ["GPU", "CPU"]),
        ("auto:gpu,cpu", ["CPU"], ["CPU"]), ("AUTO:-GPU", ["CPU", "GPU"], ["CPU"]), ("AUTO", [], ["NPU", "GPU", "CPU"]),
        ("HETERO:CPU", ["CPU"], ["CPU"]), ("hetero:NPU,cpu", ["CPU"], ["NPU", "CPU"]),
        ("MULTI:CPU(2),GPU(4)", ["CPU"], ["CPU", "GPU"]),
        ("BATCH:CPU(4)", ["CPU"], ["CPU"]), ("GPU.1", ["GPU.0", "GPU.1"], ["GPU.1"]),
        ("AUTO:GPU.1", ["GPU.0", "GPU.1"], ["GPU.1"]),
    ],
)  # fmt: skip
def test_devices_that_stand_for_others_are_those(text, available, expected):
    assert named_devices(text, available) == expected


@pytest.mark.parametrize("text", ["HETERO", "MULTI:", "BATCH", "HETERO:-CPU", "AUTO:-NPU,-GPU,-CPU"])
def test_devices_without_any_are_refused(text):
    with pytest.raises(DeviceError, match=f"device '{text}'"):
        named_devices(text, ["CPU"])


@pytest.mark.parametrize("is_chat", [False, True])
def test_no_remedy_is_more_than_is_possible(is_chat):
    possible, impossible = PromptTooLongError(2000, 1024, is_chat), PromptTooLongError(2_000_004, 1024, is_chat)
    assert str(possible).endswith("load the model with MAX_PROMPT_LEN=2000 or more")
    assert str(impossible).endswith("; no model can be loaded with more than MAX_PROMPT_LEN=1048576")
    assert str(pickle.loads(pickle.dumps(impossible))) == str(impossible)
