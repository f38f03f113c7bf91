"""Compares which properties and devices are taken, in every form, with ``openvino_genai.LLMPipeline``: both load or refuse."""

from __future__ import annotations

import os

import openvino as ov
import openvino.properties as props
import openvino.properties.device as device_properties
import openvino.properties.hint as hints
import openvino_genai as genai
import pytest
from openvino.properties import streams

from staticllm import StaticLLMPipeline, demo_model_path
from staticllm.pipelines.launch.arguments import resolve_candidates

pytestmark = [
    pytest.mark.usefixtures("shared_programs"),
    pytest.mark.skipif(
        "ONEDNN_MAX_CPU_ISA" in os.environ, reason="GenAI's paged attention fails in bf16 under a limited ISA"
    ),
]

F32 = {"INFERENCE_PRECISION_HINT": "f32"}
LENGTHS = {"MAX_PROMPT_LEN": 64, "MIN_RESPONSE_LEN": 32}
TAKEN = [
    {"DEVICE_PROPERTIES": {"CPU": F32}},
    {"DEVICE_PROPERTIES": '{"CPU": {"INFERENCE_PRECISION_HINT": "f32"}}'},
    {"DEVICE_PROPERTIES": {"CPU": F32, "GPU": {"x": 1}, "NPU": {"MAX_PROMPT_LEN": 64}}},
    {"DEVICE_PROPERTIES": ""},
    {device_properties.properties: {"CPU": {hints.inference_precision: ov.Type.f32}}},
    dict([device_properties.properties({"CPU": {hints.inference_precision(): ov.Type.f32}})]),
    dict([hints.inference_precision(ov.Type.f32), hints.enable_cpu_pinning(False)]),
    {
        hints.performance_mode: hints.PerformanceMode.LATENCY,
        streams.num(): streams.Num(1),
        props.inference_num_threads: "2",
    },
    {"ENABLE_CPU_PINNING": "no", "PERF_COUNT": False, "ALLOW_AUTO_BATCHING": "YES", "prompt_lookup": "NO"},
    {"CACHE_DIR": "", "WEIGHTS_PATH": ""},
    {"NUM_STREAMS": "AUTO", "EXECUTION_MODE_HINT": hints.ExecutionMode.ACCURACY, "INFERENCE_PRECISION_HINT": "FP32"},
]
REFUSED = [
    {"DEVICE_PROPERTIES": {"CPU": {"NO_SUCH": 1}}}, {"DEVICE_PROPERTIES": {"CPU": 5}}, {"DEVICE_PROPERTIES": 5},
    {"DEVICE_PROPERTIES": "x"}, {"DEVICE_PROPERTIES": None}, {"device_properties": {"CPU": F32}}, {"max_prompt_len": 64},
    {"inference_precision_hint": "f32"}, {"ENABLE_MMAP": "x"}, {"prompt_lookup": 1}, {"ALLOW_AUTO_BATCHING": 1}, {"NO_SUCH": 1},
]  # fmt: skip


def theirs(device, properties):
    return genai.LLMPipeline(demo_model_path(), device, properties).generate("Hello", max_new_tokens=3)


def ours(device, properties):
    with StaticLLMPipeline(demo_model_path(), device, {**LENGTHS, **properties}) as pipe:
        return pipe.generate("Hello", max_new_tokens=3)


@pytest.mark.parametrize("properties", TAKEN, ids=range(len(TAKEN)))
def test_properties_are_taken_in_every_form_of_openvino(properties):
    assert ours("CPU", properties) == theirs("CPU", properties)


@pytest.mark.parametrize("properties", REFUSED, ids=range(len(REFUSED)))
def test_properties_are_refused_where_genai_refuses_them(properties):
    with pytest.raises((RuntimeError, TypeError)):
        theirs("CPU", properties)
    with pytest.raises(RuntimeError) as error:
        ours("CPU", properties)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("device", ["HETERO:CPU", "MULTI:CPU(2)", "BATCH:CPU(4)", "AUTO:CPU"])
def test_devices_that_stand_for_others_are_taken(device):
    assert ours(device, {"DEVICE_PROPERTIES": {"CPU": F32}}) == theirs(device, {"DEVICE_PROPERTIES": {"CPU": F32}})


def test_the_properties_of_the_device_win_as_in_openvino():
    given = {
        "INFERENCE_NUM_THREADS": 2,
        "DEVICE_PROPERTIES": {"CPU": {"INFERENCE_NUM_THREADS": 1, "MAX_PROMPT_LEN": 64}},
    }
    (candidate,) = resolve_candidates("CPU", given, {})
    assert candidate.config.device_properties == {"INFERENCE_NUM_THREADS": 1} and candidate.config.max_prompt_len == 64
    own = {"INFERENCE_NUM_THREADS": 2, "DEVICE_PROPERTIES": {"CPU": {"INFERENCE_NUM_THREADS": 1}}}
    compiled = ov.Core().compile_model(demo_model_path() / "openvino_model.xml", "CPU", own)
    assert compiled.get_property("INFERENCE_NUM_THREADS") == 1


def test_the_lengths_of_an_npu_may_be_its_own_properties():
    given = {
        "DEVICE_PROPERTIES": {"NPU": {"MAX_PROMPT_LEN": 64, "NPUW_DEVICES": "CPU"}, "CPU": {"MAX_PROMPT_LEN": 128}}
    }
    found = {each.device: each.config.max_prompt_len for each in resolve_candidates("NPU,CPU", given, {})}
    assert found == {"NPU": 64, "CPU": 128}
